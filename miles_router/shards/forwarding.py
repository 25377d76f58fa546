"""Requests that one shard forwards to another over ordinary HTTP.

A request is forwarded at most once. It carries a header that marks it, and the shard that receives it answers or
refuses. The header grants no rights: the answering shard checks the keys in the client's own headers.
"""

from __future__ import annotations

import asyncio
import io
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from miles_router import tasks
from miles_router.asgi.access import READING
from miles_router.asgi.exchange import Exchange, Receive, Scope, Send
from miles_router.asgi.watch import Watch
from miles_router.asgi.wire import REQUEST_DROPPED, RawHeaders, end_to_end, first_header, header_texts, raw_headers
from miles_router.engines.paths import GENERATE
from miles_router.errors import BadRequest, Unavailable, UpstreamError, UpstreamUnreachable
from miles_router.fleet.gate import endpoint, generates
from miles_router.fleet.worker_url import parse_worker_url
from miles_router.fleet.workers import Pulse
from miles_router.forwarding.proxy import relay
from miles_router.forwarding.reply import Reply
from miles_router.forwarding.upstream import Upstream
from miles_router.metrics import Statistics, counter

#: The header, and its two values: answer this request, or return only your part of an answer built from all shards.
HOP = b"x-miles-router-hop"
FORWARD, ASK = b"forward", b"ask"
#: Keys of a scope's extensions: the value of the hop header, and the headers as they arrived.
HOP_VALUE, ORIGINAL_HEADERS = "miles_router.hop", "miles_router.original_headers"
#: Headers of the client that are not forwarded, because the receiving shard has already used them.
DROPPED = REQUEST_DROPPED | {b"x-request-id", b"origin", b"sec-fetch-site", HOP}
#: The header with the id of a turn in a session.
TURN_ID = b"x-turn-id"
#: Seconds in which a shard must accept a connection.
CONNECT_TIMEOUT = 5.0
#: Concurrent forwarded requests to one shard, above which more are refused; and concurrent `ask` calls, above which
#: more wait.
MAX_FORWARDED, MAX_ASKS = 4096, 256
#: The most bytes in the answer to an `ask` call.
MAX_ANSWER = 1 << 30


def pop_hop(scope: Scope) -> bytes | None:
    """Remove the hop header from a request and return its value; None if there is none.

    Raises:
        BadRequest: the header has an unknown value or occurs twice.
    """
    found = [value for name, value in scope["headers"] if name == HOP]
    if not found:
        return None
    scope["headers"] = [pair for pair in scope["headers"] if pair[0] != HOP]
    if len(found) > 1 or found[0] not in (FORWARD, ASK):
        raise BadRequest(f"the header {HOP.decode()} is reserved for requests between the shards of a router")
    purpose: bytes = found[0]
    return purpose


class ForwardStatistics(Statistics, prefix="miles_router_forwarded"):
    """Statistics of requests that other shards answer for this one."""

    requests = counter("Requests of clients that another shard was asked to answer.")
    questions = counter("Questions to another shard for a part of an answer.")
    unavailable = counter("Requests of both kinds that no shard accepted.")
    lost = counter("Requests of both kinds whose shard was lost before its answer began.")
    bytes_out = counter("Bytes of answers that were relayed.")


class Forwarding:
    """A sender of requests to other shards.

    Args:
        url_of: returns the URL of a shard, or None while it has no process.
    """

    def __init__(self, url_of: Callable[[int], str | None]) -> None:
        self.statistics = ForwardStatistics()
        self._url_of = url_of
        self.upstream = Upstream(connect_timeout=CONNECT_TIMEOUT)
        self._pulse = Pulse()
        self._forwarded: Counter[int] = Counter()
        self._asks: defaultdict[int, asyncio.Semaphore] = defaultdict(lambda: asyncio.Semaphore(MAX_ASKS))

    async def forward(self, owner: int, scope: Scope, receive: Receive, send: Send, *, once: bool = False) -> None:
        """Forward a request to its owner and relay the reply.

        Args:
            once: never repeat the request, because it is not a session turn. A session recognizes a repeated turn by
                its id.

        Raises:
            Unavailable: the owner did not take the request.
            UpstreamError: the owner was lost before its reply began, and may have done what was asked.
            UpstreamBroken: the owner was lost during its reply.
        """
        exchange = Exchange.of(scope)
        body = await exchange.read(receive)
        self.statistics.requests += 1
        with self._limited(owner), Watch(receive):
            exchange.forwarded = True
            try:
                reply = await self._open(FORWARD, owner, scope, scope["headers"], body, once=once)
                try:
                    await relay(reply, send, self.statistics)
                finally:
                    reply.close()
            except (Unavailable, UpstreamError):
                exchange.forwarded = False  # the owner may be dead and count nothing
                raise

    async def ask(
        self, owner: int, scope: Scope, body: bytes, headers: Mapping[str, str], patience: float | None
    ) -> tuple[int, Mapping[str, str], bytes]:
        """Return (status, headers, body) of another shard's part of an answer. The contract is the same as for
        `Owners.ask`."""
        own = dict(raw_headers(headers.items()))
        pairs = [pair for pair in scope["extensions"][ORIGINAL_HEADERS] if pair[0] not in own] + [*own.items()]

        async def answer() -> tuple[int, Mapping[str, str], bytes]:
            async with self._asks[owner]:
                reply = await self._open(ASK, owner, scope, pairs, body)
                try:
                    return reply.status, dict(header_texts(reply.headers)), await reply.read_all(MAX_ANSWER)
                finally:
                    reply.close()

        self.statistics.questions += 1
        try:
            return await (answer() if patience is None else tasks.within(patience, answer(), name="ask another shard"))
        except (UpstreamError, TimeoutError):
            self.statistics.unavailable += 1
            raise Unavailable(f"shard {owner} of the router does not answer; ask again") from None

    @contextmanager
    def _limited(self, owner: int) -> Iterator[None]:
        if self._forwarded[owner] >= MAX_FORWARDED:
            self.statistics.unavailable += 1
            raise Unavailable(f"too many requests wait for shard {owner} of the router; ask again")
        self._forwarded[owner] += 1
        try:
            yield
        finally:
            self._forwarded[owner] -= 1

    async def _open(
        self, purpose: bytes, owner: int, scope: Scope, headers: RawHeaders, body: bytes, *, once: bool = False
    ) -> Reply:
        url, method, exchange = self._url_of(owner), scope["method"], Exchange.of(scope)
        host = first_header(headers, b"host") or _host_of(scope)  # the name by which the client knows the router
        if url is None:
            self.statistics.unavailable += 1
            raise Unavailable(f"shard {owner} of the router owns this and is not connected; ask again")
        kept = end_to_end(headers, DROPPED)
        kept += [(b"x-request-id", exchange.request_id.encode("ascii")), (HOP, purpose)]
        target = exchange.mount.encode() + scope["raw_path"]
        if scope["query_string"]:
            target = b"%b?%b" % (target, scope["query_string"])
        repeatable = method in READING or purpose == ASK or (not once and _is_named_turn(scope["path"], kept))
        try:
            shard = parse_worker_url(url)
            address = shard if host is None else replace(shard, authority=host)
            return await self.upstream.open(address, method, target, kept, body, pulse=self._pulse, once=not repeatable)
        except UpstreamUnreachable as error:
            untaken = (error.refused or error.exhausted) and not error.written
            if untaken or repeatable:
                self.statistics.unavailable += 1
                raise Unavailable(f"shard {owner} of the router owns this and cannot be reached; ask again") from None
            self.statistics.lost += 1
            raise UpstreamError(
                f"shard {owner} of the router was lost while it was asked; it may have done what was asked"
            ) from None

    def abort_requests(self, url: str) -> None:
        """Abort all requests to a shard that may no longer act."""
        self.upstream.give_up(parse_worker_url(url), self._pulse, "the shard that had this is lost")


def _is_named_turn(path: str, headers: RawHeaders) -> bool:
    """Return True for a session turn with an id: its session runs it once, however often it arrives."""
    return generates(path) and endpoint(path) != GENERATE and any(name == TURN_ID for name, _ in headers)


def _host_of(scope: Scope) -> bytes | None:
    """Return the address that the client connected to, for a client that sends no Host header."""
    server = scope.get("server")
    return None if server is None else f"{server[0]}:{server[1]}".encode("ascii")


class BufferedReceive:
    """A `receive` that buffers the body it passes on, so that the request can be replayed."""

    def __init__(self, receive: Receive) -> None:
        self._receive = receive
        self._body = io.BytesIO()  # not a list: a body that arrives byte by byte would take a hundred times its size
        self.whole = False

    async def __call__(self) -> Any:
        message = await self._receive()
        if message["type"] == "http.request":
            self._body.write(message.get("body", b""))
            self.whole = not message.get("more_body", False)
        return message

    @property
    def body(self) -> bytes:
        """The body received so far."""
        return self._body.getvalue()
