"""Requests that go from one machine to the one that has what they are about, over HTTP."""

from __future__ import annotations

import hmac
from collections.abc import Callable, Mapping
from typing import Any

from miles_router import tasks
from miles_router.asgi.exchange import Exchange, Receive, Scope, Send
from miles_router.asgi.headers import REQUEST_DROPPED, RawHeaders, end_to_end, header_texts, raw_headers
from miles_router.asgi.watch import Watch
from miles_router.cluster.nodes.machines import HEADER
from miles_router.errors import OwnerUnavailable, UpstreamError, UpstreamUnreachable
from miles_router.fleet.worker_url import WorkerUrl, parse_worker_url
from miles_router.fleet.workers import Pulse
from miles_router.forwarding.proxy import relay
from miles_router.forwarding.reply import Reply
from miles_router.forwarding.upstream import Upstream
from miles_router.metrics import Metrics

#: Among a scope's extensions, where another machine has forwarded the request.
FROM_NODE = "miles_router.node"
#: Answered, or of no meaning, where the request came in.
DROPPED = REQUEST_DROPPED | {b"x-request-id", b"origin", b"sec-fetch-site", HEADER}
#: Seconds in which another machine must answer what is asked of it for a list, and bytes of the answer.
PATIENCE, MAX_ANSWER = 30.0, 1 << 30


class Neighbours:
    """The other machines, as this process reaches them.

    Args:
        url_of: where one is reached; None while it is not there.
    """

    def __init__(self, secret: str, url_of: Callable[[int], str | None], *, connect_timeout: float) -> None:
        self._secret = secret.encode("ascii")
        self._url_of = url_of
        self._upstream = Upstream(connect_timeout=connect_timeout)
        self._pulse = Pulse()

    def lost(self, url: str) -> None:
        """A machine may not act any more: nobody waits for what it would answer."""
        self._upstream.give_up(parse_worker_url(url), self._pulse, "the machine that had this is lost")

    def recognize(self, scope: Scope) -> None:
        """Note whether another machine has forwarded a request; nothing inward sees how that is known."""
        shown = [value for name, value in scope["headers"] if name == HEADER]
        if shown:
            scope["headers"] = [pair for pair in scope["headers"] if pair[0] != HEADER]
            if any(hmac.compare_digest(each, self._secret) for each in shown):
                scope.setdefault("extensions", {})[FROM_NODE] = True

    async def forward(
        self, node: int, scope: Scope, headers: RawHeaders, receive: Receive, send: Send, metrics: Metrics
    ) -> None:
        """Have another machine answer a request, and relay that.

        Args:
            headers: as the client has sent them.

        Raises:
            OwnerUnavailable: it is not there.
            UpstreamBroken: it was lost inside its answer.
        """
        exchange = Exchange.of(scope)
        body = await exchange.read(receive)
        with Watch(receive):
            reply = await self._open(node, scope, headers, exchange.request_id, body)
            try:
                await relay(reply, send, metrics)
            finally:
                reply.close()

    async def ask(
        self, node: int, scope: Scope, body: bytes, headers: Mapping[str, str]
    ) -> tuple[int, Mapping[str, str], bytes]:
        """As `Owners.ask`."""
        own = dict(raw_headers(headers.items()))
        pairs = [pair for pair in scope["headers"] if pair[0] not in own] + [*own.items()]
        work = self._ask(node, scope, pairs, Exchange.of(scope).request_id, body)
        try:
            return await tasks.within(PATIENCE, work, name="ask another machine")
        except (UpstreamError, TimeoutError):
            raise OwnerUnavailable(f"machine {node} does not answer; ask again") from None

    async def _ask(
        self, node: int, scope: Scope, headers: RawHeaders, request_id: str, body: bytes
    ) -> tuple[int, Mapping[str, str], bytes]:
        reply = await self._open(node, scope, headers, request_id, body)
        try:
            return reply.status, dict(header_texts(reply.headers)), await reply.read_all(MAX_ANSWER)
        finally:
            reply.close()

    async def _open(self, node: int, scope: Scope, headers: RawHeaders, request_id: str, body: bytes) -> Reply:
        address = self._address(node)
        kept = end_to_end(headers, DROPPED)
        kept += [(b"x-request-id", request_id.encode("ascii")), (HEADER, self._secret)]
        target = scope["raw_path"]
        if scope["query_string"]:
            target = b"%b?%b" % (target, scope["query_string"])
        try:
            return await self._upstream.open(address, scope["method"], target, kept, body, pulse=self._pulse)
        except UpstreamUnreachable:
            raise OwnerUnavailable(f"machine {node} has this, and cannot be reached; ask again") from None

    def _address(self, node: int) -> WorkerUrl:
        url = self._url_of(node)
        if url is None:
            raise OwnerUnavailable(f"machine {node} has this, and is not there; ask again")
        return parse_worker_url(url)

    async def close(self) -> None:
        """Break off everything."""
        await self._upstream.close()


class Kept:
    """A `receive` that keeps the body that it gives, for a request of which only that says whose it is."""

    def __init__(self, receive: Receive) -> None:
        self._receive = receive
        self._parts: list[bytes] = []
        self.whole = False

    async def __call__(self) -> Any:
        """The next message."""
        message = await self._receive()
        if message["type"] == "http.request":
            self._parts.append(message.get("body", b""))
            self.whole = not message.get("more_body", False)
        return message

    @property
    def body(self) -> bytes:
        """All that was given."""
        return b"".join(self._parts)
