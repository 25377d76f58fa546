"""One row of the table of control requests, and one request by it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from miles_router.control.fan_out import QUICK, FanOut, Outcome, outgoing_order
from miles_router.control.health import HealthMonitor
from miles_router.engines.actions import Action
from miles_router.engines.known import USUAL
from miles_router.errors import NoWorkerAvailable
from miles_router.fleet.fleet import Fleet
from miles_router.fleet.workers import Worker
from miles_router.forwarding.outgoing import Outgoing

if TYPE_CHECKING:
    from miles_router.control.requests import Requests

BRIEF = 5.0  # seconds a worker may take for what it does at once, if at all


#: Ends what a layer knows of a group.
GroupListener = Callable[[object], Awaitable[None]]


@dataclass(frozen=True)
class Call:
    """One control request: by which row, as it came, what it says, and what its effect works with."""

    row: Row
    request: Outgoing
    arguments: Mapping[str, Any]
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

    async def ask(self, workers: Collection[Worker]) -> list[Outcome]:
        """Pass the request on to these."""
        return await self.fan_out.ask(workers, self.request, self.row.timeout)

    async def tell(self, workers: Collection[Worker], action: Action, *, brief: bool = False) -> list[Outcome]:
        """Have these workers do something, each as its engine spells it."""
        timeout = BRIEF if brief else QUICK
        orders = [outgoing_order((worker.engine or USUAL).order(action)) for worker in workers]
        asked = zip(workers, orders, strict=True)
        return list(await asyncio.gather(*(self.fan_out.ask_one(*each, timeout) for each in asked)))


async def ask_all(call: Call) -> list[Outcome]:
    """The effect of most rows: every worker is asked, and nothing follows from it."""
    return await call.ask(call.workers())


def anything(arguments: Mapping[str, Any]) -> str | None:
    """The check of most rows: the workers know better."""
    return None


@dataclass(frozen=True)
class Row:
    """A path that goes to every worker, and what it means for the fleet."""

    path: str
    methods: tuple[str, ...] = ("POST",)
    #: Seconds a worker may take.
    timeout: float = QUICK
    #: SGLang refuses a POST here without a body; the router sends an empty object then.
    needs_body: bool = False
    #: Why no worker could make sense of the arguments, or None.
    check: Callable[[Mapping[str, Any]], str | None] = anything
    #: Asks the workers, and keeps gate and pool in step with what they answered.
    effect: Callable[[Call], Awaitable[list[Outcome]]] = ask_all
    #: Nobody joins the fleet while it is under way.
    holds_membership: bool = False
    #: It runs beside other control requests; all others run one after the other.
    beside_others: bool = False
    #: It names a version to weights that are there already: no worker has other weights behind it.
    only_names: bool = False
