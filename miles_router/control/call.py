"""One control request under way, and how it reaches each worker."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from miles_router.control.fan_out import JSON, FanOut, Outcome, outgoing_order
from miles_router.control.health import HealthMonitor
from miles_router.engines.actions import Abort, AbortAll, Action, Continue, EndGroup, Flush, Pause, Sleep
from miles_router.engines.control import QUICK
from miles_router.engines.engine import CannotServe, Engine
from miles_router.engines.known import USUAL, ReadOrder
from miles_router.errors import NoWorkerAvailable, UnsupportedByEngine
from miles_router.fleet.fleet import Fleet
from miles_router.fleet.workers import Worker
from miles_router.forwarding.outgoing import Outgoing

if TYPE_CHECKING:
    from miles_router.control.requests import Requests

BRIEF = 5.0  # seconds a worker may take for what it does at once, if at all
#: What every engine of its kind can do that was started for it.
OF_ALL = (Pause, Continue, Abort, AbortAll, Flush, Sleep)
#: The status of what an engine refuses.
REFUSED = 400
#: What an engine has done that was asked in other words than its client's.
DONE = b'{"status":"ok"}'


#: Ends what a layer knows of a group.
GroupListener = Callable[[object], Awaitable[None]]


@dataclass(frozen=True)
class Call:
    """One control request: as it came, what it means, and what its effect works with. A worker may take `timeout`
    seconds."""

    request: Outgoing
    order: ReadOrder
    timeout: float
    fleet: Fleet
    fan_out: FanOut
    requests: Requests
    health: HealthMonitor

    def workers(self) -> list[Worker]:
        """Every registered worker.

        Raises:
            NoWorkerAvailable: there is none.
        """
        if not len(self.fleet.pool):
            raise NoWorkerAvailable("no worker is registered; workers register with POST /add_worker")
        return list(self.fleet.pool)

    async def check(self) -> None:
        """Check that each engine can do it.

        Raises:
            UnsupportedByEngine: one of them cannot; none was asked.
        """
        action = self.order.action
        if isinstance(action, EndGroup):
            action = Abort("")  # which is how its generations end
        for worker, engine in await self._engines(self.fleet.pool):
            try:
                told = engine.pause_told(action) if isinstance(action, Pause) else action
                self._spelled(engine, told)
                if isinstance(told, OF_ALL):  # one that spells it so may have been started without
                    engine.order(told)
            except CannotServe as error:
                raise UnsupportedByEngine(f"{self.order.path}: {worker.url} ({engine.kind}): {error}") from None

    async def ask(self, workers: Collection[Worker]) -> list[Outcome]:
        """Pass the request on to these: as it came, or as their engine spells it."""
        asked = await self._engines(workers)
        return list(await asyncio.gather(*(self._ask_one(worker, engine) for worker, engine in asked)))

    async def tell(self, workers: Collection[Worker], action: Action, *, brief: bool = False) -> list[Outcome]:
        """Have these workers do something, each as its engine spells it."""
        timeout, engines = BRIEF if brief else QUICK, [worker.engine or USUAL for worker in workers]
        orders = [outgoing_order(engine.order(action)) for engine in engines]
        asked = zip(workers, orders, strict=True)
        outcomes = await asyncio.gather(*(self.fan_out.ask_one(*each, timeout) for each in asked))
        return [_heard(outcome, engine) for outcome, engine in zip(outcomes, engines, strict=True)]

    async def _ask_one(self, worker: Worker, engine: Engine) -> Outcome:
        spelled = self._spelled(engine, self.order.action)
        outcome = _heard(await self.fan_out.ask_one(worker, spelled, self.timeout), engine)
        if spelled is self.request or not outcome.ok:
            return outcome
        return replace(outcome, headers=[(b"content-type", JSON)], body=DONE)

    def _spelled(self, engine: Engine, action: Action) -> Outgoing:
        if action == self.order.action and self.order.is_spelled_by(engine):
            return self.request
        return outgoing_order(engine.order(action))

    async def _engines(self, workers: Iterable[Worker]) -> Iterable[tuple[Worker, Engine]]:
        """Which engine a worker is matters only where not all spell the request alike: then it is asked."""
        known = [*workers]
        engines = (
            [worker.engine or USUAL for worker in known] if self.order.is_common else await self.fleet.engines(known)
        )
        return zip(known, engines, strict=True)


def _heard(outcome: Outcome, engine: Engine) -> Outcome:
    """What a worker said, with the status of a refusal where that is one whatever its status."""
    return replace(outcome, status=REFUSED) if outcome.ok and engine.refused(outcome.body) else outcome


async def ask_all(call: Call) -> list[Outcome]:
    """The effect of most control requests: every worker is asked, and nothing follows from it."""
    return await call.ask(call.workers())
