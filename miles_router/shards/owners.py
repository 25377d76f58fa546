"""Find the shard that owns a session or text, and forward requests to it.

The name of a session or text is hashed into a slot, and each slot belongs to one shard (a router process).
"""

from __future__ import annotations

import secrets
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress

from miles_router.asgi.exchange import Exchange, Receive, Scope, Send, replay
from miles_router.errors import NotFound, Unavailable
from miles_router.fleet.gate import generates
from miles_router.fleet.placement.sessions import Affinity
from miles_router.metrics import Statistics
from miles_router.middlewares.contract import BODY_SAYS, ASGIApp
from miles_router.middlewares.owners import Elsewhere, HeldNames, Owners
from miles_router.shards.forwarding import (
    ASK,
    FORWARD,
    HOP_VALUE,
    ORIGINAL_HEADERS,
    BufferedReceive,
    Forwarding,
    pop_hop,
)
from miles_router.shards.held_names import MappedHeldNames
from miles_router.shards.topology import Shard
from miles_router.slots import slot_of

#: Key of a scope's extensions: this shard answers, whatever owner the text or key would have. Either its session is
#: here, or the key's home shard did not take the request.
ANSWER_HERE = "miles_router.answer_here"


class ShardOwners(Owners):
    """The `Owners` of one shard of a router with several processes.

    A request whose owner is down waits for it. A request that is only sent to its affinity key's home does not wait:
    this shard answers it.

    Args:
        affinity: reads a request's affinity key.
        url_of: returns the URL of a shard, or None while it has no process.
        is_running: returns whether a shard, given by its index, accepts requests now.
        check: raises Unavailable if this shard may not act now.
    """

    several = True

    def __init__(
        self,
        shard: Shard,
        affinity: Affinity,
        *,
        url_of: Callable[[int], str | None],
        is_running: Callable[[int], bool],
        check: Callable[[], None] = lambda: None,
    ) -> None:
        self._shard = shard
        self._affinity = affinity
        self._url_of = url_of
        self._is_running = is_running
        self._check = check
        self.forwarding = Forwarding(url_of)

    def numbers(self) -> Sequence[Statistics]:
        return [self.forwarding.statistics]

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        self.forwarding.upstream.backlog = self.backlog
        try:
            yield
        finally:
            await self.forwarding.upstream.close()

    async def answer_or_forward(
        self, scope: Scope, receive: Receive, send: Send, *, here: ASGIApp, check: Callable[[Scope], None]
    ) -> None:
        hop = pop_hop(scope)
        came = scope["headers"]
        scope["extensions"] = {**scope.get("extensions", {}), HOP_VALUE: hop, ORIGINAL_HEADERS: came}
        name = next((name for layer in self.layers if (name := layer.owner_name(scope)) is not None), None)
        if name is None:
            await self._answer_at_home(scope, receive, send, here, check)
        elif name == BODY_SAYS:
            buffered = BufferedReceive(receive)
            try:
                await here(scope, buffered, send)
            except Elsewhere as elsewhere:
                if not buffered.whole:
                    raise
                scope["headers"] = came
                await self._forward(elsewhere, scope, buffered.body, receive, send, here)
        elif (owner := self.owner_of(scope, name)) is not None:
            check(scope)
            await self.forwarding.forward(owner, scope, receive, send)
        else:
            scope["extensions"][ANSWER_HERE] = True
            await here(scope, receive, send)

    async def _answer_at_home(
        self, scope: Scope, receive: Receive, send: Send, here: ASGIApp, check: Callable[[Scope], None]
    ) -> None:
        """Answer a request that no middleware owns.

        The home shard of its affinity key knows the worker with its cached prefix, so the request goes there. If that
        shard does not take it, answer it here, at the cost of the cached prefix.
        """
        path, key = scope["path"], None
        if generates(path) and hop_of(scope) is None:
            key = self._affinity.key_from_headers(path, scope["headers"])
            if key is None and self._affinity.may_be_in_body(path):
                check(scope)
                body = await Exchange.of(scope).read(receive)
                key, receive = self._affinity.key_from_body(path, body), replay(body, receive)
        owner = None if key is None else self._home_of(scope, key)
        if owner is None:
            await here(scope, receive, send)
            return
        check(scope)
        body = await Exchange.of(scope).read(receive)
        await self._forward(Elsewhere(owner, needed=False), scope, body, receive, send, here)

    async def _forward(
        self, elsewhere: Elsewhere, scope: Scope, body: bytes, receive: Receive, send: Send, here: ASGIApp
    ) -> None:
        """Forward a request whose body is read. If its owner does not take it and is not needed, answer it here."""
        once, repeated = not elsewhere.needed, replay(body, receive)
        try:
            await self.forwarding.forward(elsewhere.owner, scope, repeated, send, once=once)
        except Unavailable:
            if elsewhere.needed:
                raise
            scope["extensions"][ANSWER_HERE] = True
            await here(scope, replay(body, receive), send)

    def _home_of(self, scope: Scope, key: str) -> int | None:
        """Return the index of the other shard that is home to an affinity key. Return None if this shard is the home,
        if the home is unknown, or if it does not run."""
        owner = None
        with suppress(NotFound, Unavailable):
            owner = self.owner_of(scope, key)
        return None if owner is None or not self._is_running(owner) else owner

    def owner_of(self, scope: Scope, name: str) -> int | None:
        """Return the index of the other shard that owns a name; None if this one does.

        Raises:
            NotFound: another shard asks for this shard's part of an answer, and this one does not own the name.
            Unavailable: another shard forwarded the request here, and this one does not own the name.
            Unavailable: this shard owns the name but may not act now.
        """
        owner = self._shard.shards.owner_of(slot_of(name))
        if owner == self._shard.index:
            self._check()
            return None
        check_hop(scope)
        return owner

    def require(self, scope: Scope, name: str) -> None:
        owner = self.owner_of(scope, name)
        if owner is not None:
            raise Elsewhere(owner)

    def prefer_home(self, scope: Scope) -> None:
        key = self._affinity.key_from_headers(scope["path"], scope["headers"])
        owner = None if key is None or ANSWER_HERE in scope["extensions"] else self._home_of(scope, key)
        if owner is not None:
            raise Elsewhere(owner, needed=False)

    def asked_by_other_process(self, scope: Scope) -> bool:
        return hop_of(scope) == ASK

    def is_forwarded(self, scope: Scope) -> bool:
        return ANSWER_HERE in scope["extensions"] or hop_of(scope) == FORWARD

    def others(self, scope: Scope) -> Sequence[int]:
        if self.asked_by_other_process(scope):
            return ()
        return [index for index in range(self._shard.shards.count) if index != self._shard.index]

    async def ask(
        self, owner: int, scope: Scope, body: bytes, patience: float | None = None, **headers: str
    ) -> tuple[int, Mapping[str, str], bytes]:
        return await self.forwarding.ask(owner, scope, body, headers, patience)

    def own_url(self, base_url: str) -> str | None:
        url = self._shard.url or self._url_of(self._shard.index)
        if url is None or not self._shard.shown:
            return None
        if not self._shard.shards.local:
            return url
        scheme, _, rest = base_url.partition("://")
        authority = rest.partition("/")[0]
        host = authority.rpartition(":")[0] if not authority.endswith("]") and ":" in authority else authority
        return f"{scheme}://{host}:{url.rpartition(':')[2]}"

    def new_name(self) -> str:
        """Return a random name that this shard owns.

        Raises:
            Unavailable: this shard may not act now.
        """
        while self._shard.shards.owner_of(slot_of(name := secrets.token_hex(16))) != self._shard.index:
            pass
        self._check()
        return name

    def held_names(self, kind: str, capacity: int) -> HeldNames:
        return MappedHeldNames(self._shard.directory / f"{kind}-{self._shard.index}.names", capacity)


def check_hop(scope: Scope) -> None:
    """Refuse a request from another shard for a name that this one does not own. Requests from clients pass.

    Raises:
        NotFound: another shard asks for its part of an answer.
        Unavailable: another shard forwarded the request here.
    """
    hop = hop_of(scope)
    if hop == ASK:
        raise NotFound("this shard of the router does not own what the request names")
    if hop is not None:
        raise Unavailable("this shard does not own what the forwarded request names; ask again")


def hop_of(scope: Scope) -> bytes | None:
    """Return the value of the hop header of a request; None if a client sent it."""
    hop: bytes | None = scope["extensions"][HOP_VALUE]
    return hop
