"""What a router of two processes does for many workers and sessions grows with their number, and not faster.

CPU of all its processes, with 128 simulated workers and 10,000 sessions in the end. Four times as many may cost four
times as much, and twice that: what grows with the square costs sixteen times as much.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import aiohttp
import pytest

from miles_router.testing import SimulatedWorker
from miles_router.testing.worker.model.hf_vocabulary import DirectoryTokenizer
from tests.benchmarks.procstat import scheduled_seconds
from tests.support.cache_trial import checkpoint
from tests.support.layers import written
from tests.support.processes import Processes, processes
from tests.support.session_trial import CHAT, SESSIONS, user
from tests.support.tiers import heavy

pytestmark = [pytest.mark.storm, pytest.mark.skipif(not heavy(), reason="it takes minutes")]

WORKERS = (32, 64, 128)
SESSIONS_HELD = (2_500, 5_000, 10_000)
#: How much more than linear a cost may grow: CPU times of small work spread.
MARGIN = 2.0
#: Registrations that are measured at each size; and how often each request is asked, so that rounds of checks, which
#: come between, fall on all alike.
JOINING, REPEATED = 30, 100
AT_ONCE = 32
HI = {"text": "Hi", "sampling_params": {"max_new_tokens": 1}}
TURN = {"model": "m", "max_tokens": 2, "messages": [user("Hi")]}
SHOWN = ("/workers", "/router/info", "/metrics")


class Asked(NamedTuple):
    """A request; without a body it is a GET."""

    path: str
    body: Any = None
    session: str = ""


class Growth:
    """CPU by what was done, and by size."""

    def __init__(self, router: Processes, http: aiohttp.ClientSession) -> None:
        self.router, self.http = router, http
        self.costs: dict[str, dict[int, float]] = defaultdict(dict)
        self.idle = 0.0  # of a second in which nothing is asked: checks of workers

    async def measure(self, name: str, size: int, requests: Sequence[Asked]) -> None:
        """What one of these costs; without any, what checks cost in a second."""
        before, begun = self._spent(), time.monotonic()
        for asked in requests:
            await self.ask(asked)
        if not requests:
            await asyncio.sleep(4.0)
            self.idle = (self._spent() - before) / 4.0
        spent = self._spent() - before - self.idle * (time.monotonic() - begun)
        self.costs[name][size] = spent / len(requests) if requests else self.idle

    async def ask(self, asked: Asked) -> None:
        """One request, which must succeed."""
        path, body, session = asked
        headers = {"X-Session-Id": session} if session else {}
        async with self.http.request("POST" if body else "GET", path, json=body, headers=headers) as reply:
            assert reply.status in (200, 201), await reply.read()
            await reply.read()

    async def show(self, size: int, *more: str, of: str) -> None:
        """What is shown of all, each several times."""
        for path in (*SHOWN, *more):
            await self.measure(f"{path}, {of}", size, [Asked(path)] * REPEATED)

    def _spent(self) -> float:
        return scheduled_seconds(self.router.router.process.pid)

    def check(self) -> None:
        """Raises:
        AssertionError: something grows faster than what it is done for.
        """
        for name, by_size in self.costs.items():
            for least, most in itertools.combinations(sorted(by_size), 2):
                grown = by_size[most] / by_size[least]
                print(f"{name:32} {by_size[least] * 1e3:7.2f} ms for {least}, {grown:.1f} times as much for {most}")
                assert grown <= MARGIN * most / least, f"{name}: {grown:.1f} times as much for {most} of {least}"


@asynccontextmanager
async def many_workers() -> AsyncIterator[list[SimulatedWorker]]:
    """As many as there are at most, in this process."""
    tokenizer = DirectoryTokenizer(checkpoint())
    async with AsyncExitStack() as stack:
        entered = [SimulatedWorker(tokenizer=tokenizer, weight_version="1") for _ in range(max(WORKERS))]
        yield [await stack.enter_async_context(each) for each in entered]


async def with_workers(growth: Growth, workers: list[SimulatedWorker]) -> None:
    """Register them in steps, and measure at each."""
    joining = iter([Asked("/workers", {"url": each.url}) for each in workers])
    there = 0
    for size in WORKERS:
        for asked in islice(joining, size - there - JOINING):
            await growth.ask(asked)
        growth.idle = 0.0
        await growth.measure("a registration", size, [*islice(joining, JOINING)])
        there = size
        await growth.measure("a second of checks", size, [])
        await growth.show(size, of="workers")
        await growth.measure("a generation", size, [Asked("/generate", HI)] * 4 * REPEATED)


async def with_sessions(growth: Growth) -> None:
    """Begin them in steps, and measure at each."""
    names = (f"agent-{number}" for number in itertools.count())
    there = 0
    for size in SESSIONS_HELD:
        turns = [Asked(CHAT, TURN, name) for name in islice(names, size - there)]
        first, last = iter(turns[: -4 * REPEATED]), turns[-4 * REPEATED :]

        async def agent(turns: Iterator[Asked] = first) -> None:
            for asked in turns:
                await growth.ask(asked)

        await asyncio.gather(*(agent() for _ in range(AT_ONCE)))
        await growth.measure("a session's first turn", size, last)
        there = size
        await growth.show(size, "/sessions", of="sessions")


async def test_nothing_that_the_leader_does_grows_faster_than_workers_and_sessions(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = written(tmp_path, ((SESSIONS, {}),), hf_checkpoint=checkpoint(), health_check_interval=1.0)
    async with (
        many_workers() as workers,
        processes([], "--config", str(config), "--health-check-interval", "1") as router,
    ):
        async with aiohttp.ClientSession(router.url, timeout=aiohttp.ClientTimeout(total=600)) as http:
            growth = Growth(router, http)
            await with_workers(growth, workers)
            await with_sessions(growth)
        with capsys.disabled():
            growth.check()
