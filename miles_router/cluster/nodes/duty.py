"""A process that takes requests on one of several machines: it follows a control plane that may be on another one, acts
while its leases are fresh, and has other machines answer what is theirs."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, Protocol

from miles_router.asgi.exchange import SCOPE_KEY, Exchange, Receive, Scope, Send, replay
from miles_router.asgi.headers import RawHeaders
from miles_router.asgi.moving import ASKED, note_of
from miles_router.asgi.origin import refuse_foreign
from miles_router.asgi.path import decoded
from miles_router.cluster.control.data import DataDuty, Link
from miles_router.cluster.control.table import Counts
from miles_router.cluster.nodes.forwarding import Kept, Neighbours
from miles_router.cluster.nodes.membership import Membership
from miles_router.cluster.nodes.owners import MachinesOwners, OnNode, purpose_of
from miles_router.cluster.nodes.seen import Seen
from miles_router.cluster.nodes.stamps import ASK, Address, Stamps
from miles_router.cluster.peers import Peers
from miles_router.edge import RouterApp
from miles_router.errors import BadRequest, ConfigError, RouterError
from miles_router.fleet.admission_queue import Waiting
from miles_router.fleet.gate import Gate
from miles_router.fleet.placement.admission import Admission
from miles_router.middlewares.contract import BODY_SAYS, ASGIApp
from miles_router.pools.pools import Pools
from miles_router.pools.registrations import Registrations

#: Seconds in which another machine must take a connection.
CONNECT = 5.0
#: In a request's scope: the machine that answers it.
ON_NODE = "miles_router.on_node"
#: And why it is refused.
REFUSAL = "miles_router.refusal"


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

    def __init__(self, membership: Membership, peers: Peers, counts: Counts) -> None:
        self.membership, node = membership, membership.node
        super().__init__(peers, counts, generation=0)
        self.slots = membership.claimable
        place = Address(node.index, node.life)
        stamps = Stamps(node.machines.secret, place, membership.life_of, lambda: membership.beat, Seen(peers))
        self._neighbours = Neighbours(stamps, membership.url_of, connect_timeout=CONNECT)
        membership.lost = self._neighbours.lost
        self.owners = MachinesOwners(peers, membership, self._neighbours)

    def _link_to(self, peers: Peers, generation: int) -> Link:
        return self.membership

    def gate(self, admission: Admission, **settings: Any) -> Gate:
        """See `Duty`."""
        return LeasedGate(self.membership, admission, **settings)

    def app(self, **parts: Any) -> MachineApp:
        """See `Duty`."""
        return MachineApp(self.owners, self.membership, self._neighbours, **parts)

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


class MachineApp(RouterApp):
    """The edge of one of several machines."""

    def __init__(self, owners: MachinesOwners, membership: Membership, neighbours: Neighbours, **parts: Any) -> None:
        super().__init__(**parts)
        for layer in self.layers:
            if getattr(layer, "one_machine", False):
                raise ConfigError(f"middlewares: {type(layer).__name__} keeps what only its own machine can find")
        self._owners = owners
        self._membership = membership
        self._neighbours = neighbours

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """As `RouterApp`."""
        if scope["type"] != "http":
            await super().__call__(scope, receive, send)
            return
        try:
            receive = self._neighbours.recognize(scope, receive)
        except RouterError as error:
            scope[REFUSAL] = error
        headers, read = scope["headers"], Kept(receive) if self._by_body(scope) else receive
        try:
            await super().__call__(scope, read, send)
        except OnNode as elsewhere:
            if isinstance(read, Kept) and read.whole:
                receive = replay(read.body, receive)
            scope["headers"] = headers
            scope[ON_NODE] = elsewhere.owner
            await super().__call__(scope, receive, send)

    def _by_body(self, scope: Scope) -> bool:
        """Whether only a request's body says whose it is."""
        try:
            scope["path"] = decoded(scope["raw_path"])
        except BadRequest:  # which is answered where it is found again
            return False
        return any(layer.owner_name(scope) == BODY_SAYS for layer in self._owners.layers)

    async def _restore(self, scope: Scope) -> None:
        """Nothing is brought back that another machine may change meanwhile.

        Raises:
            OnNode, NodeUnleased, OwnerUnavailable: as `MachinesOwners.require`.
            NodeUnproven, OwnerUnavailable: as `Neighbours.recognize`.
        """
        if REFUSAL in scope:
            raise scope[REFUSAL]
        if ON_NODE in scope:
            return
        if note_of(scope) != ASKED:
            for layer in self._owners.layers:
                name = layer.owner_name(scope)
                if name is not None:
                    if name != BODY_SAYS:
                        self._owners.require(scope, name)
                    break
        await super()._restore(scope)

    def _has_entered(self, scope: Scope) -> bool:
        return super()._has_entered(scope) or purpose_of(scope) == ASK

    def _enter(self, scope: Scope) -> ASGIApp:
        """The machine that answers asks which key it is; without any nobody enters here."""
        node = scope.get(ON_NODE)
        if node is None or self.doors.is_shut(scope["path"], scope["headers"]):
            return super()._enter(scope)
        door = self.doors.of(scope["path"])
        if door.foreign is not None and not door.key.required:
            refuse_foreign(scope, door.foreign, self._public_url)
        scope[SCOPE_KEY].check_announced_size(scope)
        headers: RawHeaders = scope["headers"]

        async def forward(scope: Scope, receive: Receive, send: Send) -> None:
            await self._neighbours.forward(node, scope, headers, receive, send, self._metrics)

        return forward

    def _finished(self, scope: Scope, exchange: Exchange, status: int, started_at: float) -> None:
        """The machine that answers counts it."""
        if ON_NODE not in scope:
            super()._finished(scope, exchange, status, started_at)
