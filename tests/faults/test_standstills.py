"""A fleet that stands still when its router is killed stands still for the next one on the same directory."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import orjson
import pytest

from miles_router.errors import StateFull
from miles_router.testing import SimulatedWorker
from tests.support.fleet import post
from tests.support.forks import fork_router
from tests.support.http import RawReply, ask
from tests.support.running_router import RouterProcess, router_process
from tests.support.stage import Stage
from tests.support.tiers import nightly
from tests.support.waiting import STEP, until

JSON = [("Content-Type", "application/json")]
SHORT = {"text": "Hi", "sampling_params": {"max_new_tokens": 2}}
#: Processes of a router.
COUNTS = (1, 2) if nightly() else (2,)
KILLED = -signal.SIGKILL


async def asked(router: RouterProcess, path: str, **fields: Any) -> RawReply:
    return await ask(router.url, "POST", path, JSON, orjson.dumps(fields))


async def info(router: RouterProcess) -> dict[str, Any]:
    found: dict[str, Any] = (await ask(router.url, "GET", "/router/info")).json()
    return found


@asynccontextmanager
async def on(directory: Path, count: int, *arguments: str, status: int = 0) -> AsyncIterator[RouterProcess]:
    given = ("--state-dir", str(directory), "--processes", str(count), *arguments)
    async with router_process(*given, expect_status=status, start=fork_router) as router:
        yield router
        if status == KILLED:
            router.process.kill()


async def held(router: RouterProcess) -> asyncio.Task[RawReply]:
    """A generation that waits at the gate."""
    waiting = asyncio.ensure_future(asked(router, "/generate", **SHORT))
    while (await info(router))["gate"]["held"] != 1:  # noqa: ASYNC110  # each look is a request
        await asyncio.sleep(STEP)
    return waiting


@pytest.mark.parametrize(
    ("named", "count"), [("registered", 1), ("listed", 2), *([("listed", 1)] if nightly() else [])]
)
async def test_a_paused_fleet_stays_paused_over_kills_until_it_is_continued(
    tmp_path: Path, count: int, named: str
) -> None:
    async with SimulatedWorker() as worker:
        arguments = ("--worker-urls", worker.url) if named == "listed" else ()
        async with on(tmp_path, count, *arguments, status=KILLED) as router:
            if named == "registered":
                assert (await asked(router, "/add_worker", url=worker.url)).status == 200
            assert (await asked(router, "/generate", **SHORT)).status == 200
            assert (await asked(router, "/pause_generation", mode="retract")).status == 200
            since = (await info(router))["gate"]["paused_since"]
        async with on(tmp_path, count, *arguments, status=KILLED) as router:
            gate = (await info(router))["gate"]
            assert (gate["closed"], gate["mode"], gate["paused_since"]) == (True, "retract", since)
            waiting = await held(router)
            assert len(worker.log.at("/generate")) == 1
            assert (await asked(router, "/continue_generation")).status == 200
            assert (await waiting).status == 200
        async with on(tmp_path, count, *arguments) as router:
            assert not (await info(router))["gate"]["closed"]
            assert (await asked(router, "/generate", **SHORT)).status == 200


@pytest.mark.parametrize("count", COUNTS)
async def test_a_fleet_that_sleeps_is_told_nothing_twice_and_wakes_as_it_is_told(tmp_path: Path, count: int) -> None:
    async with SimulatedWorker() as worker, SimulatedWorker() as newcomer:
        arguments = ("--worker-urls", worker.url)
        async with on(tmp_path, count, *arguments, status=KILLED) as router:
            assert (await asked(router, "/release_memory_occupation", tags=["kv_cache", "weights"])).status == 200
        async with on(tmp_path, count, *arguments, status=KILLED) as router:
            assert (await info(router))["gate"]["asleep_since"] is not None
            assert (await asked(router, "/add_worker", url=newcomer.url)).status == 200
            assert (await asked(router, "/resume_memory_occupation", tags=["weights"])).status == 200
        async with on(tmp_path, count, *arguments) as router:
            waiting = await held(router)
            assert (await asked(router, "/resume_memory_occupation", tags=["kv_cache"])).status == 200
            assert (await waiting).status == 200
        for each in (worker, newcomer):
            assert len(each.log.at("/release_memory_occupation")) == 1, "the second would end the engine"
            assert len(each.log.at("/resume_memory_occupation")) == 2


async def test_a_fleet_that_goes_on_without_workers_is_not_closed_for_the_next_router(tmp_path: Path) -> None:
    async with SimulatedWorker() as worker:
        async with on(tmp_path, 1, status=KILLED) as router:
            for stop, go_on in (
                ("/pause_generation", "/continue_generation"),
                ("/release_memory_occupation", "/resume_memory_occupation"),
            ):
                assert (await asked(router, "/add_worker", url=worker.url)).status == 200
                assert (await asked(router, stop)).status == 200
                assert (await asked(router, "/remove_worker", url=worker.url)).status == 200
                assert (await asked(router, go_on)).error_type == "no_worker_available"
        async with on(tmp_path, 1) as router:
            assert not (await info(router))["gate"]["closed"]


async def test_who_slept_before_is_told_to_sleep_again_once_it_has_woken_or_left(tmp_path: Path) -> None:
    async with SimulatedWorker() as worker, SimulatedWorker() as other:

        def told() -> list[int]:
            return [len(each.log.at("/release_memory_occupation")) for each in (worker, other)]

        async with on(tmp_path, 1, "--worker-urls", worker.url, other.url, status=KILLED) as router:
            assert (await asked(router, "/release_memory_occupation")).status == 200
        async with on(tmp_path, 1, "--worker-urls", worker.url, other.url) as router:
            assert told() == [1, 1]
            assert (await asked(router, "/remove_worker", url=other.url)).status == 200
            assert (await asked(router, "/add_worker", url=other.url)).status == 200
            assert told() == [1, 2], "it may have been started anew"
            assert (await asked(router, "/resume_memory_occupation")).status == 200
            assert (await asked(router, "/release_memory_occupation")).status == 200
            assert told() == [2, 3]
            assert (await asked(router, "/resume_memory_occupation")).status == 200


async def test_a_sleep_that_a_kill_cuts_is_whole_for_the_next_router(tmp_path: Path) -> None:
    async with SimulatedWorker() as worker:
        arguments = ("--worker-urls", worker.url)
        async with on(tmp_path, 1, *arguments, status=KILLED) as router:
            worker.faults.hang(path="/release_memory_occupation")
            order = asked(router, "/release_memory_occupation", tags=["kv_cache", "weights"])
            cut = asyncio.ensure_future(order)
            await until(lambda: worker.log.at("/release_memory_occupation"), "it is told")
        await asyncio.gather(cut, return_exceptions=True)
        async with on(tmp_path, 1, *arguments) as router:
            assert (await asked(router, "/resume_memory_occupation", tags=["weights"])).status == 200
            assert (await info(router))["gate"]["closed"], "a part is missing still"
            assert (await asked(router, "/resume_memory_occupation", tags=["kv_cache"])).status == 200
            assert not (await info(router))["gate"]["closed"]


async def test_what_cannot_be_made_durable_is_refused_before_any_worker_is_told(stage: Stage, tmp_path: Path) -> None:
    async with SimulatedWorker() as worker:
        router = await stage.router(worker.url, state_dir=str(tmp_path))

        async def full() -> None:
            raise StateFull("the disk is full")

        async def full_from_now_on() -> None:
            router.app.router.fleet.save_standstill = full

        router.app.router.fleet.save_standstill, keep = full, router.app.router.fleet.save_standstill
        for path, fields in (("/pause_generation", {"mode": "abort"}), ("/release_memory_occupation", {})):
            refused = await post(router, path, **fields)
            assert (refused.status, refused.error_type) == (507, "state_failed")
            assert not worker.log.at(path)
            assert (await post(router, "/generate", **SHORT)).status == 200
        router.app.router.fleet.save_standstill = full_from_now_on
        assert (await post(router, "/pause_generation", mode="abort")).status == 200
        assert (await post(router, "/continue_generation")).status == 200, "what was done is no failure"
        assert (await post(router, "/generate", **SHORT)).status == 200
        router.app.router.fleet.save_standstill = keep
