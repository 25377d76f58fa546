"""Which machine has what, beside which process of this one. A request for another machine is forwarded there."""

from __future__ import annotations

import secrets
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from miles_router.asgi.exchange import Scope
from miles_router.cluster.nodes.membership import Membership
from miles_router.cluster.owners.ownership import ClusterOwners, check_hop, hop_of
from miles_router.cluster.peers import Peers
from miles_router.errors import OwnerUnavailable
from miles_router.fleet.affinity import Affinity
from miles_router.slots import slot_of


class MachinesOwners(ClusterOwners):
    """Of one process of one of several machines. Owners from `peers.count` on are machines."""

    def __init__(self, peers: Peers, affinity: Affinity, membership: Membership) -> None:
        super().__init__(peers, affinity)
        self._membership = membership
        membership.lost = self._forwarding.lost

    def _url_of(self, owner: int) -> str | None:
        if self._is_machine(owner):
            return self._membership.url_of(owner - self._peers.count)
        return super()._url_of(owner)

    def _is_machine(self, owner: int) -> bool:
        return owner >= self._peers.count

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """As `Owners.running`."""
        async with super().running():
            await self._membership.begin()
            yield

    def owner_of(self, scope: Scope, name: str) -> int | None:
        """As `ClusterOwners.owner_of`.

        Raises:
            NodeUnleased, OwnerUnavailable: nobody may act for it now, as far as is known here.
        """
        if self._membership.has(name):
            return None
        hop, node = hop_of(scope), self._membership.node_of(name)
        if node is not None and hop is None:
            return self._peers.count + node
        process = self._peers.owner_of(slot_of(name))
        if node is None and process != self._peers.index and (hop is None or hop.to_machine):
            return process
        self._membership.check()
        if self.is_asked(scope):
            check_hop(scope)
        raise OwnerUnavailable("this is moving from one machine to another; ask again")

    def others(self, scope: Scope) -> Sequence[int]:
        """As `Owners.others`."""
        hop = hop_of(scope)
        if hop is not None and hop.to_machine:
            return self._peers.others
        found = super().others(scope)
        return found if hop is not None else [*found, *(self._peers.count + node for node in self._membership.urls)]

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

    def own_url(self, base_url: str) -> str | None:
        """As `Owners.own_url`: none, for `base_url` may be another machine's."""
        return None
