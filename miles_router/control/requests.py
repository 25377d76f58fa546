"""The requests in flight as control sees them: marked for an abort, and who has to hear of it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Sequence
from typing import NamedTuple, Protocol

from miles_router.control.call import GroupListener
from miles_router.errors import GroupAborted, StateError
from miles_router.fleet.gate import Gate
from miles_router.fleet.inflight import InFlight


class Aborted(NamedTuple):
    """A request that is aborted: the URLs of the workers that have it, and all that these may call its generations;
    `renamed` where that is more than its client does."""

    urls: Collection[str]
    names: Collection[str]
    renamed: bool = False


class GroupEnd(NamedTuple):
    """What is left to do for a group that was ended, and why some of its end will not outlive the router."""

    aborted: list[Aborted]
    failures: list[StateError]


class Requests(Protocol):
    """Those of one pool."""

    #: Layers that end what they know of a group when it is aborted.
    group_listeners: list[GroupListener]

    async def abort(self, rid: str | None) -> list[Aborted]:
        """Mark those that an abort means (all for None), as `InFlight.abort`, and let go on who waits at the gate."""
        ...

    async def end_group(self, group: str | int) -> GroupEnd:
        """The same for a group: what layers know of it, and its requests. One whose generations have no name that a
        worker knows is broken off, which ends it there too."""
        ...

    async def at(self, url: str) -> Collection[str]:
        """The ids of those that the worker at this URL has."""
        ...


class OwnRequests:
    """Those of this process."""

    def __init__(self, in_flight: InFlight, gate: Gate) -> None:
        self.group_listeners: list[GroupListener] = []
        self.in_flight = in_flight
        self._gate = gate

    async def abort(self, rid: str | None, elsewhere: Collection[str | None] = ()) -> list[Aborted]:
        """See `Requests`.

        Args:
            elsewhere: workers at which a request of another process has exactly this id.
        """
        concerned = await self.in_flight.abort(rid, elsewhere)
        found = []
        self._gate.release(*(exchange.flight for exchange in concerned))
        for exchange, own in concerned.items():
            flight = exchange.flight
            names = {each for name in own for each in (name, *flight.names_inward(name))}
            found.append(Aborted(list(flight.urls), sorted(names), bool(flight.inward)))
        return found

    async def places(self, rid: str) -> list[str | None]:
        """The workers at which a request has exactly this id; None for those that no worker has."""
        return list(await self.in_flight.places(rid))

    async def end_group(self, group: str | int) -> GroupEnd:
        """See `Requests`."""
        heard = await asyncio.gather(*map(_failing(group), self.group_listeners))
        found = []
        members = self.in_flight.of_group(str(group).encode())
        for exchange in members:
            exchange.flight.aborted = True
        self._gate.release(*(exchange.flight for exchange in members))
        for exchange, rids in members.items():
            flight = exchange.flight
            if flight.urls and rids:
                names = {each for name in rids for each in (name, *flight.names_inward(name))}
                found.append(Aborted(list(flight.urls), sorted(names)))
            elif flight.stop is not None:
                flight.stop(GroupAborted(f"group {group!r} was aborted"))
        return GroupEnd(found, [failure for failure in heard if failure is not None])

    async def at(self, url: str) -> set[str]:
        """See `Requests`."""
        return self.in_flight.at(url)


def _failing(group: str | int) -> Callable[[GroupListener], Awaitable[StateError | None]]:
    async def tell(listener: GroupListener) -> StateError | None:
        try:
            await listener(group)
        except StateError as error:  # all else ends all the same
            return error
        return None

    return tell


def urls_of(aborted: Sequence[Aborted]) -> set[str]:
    """Every worker that has one of them."""
    return {url for each in aborted for url in each.urls}
