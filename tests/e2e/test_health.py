"""Health: what quarantines a worker, what does not, what brings it back, and what its first good answer brings."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from miles_router.fleet.workers import Worker, WorkerState
from tests.support.fleet import post
from tests.support.http import request
from tests.support.metrics import metric, metrics, samples, total
from tests.support.running_router import RunningRouter, processes_used, running_router
from tests.support.scripted_worker import CLOSE, HANG, RESET, Behaviour, ScriptedWorker, reply, script
from tests.support.session_apis import case
from tests.support.stage import Stage
from tests.support.waiting import STEP, until

FAST: dict[str, Any] = {
    "health_check_interval": 0.02,
    "health_check_timeout": 0.1,
    "health_check_failure_threshold": 3,
    "deep_health_check_interval": 0.0,
}
DEATHS: dict[str, Behaviour] = {
    "answers 503": script(reply(b"", 503)),
    "resets": script(RESET),
    "hangs": script(HANG),
    "garbage": script(b"garbage\r\n\r\n", CLOSE),
}


def model_info(version: str) -> Behaviour:
    return script(reply(b'{"weight_version": "%b"}' % version.encode()))


async def probed(worker: ScriptedWorker, times: int = 2) -> None:
    """Wait until the worker was asked `times` more times for its liveness."""
    seen = len(worker.probes)
    await until(lambda: len(worker.probes) >= seen + times, f"{times} more probes")


async def state(router: RunningRouter, worker: ScriptedWorker, wanted: WorkerState) -> Worker:
    record = router.worker(worker)
    await until(lambda: record.state is wanted, f"{record!r} is {wanted.value}")
    return record


async def router_of(stage: Stage, *workers: ScriptedWorker, **settings: Any) -> RunningRouter:
    return await stage.router(*workers, **{**FAST, **settings})


# Quarantine


@pytest.mark.parametrize("death", [*DEATHS.values()], ids=[*DEATHS])
async def test_failures_in_a_row_quarantine_a_worker(stage: Stage, death: Behaviour) -> None:
    sick, well = await stage.worker(), await stage.worker()
    router = await router_of(stage, sick, well)
    sick.model_info = death
    record = await state(router, sick, WorkerState.QUARANTINED)
    assert record.failures >= 3
    before = len(well.requests)
    for _ in range(4):
        assert (await router.ask("POST", "/generate", body=b"{}")).status == 200
    assert (len(sick.requests), len(well.requests) - before) == (0, 4)


async def test_fewer_failures_than_the_threshold_are_forgotten_by_one_success(stage: Stage) -> None:
    worker = await stage.worker()
    router = await router_of(stage, worker, health_check_failure_threshold=5)
    record = router.worker(worker)
    for _ in range(3):
        worker.model_info = script(reply(b"", 500))
        await until(lambda: record.failures >= 2, "two failures")
        worker.model_info = model_info("1")
        await until(lambda: record.failures == 0, "forgotten")
    assert (record.state, record.reason) == (WorkerState.READY, "registered")


async def test_connect_failures_while_forwarding_count_at_once(stage: Stage) -> None:
    gone, well = await stage.worker(), await stage.worker()
    router = await stage.router(gone, well, health_check_failure_threshold=2)  # no probe within this test
    gone.kill()
    for _ in range(6):
        assert (await router.ask("POST", "/generate", body=b"{}")).status == 200
    record = router.worker(gone)
    assert record.state is WorkerState.QUARANTINED
    assert 2 <= record.failures <= 1 + processes_used(), "each process may have one under way"


async def test_a_busy_worker_whose_health_hangs_stays(stage: Stage) -> None:
    worker = await stage.worker()
    worker.health = script(HANG)
    router = await router_of(
        stage, worker, deep_health_check_interval=0.01, health_check_timeout=0.25
    )  # a busy machine answers /model_info within it
    await until(lambda: sum(probe.path == "/health" for probe in worker.probes) >= 4, "four deep checks")
    record = router.worker(worker)
    assert (record.state, record.failures) == (WorkerState.READY, 0)


async def test_a_worker_whose_health_answers_sick_is_quarantined(stage: Stage) -> None:
    worker = await stage.worker()
    worker.health = script(reply(b"", 503))
    router = await router_of(stage, worker, deep_health_check_interval=0.01)
    record = await state(router, worker, WorkerState.QUARANTINED)
    assert "/health" in record.reason


async def test_any_answer_to_the_cheap_check_is_a_sign_of_life(stage: Stage) -> None:
    worker = await stage.worker()
    router = await router_of(stage, worker)
    for body in [b"", b"text", b"[]", b"{}", b'{"weight_version": null}', b'{"weight_version": 7}']:
        with case(body):
            worker.model_info = script(reply(body))
            await probed(worker, 4)
            assert (router.worker(worker).state, router.worker(worker).failures) == (WorkerState.READY, 0)


async def test_probes_get_through_while_all_connections_are_taken_by_requests(stage: Stage) -> None:
    """`max_connections` bounds requests: a full fleet must not look dead."""
    worker = (await stage.worker()).always(script(HANG))
    router = await router_of(stage, worker, max_connections=1, health_check_timeout=0.05)
    clients = [await stage.client(router) for _ in range(2)]
    for client in clients:
        await client.send(request("POST", "/generate", body=b"{}"))
    await until(lambda: worker.busy and router.pool.in_flight == 2, "one request runs, one waits")
    await probed(worker, 5)
    assert router.worker(worker).state is WorkerState.READY
    for client in clients:
        client.abort()


# Readmission


@pytest.mark.parametrize(
    ("readmit", "version", "returns"),
    [
        ("same-weights", "1", True),
        ("same-weights", "0", False),
        ("healthy", "0", True),
        ("never", "1", False),
    ],
)
async def test_recovery_readmits_by_policy(stage: Stage, readmit: str, version: str, returns: bool) -> None:
    worker, fleet = await stage.worker(), [await stage.worker(), await stage.worker()]
    router = await router_of(stage, worker, *fleet, readmit=readmit)
    worker.kill()
    record = await state(router, worker, WorkerState.QUARANTINED)
    worker.model_info = model_info(version)
    await worker.listen()
    if returns:
        await state(router, worker, WorkerState.READY)
        assert record.failures == 0
    else:
        await probed(worker, 5)
        assert record.state is WorkerState.QUARANTINED


async def test_the_fleets_version_moves_on_while_a_worker_is_away(stage: Stage) -> None:
    worker, fleet = await stage.worker(), await stage.worker()
    router = await router_of(stage, worker, fleet)
    worker.kill()
    record = await state(router, worker, WorkerState.QUARANTINED)
    fleet.model_info = model_info("2")
    await until(lambda: router.pool.weight_version == "2", "the fleet is at 2")
    await worker.listen()  # still at 1
    await probed(worker, 4)
    assert record.state is WorkerState.QUARANTINED
    worker.model_info = model_info("2")
    await state(router, worker, WorkerState.READY)


async def test_a_worker_that_only_passes_the_cheap_check_stays_out(stage: Stage) -> None:
    worker = await stage.worker()
    router = await router_of(stage, worker, readmit="healthy", health_check_timeout=0.03)
    worker.model_info = script(reply(b"", 500))
    record = await state(router, worker, WorkerState.QUARANTINED)
    worker.health = script(HANG)
    worker.model_info = model_info("1")
    await until(lambda: sum(probe.path == "/health" for probe in worker.probes) >= 2, "it was asked for its health")
    assert record.state is WorkerState.QUARANTINED
    worker.health = script(reply(b""))
    await state(router, worker, WorkerState.READY)


# Workers that the configuration names take requests once they have answered

EXPECTED = "named in the configuration, and has not answered yet"
SHORT: dict[str, Any] = {"text": "Hi", "sampling_params": {"max_new_tokens": 1}}


async def got(router: RunningRouter, path: str) -> Any:
    answer = await router.ask("GET", path)
    assert answer.status == 200, answer.body
    return answer.json()


async def shown(router: RunningRouter, url: str) -> dict[str, Any]:
    """What the router says of one worker."""
    found: list[dict[str, Any]] = (await got(router, "/workers"))["workers"]
    return next(each for each in found if each["url"] == url)


async def in_state(router: RunningRouter, url: str, state: str) -> dict[str, Any]:
    while (found := await shown(router, url))["state"] != state:  # noqa: ASYNC110
        await asyncio.sleep(STEP)
    return found


async def refusing(stage: Stage) -> ScriptedWorker:
    """A worker that takes no connection yet."""
    worker = await stage.worker()
    worker.refuse()
    return worker


async def test_a_worker_that_never_answered_is_shown_as_unreached(stage: Stage) -> None:
    silent = await refusing(stage)
    router = await stage.router(silent)
    record = await shown(router, silent.url)
    assert record["state"] == "unreached"
    assert record["reason"].startswith(EXPECTED)
    for path in ("/health", "/router/info"):
        said = await got(router, path)
        assert (said["workers_total"], said["workers_routable"], said["workers_unreached"]) == (1, 0, 1)
    assert (await router.ask("GET", "/readiness")).status == 503
    listed = await got(router, "/list_workers")
    assert (listed["urls"], [*listed["unreached"]]) == ([silent.url], [silent.url])
    assert listed["unreached"][silent.url].startswith(EXPECTED)
    text = await metrics(router.url)
    assert [each.value for each in samples(text, "miles_router_worker_routable", worker=silent.url)] == [0]
    assert total(text, "miles_router_workers", state="unreached") == 1


async def test_a_router_whose_workers_are_up_takes_requests_at_once(stage: Stage) -> None:
    workers = [await stage.worker() for _ in range(3)]
    async with running_router(*workers) as router:
        answers = await asyncio.gather(*(post(router, "/generate", **SHORT) for _ in range(9)))
    assert [answer.status for answer in answers] == [200] * 9
    assert all(worker.requests for worker in workers)


async def test_a_worker_that_registers_itself_takes_requests_at_once(stage: Stage) -> None:
    silent, other = await refusing(stage), await refusing(stage)
    router = await stage.router(silent)
    for url in (other.url, silent.url):  # the second one is named in the configuration, too
        answer = await post(router, "/add_worker", url=url)
        assert answer.status == 200
        assert (await shown(router, url))["state"] == "ready"
    assert (await post(router, "/remove_worker", url=silent.url)).status == 200
    assert (await got(router, "/list_workers")) == {"urls": [other.url]}


async def test_a_worker_that_had_registered_itself_takes_requests_behind_a_restart(
    stage: Stage, tmp_path: Path
) -> None:
    named, gone = await stage.worker(), await refusing(stage)
    async with running_router(named, state_dir=str(tmp_path)) as before:
        assert (await post(before, "/add_worker", url=gone.url)).status == 200
    named.refuse()
    async with running_router(named, state_dir=str(tmp_path)) as after:
        states = [(await shown(after, worker.url))["state"] for worker in (named, gone)]
        assert states == ["unreached", "ready"]


async def test_a_control_request_does_not_fail_for_a_worker_that_never_answered(stage: Stage) -> None:
    silent, well = await refusing(stage), await stage.worker()
    router = await stage.router(silent, well)
    answer = await post(router, "/flush_cache")
    assert answer.status == 200
    assert answer.json()["workers"][silent.url]["status"] == 0


async def test_the_first_good_answer_makes_a_worker_routable(stage: Stage) -> None:
    for readmit in ("same-weights", "never"):
        late = await refusing(stage)
        router = await stage.router(late, readmit=readmit, health_check_failure_threshold=1)
        for path in ("/generate", "/get_model_info"):
            answer = await router.ask("GET" if path == "/get_model_info" else "POST", path, body=b"{}")
            assert (answer.status, answer.error_type) == (503, "no_worker_available")
            assert "1 unreached" in answer.json()["error"]["message"]
            assert int(answer.value("retry-after") or 0) >= 1
        while not (await shown(router, late.url))["failures"]:  # noqa: ASYNC110
            await asyncio.sleep(STEP)
        await late.listen()
        record = await in_state(router, late.url, "ready")
        assert (record["reason"], record["failures"]) == ("registered", 0), readmit
        assert (await post(router, "/generate", **SHORT)).status == 200
        assert "unreached" not in await got(router, "/list_workers")


async def test_no_request_goes_where_nothing_good_has_answered(stage: Stage) -> None:
    hanging, failing, well = [await stage.worker() for _ in range(3)]
    silent = await refusing(stage)
    hanging.model_info, failing.model_info = script(HANG), script(reply(b"", 500))
    router = await stage.router(hanging, failing, silent, well, health_check_timeout=0.2)
    assert [(await post(router, "/generate", **SHORT)).status for _ in range(6)] == [200] * 6
    assert (hanging.requests, failing.requests, len(well.requests)) == ([], [], 6)
    assert await metric(router, "miles_router_retries_total") == 0
    for starting in (hanging, failing):
        starting.model_info = script(reply(b'{"weight_version": "1"}'))
        await in_state(router, starting.url, "ready")
