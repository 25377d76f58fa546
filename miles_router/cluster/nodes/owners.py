"""Which machine has what, beside which process of this one. A request for another machine is forwarded there."""

from __future__ import annotations

import secrets
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager

from miles_router.asgi.exchange import Scope
from miles_router.asgi.moving import ASKED, Elsewhere, note_of
from miles_router.cluster.nodes.forwarding import FROM_NODE, Neighbours
from miles_router.cluster.nodes.membership import Membership
from miles_router.cluster.owners.ownership import ClusterOwners
from miles_router.cluster.peers import Peers
from miles_router.errors import OwnerUnavailable
from miles_router.slots import slot_of


class OnNode(Elsewhere):
    """Another machine answers a request, nothing of which was answered."""


class MachinesOwners(ClusterOwners):
    """Of one process of one of several machines. Owners from `peers.count` on are machines."""

    def __init__(self, peers: Peers, membership: Membership, neighbours: Neighbours) -> None:
        super().__init__(peers)
        self._membership = membership
        self._neighbours = neighbours

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """As `Owners.running`."""
        async with super().running():
            await self._membership.begin()
            try:
                yield
            finally:
                await self._neighbours.close()

    def elsewhere(self, name: str) -> int | None:
        """The other process of this machine that has what is named so."""
        return None if self._membership.node_of(name) is not None else super().elsewhere(name)

    def require(self, scope: Scope, name: str) -> None:
        """As `Owners.require`.

        Raises:
            OnNode: another machine has it.
            NodeUnleased, OwnerUnavailable: nobody may act for it now, as far as is known here.
        """
        if note_of(scope) == ASKED or self._membership.has(name):
            return
        node = self._membership.node_of(name)
        if node is not None and not purpose_of(scope):
            raise OnNode(node)
        process = self.elsewhere(name)
        if process is not None:
            raise Elsewhere(process, purpose_of(scope))
        self._membership.check()
        raise OwnerUnavailable("this is moving from one machine to another; ask again")

    def others(self, scope: Scope) -> Sequence[int]:
        """As `Owners.others`."""
        found = super().others(scope)
        if note_of(scope) == ASKED or purpose_of(scope):
            return found
        return [*found, *(self._peers.count + node for node in self._membership.urls)]

    async def ask(self, owner: int, scope: Scope, body: bytes, **headers: str) -> tuple[int, Mapping[str, str], bytes]:
        """As `Owners.ask`."""
        if owner < self._peers.count:
            return await super().ask(owner, scope, body, **headers)
        return await self._neighbours.ask(owner - self._peers.count, scope, body, headers)

    def new_name(self) -> str:
        """As `Owners.new_name`.

        Raises:
            NodeUnleased, OwnerUnavailable: this process has nothing to make it in.
        """
        self._membership.check()
        slots = self._membership.slots
        if not slots:
            raise OwnerUnavailable("this machine has no part of the sessions yet; ask again")
        while slot_of(name := secrets.token_hex(16)) not in slots:
            pass
        return name

    async def require_text(self, scope: Scope, texts: Sequence[str], continues: Callable[[str], bool]) -> None:
        """Texts have no owner over machines: a stack that records them does not start."""
        raise NotImplementedError

    def own_url(self, base_url: str) -> str | None:
        """As `Owners.own_url`: none, for `base_url` may be another machine's."""
        return None


def purpose_of(scope: Scope) -> bytes:
    """What another machine has sent a request for; nothing where none has."""
    purpose: bytes = scope.get("extensions", {}).get(FROM_NODE, b"")
    return purpose
