"""One request of a client as an ASGI app sees it: what it may read, and the reply that it writes."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable
from typing import Protocol

from miles_router.asgi.exchange import Exchange, Message, Scope
from miles_router.asgi.outlet import Source
from miles_router.errors import RouterError
from miles_router.forwarding.framing import (
    CHUNKED,
    CRLF,
    INLINE_BODY,
    LAST_CHUNK,
    NO_BODY,
    UNTIL_CLOSE,
    InvalidFraming,
    reply_head,
)
from miles_router.middlewares.contract import ASGIApp

logger = logging.getLogger(__name__)

#: Bytes of a body that wait for the app before the client is held back.
HIGH_WATER = 256 * 1024
#: What each part of a body takes beside its bytes: chunks of one byte are no small body.
PART = 64


class Line(Protocol):
    """The connection that a request came on: `client_connection.ClientConnection`."""

    transport: asyncio.Transport
    #: The client reads slowly: what is written now would only pile up.
    write_paused: bool
    #: No further request is wanted, so that the reply says `Connection: close`.
    closing: bool
    #: What `send` gives where nothing has to be waited for.
    sent: asyncio.Future[None]

    def count_backlog(self) -> None:
        """Tell how much waits for a client that reads slowly."""
        ...

    async def writable(self) -> None:
        """Wait until the client has caught up, or is gone."""
        ...

    def pause_reading(self) -> None:
        """Hold the client back."""
        ...

    def resume_reading(self) -> None:
        """Let it go on."""
        ...

    def flush_soon(self, request: ClientRequest) -> None:
        """Call its `flush` at the end of this step of the event loop."""
        ...

    def write_continue(self) -> None:
        """Tell the client to send its body."""
        ...

    def reply_ended(self, request: ClientRequest) -> None:
        """The last byte of its reply was written."""
        ...

    def break_off(self, request: ClientRequest) -> None:
        """Its reply will never be complete, and must not look so."""
        ...

    def refuse(self, error: RouterError, name: str) -> None:
        """Answer the request whose id is `name` with `error`, and close."""
        ...


class ClientRequest:
    """`receive` and `send` of one request; also the `Sink` that its reply's body may be written to."""

    __slots__ = (
        "_begun",
        "_body",
        "_buffered",
        "_given",
        "_gone",
        "_head",
        "_line",
        "_method",
        "_news",
        "_parts",
        "_source",
        "awaits_continue",
        "ended",
        "http_1_0",
        "keep_alive",
        "task",
        "whole",
    )

    def __init__(
        self,
        line: Line,
        method: str,
        *,
        http_1_0: bool,
        keep_alive: bool,
        awaits_continue: bool,
    ) -> None:
        self._line = line
        self._method = method
        self.http_1_0 = http_1_0
        #: Whether the connection stays open behind the reply; the app may still say no.
        self.keep_alive = keep_alive
        self.task: asyncio.Task[None] | None = None
        # The body
        #: The client waits for `100 Continue` before it sends it.
        self.awaits_continue = awaits_continue
        self._parts: list[bytes] = []
        self._buffered = 0
        self.whole = False  # its last byte has come
        self._given = False  # and the app has it
        self._gone = False
        self._news: asyncio.Event | None = None
        # The reply
        self._begun = False
        self.ended = False
        self._head: bytes | None = None  # not written yet: a body in the same step shares its write
        self._body = NO_BODY  # how it is framed; of one with a length, what is left
        self._source: Source | None = None

    async def run(self, app: ASGIApp, scope: Scope) -> None:
        """Let `app` answer. Whatever it does, the client is never left waiting, and half a reply never looks whole."""
        try:
            await app(scope, self.receive, self.send)
            if not self._begun and not self._gone:
                name = Exchange.of(scope).request_id
                logger.error("no_reply", extra={"fields": {"request_id": name, "path": scope["path"]}})
                self._line.refuse(RouterError("the router gave no answer"), name)
        except Exception as error:  # the app's own edge answers errors; this is a defect of that
            logger.error("internal_error", exc_info=error)
            if not self._begun and not self._gone:
                self._line.refuse(
                    RouterError("the router failed; its log has the details"), Exchange.of(scope).request_id
                )
        finally:
            if not self.ended and not self._gone:
                self._line.break_off(self)

    # What the app calls

    async def receive(self) -> Message:
        """ASGI: the next part of the body, or that the client is gone or answered."""
        while not self._gone and not self.ended:
            if self._parts or (self.whole and not self._given):
                return self._next_part()
            if self.awaits_continue:
                self.awaits_continue = False
                self._line.write_continue()
            if self._news is None:
                self._news = asyncio.Event()
            self._news.clear()
            self._line.resume_reading()  # which may bring news at once
            await self._news.wait()
        return {"type": "http.disconnect"}

    def _next_part(self) -> Message:
        body = self._parts[0] if len(self._parts) == 1 else b"".join(self._parts)
        self._parts.clear()
        self._buffered = 0
        self._given = self.whole
        return {"type": "http.request", "body": body, "more_body": not self.whole}

    def send(self, message: Message) -> Awaitable[None]:
        """ASGI: write the reply. Nothing is written once the client is gone.

        Raises:
            InvalidFraming: what could not be written without doubt about where the reply ends.
            RuntimeError: messages in another order than ASGI's.
        """
        if self._line.write_paused and not self._gone:
            return self._send_later(message)
        kind = message["type"]
        if kind == "http.response.body":
            if not self._begun or self.ended:
                raise RuntimeError("a part of a reply came before its start, or after its end")
            if not self._gone:
                self._write(message.get("body", b""), not message.get("more_body", False))
        elif kind == "http.response.start":
            if self._begun:
                raise RuntimeError("a reply was begun a second time")
            self._begin(message)
        else:
            raise RuntimeError(f"an HTTP reply has no message {kind!r}")
        return self._line.sent

    async def _send_later(self, message: Message) -> None:
        await self._line.writable()
        await self.send(message)

    def _begin(self, message: Message) -> None:
        # A client that was not told to go on may send the body or another request; nobody could tell which it is (RFC
        # 9110 section 10.1.1).
        keep_alive = self.keep_alive and not self._line.closing and not (self.awaits_continue and not self.whole)
        self._head, self._body, self.keep_alive = reply_head(
            message["status"],
            message.get("headers", ()),
            method=self._method,
            http_1_0=self.http_1_0,
            keep_alive=keep_alive,
        )
        self._begun, self.awaits_continue = True, False
        self._line.flush_soon(self)

    def _write(self, data: bytes, last: bool) -> None:
        head, self._head = self._head, None
        pieces = [] if head is None else [head]
        if self._body == CHUNKED:
            if data:
                pieces += (b"%x\r\n" % len(data), data, CRLF)
            if last:
                pieces.append(LAST_CHUNK)
        elif self._body != NO_BODY:
            if self._body != UNTIL_CLOSE:
                left = self._body - len(data)
                if left < 0 or (last and left):
                    raise InvalidFraming("a reply's body is not as long as its Content-Length says")
                self._body = left
            pieces.append(data)
        if len(data) <= INLINE_BODY:
            self._line.transport.write(b"".join(pieces))
        else:
            self._line.transport.writelines(pieces)
        if self._line.write_paused:
            self._line.count_backlog()
        if last:
            self.ended = True
            if self._news is not None:
                self._news.set()
            self._line.reply_ended(self)

    # `Sink`

    def write(self, data: bytes) -> None:
        """The next bytes of the reply's body, past `send`."""
        if not self._gone:
            self._write(data, False)

    def fed_by(self, source: Source | None) -> None:
        """Who is told when the client reads slowly."""
        self._source = source
        if source is not None and self._line.write_paused:
            source.pause()

    # What the connection calls

    def feed(self, data: bytes) -> None:
        """More of the body has come."""
        if self.ended:
            return
        self.awaits_continue = False  # it did not wait
        self._parts.append(data)
        self._buffered += len(data) + PART
        if self._news is not None:
            self._news.set()
        if self._buffered > HIGH_WATER:
            self._line.pause_reading()

    def complete(self) -> None:
        """The last byte of the body has come."""
        self.whole = True
        if self._news is not None:
            self._news.set()

    def flush(self) -> None:
        """Write the head that nothing followed yet."""
        head, self._head = self._head, None
        if head is not None and not self._gone:
            self._line.transport.write(head)

    @property
    def begun(self) -> bool:
        """Whether a byte of the reply was, or will be, written."""
        return self._begun

    @property
    def ends_with_connection(self) -> bool:
        """Whether only the connection's end tells where the reply ends."""
        return self._body == UNTIL_CLOSE

    def slowed(self, paused: bool) -> None:
        """The client reads slowly, or has caught up."""
        if self._source is not None:
            (self._source.pause if paused else self._source.resume)()

    def lost(self) -> None:
        """The client is gone."""
        self._gone = True
        self._parts.clear()
        if self._news is not None:
            self._news.set()
