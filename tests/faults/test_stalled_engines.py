"""An engine that stands still behind an HTTP process that answers: it is found, and nobody else is taken for one."""

from __future__ import annotations

import asyncio
import logging
import time
from typing import Any

import orjson
import pytest

from miles_router.fleet.workers import WorkerState
from miles_router.testing import SimulatedWorker
from tests.support.descriptors import no_descriptors
from tests.support.fleet import JSON, PROBING, becomes, info, post, posting, simulated, until_all_know
from tests.support.http import CutReply, ask
from tests.support.metrics import metric
from tests.support.running_router import RunningRouter, processes_used
from tests.support.scripted_worker import HANG, reply, script
from tests.support.stage import Stage
from tests.support.under_way import under_way
from tests.support.waiting import until
from tests.support.worker_process import WorkerProcess, worker_process

READY, QUARANTINED = WorkerState.READY, WorkerState.QUARANTINED
#: Of several processes, whose signs of life come by way of another one, on a machine that has other things to do.
STALL = 0.15 if processes_used() == 1 else 1.0
WATCHING: dict[str, Any] = {**PROBING, "stall_timeout": STALL}
REASON = f"stalled: its engine gave no sign of life for {STALL:g} s"
#: Many times what it takes to give an engine up.
LONG = 4 * STALL
#: Tokens that take eight seconds.
LASTING = 400


def generating(router: RunningRouter, tokens: int = 100, **fields: Any) -> asyncio.Task[Any]:
    sampling = {"max_new_tokens": tokens, "ignore_eos": True}
    return posting(router, text="Hi", sampling_params=sampling, **fields)


async def on_each(*workers: SimulatedWorker) -> None:
    await until(lambda: all(worker.running for worker in workers), "one runs on each")


async def one_on_each(router: RunningRouter, sick: SimulatedWorker, well: SimulatedWorker) -> list[asyncio.Task[Any]]:
    """One after the other: processes that do not know yet what others have sent may choose the same worker. The first
    is long enough to be there still, on a busy machine too."""
    first = generating(router, LASTING)
    await until(lambda: sick.running or well.running, "one runs")
    await until_all_know(router, in_flight=1)
    answers = [first, generating(router, LASTING)]
    await on_each(sick, well)
    return answers


def stand_still(sick: SimulatedWorker, well: SimulatedWorker) -> None:
    """From here on one engine does nothing, and the other one all at once."""
    sick.stop_scheduler()
    well.engine.token_latency_s = 0


def sampled(worker: SimulatedWorker) -> int:
    return sum(len(generation.output_ids) for generation in worker.engine.running.values())


async def running(worker: WorkerProcess) -> int:
    (rank,) = (await ask(worker.url, "GET", "/v1/loads")).json()["loads"]
    return int(rank["num_running_reqs"])


async def stalls(router: RunningRouter) -> int:
    return int(await metric(router, "miles_router_stalled_workers_total"))


async def described(router: RunningRouter, worker: SimulatedWorker) -> tuple[str, str]:
    (found,) = [each for each in (await info(router))["workers"] if each["url"] == worker.url]
    return found["state"], found["reason"]


# It is found


async def test_what_a_stalled_engine_had_goes_on_elsewhere_and_nobody_elses_is_touched(
    stage: Stage, caplog: pytest.LogCaptureFixture
) -> None:
    async with simulated(token_latency_s=0.02, stop_probability=0) as (sick, well):
        router = await stage.router(sick.url, well.url, **WATCHING)
        await asyncio.gather(*(generating(router, 1) for _ in range(4)))  # so that connections are kept
        answers = [generating(router) for _ in range(8)]
        await until(lambda: sick.running == well.running == 4, "four run on each")
        stand_still(sick, well)
        for answer in [await each for each in answers]:
            assert (answer.status, len(answer.json()["output_ids"])) == (200, 100)
        assert (len(sick.log.at("/generate")), len(well.log.at("/generate"))) == (6, 10)
        assert router.app.router.metrics.retries == 4
        assert await described(router, sick) == ("quarantined", REASON)
        assert await stalls(router) == 1
        (line,) = [record for record in caplog.records if record.getMessage() == "worker_stalled"]
        assert (line.levelno, line.fields) == (logging.WARNING, {"worker": sick.url, "requests": 4})  # type: ignore[attr-defined]


async def test_it_keeps_its_reason_while_it_is_silent_and_comes_back_when_it_moves(stage: Stage) -> None:
    async with simulated(token_latency_s=0.02, stop_probability=0) as (sick, well):
        router = await stage.router(sick.url, well.url, **WATCHING)
        answers = await one_on_each(router, sick, well)
        stand_still(sick, well)
        assert [(await each).status for each in answers] == [200, 200]
        seen = len(sick.log.at("/health"))
        await until(lambda: len(sick.log.at("/health")) > seen + 2, "it was asked for its health")
        assert await described(router, sick) == ("quarantined", REASON)
        sick.continue_scheduler()
        await becomes(router, sick, READY)
        await until(lambda: not sick.running, "it generates for nobody")
        answers = [generating(router, 1) for _ in range(4)]
        assert [(await each).status for each in answers] == [200] * 4
        since = len(sick.log.at("/generate")) - 1
        assert since == 2 or (processes_used() > 1 and since > 0), "half of them, as far as each process knows"


async def test_a_stream_that_had_begun_is_broken_off(stage: Stage) -> None:
    async with SimulatedWorker(token_latency_s=0.02, stop_probability=0) as worker:
        router = await stage.router(worker.url, **WATCHING)

        async def stop_it() -> None:
            await until(lambda: sampled(worker) > 5, "it has begun")
            worker.stop_scheduler()

        async with under_way(stop_it()):
            sampling = {"max_new_tokens": 1000, "ignore_eos": True}
            with pytest.raises(CutReply) as cut_off:
                await post(router, "/generate", text="Hi", stream=True, sampling_params=sampling)
        body = cut_off.value.reply.body
        assert (body.count(b"\n\n") > 5, b"[DONE]" in body) == (True, False)
        assert await described(router, worker) == ("quarantined", REASON)


async def test_a_stream_goes_on_elsewhere_where_the_loss_of_a_worker_allows_it(stage: Stage) -> None:
    async with simulated(token_latency_s=0.02, stop_probability=0) as workers:
        router = await stage.router(*(worker.url for worker in workers), resume_on_worker_loss=True, **WATCHING)
        streaming = generating(router, stream=True)
        await until(lambda: any(worker.running for worker in workers), "it runs")
        sick, well = sorted(workers, key=lambda worker: not worker.running)
        await until(lambda: sampled(sick) > 5, "it has begun")
        stand_still(sick, well)
        events = (await streaming).body.split(b"\n\n")
        assert events[-2] == b"data: [DONE]"
        last = orjson.loads(events[-3].removeprefix(b"data: "))
        assert (len(last["output_ids"]), last["meta_info"]["resumed"]) == (100, 1)


async def test_answers_of_the_http_process_alone_do_not_hide_it(stage: Stage) -> None:
    """It refuses bad requests, and answers what needs no engine."""
    async with SimulatedWorker(stop_probability=0) as worker:
        router = await stage.router(worker.url, **WATCHING)
        worker.stop_scheduler()
        waiting = generating(router)

        async def chatter() -> None:
            while not waiting.done():
                refused = await post(router, "/generate", text="x", sampling_params={"temperature": -1})
                assert refused.status in (400, 502, 503)
                assert (await post(router, "/v1/tokenize", prompt="x")).status in (200, 503)

        await asyncio.gather(*(chatter() for _ in range(3)))
        assert ((await waiting).status, (await waiting).error_type) == (502, "upstream_unreachable")
        assert await stalls(router) == 1


async def test_it_is_found_though_its_health_has_failed_and_it_looks_paused(stage: Stage) -> None:
    async with simulated(token_latency_s=0.02, stop_probability=0, health_timeout_s=0.05) as (sick, well):
        router = await stage.router(sick.url, well.url, **{**WATCHING, "deep_health_check_interval": 0.01})
        answers = await one_on_each(router, sick, well)
        stand_still(sick, well)
        await until(lambda: not sick.engine.healthy, "its health has failed")
        assert [(await each).status for each in answers] == [200, 200]
        assert (await described(router, sick))[0] == "quarantined"
        assert await stalls(router) == 1


async def test_it_is_found_while_a_pause_waits_for_it(stage: Stage) -> None:
    """Else it would fail every pause, and a trainer that tries again at once would never be rid of it."""
    async with simulated(token_latency_s=0.02, stop_probability=0) as (sick, well):
        router = await stage.router(sick.url, well.url, **WATCHING)
        answers = await one_on_each(router, sick, well)
        sick.stop_scheduler()
        pausing = posting(router, "/pause_generation", mode="in_place")
        await becomes(router, sick, QUARANTINED)
        assert not pausing.done()
        sick.continue_scheduler()
        assert (await pausing).status == 200
        sick.engine.token_latency_s = well.engine.token_latency_s = 0
        assert (await post(router, "/continue_generation")).status == 200
        assert [len((await each).json()["output_ids"]) for each in answers] == [LASTING, LASTING]


@pytest.mark.parametrize("query", ["", "&drain=true"], ids=["removed", "draining"])
async def test_a_worker_that_leaves_is_still_watched(stage: Stage, query: str) -> None:
    async with simulated(token_latency_s=0.02, stop_probability=0) as (sick, well):
        router = await stage.router(sick.url, well.url, **WATCHING)
        answers = await one_on_each(router, sick, well)
        stand_still(sick, well)
        gone = await router.ask("POST", f"/remove_worker?url={sick.url}{query}")
        assert (gone.status, gone.json()["worker_urls"].keys()) == (200, {well.url})
        assert [(await each).status for each in answers] == [200, 200]


async def test_what_a_wholly_silent_worker_had_is_lost_too(stage: Stage) -> None:
    """Its checks fail, which alone would let its requests wait for ever."""
    silent, well = await stage.worker(), await stage.worker()
    router = await stage.router(silent, well, **WATCHING)
    silent.always(script(HANG))
    answers = [posting(router)]
    while not silent.busy:  # each process takes turns by itself
        await until(lambda: silent.busy or answers[-1].done(), "one has it")
        if not silent.busy:
            answers.append(posting(router))
    silent.model_info = silent.health = silent.standing["/health_generate"] = script(HANG)
    assert {(await each).status for each in answers} == {200}
    assert await stalls(router) == 1


async def test_requests_that_the_engine_does_not_work_on_are_left_alone(stage: Stage) -> None:
    """An update of one worker that takes long must not be asked of another."""
    sick, well = await stage.worker(), await stage.worker()
    router = await stage.router(sick, well, **WATCHING)
    for worker in (sick, well):
        worker.always(script(HANG))
    tasks = [posting(router, "/update_weights_from_tensor", weights="x")]
    await until(lambda: sick.busy + well.busy, "the first is there")
    await until_all_know(router, in_flight=1)
    tasks.append(posting(router, "/update_weights_from_tensor", weights="x"))
    await until(lambda: sick.busy == well.busy == 1, "one on each")
    well.always(script(reply()))
    sick.standing = dict.fromkeys(("/server_info", "/get_server_info", "/health_generate"), script(HANG))
    tasks.append(posting(router))
    await until(lambda: sick.busy == 2 or tasks[-1].done(), "a generation")
    assert (await tasks[-1]).status == 200
    assert not tasks[0].done()
    assert not tasks[1].done()
    for task in tasks[:2]:
        task.cancel()


# What is none


async def quiet_for(router: RunningRouter, seconds: float) -> None:
    """The watch looks on for many times as long as it is patient."""
    await asyncio.sleep(seconds)
    assert await stalls(router) == 0


@pytest.mark.parametrize("answers", ["/server_info", "/health_generate"])
async def test_an_engine_that_is_slow_is_not_stalled(stage: Stage, answers: str) -> None:
    """Nothing comes of a whole answer, or of a long prompt, for as long as it takes; its scheduler moves. It is asked
    for a token where `/server_info` is held up by others who ask for it."""
    async with SimulatedWorker(token_latency_s=0.02, stop_probability=0) as worker:
        if answers == "/health_generate":
            worker.faults.hang(path="/server_info", times=None)
        router = await stage.router(worker.url, **WATCHING)
        worker.log.clear()
        slow = generating(router, 1000)
        await until(lambda: worker.log.at(answers), "it is asked")
        await quiet_for(router, LONG)
        assert answers == "/health_generate" or not worker.log.at("/health_generate"), "as it answers"
        worker.engine.token_latency_s = 0
        assert (await slow).status == 200


async def test_an_engine_that_knows_none_of_the_questions_is_not_suspected(stage: Stage) -> None:
    worker, answers = await stage.worker(), asyncio.Event()
    router = await stage.router(worker, **WATCHING)
    worker.standing = {"/health_generate": script(reply(b"", 404))}
    worker.always(script(answers, reply()))
    waiting = posting(router)
    await quiet_for(router, LONG)
    answers.set()
    assert (await waiting).status == 200


@pytest.mark.parametrize(
    ("standstill", "end"),
    [("/pause_generation", "/continue_generation"), ("/release_memory_occupation", "/resume_memory_occupation")],
)
async def test_a_fleet_that_the_router_silenced_is_not_stalled(stage: Stage, standstill: str, end: str) -> None:
    async with SimulatedWorker(token_latency_s=0.02, stop_probability=0) as worker:
        router = await stage.router(worker.url, **WATCHING)
        running = generating(router)
        await on_each(worker)
        assert (await post(router, standstill, mode="in_place")).status == 200
        worker.stop_scheduler()  # as an update within it may do
        await quiet_for(router, LONG)
        worker.continue_scheduler()
        assert (await post(router, end)).status == 200
        worker.engine.token_latency_s = 0
        assert len((await running).json()["output_ids"]) == 100


async def test_an_update_through_the_router_is_no_stall(stage: Stage) -> None:
    async with SimulatedWorker(token_latency_s=0.02, stop_probability=0) as worker:
        router = await stage.router(worker.url, **WATCHING)
        running = generating(router)
        await on_each(worker)
        worker.stop_scheduler()
        updating = posting(router, "/update_weights_from_disk", model_path="m")
        await quiet_for(router, LONG)
        worker.continue_scheduler()
        worker.engine.token_latency_s = 0
        assert ((await updating).status, (await running).status) == (200, 200)


@pytest.mark.parametrize("busy", [False, True], ids=["paused", "paused for an update"])
async def test_what_somebody_else_paused_is_not_stalled(stage: Stage, busy: bool) -> None:
    """Its health fails, and within the pause its scheduler may be busy with an update for long."""
    async with SimulatedWorker(token_latency_s=0.02, stop_probability=0) as worker:
        router = await stage.router(worker.url, **WATCHING)
        running = generating(router)
        await on_each(worker)
        fields = orjson.dumps({"mode": "in_place"})
        assert (await ask(worker.url, "POST", "/pause_generation", JSON, fields)).status == 200
        await until(lambda: worker.log.at("/ping"), "the watch has asked")
        await until(lambda: all(exchange.done for exchange in worker.log.at("/ping")), "and was told")
        worker.engine.healthy = False
        if busy:
            worker.stop_scheduler()
        await quiet_for(router, LONG)
        worker.continue_scheduler()
        assert (await ask(worker.url, "POST", "/continue_generation", JSON, b"{}")).status == 200
        worker.engine.token_latency_s = 0
        assert len((await running).json()["output_ids"]) == 100
        await becomes(router, worker, READY)


@pytest.mark.alone("it stops the test's process")
async def test_a_router_that_stood_still_itself_blames_nobody(stage: Stage) -> None:
    async with SimulatedWorker(token_latency_s=0.02, stop_probability=0) as worker:
        router = await stage.router(worker.url, **WATCHING)
        running = generating(router, 20)
        await on_each(worker)
        for _ in range(3):
            time.sleep(LONG)  # noqa: ASYNC251
            await asyncio.sleep(0.01)
        assert (await running).status == 200
        assert await stalls(router) == 0


@pytest.mark.alone("it takes descriptors from the test's process")
async def test_a_router_without_descriptors_blames_nobody(stage: Stage, caplog: pytest.LogCaptureFixture) -> None:
    """It cannot ask, so it learns nothing: neither its checks nor the watch find a fault. The worker has descriptors:
    where one comes free here, it is asked and answers."""
    silent = 2.0
    patient = {"health_check_timeout": silent, "stall_timeout": silent / 4}
    async with worker_process("--token-latency-ms", str(silent * 1000)) as worker:
        router = await stage.router(worker.url, **{**PROBING, **patient})
        slow = [generating(router, 2) for _ in range(4)]  # so that no connection is idle
        while await running(worker) < len(slow):  # noqa: ASYNC110 - another process announces no event
            await asyncio.sleep(0.02)
        with no_descriptors():
            await asyncio.sleep(silent)
        assert "worker_quarantined" not in [record.message for record in caplog.records]
        assert [(await each).status for each in slow] == [200] * 4
        assert await stalls(router) == 0
