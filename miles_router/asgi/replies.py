"""The relay of replies from the inner app to the client, for layers that read or change replies.

A layer subclasses `Tap` and overrides the methods for the parts it needs. Everything else passes byte for byte, and the
relay buffers only what an overridden method needs:

    whole(body)    a complete JSON answer                 -> the answer for the client
    event(event)   one event of a stream                  -> the bytes for the client
    piece(data)    bytes as they arrive, before the other two
    ended()        the end of a stream, before the client receives it

`Collected` buffers a whole reply for a layer that answers the client itself.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from enum import Enum
from typing import Any, ClassVar, Protocol

import orjson

from miles_router.asgi.exchange import UNBOUNDED, Exchange, Message, Receive, Scope, Send
from miles_router.asgi.wire import RawHeaders, first_header
from miles_router.engines.events import Event, EventReader
from miles_router.errors import UpstreamError

logger = logging.getLogger(__name__)

OK = 200
JSON, EVENT_STREAM = b"application/json", b"text/event-stream"
IDENTITY = b"identity"
TOO_LARGE = "too_large"


class Kind(Enum):
    """The kind of a reply's body."""

    JSON = "json"
    EVENTS = "events"
    OTHER = "other"


class UnreadCounter(Protocol):
    """A counter of replies that a layer should have read but could not: `router.metrics`."""

    def unread_reply(self, layer: str, reason: str) -> None: ...


class Tap:
    """A relay for one reply through one layer. Pass its `send` to the inner app, or use `call`.

    Args:
        send: sends to the client.
        metrics: counts replies that could not be read (`miles_router_unread_replies_total`).
    """

    #: The layer's name in logs and metrics.
    layer: str = "middleware"
    #: Maximum bytes of a JSON answer, or of a stream's events, to buffer; a larger reply passes unread. `call` lowers
    #: it to the request's limit (`--max-answer-bytes`).
    max_collected: int = UNBOUNDED
    #: True if `piece` returns as many bytes as it gets, so that Content-Length stays correct.
    same_length = False
    #: True if `piece` parses the bytes, so that it needs an uncompressed JSON or event reply.
    reads_pieces: ClassVar[bool] = False
    #: True if the reply's head is sent together with the first bytes that `piece` returns. A layer that only observes
    #: sets it to False.
    holds_head = True
    _wants_pieces: ClassVar[bool] = False
    _wants_whole: ClassVar[bool] = False
    _wants_events: ClassVar[bool] = False

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        cls._wants_pieces = cls.piece is not Tap.piece
        cls._wants_whole = cls.whole is not Tap.whole
        cls._wants_events = cls.event is not Tap.event

    def __init__(self, send: Send, metrics: UnreadCounter | None = None) -> None:
        #: The original `http.response.start`; empty before it arrives.
        self.start: Message = {}
        self.kind = Kind.OTHER
        self.events = EventReader()
        self._send = send
        self._metrics = metrics
        self._started = False  # the head was sent to the client
        self._passing = False  # the rest of the reply passes unchanged
        self._finished = False  # the end was sent to the client; later messages are dropped
        self._collecting = False
        self._reading_events = False  # only `event` is overridden, `piece` is not
        self._parts: list[bytes] = []
        self._size = 0
        self._shown: list[bytes] = []  # bytes for the client from the events of this message, not sent yet
        self._kept: dict[object, int] = {}  # bytes of a stream that the layer holds, by part (see `keep`)
        self._kept_size = 0

    # For layers to override

    def passes(self, start: Message) -> bool:
        """Return True if the reply should pass unread. By default every status but 200 does."""
        return bool(start["status"] != OK)

    async def begun(self) -> None:
        """Prepare for a reply that the layer reads; `start` and `kind` are set. Nothing was sent to the client yet."""

    async def piece(self, data: bytes, *, more: bool) -> bytes:
        """Return the bytes that replace `data` for `whole`, `event` and the client."""
        return data

    async def whole(self, body: bytes) -> bytes | None:
        """Return the client's answer for a JSON answer, or None if the layer calls `answer` itself later."""
        return body

    async def event(self, event: Event) -> bytes:
        """Return the client's bytes for one event of a stream."""
        return event.raw

    async def ended(self) -> bytes | None:
        """Return the last bytes for the client at the end of a stream, or None if the layer continues the stream itself
        (`give`, `finish`)."""
        return b""

    def unread(self, reason: str) -> None:
        """Log and count a reply that passes unread although the layer should have read it. Override it and raise to
        refuse such replies instead.

        Args:
            reason: `content_encoding`, `content_type` or `too_large`.
        """
        logger.warning("reply_unread", extra={"fields": {"layer": self.layer, "reason": reason}})
        if self._metrics is not None:
            self._metrics.unread_reply(self.layer, reason)

    # For layers to use

    @property
    def passing(self) -> bool:
        """True if the rest of the reply passes unchanged: `passes` returned True, it is unread, or after `let_go`."""
        return self._passing

    @property
    def collected(self) -> bytes:
        """The bytes of an incomplete JSON answer so far."""
        return b"".join(self._parts)

    async def call(
        self, app: Callable[[Scope, Receive, Send], Awaitable[None]], scope: Scope, receive: Receive
    ) -> None:
        """Call the inner app without `Accept-Encoding`, so that the reply is not compressed."""
        self.max_collected = min(self.max_collected, Exchange.of(scope).max_answer_bytes)
        await app(readable(scope), receive, self.send)

    def keep(self, part: object, nbytes: int, *, more: bool) -> None:
        """Record that the layer holds `nbytes` of one part of a stream. When all parts together exceed `max_collected`,
        the rest of the stream passes unread.

        Args:
            more: True to add to the part's earlier bytes, False to replace them.
        """
        before = self._kept.get(part, 0)
        self._kept[part] = before + nbytes if more else nbytes
        self._kept_size += self._kept[part] - before

    async def give(self, data: bytes) -> None:
        """Send body bytes to the client."""
        if data:
            await self._give(data, more=True)

    async def give_shown(self) -> None:
        """Send the bytes of the earlier events to the client now. Call it in `event` before slow work."""
        if self._shown:
            await self._give(b"", more=True)

    async def finish(self, data: bytes = b"") -> None:
        """Send the last bytes of the body to the client. Later messages of the inner app are dropped."""
        await self._give(data, more=False)

    async def answer(self, body: bytes) -> None:
        """Send the client a complete answer with its Content-Length, in place of the collected one."""
        self._started = self._finished = True
        await self._send(with_length(self.start, body))
        await self._send({"type": "http.response.body", "body": body, "more_body": False})

    async def let_go(self) -> None:
        """Stop reading this reply: send the collected bytes to the client unchanged, and pass the rest."""
        collected = self.collected if self._collecting else self.events.release()
        self._passing, self._parts = True, []
        await self.give(collected)

    # For the inner app

    async def send(self, message: Message) -> None:
        """Process one ASGI message of the reply."""
        if message["type"] == "http.response.start":
            await self._begin(message)
        elif self._finished:
            return
        elif self._passing:
            await self._pass_on(message)
        elif self._reading_events:  # a shorter path for the most frequent case
            await self._take_events(message.get("body", b""), more=message.get("more_body", False))
        else:
            await self._take(message.get("body", b""), more=message.get("more_body", False))

    async def _begin(self, start: Message) -> None:
        self.start = start
        self.kind = kind_of(start["headers"])
        if self._passing or self.passes(start) or not self._can_read():
            self._passing = True
            await self._pass_on(start)
            return
        await self.begun()
        self._collecting = self._collects()
        self._reading_events = self.kind is Kind.EVENTS and self._wants_events and not self._wants_pieces
        held = self._wants_pieces and self.holds_head
        if not self._collecting and not held:  # a stream's head does not wait for its first event
            await self._give_start()

    def _collects(self) -> bool:
        return self.kind is Kind.JSON and self._wants_whole

    def _can_read(self) -> bool:
        if not (self._wants_whole or self._wants_events or self.reads_pieces):
            return True  # the layer handles bytes of any kind
        if is_encoded(self.start["headers"]):
            self.unread("content_encoding")
        elif self.kind is Kind.OTHER:
            self.unread("content_type")
        else:
            return True
        return False

    async def _pass_on(self, message: Message) -> None:
        self._started = True
        self._finished = message["type"] == "http.response.body" and not message.get("more_body", False)
        await self._send(message)

    async def _take(self, data: bytes, *, more: bool) -> None:
        if self._wants_pieces:
            data = await self.piece(data, more=more)
            if self._finished:
                return
            if self._passing:
                await self._give(data, more=more)
                return
        if self._collecting:
            await self._collect(data, more=more)
        elif self.kind is Kind.EVENTS and self._wants_events:
            await self._take_events(data, more=more)
        elif data or not more:
            await self._give(data, more=more)

    async def _collect(self, data: bytes, *, more: bool) -> None:
        self._parts.append(data)
        self._size += len(data)
        if self._size > self.max_collected:
            self.unread(TOO_LARGE)
            await self.let_go()
            if not more:
                await self.finish()
        elif not more:
            parts, self._parts = self._parts, []
            body = await self.whole(b"".join(parts))
            if body is not None:
                await self.answer(body)

    async def _take_events(self, data: bytes, *, more: bool) -> None:
        for raw in self.events.feed(data):
            shown = await self.event(Event.read(raw))  # it may call `give_shown`
            if shown:
                self._shown.append(shown)
            if self._finished:  # the layer has ended the stream
                return
        if self.events.pending + self._kept_size > self.max_collected:
            self.unread(TOO_LARGE)
            self._passing = True
            self._shown.append(self.events.release())
        if not more:
            end = b"" if self._passing else await self.ended()
            if end is not None:
                await self._give(end + self.events.rest, more=False)
                return
        if self._shown:
            await self._give(b"", more=True)

    async def _give(self, data: bytes, *, more: bool) -> None:
        if self._finished:
            return
        if self._shown:
            if data:
                self._shown.append(data)
            data, self._shown = b"".join(self._shown), []  # `join` does not copy a single item
        if not self._started:
            await self._give_start()
        self._finished = not more
        await self._send({"type": "http.response.body", "body": data, "more_body": more})

    async def _give_start(self) -> None:
        """Send the head; drop the worker's Content-Length if the layer may change the body."""
        self._started = True
        rewrites_events = self._wants_events and self.kind is Kind.EVENTS and not self._passing
        if rewrites_events or (self._wants_pieces and not self.same_length):
            headers = [pair for pair in self.start["headers"] if pair[0] != b"content-length"]
            await self._send({**self.start, "headers": headers})
        else:
            await self._send(self.start)


class Collected(Tap):
    """A buffer of a whole reply of any kind. Nothing is sent to the client."""

    def __init__(self, metrics: UnreadCounter | None = None) -> None:
        super().__init__(drop, metrics)
        #: The body; empty until the reply is complete.
        self.body = b""

    @property
    def status(self) -> int:
        return int(self.start["status"])

    @property
    def is_json(self) -> bool:
        """True for a readable answer: status 200, JSON, not compressed."""
        return self.status == OK and self.kind is Kind.JSON and not is_encoded(self.start["headers"])

    def parse(self) -> Any:
        """Return the parsed JSON body; None if it is invalid."""
        try:
            return orjson.loads(self.body)
        except orjson.JSONDecodeError:
            return None

    async def give_to(self, send: Send, body: bytes | None = None) -> None:
        """Send the reply to a client, unchanged or with another `body`."""
        body = self.body if body is None else body
        await send(self.start if body is self.body else with_length(self.start, body))
        await send({"type": "http.response.body", "body": body, "more_body": False})

    def passes(self, start: Message) -> bool:
        return False

    def _can_read(self) -> bool:
        return True

    def _collects(self) -> bool:
        return True

    async def whole(self, body: bytes) -> None:
        self.body = body

    def unread(self, reason: str) -> None:
        """Refuse a reply that is too large to buffer.

        Raises:
            UpstreamError: always.
        """
        super().unread(reason)
        raise UpstreamError(f"the worker's answer has over {self.max_collected} bytes (--max-answer-bytes)")


async def drop(message: Message) -> None:
    """Ignore the message: a `send` for replies that no client receives."""


def with_length(start: Message, body: bytes) -> Message:
    """Return `http.response.start` with the Content-Length of `body`."""
    headers = [pair for pair in start["headers"] if pair[0] != b"content-length"]
    return {**start, "headers": [*headers, (b"content-length", str(len(body)).encode("ascii"))]}


def is_encoded(headers: RawHeaders) -> bool:
    """Return True for a compressed body, by its Content-Encoding."""
    encoding = first_header(headers, b"content-encoding")
    return encoding is not None and encoding.lower() != IDENTITY


def kind_of(headers: RawHeaders) -> Kind:
    """Return the kind of a body by its Content-Type."""
    declared = (first_header(headers, b"content-type") or b"").lower()
    if declared.startswith(JSON):
        return Kind.JSON
    return Kind.EVENTS if declared.startswith(EVENT_STREAM) else Kind.OTHER


def readable(scope: Scope) -> Scope:
    """Return `scope` without `Accept-Encoding`, so that the worker sends an uncompressed reply."""
    kept = [pair for pair in scope["headers"] if pair[0] != b"accept-encoding"]
    return scope if len(kept) == len(scope["headers"]) else {**scope, "headers": kept}
