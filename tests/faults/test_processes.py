"""Processes of one router that die, or stand still: what they had is broken off and given back, and nothing else is."""

from __future__ import annotations

import asyncio
import os
import resource
import signal
from pathlib import Path

import psutil

from miles_router.serving.supervisor import MAX_QUICK_DEATHS
from miles_router.testing import SimulatedWorker
from tests.e2e.test_processes import MANY, generations, holding
from tests.support.http import CutReply, ask
from tests.support.layers import written
from tests.support.processes import processes
from tests.support.running_router import refuses
from tests.support.stage import Stage
from tests.support.waiting import until


async def test_killed_process_breaks_its_own_requests_and_returns_its_leases(stage: Stage) -> None:
    gate = asyncio.Event()
    worker = await holding(stage, gate)
    async with processes([worker]) as router:
        under_way = router.generating(MANY)
        await until(lambda: generations(worker) == MANY, "all generations are at the worker")
        victim, survivor = await router.data()
        await router.kill(victim)
        info = await router.shows(lambda info: info["in_flight"] < MANY)
        gate.set()
        answers = await asyncio.gather(*under_way, return_exceptions=True)
        broken = [each for each in answers if isinstance(each, (CutReply, OSError))]
        whole = [each for each in answers if not isinstance(each, BaseException)]
        assert 0 < len(broken) < MANY, "the system dealt the connections to both"
        assert len(broken) + len(whole) == MANY
        assert {each.status for each in whole} == {200}
        assert info["in_flight"] == len(whole)
        await router.becomes_idle()
        await router.whole()
        assert survivor in await router.data()
        assert {each.status for each in await asyncio.gather(*router.generating(MANY))} == {200}


async def test_clients_that_come_while_a_process_is_away_wait_for_it(stage: Stage) -> None:
    worker = await stage.worker()
    async with processes([worker]) as router:
        for each in await router.data():
            await router.kill(each)
        assert {each.status for each in await asyncio.gather(*router.generating(MANY))} == {200}


async def test_what_a_killed_process_has_counted_goes_with_it_and_it_is_shown_as_away(stage: Stage) -> None:
    worker = await stage.worker()
    async with processes([worker]) as router:
        await asyncio.gather(*router.generating(MANY))
        counted = [await router.metric("miles_router_requests_total", route="generate", shard=each) for each in "01"]
        assert sum(counted) == MANY
        victim, survivor = await router.data()
        os.kill(victim, signal.SIGSTOP)
        shown = (await ask(router.own_url(survivor), "GET", "/metrics")).body.decode().splitlines()
        assert sorted(line[-3:] for line in shown if line.startswith("miles_router_shard_up{")) == ["0.0", "1.0"]
        await router.kill(victim)
        await router.whole()
        assert await router.metric("miles_router_shard_up") == len(counted)
        left = await router.metric("miles_router_requests_total", route="generate")
        assert left in counted
        await router.kill(await router.control())
        assert await router.metric("miles_router_requests_total", route="generate") == left


async def test_layer_statistics_sum_over_all_processes(stage: Stage, tmp_path: Path) -> None:
    worker = await stage.worker()
    config = written(tmp_path, [("tests.support.plugins.working.Tagging", {"tag": "one"})])
    async with processes([worker], "--config", str(config)) as router:
        await asyncio.gather(*router.generating(MANY))
        want = {"tags": {"one": MANY}, "length": len("one")}
        assert (await router.info())["statistics"]["tagging"] == want
        await router.kill(await router.control())
        assert (await router.info())["statistics"]["tagging"] == want


async def test_a_stalled_worker_counts_once_however_many_processes_have_seen_it() -> None:
    settings = ("--stall-timeout", "1", "--health-check-interval", "0.05", "--gate-timeout", "1")
    long = {"text": "Hi", "sampling_params": {"max_new_tokens": 1000}}
    async with (
        SimulatedWorker(token_latency_s=0.01, stop_probability=0) as sick,
        processes([sick.url], *settings) as router,
    ):
        under_way = [asyncio.ensure_future(router.post("/generate", **long)) for _ in range(MANY)]
        await until(lambda: sick.running == MANY, "all generations run")
        sick.stop_scheduler()
        assert 200 not in {each.status for each in await asyncio.gather(*under_way)}
        assert await router.metric("miles_router_stalled_workers_total") == 1
        await router.kill(await router.control())
        assert await router.metric("miles_router_stalled_workers_total") == 1
        sick.continue_scheduler()


async def test_while_the_leader_is_away_generations_go_on_and_it_comes_back_as_it_was(stage: Stage) -> None:
    first, second = await stage.worker(), await stage.worker()
    async with processes([first]) as router:
        await router.post("/workers", url=second.url, labels={"rack": "7"}, api_key="secret")
        await router.post("/remove_worker", url=first.url)
        before = (await router.ask("GET", "/workers")).json()["workers"]
        control = await router.control()
        os.kill(control, signal.SIGSTOP)
        assert {each.status for each in await asyncio.gather(*router.generating(MANY))} == {200}
        await router.kill(control)
        after = (await router.ask("GET", "/workers")).json()["workers"]
        changing = ("last_check", "facts")
        assert [{k: v for k, v in each.items() if k not in changing} for each in after] == [
            {k: v for k, v in each.items() if k not in changing} for each in before
        ]
        assert {each.status for each in await asyncio.gather(*router.generating(MANY))} == {200}
        assert generations(first) == 0


async def test_a_leader_that_stands_still_is_killed_and_the_next_one_answers_what_is_asked(stage: Stage) -> None:
    async with processes([await stage.worker()]) as router:
        control = await router.control()
        os.kill(control, signal.SIGSTOP)
        told = await router.ask("GET", "/workers")
        assert told.status == 200
        assert len(told.json()["workers"]) == 1
        assert await router.control() != control
        assert "process_hangs process=leader" in router.router.stderr()


async def test_a_paused_fleet_stays_paused_when_the_leader_is_killed(stage: Stage) -> None:
    worker = await stage.worker()
    async with processes([worker]) as router:
        await router.post("/pause_generation", mode="in_place")
        waiting = router.generating(MANY)
        await router.held(MANY)
        await router.kill(await router.control())
        await router.held(MANY)
        assert generations(worker) == 0
        assert (await router.post("/continue_generation")).status == 200
        assert {each.status for each in await asyncio.gather(*waiting)} == {200}


async def test_process_that_ignores_a_pause_is_killed_before_any_engine_pauses(stage: Stage) -> None:
    worker = await stage.worker()
    async with processes([worker]) as router:
        victim, _ = await router.data()
        control = await router.control()
        os.kill(victim, signal.SIGSTOP)
        # Of many connections some lead to the other; those that the victim has not taken wait for the next.
        asking = [asyncio.ensure_future(router.post("/pause_generation", mode="in_place")) for _ in range(MANY)]
        await until(lambda: victim not in router.children, "it was killed")
        assert {each.status for each in await asyncio.gather(*asking)} == {200}
        told = router.router.stderr()
        assert f"process_does_not_follow process={victim}" in told or "process_hangs" in told
        assert await router.control() == control
        await router.whole()
        waiting = router.generating(MANY)
        await router.held(MANY)
        assert (await router.post("/continue_generation")).status == 200
        await asyncio.gather(*waiting)


async def test_all_processes_end_with_their_supervisor(stage: Stage) -> None:
    async with SimulatedWorker() as worker, processes([worker.url], expect_status=-9) as router:
        children = [psutil.Process(each) for each in router.children]
        assert len(children) == 3
        router.router.process.kill()
        await until(lambda: not any(each.is_running() for each in children), "all have ended")
        await until(lambda: refuses(router.url), "nothing listens any more")


async def test_a_process_that_dies_again_and_again_is_named(stage: Stage) -> None:
    async with processes([await stage.worker()]) as router:
        for _ in range(MAX_QUICK_DEATHS + 1):
            await router.whole()
            await router.kill(await router.control())
        await until(lambda: "process_dies_again_and_again process=leader" in router.router.stderr(), "it is said")
        await router.whole()


async def test_a_process_for_which_the_system_has_no_room_is_started_once_it_has(stage: Stage) -> None:
    async with processes([await stage.worker()]) as router:
        supervisor = router.router.process.pid
        soft, hard = resource.prlimit(supervisor, resource.RLIMIT_NOFILE)
        resource.prlimit(supervisor, resource.RLIMIT_NOFILE, (3, hard))
        await router.kill(await router.control())
        await until(lambda: "process_not_started process=leader" in router.router.stderr(), "it is said")
        resource.prlimit(supervisor, resource.RLIMIT_NOFILE, (soft, hard))
        await router.whole()
