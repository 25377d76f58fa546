"""Which process has what: by its name, dealt into slots; and what of it a process that has ended has lost."""

from __future__ import annotations

import secrets
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress

from miles_router.asgi.exchange import Exchange, Receive, Scope, Send, replay
from miles_router.cluster.owners.forwarding import ASK, CAME, FORWARD, HOPPED, Forwarding, Hop, Kept
from miles_router.cluster.owners.held_names import KeptNames
from miles_router.cluster.peers import Peers
from miles_router.errors import NodeUnleased, NotFound, OwnerUnavailable
from miles_router.fleet.affinity import Affinity
from miles_router.fleet.gate import generates
from miles_router.metrics import Statistics
from miles_router.middlewares.contract import BODY_SAYS, ASGIApp
from miles_router.middlewares.owners import Elsewhere, HeldNames, Owners
from miles_router.slots import slot_of

#: Among a scope's extensions: it is answered here, whatever its text or its key says. Its session is here, or the
#: process where its key is at home does not take it.
STAYS = "miles_router.stays"


class ClusterOwners(Owners):
    """One of several processes.

    Args:
        is_there: whether another process sends requests now. A request for one that does not waits for it, but where a
            key alone draws it there.
    """

    several = True

    def __init__(
        self, peers: Peers, affinity: Affinity, is_there: Callable[[int], bool] = lambda process: True
    ) -> None:
        self._peers = peers
        self._affinity = affinity
        self._is_there = is_there
        self._forwarding = Forwarding(self._url_of, self._is_machine)

    def _url_of(self, owner: int) -> str | None:
        return self._peers.urls[owner]

    def _is_machine(self, owner: int) -> bool:
        return False

    def numbers(self) -> Sequence[Statistics]:
        """As `Owners.numbers`."""
        return [self._forwarding.statistics]

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """As `Owners.running`."""
        self._forwarding.share(self.backlog)
        try:
            yield
        finally:
            await self._forwarding.close()

    async def answer(
        self, scope: Scope, receive: Receive, send: Send, *, here: ASGIApp, check: Callable[[Scope], None]
    ) -> None:
        """As `Owners.answer`."""
        hop = Hop.taken(scope)
        came = scope["headers"]
        scope["extensions"] = {**scope.get("extensions", {}), HOPPED: hop, CAME: came}
        name = next((name for layer in self.layers if (name := layer.owner_name(scope)) is not None), None)
        if name is None:
            await self._answer_at_home(scope, receive, send, here, check)
        elif name == BODY_SAYS:
            kept = Kept(receive)
            try:
                await here(scope, kept, send)
            except Elsewhere as elsewhere:
                if not kept.whole:
                    raise
                scope["headers"] = came
                try:
                    await self._forwarding.forward(elsewhere.owner, scope, replay(kept.body, receive), send)
                except OwnerUnavailable:
                    if elsewhere.needed:
                        raise
                    scope["extensions"][STAYS] = True
                    await here(scope, replay(kept.body, receive), send)
        elif (owner := self.owner_of(scope, name)) is not None:
            check(scope)
            await self._forwarding.forward(owner, scope, receive, send)
        else:
            scope["extensions"][STAYS] = True
            await here(scope, receive, send)

    async def _answer_at_home(
        self, scope: Scope, receive: Receive, send: Send, here: ASGIApp, check: Callable[[Scope], None]
    ) -> None:
        """Answer what no layer has: where its key is at home, for there the worker is known that has its prefix. Where
        that process does not take it, here: that costs its prefix."""
        path = scope["path"]
        hop = hop_of(scope)
        if generates(path) and (hop is None or (hop.purpose == FORWARD and hop.to_machine)):
            key = self._affinity.named(path, scope["headers"])
            if key is None and self._affinity.looks_inside(path):
                check(scope)
                body = await Exchange.of(scope).read(receive)
                key, receive = self._affinity.in_body(path, body), replay(body, receive)
            owner = None if key is None else self._home_of(scope, key)
            if owner is not None:
                check(scope)
                body = await Exchange.of(scope).read(receive)
                receive = replay(body, receive)
                try:
                    await self._forwarding.forward(owner, scope, receive, send, once=True)
                    return
                except OwnerUnavailable:
                    receive = replay(body, receive)
        await here(scope, receive, send)

    def _home_of(self, scope: Scope, key: str) -> int | None:
        """The other process in which a key is at home; None where it is this one, or nobody knows."""
        owner = None
        with suppress(NotFound, OwnerUnavailable, NodeUnleased):
            owner = self.owner_of(scope, key)
        return None if owner is None or not (self._is_machine(owner) or self._is_there(owner)) else owner

    def owner_of(self, scope: Scope, name: str) -> int | None:
        """Return the other process that has what is named so; None where it is this one.

        Raises:
            NotFound: another process asks whether this one has it.
            OwnerUnavailable: another process has sent it here, and this one does not have it.
        """
        owner = self._peers.owner_of(slot_of(name))
        if owner == self._peers.index:
            return None
        check_hop(scope)
        return owner

    def require(self, scope: Scope, name: str) -> None:
        """As `Owners.require`."""
        owner = self.owner_of(scope, name)
        if owner is not None:
            raise Elsewhere(owner)

    def prefer(self, scope: Scope) -> None:
        """As `Owners.prefer`."""
        key = self._affinity.named(scope["path"], scope["headers"])
        owner = None if key is None or STAYS in scope["extensions"] else self._home_of(scope, key)
        if owner is not None:
            raise Elsewhere(owner, needed=False)

    def is_asked(self, scope: Scope) -> bool:
        """As `Owners.is_asked`."""
        hop = hop_of(scope)
        return hop is not None and hop.purpose == ASK

    def is_forwarded(self, scope: Scope) -> bool:
        """As `Owners.is_forwarded`."""
        hop = hop_of(scope)
        return STAYS in scope["extensions"] or (hop is not None and hop.purpose == FORWARD)

    def others(self, scope: Scope) -> Sequence[int]:
        """As `Owners.others`."""
        return () if self.is_asked(scope) else self._peers.others

    async def ask(
        self, owner: int, scope: Scope, body: bytes, patience: float | None = None, **headers: str
    ) -> tuple[int, Mapping[str, str], bytes]:
        """As `Owners.ask`."""
        return await self._forwarding.ask(owner, scope, body, headers, patience)

    def own_url(self, base_url: str) -> str | None:
        """As `Owners.own_url`."""
        if not self._peers.shown:
            return None
        scheme, _, authority = base_url.partition("://")
        host = authority.rpartition(":")[0] if not authority.endswith("]") and ":" in authority else authority
        return f"{scheme}://{host}:{self._peers.urls[self._peers.index].rpartition(':')[2]}"

    def new_name(self) -> str:
        """As `Owners.new_name`."""
        while self._peers.owner_of(slot_of(name := secrets.token_hex(16))) != self._peers.index:
            pass
        return name

    def held_names(self, kind: str, capacity: int) -> HeldNames:
        """As `Owners.held_names`."""
        return KeptNames(self._peers.directory / f"{kind}-{self._peers.index}.names", capacity)


def check_hop(scope: Scope) -> None:
    """Let pass what a client has sent here, of which this process does not have what it names.

    Raises:
        NotFound, OwnerUnavailable: as `ClusterOwners.owner_of`.
    """
    hop = hop_of(scope)
    if hop is not None and hop.purpose == ASK:
        raise NotFound("this process of the router does not have it")
    if hop is not None:
        raise OwnerUnavailable("this process of the router does not have what it was asked for; ask again")


def hop_of(scope: Scope) -> Hop | None:
    """Return how a request has come from another process; None where a client has sent it here."""
    hop: Hop | None = scope["extensions"][HOPPED]
    return hop
