"""What the router knows of its fleet and tells: the gate, and which weights each worker has, named or not."""

from __future__ import annotations

import asyncio
import itertools
import json
import time
from typing import Any

import pytest

from miles_router.testing import SimulatedWorker
from tests.support.fleet import info, post, simulated
from tests.support.http import RawReply
from tests.support.metrics import metric
from tests.support.resuming import answer, length, streamed, told
from tests.support.running_router import RunningRouter
from tests.support.scripted_worker import CLOSE, ScriptedWorker, Visit, reply, script
from tests.support.stage import Stage
from tests.support.waiting import soon, until


async def shown(router: RunningRouter, field: str) -> dict[str, Any]:
    """One field of each worker, by url."""
    return {worker["url"]: worker[field] for worker in (await info(router))["workers"]}


def busy_with(worker: SimulatedWorker) -> int:
    return len(worker.log.at("/generate"))


# Weight versions


async def test_the_fleets_version_and_each_workers_follow_an_update_at_once(stage: Stage) -> None:
    async with simulated(weight_version="1") as workers:
        router = await stage.router(*(worker.url for worker in workers))
        assert (await info(router))["weight_version"] == "1"
        for path, fields in (
            ("/update_weight_version", {"new_version": "2"}),
            ("/update_weights_from_disk", {"model_path": "m", "weight_version": "3"}),
        ):
            assert (await post(router, path, **fields)).status == 200
            version = next(value for value in fields.values() if value.isdigit())
            assert (await info(router))["weight_version"] == version
            assert await shown(router, "weight_version") == {worker.url: version for worker in workers}
            assert await shown(router, "state") == {worker.url: "ready" for worker in workers}


async def test_a_worker_that_missed_an_update_takes_no_traffic_and_returns_once_updated(
    stage: Stage,
) -> None:
    async with simulated(weight_version="1") as (one, two):
        router = await stage.router(one.url, two.url)
        two.faults.status(500, path="/update_weight_version")
        assert (await post(router, "/update_weight_version", new_version="2")).status == 502
        assert await shown(router, "state") == {one.url: "ready", two.url: "outdated"}
        assert (await shown(router, "reason"))[two.url] == "its weight version '1' differs from the fleet's '2'"
        said = await info(router)
        assert (said["weight_version"], said["workers_outdated"], said["workers_routable"]) == ("2", 1, 1)
        assert await metric(router, "miles_router_workers", state="outdated") == 1
        for _ in range(4):
            await post(router, "/generate", text="Hi", sampling_params={"max_new_tokens": 1})
        assert (busy_with(one), busy_with(two)) == (4, 0)
        assert (await post(router, "/update_weight_version", new_version="2")).status == 200
        assert await shown(router, "state") == {one.url: "ready", two.url: "ready"}
        for _ in range(4):
            await post(router, "/generate", text="Hi", sampling_params={"max_new_tokens": 1})
        assert busy_with(two) in (1, 2, 3), "of several processes each takes turns by itself"


async def heard_of(router: RunningRouter, worker: SimulatedWorker) -> None:
    """Have the router ask this worker alone, for the sake of a generation that nobody aborted through it."""
    sampling = {"max_new_tokens": 4000, "ignore_eos": True}
    running = asyncio.ensure_future(post(router, "/generate", text="Hi", sampling_params=sampling))
    await until(lambda: worker.running, "it runs")
    worker.engine.abort_all()
    assert (await running).json()["meta_info"]["finish_reason"]["type"] == "abort"


async def test_a_version_that_changed_behind_the_router_makes_it_ask_the_others_at_once(stage: Stage) -> None:
    async with simulated(weight_version="1", token_latency_s=0.002) as (one, two):
        router = await stage.router(one.url, two.url, partial_rollout="resume")  # no check within this test
        one.engine.weight_version = two.engine.weight_version = "2"
        await heard_of(router, one)
        await until(lambda: router.pool.get(two.url).weight_version == "2", "the other was asked")
        assert await shown(router, "state") == {one.url: "ready", two.url: "ready"}
        assert (await info(router))["weight_version"] == "2"


async def test_while_engines_are_updated_one_by_one_nobody_waits_for_the_next_check(stage: Stage) -> None:
    interval = 8.0
    async with simulated(weight_version="1", token_latency_s=0.002) as (one, two):
        checked = time.monotonic()
        router = await stage.router(one.url, two.url, partial_rollout="resume", health_check_interval=interval)
        one.engine.weight_version = "2"
        await heard_of(router, one)
        assert router.pool.get(one.url).state.value == "outdated"
        two.engine.weight_version = "2"
        await until(lambda: len(router.pool.routable) == 2, "the fleet is in step")
        assert time.monotonic() - checked < interval


async def test_versions_that_keep_changing_make_no_storm_of_questions(stage: Stage) -> None:
    """As behind an address that has two engines."""
    workers = [await stage.worker() for _ in range(2)]
    router = await stage.router(*workers, readmit="healthy")
    versions = itertools.count()

    async def late(visit: Visit) -> None:
        await asyncio.sleep(0.01)
        await visit.run([reply(b'{"weight_version": "%d"}' % next(versions))])

    workers[0].model_info = lambda visit: visit.run([reply(b'{"weight_version": "%d"}' % next(versions))])
    workers[1].model_info = late
    before = next(versions)
    assert (await post(router, "/update_weights_from_disk", model_path="m")).status == 200
    await until(lambda: all(int(worker.weight_version or 0) > before for worker in router.pool), "they were asked")
    await asyncio.sleep(0.2)
    assert next(versions) - before < 20


async def test_worker_with_other_weights_is_kept_out_from_the_first_request(stage: Stage) -> None:
    async with SimulatedWorker(weight_version="2") as old, SimulatedWorker(weight_version="1") as late:
        router = await stage.router(old.url)
        await post(router, "/add_worker", url=late.url)
        assert await shown(router, "state") == {old.url: "ready", late.url: "outdated"}
        for _ in range(3):
            await post(router, "/generate", text="Hi", sampling_params={"max_new_tokens": 1})
        assert (busy_with(old), busy_with(late)) == (3, 0)


@pytest.mark.parametrize("asked", ["before", "during"])
async def test_what_a_worker_says_late_of_its_weights_does_not_undo_an_update(stage: Stage, asked: str) -> None:
    worker, other = await stage.worker(), await stage.worker()
    router = await stage.router(worker, other, health_check_interval=0.02)
    late, updating = asyncio.Event(), asyncio.Event()

    async def probed() -> None:
        before = len(worker.probes)
        worker.model_info = script(late, reply(b'{"weight_version": "1"}'))
        await until(lambda: any(each.path == "/model_info" for each in worker.probes[before:]), "it is asked")

    if asked == "before":
        await probed()
    worker.next(script(updating, reply()))
    update = asyncio.ensure_future(post(router, "/update_weight_version", new_version="2"))
    await until(lambda: worker.requests, "it is being updated")
    if asked == "during":
        await probed()
    worker.model_info = other.model_info = script(reply(b'{"weight_version": "2"}'))
    updating.set()
    assert (await update).status == 200
    seen = len(worker.probes)
    late.set()
    await until(lambda: len(worker.probes) > seen + 2, "it was asked again")
    assert await shown(router, "weight_version") == {worker.url: "2", other.url: "2"}
    assert await shown(router, "reason") == {worker.url: "registered", other.url: "registered"}


# The gate


async def test_the_gate_says_since_when_by_which_mode_and_how_many_wait(stage: Stage) -> None:
    router = await stage.router(await stage.worker())

    async def metrics() -> list[float]:
        labels: list[dict[str, str]] = [{"reason": "paused"}, {"reason": "asleep"}]
        closed = [await metric(router, "miles_router_gate_closed", **each) for each in labels]
        return [
            *closed,
            await metric(router, "miles_router_gate_held"),
            await metric(router, "miles_router_pauses_total"),
        ]

    opened: dict[str, Any] = {"closed": False, "mode": None, "paused_since": None, "asleep_since": None}
    opened |= {"workers_paused_since": None, "queued": 0}
    assert ((await info(router))["gate"], await metrics()) == ({**opened, "held": 0, "pauses": 0}, [0, 0, 0, 0])
    await post(router, "/pause_generation", mode="retract")
    waiting = asyncio.ensure_future(post(router, "/generate", text="Hi"))
    await until(lambda: router.app.router.gate.held, "it waits")
    gate = (await info(router))["gate"]
    assert time.time() - 60 < gate["paused_since"] <= time.time()
    shown = {**opened, "closed": True, "mode": "retract", "paused_since": gate["paused_since"], "held": 1, "pauses": 1}
    assert (gate, await metrics()) == (shown, [1, 0, 1, 1])
    await post(router, "/continue_generation")
    assert (await waiting).status == 200
    assert ((await info(router))["gate"], await metrics()) == ({**opened, "held": 0, "pauses": 1}, [0, 0, 0, 1])


async def test_a_pause_that_some_refuse_is_taken_back_and_nobody_stays_paused(stage: Stage) -> None:
    async with simulated() as (one, two):
        router = await stage.router(one.url, two.url)
        two.faults.status(500, path="/pause_generation")
        answer = await post(router, "/pause_generation", mode="in_place")
        assert (answer.status, answer.json()["workers"][two.url]["status"]) == (502, 500)
        assert [each.path for each in one.log if each.method == "POST"] == [
            "/pause_generation",
            "/continue_generation",
        ]
        assert (one.engine.paused, two.engine.paused, (await info(router))["gate"]["closed"]) == (None, None, False)
        reply = await post(router, "/generate", text="Hi", sampling_params={"max_new_tokens": 1})
        assert reply.status == 200


async def test_asleep_is_shown_and_held_until_every_released_part_is_back(stage: Stage) -> None:
    router = await stage.router(await stage.worker())
    await post(router, "/release_memory_occupation")
    assert await metric(router, "miles_router_gate_closed", reason="asleep") == 1
    for tags, asleep in ((["weights"], True), (["kv_cache", "cuda_graph"], False)):
        await post(router, "/resume_memory_occupation", tags=tags)
        gate = (await info(router))["gate"]
        assert (gate["asleep_since"] is not None, gate["closed"]) == (asleep, asleep)
    await post(router, "/release_memory_occupation", tags=["kv_cache"])
    assert (await info(router))["gate"]["closed"]
    await post(router, "/resume_memory_occupation")
    assert not (await info(router))["gate"]["closed"]


async def test_sleep_that_nobody_took_is_none_and_a_wake_that_failed_wakes_nobody(stage: Stage) -> None:
    worker, router = await stage.worker_and_router()
    for path, asleep in (("/release_memory_occupation", False), ("/resume_memory_occupation", True)):
        worker.next(script(reply(b"", 500)))
        assert (await post(router, path)).status == 502
        assert (await info(router))["gate"]["closed"] is asleep
        await post(router, "/release_memory_occupation")


# A lost worker


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("deaths", "status"), [(2, 200), (9, 502)])
async def test_where_every_worker_was_tried_a_request_goes_to_one_that_is_back(
    stage: Stage, stream: bool, deaths: int, status: int
) -> None:
    """Before a reply has begun nothing is lost, as long as `max_retries` is not used up."""
    worker, router = await stage.worker_and_router(resume_on_worker_loss=True, max_retries=2)
    worker.next(*[script(CLOSE)] * deaths)
    last = answer([9], length(1))
    worker.always(streamed(last) if stream else told(last))
    came = await soon(post(router, "/generate", input_ids=[1, 2], stream=stream))
    assert came.status == status
    assert len(worker.requests) <= 4  # the first may have met a connection that was no longer good


DISK, TENSOR, NAME = "/update_weights_from_disk", "/update_weights_from_tensor", "/update_weight_version"
DONE, REFUSED = script(reply(b'{"success": true}')), script(reply(b'{"success": false}', 400))
SAME_SETTINGS: dict[str, Any] = {"fan_out": (TENSOR,), "health_check_interval": 0.05}


async def scripted(stage: Stage, path: str, behaviour: Any = DONE) -> ScriptedWorker:
    """A worker that names version "1", whatever its weights are."""
    worker = await stage.worker()
    worker.standing.update({path: behaviour, NAME: DONE})
    return worker


async def update(router: RunningRouter, path: str, **fields: Any) -> RawReply:
    return await router.ask("POST", path, [("Content-Type", "application/json")], json.dumps(fields).encode())


def states(router: RunningRouter) -> dict[str, str]:
    return {worker.url: worker.state.value for worker in router.pool}


@pytest.mark.parametrize("path", [DISK, TENSOR])
async def test_a_worker_that_refused_an_unnamed_update_is_outdated(
    stage: Stage, caplog: pytest.LogCaptureFixture, path: str
) -> None:
    good, bad = await scripted(stage, path), await scripted(stage, path, REFUSED)
    router = await stage.router(good, bad, **SAME_SETTINGS)
    await router.probed()
    assert (await update(router, path, model_path="/new")).status == 502
    assert states(router) == {good.url: "ready", bad.url: "outdated"}
    assert router.pool.weight_version is None
    (said,) = [each.__dict__["fields"] for each in caplog.records if each.message == "weights_without_version"]
    assert said["missed_by"] == [bad.url]
    for _ in range(6):
        assert (await router.ask("POST", "/generate", body=b"{}")).status == 200
    assert (len(good.requests), bad.requests) == (6, [])
    await router.probed()
    assert states(router)[bad.url] == "outdated", "its version string says nothing"
    bad.standing[path] = DONE
    assert (await update(router, path, model_path="/new")).status == 200
    assert states(router) == {good.url: "ready", bad.url: "ready"}


async def test_a_newcomer_behind_an_unnamed_update_waits_for_one(stage: Stage) -> None:
    first, newcomer = await scripted(stage, DISK), await scripted(stage, DISK)
    router = await stage.router(first, **SAME_SETTINGS)
    await router.probed()
    assert (await update(router, DISK, model_path="/new")).status == 200
    assert (await router.ask("POST", f"/add_worker?url={newcomer.url}")).status == 200
    assert states(router) == {first.url: "ready", newcomer.url: "outdated"}
    for _ in range(4):
        assert (await router.ask("POST", "/generate", body=b"{}")).status == 200
    assert newcomer.requests == []
    assert (await update(router, DISK, model_path="/newer")).status == 200
    assert states(router) == {first.url: "ready", newcomer.url: "ready"}


async def test_a_name_alone_does_not_bring_back_who_missed_an_update(stage: Stage) -> None:
    good, bad = await scripted(stage, DISK), await scripted(stage, DISK, REFUSED)
    router = await stage.router(good, bad)  # whose checks are far between: nobody looks until the name was told
    await until(lambda: router.pool.weight_version == "1", "both have said their version")
    await update(router, DISK, model_path="/new")
    for worker in (good, bad):
        worker.model_info = script(reply(b'{"model_path": "scripted", "weight_version": "2"}'))
    assert (await update(router, NAME, new_version="2")).status == 200
    assert router.pool.weight_version == "2"
    assert states(router) == {good.url: "ready", bad.url: "outdated"}
