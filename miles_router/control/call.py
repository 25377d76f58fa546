"""One control request in progress, and how it is sent to each worker."""

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
from miles_router.fleet.workers import Worker, WorkerState
from miles_router.forwarding.forwarded import Outgoing

if TYPE_CHECKING:
    from miles_router.control.requests import Requests

BRIEF = 5.0  # seconds a worker may take for a request that it answers at once or never
#: Actions that depend on the flags with which an engine was started.
FLAG_DEPENDENT = (Pause, Continue, Abort, AbortAll, Flush, Sleep)
#: The HTTP status of a refusal.
REFUSED = 400
#: The answer for a worker that succeeded with a translated request: its own answer is of another engine's form.
DONE = b'{"status":"ok"}'
#: The answer for a worker that got no request, because each kind of engine needs another form of it.
NOT_SENT = b"nothing was sent: the worker has never answered, so the kind of its engine is not known"


#: Ends the sessions or requests of a group that one middleware holds.
GroupListener = Callable[[object], Awaitable[None]]


@dataclass(frozen=True)
class Call:
    """A control request: the request as received, its parsed meaning, and the parts of the router that it works on.
    `timeout` is the number of seconds a worker may take to answer."""

    request: Outgoing
    order: ReadOrder
    timeout: float
    fleet: Fleet
    fan_out: FanOut
    requests: Requests
    health: HealthMonitor

    def workers(self) -> list[Worker]:
        """Return every registered worker.

        Raises:
            NoWorkerAvailable: no worker is registered.
        """
        if not len(self.fleet.pool):
            raise NoWorkerAvailable("no worker is registered; workers register with POST /add_worker")
        return list(self.fleet.pool)

    async def check(self) -> None:
        """Check, before anything is sent, that every worker's engine supports the action.

        Raises:
            UnsupportedByEngine: an engine does not support it.
        """
        action = self.order.action
        if isinstance(action, EndGroup):
            action = Abort("")  # ending a group aborts its generations
        for worker, engine in await self._engines(self.fleet.pool):
            try:
                requested = engine.supported_pause(action) if isinstance(action, Pause) else action
                self._in_engine_form(engine, requested)
                if isinstance(requested, FLAG_DEPENDENT):
                    engine.order(requested)  # the engine has the route, but its flags may disable the action
            except CannotServe as error:
                raise UnsupportedByEngine(f"{self.order.path}: {worker.url} ({engine.kind}): {error}") from None

    async def ask(self, workers: Collection[Worker]) -> list[Outcome]:
        """Send the request to these workers: as received, or translated for their engine."""
        asked = await self._engines(workers)
        return list(await asyncio.gather(*(self._ask_one(worker, engine) for worker, engine in asked)))

    async def send_action(self, workers: Collection[Worker], action: Action, *, brief: bool = False) -> list[Outcome]:
        """Send an action of the router's own to these workers, in the form of each worker's engine. With `brief`, wait
        `BRIEF` seconds for each, else `QUICK`."""
        timeout, engines = BRIEF if brief else QUICK, [worker.engine or USUAL for worker in workers]
        orders = [outgoing_order(engine.order(action)) for engine in engines]
        asked = zip(workers, orders, strict=True)
        outcomes = await asyncio.gather(*(self.fan_out.ask_one(*each, timeout) for each in asked))
        return [_detect_refusal(outcome, engine) for outcome, engine in zip(outcomes, engines, strict=True)]

    async def _ask_one(self, worker: Worker, engine: Engine) -> Outcome:
        if worker.state is WorkerState.UNREACHED and worker.engine is None and not self.order.is_common:
            return Outcome(worker, 0, [], NOT_SENT, reachable=False)
        spelled = self._in_engine_form(engine, self.order.action)
        outcome = _detect_refusal(await self.fan_out.ask_one(worker, spelled, self.timeout), engine)
        if spelled is self.request or not outcome.ok:
            return outcome
        return replace(outcome, headers=[(b"content-type", JSON)], body=DONE)

    def _in_engine_form(self, engine: Engine, action: Action) -> Outgoing:
        if action == self.order.action and self.order.is_spelled_by(engine):
            return self.request
        return outgoing_order(engine.order(action))

    async def _engines(self, workers: Iterable[Worker]) -> Iterable[tuple[Worker, Engine]]:
        """Return each worker with its engine. A worker of unknown kind is asked only if engines differ in this
        request."""
        known = [*workers]
        engines = (
            [worker.engine or USUAL for worker in known] if self.order.is_common else await self.fleet.engines(known)
        )
        return zip(known, engines, strict=True)


def _detect_refusal(outcome: Outcome, engine: Engine) -> Outcome:
    """Return the outcome, with status 400 if its body is a refusal: some engines refuse with status 200."""
    return replace(outcome, status=REFUSED) if outcome.ok and engine.refused(outcome.body) else outcome


async def ask_all(call: Call) -> list[Outcome]:
    """Send the request to every worker: the whole effect of most control requests."""
    return await call.ask(call.workers())
