"""A leader of several machines tells engines nothing that it is not certain to decide."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from miles_router.control.engine_metrics import engine_metrics
from miles_router.control.fan_out import FanOut, Outcome, outgoing_order
from miles_router.engines.actions import Pause
from miles_router.engines.sglang.control import PAUSE
from miles_router.engines.sglang.engine import SGLANG
from miles_router.fleet.worker_url import parse_worker_url
from miles_router.fleet.workers import Worker
from miles_router.forwarding.upstream import Upstream
from tests.support.fleet import asked, by_path
from tests.support.scripted_worker import ScriptedWorker, reply, script
from tests.support.waiting import PATIENCE

SECONDS = 8.0


class Leader:
    """A leader: whether it finds that it decides, and for how long it stands still behind that, once."""

    def __init__(self, *decides: bool, stands_still: float = 0.0) -> None:
        self.now = 0.0
        self.asked = 0
        self._decides = decides
        self._stands_still = stands_still
        self._certain_until = 0.0

    async def confirmed(self) -> bool:
        """Whether it decides, as the store says."""
        decides = self._decides[self.asked]
        self.asked += 1
        if decides:
            self._certain_until = self.now + SECONDS
        self.now += self._stands_still
        self._stands_still = 0.0
        return decides

    @asynccontextmanager
    async def telling(self) -> AsyncIterator[tuple[Outcome, list[str]]]:
        """What comes of a pause, and what the engine has heard."""
        async with ScriptedWorker() as engine:
            engine.always(by_path())
            upstream = Upstream()
            try:
                fan_out = FanOut(upstream, self.confirmed, lambda: self.now < self._certain_until)
                worker = Worker(parse_worker_url(engine.url))
                order = outgoing_order(SGLANG.order(Pause("in_place")))
                (outcome,) = await fan_out.ask([worker], order, PATIENCE)
                yield outcome, asked(engine)
            finally:
                await upstream.close()


async def test_one_that_decides_tells_them() -> None:
    leader = Leader(True, stands_still=SECONDS - 0.1)
    async with leader.telling() as (outcome, heard):
        assert outcome.ok
        assert (heard, leader.asked) == ([PAUSE], 1)


async def test_one_that_was_succeeded_tells_them_nothing_and_says_why() -> None:
    async with Leader(False).telling() as (outcome, heard):
        assert (outcome.ok, outcome.reachable) == (False, False)
        assert b"may no longer be the leader" in outcome.body
        assert heard == []


async def test_one_that_stood_still_before_it_wrote_makes_sure_again() -> None:
    leader = Leader(True, False, stands_still=SECONDS)
    async with leader.telling() as (outcome, heard):
        assert not outcome.ok
        assert (heard, leader.asked) == ([], 2)
    leader = Leader(True, True, stands_still=SECONDS)
    async with leader.telling() as (outcome, heard):
        assert outcome.ok
        assert (heard, leader.asked) == ([PAUSE], 2)


async def test_what_engines_say_of_themselves_is_asked_whoever_decides() -> None:
    leader = Leader(False)
    async with ScriptedWorker() as engine:
        engine.always(by_path(metrics=script(reply(b"up 1\n"))))
        upstream = Upstream()
        try:
            fan_out = FanOut(upstream, leader.confirmed, lambda: False)
            worker = Worker(parse_worker_url(engine.url))
            assert "up{" in await engine_metrics([worker], fan_out.reading(), PATIENCE)
        finally:
            await upstream.close()
    assert leader.asked == 0
