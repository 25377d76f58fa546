"""Health: what quarantines a worker, what does not, and what brings it back."""

from __future__ import annotations

from typing import Any

import pytest

from miles_router.fleet.workers import Worker, WorkerState
from tests.support.http import request
from tests.support.running_router import RunningRouter, processes_used
from tests.support.scripted_worker import CLOSE, HANG, RESET, Behaviour, ScriptedWorker, reply, script
from tests.support.session_apis import case
from tests.support.stage import Stage
from tests.support.waiting import until

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


# Paused


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


async def test_a_worker_kept_out_for_its_weights_returns_with_the_right_ones(stage: Stage) -> None:
    worker, fleet = await stage.worker(), await stage.worker()
    router = await router_of(stage, worker, fleet)
    worker.kill()
    record = await state(router, worker, WorkerState.QUARANTINED)
    worker.model_info = model_info("0")
    await worker.listen()
    await until(lambda: "'0'" in record.reason and "'1'" in record.reason, "the reason names both versions")
    worker.model_info = model_info("1")
    await state(router, worker, WorkerState.READY)


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


# What is said about it
