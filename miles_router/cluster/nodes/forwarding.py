"""Requests that go from one machine to the one that has what they are about, over HTTP."""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping
from typing import Any

from miles_router import tasks
from miles_router.asgi.doors import READING
from miles_router.asgi.exchange import Exchange, Receive, Scope, Send
from miles_router.asgi.headers import REQUEST_DROPPED, RawHeaders, end_to_end, first_header, header_texts, raw_headers
from miles_router.asgi.moving import note_of
from miles_router.asgi.watch import Watch
from miles_router.cluster.nodes.machines import HEADER
from miles_router.cluster.nodes.stamps import ASK, FORWARD, Stamps, checked
from miles_router.errors import NodeUnproven, OwnerLost, OwnerUnavailable, UpstreamError, UpstreamUnreachable
from miles_router.fleet.worker_url import WorkerUrl, parse_worker_url
from miles_router.fleet.workers import Pulse
from miles_router.forwarding.proxy import relay
from miles_router.forwarding.reply import Reply
from miles_router.forwarding.upstream import Admit, NotAdmitted, Upstream
from miles_router.metrics import Metrics

#: Among a scope's extensions, where another machine has sent the request: what for.
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

    def __init__(self, stamps: Stamps, url_of: Callable[[int], str | None], *, connect_timeout: float) -> None:
        self._stamps = stamps
        self._url_of = url_of
        self._upstream = Upstream(connect_timeout=connect_timeout)
        self._pulse = Pulse()

    def lost(self, url: str) -> None:
        """A machine may not act any more: nobody waits for what it would answer."""
        self._upstream.give_up(parse_worker_url(url), self._pulse, "the machine that had this is lost")

    def recognize(self, scope: Scope, receive: Receive) -> Receive:
        """Note whether another machine has sent a request, and what for; nothing inward sees how that is known. Gives
        where its body is read from then on.

        Raises:
            NodeUnproven, OwnerUnavailable: it says so and may not be believed. As `Stamps.read`.
        """
        told = note_of(scope)
        shown = [value for name, value in scope["headers"] if name == HEADER]
        if not shown:
            return receive
        scope["headers"] = [pair for pair in scope["headers"] if pair[0] != HEADER]
        extensions = scope.setdefault("extensions", {})
        if told in (FORWARD, ASK):  # by the process of this machine where it came in
            extensions[FROM_NODE] = told
            return receive
        if len(shown) > 1:
            raise NodeUnproven(f"{HEADER.decode()} came more than once")
        extensions[FROM_NODE], digest = self._stamps.read(shown[0], scope)
        return checked(receive, digest)

    async def forward(
        self, node: int, scope: Scope, headers: RawHeaders, receive: Receive, send: Send, metrics: Metrics
    ) -> None:
        """Have another machine answer a request, and relay that.

        Args:
            headers: as the client has sent them.

        Raises:
            OwnerUnavailable: it is not there.
            OwnerLost: it was lost before it had answered, and may have done it.
            UpstreamBroken: it was lost inside its answer.
        """
        exchange = Exchange.of(scope)
        body = await exchange.read(receive)
        with Watch(receive):
            reply = await self._open(FORWARD, node, scope, headers, exchange.request_id, body)
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
        except (OwnerLost, UpstreamError, TimeoutError):
            raise OwnerUnavailable(f"machine {node} does not answer; ask again") from None

    async def _ask(
        self, node: int, scope: Scope, headers: RawHeaders, request_id: str, body: bytes
    ) -> tuple[int, Mapping[str, str], bytes]:
        reply = await self._open(ASK, node, scope, headers, request_id, body)
        try:
            return reply.status, dict(header_texts(reply.headers)), await reply.read_all(MAX_ANSWER)
        finally:
            reply.close()

    async def _open(
        self, purpose: bytes, node: int, scope: Scope, headers: RawHeaders, request_id: str, body: bytes
    ) -> Reply:
        address, method = self._address(node), scope["method"]
        kept = end_to_end(headers, DROPPED)
        kept.append((b"x-request-id", request_id.encode("ascii")))
        target = scope["raw_path"]
        if scope["query_string"]:
            target = b"%b?%b" % (target, scope["query_string"])
        kept.append((HEADER, self._stamps.made(purpose, node, method, target, kept, body)))
        try:
            admit = None if method in READING else self._once_in_a_beat()
            reply = await self._upstream.open(address, method, target, kept, body, admit=admit, pulse=self._pulse)
        except NotAdmitted:
            raise OwnerLost(f"machine {node} was lost while it was asked; it may have done it") from None
        except UpstreamUnreachable as error:
            if error.refused or error.exhausted or method in READING:
                raise OwnerUnavailable(f"machine {node} has this, and cannot be reached; ask again") from None
            raise OwnerLost(f"machine {node} was lost while it was asked; it may have done it") from None
        # A lost connection was made anew, and what was sent, sent again. In other answers the header is a worker's.
        if reply.status == NodeUnproven.status and first_header(reply.headers, HEADER) is not None:
            reply.close()
            raise OwnerLost(f"machine {node} has had this before, and its answer was lost")
        return reply

    def _once_in_a_beat(self) -> Admit:
        """Lets a request be sent again where a kept connection was lost, as long as the other machine remembers it: for
        too old it would be told to ask again, and have it done twice."""
        beat, sent = self._stamps.beat, False

        def admit() -> bool:
            nonlocal sent
            again, sent = sent, True
            return not again or self._stamps.beat == beat

        return admit

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
        self._body = io.BytesIO()  # not a list: what comes byte by byte must not take a hundred times its size
        self.whole = False

    async def __call__(self) -> Any:
        """The next message."""
        message = await self._receive()
        if message["type"] == "http.request":
            self._body.write(message.get("body", b""))
            self.whole = not message.get("more_body", False)
        return message

    @property
    def body(self) -> bytes:
        """All that was given."""
        return self._body.getvalue()
