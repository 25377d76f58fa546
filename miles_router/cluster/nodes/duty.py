"""A process that takes requests on one of several machines: it follows a control plane that may be on another one, acts
while its leases are fresh, and has other machines answer what is theirs."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, Protocol

from miles_router.cluster.control.data import DataDuty, Link
from miles_router.cluster.nodes.membership import Membership
from miles_router.cluster.nodes.owners import MachinesOwners
from miles_router.cluster.peers import Peers
from miles_router.edge import RouterApp
from miles_router.errors import ConfigError
from miles_router.fleet.admission_queue import Waiting
from miles_router.fleet.affinity import Affinity
from miles_router.fleet.gate import Gate
from miles_router.fleet.placement.admission import Admission
from miles_router.pools.pools import Pools
from miles_router.pools.registrations import Registrations


class Leased(Protocol):
    """As `Membership`."""

    @property
    def is_fresh(self) -> bool:
        """Whether this process may act."""
        ...

    def check(self) -> None:
        """Raises NodeUnleased where it may not."""
        ...


class LeasedGate(Gate):
    """Closed while this process may not act as well; nobody waits for that."""

    def __init__(self, membership: Leased, admission: Admission, **settings: Any) -> None:
        self._membership = membership
        super().__init__(admission, **settings)

    @property  # asked at each write
    def closed(self) -> bool:
        """Whether no generation may be sent."""
        return self._closed or not self._membership.is_fresh

    @closed.setter
    def closed(self, value: bool) -> None:
        self._closed = value

    async def _hold(self, who: Waiting, came_at: float) -> None:
        self._membership.check()
        await super()._hold(who, came_at)


class MachineDuty(DataDuty):
    """A process that takes requests on one of several machines."""

    shares_state = True

    def __init__(self, membership: Membership, peers: Peers, affinity: Affinity) -> None:
        self.membership = membership
        super().__init__(peers, generation=0)
        self.slots = membership.claimable
        self.owners = MachinesOwners(peers, affinity, membership)

    def _link_to(self, peers: Peers, generation: int) -> Link:
        return self.membership

    def gate(self, admission: Admission, **settings: Any) -> Gate:
        """See `Duty`."""
        return LeasedGate(self.membership, admission, **settings)

    def app(self, **parts: Any) -> RouterApp:
        """See `Duty`.

        Raises:
            ConfigError: a layer keeps what other machines cannot find.
        """
        for layer in parts["layers"]:
            if getattr(layer, "one_machine", False):
                raise ConfigError(f"middlewares: {type(layer).__name__} keeps what only its own machine can find")
        return RouterApp(**parts)

    async def restore(self, registrations: Registrations) -> None:
        """See `Duty`. Who the workers are is decided elsewhere."""

    @asynccontextmanager
    async def running(self, pools: Pools) -> AsyncIterator[None]:
        """See `Duty`."""
        self.membership.store = pools.default.router.store
        async with super().running(pools):
            try:
                yield
            finally:
                await self.membership.leave()
