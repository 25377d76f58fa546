"""Which process has what: by its name, dealt into slots; and what of it a process that has ended has lost."""

from __future__ import annotations

import secrets
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager

from miles_router.asgi.exchange import Scope
from miles_router.asgi.moving import Elsewhere
from miles_router.asgi.outlet import HANDED
from miles_router.cluster.owners.asking import ASKED, ask
from miles_router.cluster.owners.handover import FILED, INLINE, ConnectionCarrier
from miles_router.cluster.owners.held_names import KeptNames
from miles_router.cluster.owners.links import Links
from miles_router.cluster.owners.texts import TextOwners
from miles_router.cluster.peers import Peers
from miles_router.metrics import Statistics
from miles_router.middlewares.owners import HeldNames, Owners
from miles_router.roots import Root
from miles_router.slots import slot_of


class ClusterOwners(Owners):
    """One of several processes. `handover` is the server's."""

    several = True

    def __init__(self, peers: Peers) -> None:
        self._peers = peers
        self._links = Links(peers)
        self.handover = ConnectionCarrier(self._links, self)
        self._links.takers[INLINE] = self._links.takers[FILED] = self.handover.receive
        self._texts = TextOwners(peers, self._links)

    def numbers(self) -> Sequence[Statistics]:
        """As `Owners.numbers`."""
        return [self.handover.statistics]

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """As `Owners.running`."""
        self._texts.start()
        self._links.start()
        try:
            yield
        finally:
            self._links.close()

    def own_url(self, base_url: str) -> str | None:
        """As `Owners.own_url`."""
        if self.handover.own_port is None:
            return None
        scheme, _, authority = base_url.partition("://")
        host = authority.rpartition(":")[0] if not authority.endswith("]") and ":" in authority else authority
        return f"{scheme}://{host}:{self.handover.own_port}"

    def elsewhere(self, name: str) -> int | None:
        """The other process that has what is named so."""
        owner = self._peers.owner_of(slot_of(name))
        return None if owner == self._peers.index else owner

    def require(self, scope: Scope, name: str) -> None:
        """As `Owners.require`."""
        owner = self.elsewhere(name)
        if owner is not None and note_about(scope) != ASKED:
            raise Elsewhere(owner)

    async def require_text(self, scope: Scope, texts: Sequence[str], continues: Callable[[str], bool]) -> None:
        """As `Owners.require_text`."""
        note = note_about(scope)
        if note != ASKED:
            await self._texts.require(note, texts, continues)

    def hold_texts(self, roots: Sequence[Root]) -> None:
        """As `Owners.hold_texts`."""
        self._texts.hold(roots)

    async def owner_of_text(self, scope: Scope, text: str) -> int | None:
        """As `Owners.owner_of_text`."""
        return None if note_about(scope) == ASKED else await self._texts.owner(text)

    def others(self, scope: Scope) -> Sequence[int]:
        """As `Owners.others`."""
        return () if note_about(scope) == ASKED else self._peers.others

    async def ask(self, owner: int, scope: Scope, body: bytes, **headers: str) -> tuple[int, Mapping[str, str], bytes]:
        """As `Owners.ask`."""
        return await ask(self.handover, owner, scope, body, headers)

    def new_name(self) -> str:
        """As `Owners.new_name`."""
        while self.elsewhere(name := secrets.token_hex(16)) is not None:
            pass
        return name

    def held_names(self, kind: str, capacity: int) -> HeldNames:
        """As `Owners.held_names`."""
        return KeptNames(self._peers.directory / f"{kind}-{self._peers.index}.names", capacity)


def note_about(scope: Scope) -> bytes:
    """What the process has said that has handed a request over."""
    note: bytes = scope.get("extensions", {}).get(HANDED, b"")
    return note
