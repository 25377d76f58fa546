"""The requests in flight as control requests see them: which ones an abort means, and which workers run them."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Sequence
from typing import NamedTuple, Protocol

from miles_router.control.call import GroupListener
from miles_router.errors import Conflict, StateError
from miles_router.fleet.gate import Gate
from miles_router.fleet.inflight import InFlight


class Aborted(NamedTuple):
    """An aborted request: the URLs of its workers, and the ids under which they may know its generations. `renamed`
    means that these ids include others than the client's."""

    urls: Collection[str]
    names: Collection[str]
    renamed: bool = False


class GroupEnd(NamedTuple):
    """The result of ending a group: the requests to abort at workers, and the errors of what could not be made
    durable."""

    aborted: list[Aborted]
    failures: list[StateError]


class Requests(Protocol):
    """The requests in flight of one pool."""

    async def abort(self, rid: str | None) -> list[Aborted]:
        """Mark the requests that an abort means (all for None) as aborted, and release the ones that wait at the
        gate."""
        ...

    async def end_group(self, group: str | int) -> GroupEnd:
        """End a group: its part in each middleware, and its requests. A request without an id that a worker knows is
        aborted, which ends its generation too."""
        ...

    async def ids_at(self, url: str) -> Collection[str]:
        """Return the ids of the requests that run at the worker with this URL."""
        ...


class OwnRequests:
    """The requests in flight of this process."""

    def __init__(self, in_flight: InFlight, gate: Gate) -> None:
        #: Middleware callbacks that end their part of a group when it is aborted.
        self.group_listeners: list[GroupListener] = []
        self.in_flight = in_flight
        self._gate = gate

    async def abort(self, rid: str | None, elsewhere: Collection[str | None] = ()) -> list[Aborted]:
        """Abort as `Requests.abort` does.

        Args:
            elsewhere: workers at which a request of another process has exactly this id.
        """
        concerned = await self.in_flight.abort(rid, elsewhere)
        found = []
        self._gate.release(*(exchange.routing for exchange in concerned))
        for exchange, own in concerned.items():
            routing = exchange.routing
            names = {each for name in own for each in (name, *routing.names_inward(name))}
            found.append(Aborted(list(routing.urls), sorted(names), bool(routing.inward)))
        return found

    async def workers_with(self, rid: str) -> list[str | None]:
        """Return the URLs of the workers at which a request has exactly this id; None stands for requests without a
        worker yet."""
        return list(await self.in_flight.workers_with(rid))

    async def end_group(self, group: str | int) -> GroupEnd:
        failures = await asyncio.gather(*map(_end_for_listener(group), self.group_listeners))
        found = []
        members = self.in_flight.in_group(str(group).encode())
        for exchange in members:
            exchange.routing.aborted = True
        self._gate.release(*(exchange.routing for exchange in members))
        for exchange, rids in members.items():
            routing = exchange.routing
            if routing.urls and rids:
                names = {each for name in rids for each in (name, *routing.names_inward(name))}
                found.append(Aborted(list(routing.urls), sorted(names)))
            elif routing.stop is not None:
                routing.stop(Conflict(f"group {group!r} was aborted"))
        return GroupEnd(found, [failure for failure in failures if failure is not None])

    async def ids_at(self, url: str) -> list[str]:
        return sorted(self.in_flight.ids_at(url))


def _end_for_listener(group: str | int) -> Callable[[GroupListener], Awaitable[StateError | None]]:
    async def notify(listener: GroupListener) -> StateError | None:
        try:
            await listener(group)
        except StateError as error:  # the other listeners and requests must end too
            return error
        return None

    return notify


def urls_of(aborted: Sequence[Aborted]) -> set[str]:
    """Return the URLs of all workers that run one of these requests."""
    return {url for each in aborted for url in each.urls}
