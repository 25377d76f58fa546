"""The relay of replies: what stands between the app inside and the client, for every layer that looks at replies.

A layer subclasses `Tap` and says what it wants to see; all else passes byte for byte, and nothing is collected that was
not asked for:

    whole(body)    a JSON answer, collected      -> what the client is given
    event(event)   one event of a stream         -> what the client is given
    piece(data)    bytes as they come, in front of the other two
    ended()        the stream's end, before the client learns of it

`Collected` keeps a whole reply for a layer that answers by itself.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from enum import Enum
from typing import Any, ClassVar, Protocol

import orjson

from miles_router.asgi.exchange import UNBOUNDED, Exchange, Message, Receive, Scope, Send
from miles_router.asgi.headers import RawHeaders, first_header
from miles_router.engines.events import Event, EventReader
from miles_router.errors import UpstreamInvalidResponse

logger = logging.getLogger(__name__)

OK = 200
JSON, EVENT_STREAM = b"application/json", b"text/event-stream"
IDENTITY = b"identity"
TOO_LARGE = "too_large"


class Kind(Enum):
    """What a reply's body is."""

    JSON = "json"
    EVENTS = "events"
    OTHER = "other"


class UnreadCounter(Protocol):
    """Who counts replies that a layer should have read and could not: `router.metrics`."""

    def unread_reply(self, layer: str, reason: str) -> None:
        """One more."""
        ...


class Tap:
    """One reply on its way through a layer. Give `send` to the app inside, or use `call`.

    Args:
        send: the client's side.
        metrics: counts replies that could not be read (`miles_router_unread_replies_total`).
    """

    #: The layer's name in logs and metrics.
    layer: str = "middleware"
    #: Bytes of a JSON answer, or of a stream's events, that are held at most; a larger reply passes unread. `call`
    #: takes the request's bound (`--max-answer-bytes`).
    max_collected: int = UNBOUNDED
    #: Whether `piece` gives as many bytes as it takes, so that the reply's Content-Length stays true.
    same_length = False
    #: Whether `piece` reads what it sees, and is not content with bytes of any kind.
    reads_pieces: ClassVar[bool] = False
    #: Whether the reply's head waits for what `piece` gives first. A layer that only looks on does not need that.
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
        #: The reply's first message as it came; empty before.
        self.start: Message = {}
        self.kind = Kind.OTHER
        #: The reader of a stream's events.
        self.events = EventReader()
        self._send = send
        self._metrics = metrics
        self._started = False  # the client has the reply's head
        self._passing = False  # all that comes goes on as it is
        self._finished = False  # the client has the reply's end; what still comes is dropped
        self._collecting = False
        self._reading_events = False  # and no pieces
        self._parts: list[bytes] = []
        self._size = 0
        self._shown: list[bytes] = []  # of the events of this piece, not given yet
        self._kept: dict[object, int] = {}  # bytes that the layer keeps of a stream, by part
        self._kept_size = 0

    # What a layer overrides

    def passes(self, start: Message) -> bool:
        """Whether this reply is none of the layer's business. By default refusals and errors are not."""
        return bool(start["status"] != OK)

    async def begun(self) -> None:
        """A reply has begun that the layer sees (`start`, `kind`); nothing of it has gone on yet."""

    async def piece(self, data: bytes, *, more: bool) -> bytes:
        """Bytes as they came; gives what the rest of the layer, or the client, gets of them."""
        return data

    async def whole(self, body: bytes) -> bytes | None:
        """A JSON answer; gives the client's, or None where the layer answers later by itself (`answer`)."""
        return body

    async def event(self, event: Event) -> bytes:
        """An event; gives what the client gets for it, behind what it got for the events before."""
        return event.raw

    async def ended(self) -> bytes | None:
        """The stream has ended; gives what the client gets before its end, or None where the layer goes on by itself
        (`give`, `finish`)."""
        return b""

    def unread(self, reason: str) -> None:
        """A reply that the layer should have read passes unread: `content_encoding`, `content_type`, `too_large`.
        Raise here to refuse it instead."""
        logger.warning("reply_unread", extra={"fields": {"layer": self.layer, "reason": reason}})
        if self._metrics is not None:
            self._metrics.unread_reply(self.layer, reason)

    # What a layer sees and calls

    @property
    def passing(self) -> bool:
        """Whether all that comes goes on as it is: the reply is none of the layer's business, passes unread, or was let
        go."""
        return self._passing

    @property
    def collected(self) -> bytes:
        """What has come of a JSON answer that is not complete."""
        return b"".join(self._parts)

    async def call(
        self, app: Callable[[Scope, Receive, Send], Awaitable[None]], scope: Scope, receive: Receive
    ) -> None:
        """Call the app inside, asking for a reply that can be read."""
        self.max_collected = min(self.max_collected, Exchange.of(scope).max_answer_bytes)
        await app(readable(scope), receive, self.send)

    def keep(self, part: object, nbytes: int, *, more: bool) -> None:
        """The layer keeps so many bytes of a part of a stream: beside what it kept of it before (`more`), or in its
        place. Once all parts have more than `max_collected`, the rest of the stream passes unread."""
        before = self._kept.get(part, 0)
        self._kept[part] = before + nbytes if more else nbytes
        self._kept_size += self._kept[part] - before

    async def give(self, data: bytes) -> None:
        """Give the client some of the body."""
        if data:
            await self._give(data, more=True)

    async def give_shown(self) -> None:
        """Give the client what it gets for the events before this one, which takes its time."""
        if self._shown:
            await self._give(b"", more=True)

    async def finish(self, data: bytes = b"") -> None:
        """Give the client the last of the body; what still comes from inside is dropped."""
        await self._give(data, more=False)

    async def answer(self, body: bytes) -> None:
        """Give the client a whole answer, with its length, in place of one that was collected."""
        self._started = self._finished = True
        await self._send(with_length(self.start, body))
        await self._send({"type": "http.response.body", "body": body, "more_body": False})

    async def let_go(self) -> None:
        """Look at no more of this reply: what was collected goes on as it came, and the rest as it comes."""
        collected = self.collected if self._collecting else self.events.release()
        self._passing, self._parts = True, []
        await self.give(collected)

    # What the app inside calls

    async def send(self, message: Message) -> None:
        """One ASGI message of the reply."""
        if message["type"] == "http.response.start":
            await self._begin(message)
        elif self._finished:
            return
        elif self._passing:
            await self._pass_on(message)
        elif self._reading_events:  # the way of each event is short
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
            return True  # bytes are bytes
        encoding = first_header(self.start["headers"], b"content-encoding")
        if encoding is not None and encoding.lower() != IDENTITY:
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
            shown = await self.event(Event.read(raw))  # in which what was shown before may be given
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
            data, self._shown = b"".join(self._shown), []  # which copies nothing where it is one
        if not self._started:
            await self._give_start()
        self._finished = not more
        await self._send({"type": "http.response.body", "body": data, "more_body": more})

    async def _give_start(self) -> None:
        """The head of a reply that is not answered whole: its length is the worker's only if nothing is changed."""
        self._started = True
        rewrites_events = self._wants_events and self.kind is Kind.EVENTS and not self._passing
        if rewrites_events or (self._wants_pieces and not self.same_length):
            headers = [pair for pair in self.start["headers"] if pair[0] != b"content-length"]
            await self._send({**self.start, "headers": headers})
        else:
            await self._send(self.start)


class Collected(Tap):
    """A whole reply of any kind, kept for a layer that answers by itself. Nothing is given to the client."""

    def __init__(self, metrics: UnreadCounter | None = None) -> None:
        super().__init__(drop, metrics)
        #: The whole body, once it is there.
        self.body = b""

    @property
    def status(self) -> int:
        """The reply's status."""
        return int(self.start["status"])

    @property
    def is_json(self) -> bool:
        """Whether it is an answer that can be read: 200, JSON, not compressed."""
        return (
            self.status == OK
            and self.kind is Kind.JSON
            and first_header(self.start["headers"], b"content-encoding") is None
        )

    def parse(self) -> Any:
        """Its JSON; None where it is none."""
        try:
            return orjson.loads(self.body)
        except orjson.JSONDecodeError:
            return None

    async def give_to(self, send: Send, body: bytes | None = None) -> None:
        """Give it to a client as it came, or with another body."""
        body = self.body if body is None else body
        await send(self.start if body is self.body else with_length(self.start, body))
        await send({"type": "http.response.body", "body": body, "more_body": False})

    def passes(self, start: Message) -> bool:
        """None does."""
        return False

    def _can_read(self) -> bool:
        return True

    def _collects(self) -> bool:
        return True

    async def whole(self, body: bytes) -> None:
        """Keep it."""
        self.body = body

    def unread(self, reason: str) -> None:
        """It is too large.

        Raises:
            UpstreamInvalidResponse: always.
        """
        super().unread(reason)
        raise UpstreamInvalidResponse(f"the worker's answer has over {self.max_collected} bytes (--max-answer-bytes)")


async def drop(message: Message) -> None:
    """The client's side of a reply that is not given to it."""


def with_length(start: Message, body: bytes) -> Message:
    """A reply's first message, for another body."""
    headers = [pair for pair in start["headers"] if pair[0] != b"content-length"]
    return {**start, "headers": [*headers, (b"content-length", str(len(body)).encode("ascii"))]}


def kind_of(headers: RawHeaders) -> Kind:
    """What a body is, by its Content-Type."""
    declared = first_header(headers, b"content-type") or b""
    if declared.startswith(JSON):
        return Kind.JSON
    return Kind.EVENTS if declared.startswith(EVENT_STREAM) else Kind.OTHER


def readable(scope: Scope) -> Scope:
    """The request, asking for a reply that can be read here, whatever encodings the client could read."""
    kept = [pair for pair in scope["headers"] if pair[0] != b"accept-encoding"]
    return scope if len(kept) == len(scope["headers"]) else {**scope, "headers": kept}
