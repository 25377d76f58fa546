"""Pauses and sleep: workers that refuse or hang, pauses in pauses, workers that join meanwhile."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import orjson
import pytest

from miles_router.control import call
from miles_router.fleet.workers import WorkerState
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
    shown,
    simulated,
    states,
)
from tests.support.http import ask
from tests.support.running_router import RunningRouter
from tests.support.scripted_worker import HANG, Behaviour, Visit, reply, script
from tests.support.stage import Stage
from tests.support.waiting import soon, until

REFUSES = script(reply(b'{"error": "no"}', 503))


def hurry(router: RunningRouter, seconds: float = 0.15) -> None:
    """Give workers less time for control requests."""
    by_path = router.app.router.control.by_path
    for path, known in by_path.items():
        by_path[path] = replace(known, timeout=seconds)


@pytest.fixture
def brief(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give workers less time to go on, too, where a pause is undone."""
    monkeypatch.setattr(call, "BRIEF", 0.15)


# Some worker does not do it


@pytest.mark.usefixtures("brief")
@pytest.mark.parametrize("mode", ["abort", "retract", "in_place"])
async def test_pause_that_a_worker_hangs_on_is_undone_in_bounded_time_by_name(stage: Stage, mode: str) -> None:
    well, hanging = await stage.worker(), await stage.worker()
    hanging.always(by_path(pause_generation=script(HANG), continue_generation=script(HANG)))
    router = await stage.router(well, hanging)
    hurry(router)
    pausing = posting(router, "/pause_generation", mode=mode)
    await until(lambda: well.requests and hanging.requests, "both are asked")
    assert (await info(router))["gate"]["mode"] == mode
    waiting = posting(router)
    await held(router, 1)
    answer = await soon(pausing)
    assert (answer.status, answer.json()["error"]["message"]) == (502, f"these workers failed: {hanging.url}")
    assert answer.json()["workers"][hanging.url] == {"status": 0, "body": "no answer within 0.15 s"}
    assert await is_open(router)
    assert await shown(router, hanging) == ("paused", "may be paused, and could not be continued")
    assert (await waiting).status == (await posting(router)).status == 200
    assert asked(well) == ["/pause_generation", "/continue_generation", "/generate", "/generate"]
    assert asked(hanging) == ["/pause_generation", "/continue_generation"]


async def test_a_worker_that_was_too_slow_for_a_pause_goes_on_with_the_others(stage: Stage) -> None:
    well, slow = await stage.worker(), await stage.worker()
    slow.next(script(HANG))
    router = await stage.router(well, slow)
    hurry(router)
    assert (await post(router, "/pause_generation")).status == 502
    assert asked(slow) == ["/pause_generation", "/continue_generation"]
    assert (await states(router), await is_open(router)) == ({well.url: "ready", slow.url: "ready"}, True)


@pytest.mark.usefixtures("brief")
async def test_a_worker_that_may_be_paused_returns_once_it_says_that_it_is_not(stage: Stage) -> None:
    well, slow = await stage.worker(), await stage.worker()
    router = await stage.router(well, slow, **PROBING)
    hurry(router, 0.02)
    slow.model_info = slow.health = by_path(model_info=script(reply(b"{}")), ready=REFUSES, health=script(HANG))
    slow.always(script(HANG))
    assert (await post(router, "/pause_generation")).status == 502
    assert await shown(router, slow) == ("paused", "may be paused, and could not be continued")
    slow.model_info = slow.health = script(reply(b"{}"))
    await becomes(router, slow, WorkerState.READY)


async def test_a_pause_that_finds_a_dead_worker_is_taken_back_and_it_takes_no_traffic(stage: Stage) -> None:
    well, dead = await stage.worker(), await stage.worker()
    router = await stage.router(well, dead)
    dead.kill()
    assert (await post(router, "/pause_generation")).status == 502
    assert await is_open(router)
    for _ in range(3):
        assert (await posting(router)).status == 200
    assert asked(well) == ["/pause_generation", "/continue_generation", *["/generate"] * 3]
    assert router.app.router.metrics.retries == 0


async def test_where_a_second_pause_fails_the_first_one_stands(stage: Stage) -> None:
    well, sick = await stage.worker(), await stage.worker()
    router = await stage.router(well, sick)
    await post(router, "/pause_generation", mode="in_place")
    sick.next(script(reply()), REFUSES)  # it is made ready for the abort, and refuses it
    assert (await post(router, "/pause_generation", mode="abort")).status == 502
    said = (await info(router))["gate"]
    assert (said["closed"], said["mode"]) == (True, "in_place")
    assert "/continue_generation" not in asked(well)
    assert (await post(router, "/continue_generation")).status == 200
    assert await is_open(router)


async def test_a_continue_that_some_worker_hangs_on_frees_the_others_in_bounded_time(stage: Stage) -> None:
    well, hanging = await stage.worker(), await stage.worker()
    router = await stage.router(well, hanging)
    await post(router, "/pause_generation")
    waiting = [posting(router) for _ in range(3)]
    await held(router, 3)
    hanging.always(script(HANG))
    hurry(router)
    answer = await soon(post(router, "/continue_generation"))
    assert (answer.status, answer.json()["error"]["message"]) == (502, f"these workers failed: {hanging.url}")
    assert [(await each).status for each in waiting] == [200, 200, 200]
    assert (await shown(router, hanging), await is_open(router)) == (("paused", "could not be continued"), True)
    hanging.always(script(reply()))
    assert (await post(router, "/continue_generation")).status == 200
    assert await shown(router, hanging) == ("ready", "resumed")


async def test_where_nobody_could_be_continued_the_gate_stays_closed_until_somebody_is(stage: Stage) -> None:
    workers = [await stage.worker() for _ in range(2)]
    router = await stage.router(*workers)
    await post(router, "/pause_generation")
    waiting = [posting(router, number=number) for number in range(3)]
    await held(router, 3)
    for worker in workers:
        worker.next(REFUSES)
    assert (await post(router, "/continue_generation")).status == 502
    said = (await info(router))["gate"]
    assert (said["closed"], said["paused_since"], said["workers_paused_since"] is None) == (True, None, False)
    assert gate(router).held == 3
    workers[0].next(REFUSES)
    assert (await post(router, "/continue_generation")).status == 502
    assert [(await each).status for each in waiting] == [200, 200, 200]
    assert await states(router) == {workers[0].url: "paused", workers[1].url: "ready"}
    assert asked(workers[1])[3:] == ["/generate"] * 3


@pytest.mark.parametrize(
    ("standstill", "end"),
    [("/pause_generation", "/continue_generation"), ("/release_memory_occupation", "/resume_memory_occupation")],
)
async def test_a_standstill_can_be_ended_when_its_workers_are_gone(stage: Stage, standstill: str, end: str) -> None:
    old, new = await stage.worker(), await stage.worker()
    router = await stage.router(old)
    await post(router, standstill)
    waiting = posting(router)
    await held(router, 1)
    await post(router, f"/remove_worker?url={old.url}")
    assert (await post(router, end)).error_type == "no_worker_available"
    assert await is_open(router)
    assert (await waiting).error_type == "no_worker_available"
    await post(router, "/add_worker", url=new.url)
    assert (await posting(router)).status == 200
    assert asked(new) == ["/generate"]


# A pause in a pause


def like_sglang(keeps: list[str]) -> Behaviour:
    """As SGLang 0.5.23: what is kept in place never comes to its end, and `abort` waits for that, deaf to continue."""

    async def behave(visit: Visit) -> None:
        body = orjson.loads(await visit.read_body() or b"{}")
        if visit.request.path == "/pause_generation":
            if body["mode"] == "abort" and keeps and keeps[-1] == "in_place":
                keeps.append("deaf")
            keeps.append(body["mode"])
        elif visit.request.path == "/continue_generation" and "deaf" not in keeps:
            keeps.clear()
        await visit.run([HANG if "deaf" in keeps else reply()])

    return behave


async def test_an_abort_after_in_place_does_not_hang_and_can_be_continued(stage: Stage) -> None:
    keeps: list[list[str]] = [[], []]
    workers = [(await stage.worker()).always(like_sglang(each)) for each in keeps]
    router = await stage.router(*workers)
    hurry(router, 2)
    assert (await post(router, "/pause_generation", mode="in_place")).status == 200
    assert (await post(router, "/pause_generation", mode="abort")).status == 200
    assert (keeps, (await info(router))["gate"]["mode"]) == ([["in_place", "retract", "abort"]] * 2, "abort")
    assert (await post(router, "/pause_generation", mode="abort")).status == 200
    assert keeps[0][3:] == ["abort"], "what was aborted is kept no more"
    assert (await post(router, "/continue_generation")).status == 200
    assert (keeps, await is_open(router)) == ([[], []], True)


async def test_so_it_is_where_somebody_else_paused_a_worker_in_place(stage: Stage) -> None:
    keeps: list[list[str]] = [[], []]
    workers = [(await stage.worker()).always(like_sglang(each)) for each in keeps]
    router = await stage.router(*workers)
    await ask(workers[1].url, "POST", "/pause_generation", JSON, b'{"mode": "in_place"}')
    router.pool.set_paused(router.worker(workers[1]), "noticed")
    hurry(router, 2)
    assert (await post(router, "/pause_generation", mode="abort")).status == 200
    assert keeps == [["abort"], ["in_place", "retract", "abort"]]


@pytest.mark.parametrize(("partial_rollout", "finish"), [("resume", "length"), ("return", "abort")])
@pytest.mark.parametrize("first", ["in_place", "retract"])
async def test_what_was_kept_in_place_and_then_aborted_is_cut_as_by_any_abort(
    stage: Stage, first: str, partial_rollout: str, finish: str
) -> None:
    async with simulated(token_latency_s=0.002, stop_probability=0) as workers:
        router = await stage.router(*(worker.url for worker in workers), partial_rollout=partial_rollout)
        sampling = {"max_new_tokens": 1000, "ignore_eos": True}
        tasks = [posting(router, text="Hi", rid=f"r{number}", sampling_params=sampling) for number in range(4)]
        await until(lambda: sum(worker.running for worker in workers) == 4, "they run")
        for mode in (first, "abort"):
            assert (await soon(post(router, "/pause_generation", mode=mode))).status == 200
        assert (await post(router, "/flush_cache")).status == 200
        for worker in workers:
            worker.engine.token_latency_s = 0
        assert (await post(router, "/continue_generation")).status == 200
        for answer in [(await each).json() for each in tasks]:
            assert answer["meta_info"]["finish_reason"]["type"] == finish
            assert finish == "abort" or len(answer["output_ids"]) == 1000


# Who joins


@pytest.mark.alone("idle workers take turns in each process")
async def test_who_joins_a_paused_fleet_is_paused_before_anything_else_reaches_it(stage: Stage) -> None:
    old, new = await stage.worker(), await stage.worker()
    router = await stage.router(old)
    await post(router, "/pause_generation", mode="in_place")
    waiting = [posting(router) for _ in range(2)]
    await held(router, 2)
    assert (await post(router, "/add_worker", url=new.url)).status == 200
    assert (asked(new), new.requests[0].body) == (["/pause_generation"], b'{"mode":"in_place"}')
    await post(router, "/continue_generation")
    assert [(await each).status for each in waiting] == [200, 200]
    assert asked(new) == ["/pause_generation", "/continue_generation", "/generate"]


@pytest.mark.parametrize("path", ["/pause_generation", "/release_memory_occupation"])
@pytest.mark.parametrize("refusal", [REFUSES, script(HANG)], ids=["refuses", "dies"])
async def test_who_cannot_follow_the_fleet_does_not_join_it(stage: Stage, path: str, refusal: Behaviour) -> None:
    old, new = await stage.worker(), (await stage.worker()).always(refusal)
    router = await stage.router(old)
    await post(router, path)
    joining = posting(router, "/add_worker", url=new.url)
    await until(lambda: new.requests, "it is asked to")
    if refusal is not REFUSES:
        new.kill()
    answer = await soon(joining)
    assert (answer.status, answer.error_type, asked(new)) == (502, "fan_out_failed", [path])
    assert (await router.ask("GET", "/list_workers")).json() == {"urls": [old.url]}


async def test_who_joins_while_the_fleet_is_being_continued_is_not_left_paused(stage: Stage) -> None:
    old, new = await stage.worker(), await stage.worker()
    router = await stage.router(old)
    await post(router, "/pause_generation")
    go_on = asyncio.Event()
    old.next(script(go_on, reply()))
    continuing = posting(router, "/continue_generation", now=True)
    await until(lambda: len(old.requests) == 2, "it is being continued")
    joining = posting(router, "/add_worker", url=new.url)
    for _ in range(5):  # time in which a registration gets through
        await info(router)
    go_on.set()
    assert (await continuing).status == (await joining).status == 200
    assert asked(new) == [], "neither paused nor continued"


async def test_who_joins_a_sleeping_fleet_is_put_to_sleep_first_and_wakes_with_it(
    stage: Stage,
) -> None:
    old, new = await stage.worker(), await stage.worker()
    new.model_info = script(HANG)
    router = await stage.router(old, **{**PROBING, "health_check_failure_threshold": 1})
    steps: list[tuple[str, dict[str, Any]]] = [
        ("/release_memory_occupation", {}),
        ("/resume_memory_occupation", {"tags": ["weights"]}),
    ]
    for path, body in steps:
        await post(router, path, **body)
    waiting = [posting(router) for _ in range(2)]
    await held(router, 2)
    router.app.router.pool.weight_version = None  # it cannot be asked for its version
    assert (await post(router, "/add_worker", url=new.url)).status == 200
    assert [(each.path, orjson.loads(each.body)) for each in new.requests] == steps
    assert (await post(router, "/add_worker", url=new.url)).status == 200
    assert len(new.requests) == 2, "who has joined already sleeps"
    await until(lambda: len(new.probes) > 3, "it is silent to some probes")
    assert (await states(router), gate(router).held) == ({old.url: "ready", new.url: "ready"}, 2)
    new.model_info = script(reply(b"{}"))
    await post(router, "/resume_memory_occupation", tags=["kv_cache"])
    assert [(await each).status for each in waiting] == [200, 200]
    assert asked(new)[2:] == ["/resume_memory_occupation", "/generate"]


async def test_who_joins_a_fleet_that_has_woken_is_left_as_it_is(stage: Stage) -> None:
    old, new = await stage.worker(), await stage.worker()
    router = await stage.router(old)
    for path in ("/release_memory_occupation", "/resume_memory_occupation", "/pause_generation"):
        await post(router, path)
    await post(router, "/continue_generation")
    await post(router, "/add_worker", url=new.url)
    assert asked(new) == []
