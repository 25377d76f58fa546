"""Which process has what: by its name, dealt into slots; and what of it a process that has ended has lost."""

from __future__ import annotations

import secrets
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from miles_router.asgi.exchange import Scope
from miles_router.cluster.handover import FILED, INLINE, ConnectionHandover
from miles_router.cluster.held_names import KeptNames
from miles_router.cluster.links import Links
from miles_router.cluster.peers import Peers
from miles_router.errors import Elsewhere
from miles_router.middlewares.owners import HeldNames, Owners
from miles_router.slots import slot_of


class ClusterOwners(Owners):
    """One of several processes. `handover` is the server's."""

    def __init__(self, peers: Peers) -> None:
        self._peers = peers
        #: The port on which this process alone listens, where clients may be told of it.
        self.own_port: int | None = None
        self._links = Links(peers)
        self.handover = ConnectionHandover(self._links, self)
        self._links.takers[INLINE] = self._links.takers[FILED] = self.handover.receive

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """As `Owners.running`."""
        self._links.start()
        try:
            yield
        finally:
            self._links.close()

    def own_url(self, base_url: str) -> str | None:
        """As `Owners.own_url`."""
        if self.own_port is None:
            return None
        scheme, _, authority = base_url.partition("://")
        host = authority.rpartition(":")[0] if not authority.endswith("]") and ":" in authority else authority
        return f"{scheme}://{host}:{self.own_port}"

    def elsewhere(self, name: str) -> int | None:
        """The other process that has what is named so."""
        owner = self._peers.owner_of(slot_of(name))
        return None if owner == self._peers.index else owner

    def require(self, scope: Scope, name: str) -> None:
        """As `Owners.require`."""
        owner = self.elsewhere(name)
        if owner is not None:
            raise Elsewhere(owner)

    def new_name(self) -> str:
        """As `Owners.new_name`."""
        while self.elsewhere(name := secrets.token_hex(16)) is not None:
            pass
        return name

    def held_names(self, kind: str, capacity: int) -> HeldNames:
        """As `Owners.held_names`."""
        return KeptNames(self._peers.directory / f"{kind}-{self._peers.index}.names", capacity)
