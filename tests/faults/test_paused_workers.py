"""Workers that are silent, die or are paused by somebody else, in a pause of the router's own and outside of one."""

from __future__ import annotations

import asyncio
from typing import Any

import orjson
import pytest

from miles_router.fleet.workers import WorkerState
from miles_router.testing import SimulatedWorker
from tests.support.fleet import (
    JSON,
    PROBING,
    asked,
    becomes,
    by_path,
    gate,
    held,
    info,
    is_open,
    post,
    posting,
    simulated,
    states,
    until_all_know,
)
from tests.support.http import ask
from tests.support.scripted_worker import HANG, Behaviour, reply, script
from tests.support.stage import Stage
from tests.support.waiting import until

READY, PAUSED, QUARANTINED = WorkerState.READY, WorkerState.PAUSED, WorkerState.QUARANTINED


# Who is silent, and who dies


@pytest.mark.parametrize(
    ("standstill", "end"),
    [("/pause_generation", "/continue_generation"), ("/release_memory_occupation", "/resume_memory_occupation")],
)
@pytest.mark.parametrize("failure", [script(HANG), script(reply(b"", 503))], ids=["silent", "503"])
async def test_probes_that_fail_count_for_nothing_in_a_standstill_and_again_after_it(
    stage: Stage, standstill: str, end: str, failure: Behaviour
) -> None:
    worker, router = await stage.worker_and_router(**{**PROBING, "health_check_failure_threshold": 2})
    await post(router, standstill)
    worker.model_info, seen = failure, len(worker.probes)
    await until(lambda: len(worker.probes) > seen + 4, "four probes have failed")
    assert (router.worker(worker).state, router.worker(worker).failures) == (READY, 0)
    waiting = posting(router)
    await held(router, 1)
    await post(router, end)
    assert (await waiting).status == 200
    await becomes(router, worker, QUARANTINED)


async def test_a_probe_that_began_in_a_pause_and_fails_after_it_counts_for_nothing(stage: Stage) -> None:
    settings = {**PROBING, "health_check_timeout": 10.0, "health_check_failure_threshold": 1}
    worker, router = await stage.worker_and_router(**settings)
    answers = asyncio.Event()
    await post(router, "/pause_generation")
    worker.model_info, seen = script(answers, reply(b"", 503)), len(worker.probes)
    await until(lambda: len(worker.probes) > seen, "a probe is under way")
    worker.model_info = script(reply(b"{}"))
    await post(router, "/continue_generation")
    answers.set()
    await until(lambda: len(worker.probes) > seen + 2, "the next probe has come")
    assert not router.app.router.metrics.transitions[("ready", "quarantined")]


@pytest.mark.parametrize("over", [False, True], ids=["it still lasts", "it is over"])
async def test_own_pause_during_a_probe_is_not_taken_for_a_foreign_pause(stage: Stage, over: bool) -> None:
    worker, router = await stage.worker_and_router(**PROBING)
    says, before = asyncio.Event(), len(worker.probes)
    worker.model_info = by_path(ready=script(says, reply(b"", 503)), model_info=script(reply(b"{}")))
    worker.health = script(reply(b"", 503))
    await until(lambda: any(each.path == "/ready" for each in worker.probes[before + 1 :]), "it is asked")
    await post(router, "/pause_generation")
    if over:
        await post(router, "/continue_generation")
    worker.model_info = script(reply(b"{}"))
    says.set()
    seen = len(worker.probes)
    await until(lambda: len(worker.probes) > seen + 2, "the next probe has come")
    assert not router.app.router.metrics.transitions[("ready", "paused")]
    assert (router.worker(worker).state, gate(router).closed) == (READY, not over)


async def test_a_worker_that_dies_in_a_pause_is_quarantined_and_the_others_go_on(stage: Stage) -> None:
    well, dying = await stage.worker(), await stage.worker()
    router = await stage.router(well, dying, **PROBING)
    await post(router, "/pause_generation")
    waiting = [posting(router) for _ in range(3)]
    await held(router, 3)
    dying.kill()
    await becomes(router, dying, QUARANTINED)
    assert gate(router).held == 3
    answer = await post(router, "/continue_generation")
    assert (answer.status, answer.json()["workers"][dying.url]["status"]) == (200, 0)
    assert [(await each).status for each in waiting] == [200, 200, 200]
    assert len(asked(well)) == 5


async def test_a_worker_whose_death_in_a_pause_nobody_noticed_takes_nothing_after_it(stage: Stage) -> None:
    well, dying = await stage.worker(), await stage.worker()
    router = await stage.router(well, dying)
    await post(router, "/pause_generation")
    waiting = [posting(router) for _ in range(3)]
    await held(router, 3)
    dying.kill()
    assert (await post(router, "/continue_generation")).status == 502
    assert await states(router) == {well.url: "ready", dying.url: "paused"}
    assert [(await each).status for each in waiting] == [200, 200, 200]
    assert router.app.router.metrics.retries == 0


@pytest.mark.parametrize("mode", ["in_place", "retract"])
async def test_what_a_worker_kept_in_a_pause_and_lost_by_dying_is_asked_of_another(stage: Stage, mode: str) -> None:
    async with simulated(token_latency_s=0.002, stop_probability=0) as workers:
        router = await stage.router(*(worker.url for worker in workers))
        sampling = {"max_new_tokens": 1000, "ignore_eos": True}
        tasks = []
        for count in (1, 2):
            tasks.append(posting(router, text="Hi", sampling_params=sampling))
            await until(lambda: sum(bool(worker.running) for worker in workers) == count, "one runs on each")  # noqa: B023
            await until_all_know(router, in_flight=count)  # else another process may take the same worker
        await post(router, "/pause_generation", mode=mode)
        await workers[0].kill()
        await held(router, 1)
        assert len(workers[1].log.at("/generate")) == 1, "it does not go behind the pause"
        workers[1].engine.token_latency_s = 0
        await post(router, "/continue_generation")
        assert [len((await each).json()["output_ids"]) for each in tasks] == [1000, 1000]


# Paused by somebody else


async def behind_its_back(worker: SimulatedWorker, path: str, **fields: Any) -> None:
    assert (await ask(worker.url, "POST", path, JSON, orjson.dumps(fields))).status == 200


@pytest.mark.parametrize("mode", ["abort", "retract", "in_place"])
async def test_one_that_somebody_else_paused_takes_no_traffic_and_returns_by_itself(stage: Stage, mode: str) -> None:
    async with simulated() as (one, two):
        router = await stage.router(one.url, two.url, **PROBING)
        await behind_its_back(two, "/pause_generation", mode=mode)
        await becomes(router, two, PAUSED)
        assert await states(router) == {one.url: "ready", two.url: "paused"}
        assert not gate(router).closed
        for answer in [await each for each in [posting(router) for _ in range(6)]]:
            assert answer.status == 200
        assert (len(one.log.at("/generate")), len(two.log.at("/generate"))) == (6, 0)
        await behind_its_back(two, "/continue_generation")
        await becomes(router, two, READY)
        assert await states(router) == {one.url: "ready", two.url: "ready"}


async def test_when_somebody_else_has_paused_all_the_gate_closes_until_one_goes_on(stage: Stage) -> None:
    async with simulated() as (one, two):
        router = await stage.router(one.url, two.url, **PROBING)
        for worker in (one, two):
            await behind_its_back(worker, "/pause_generation")
        await until(lambda: gate(router).closed, "the gate is closed")
        said = (await info(router))["gate"]
        assert (said["workers_paused_since"] is None, said["paused_since"], said["mode"]) == (False, None, None)
        waiting = [posting(router) for _ in range(4)]
        await held(router, 4)
        assert not one.log.at("/generate") + two.log.at("/generate")
        await behind_its_back(two, "/continue_generation")
        assert [(await each).status for each in waiting] == [200] * 4
        assert (len(one.log.at("/generate")), len(two.log.at("/generate"))) == (0, 4)
        assert await states(router) == {one.url: "paused", two.url: "ready"}
        assert await is_open(router)


async def test_a_continue_through_the_router_ends_everybody_elses_pauses_at_once(stage: Stage) -> None:
    async with simulated() as workers:
        router = await stage.router(*(worker.url for worker in workers))  # no probe within this test
        for worker in workers:
            await behind_its_back(worker, "/pause_generation")
            router.pool.set_paused(router.pool.get(worker.url), "noticed")
        waiting = posting(router)
        await held(router, 1)
        assert (await post(router, "/continue_generation")).status == 200
        assert set((await states(router)).values()) == {"ready"}
        assert (await waiting).status == 200


async def test_one_that_joins_opens_a_gate_that_only_paused_workers_had_closed(stage: Stage) -> None:
    async with simulated() as (one, two):
        router = await stage.router(one.url, **PROBING)
        await behind_its_back(one, "/pause_generation")
        await until(lambda: gate(router).closed, "the gate is closed")
        waiting = posting(router)
        await held(router, 1)
        await post(router, "/add_worker", url=two.url)
        assert (await waiting).status == 200
        assert len(two.log.at("/generate")) == 1


async def test_what_somebody_else_cut_comes_as_the_engine_gave_it_without_resume(stage: Stage) -> None:
    async with simulated(token_latency_s=0.002, stop_probability=0) as (one, two):
        router = await stage.router(one.url, two.url)
        cut = posting(router, text="Hi", rid="cut", sampling_params={"max_new_tokens": 4000, "ignore_eos": True})
        await until(lambda: one.running + two.running, "it runs")
        (worker,) = [each for each in (one, two) if each.running]
        await worker.log.wait_for(lambda log: log.generation("cut"))
        await behind_its_back(worker, "/pause_generation", mode="abort")
        answer = (await cut).json()
        assert answer["meta_info"]["finish_reason"]["type"] == "abort"
        assert answer["output_ids"] == worker.log.generation("cut").output_ids
