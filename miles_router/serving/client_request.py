"""The ASGI side of one client request: `receive` for its body and `send` for its reply."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable
from typing import TYPE_CHECKING

from miles_router.asgi.exchange import Exchange, Message, Scope
from miles_router.asgi.wire import (
    CHUNKED,
    CRLF,
    INLINE_BODY,
    LAST_CHUNK,
    NO_BODY,
    UNTIL_CLOSE,
    InvalidFraming,
    reply_head,
)
from miles_router.errors import InternalError
from miles_router.middlewares.contract import ASGIApp
from miles_router.serving import client_states as states

if TYPE_CHECKING:
    from miles_router.forwarding.connection import Connection
    from miles_router.serving.client_connection import ClientConnection

logger = logging.getLogger(__name__)

#: Bytes of a body waiting for the app at which reading from the client pauses.
HIGH_WATER = 256 * 1024
#: Bytes counted in addition for each buffered part, because many chunks of one byte take far more memory.
PART = 64


class ClientRequest:
    """A request with its ASGI `receive` and `send`. A worker's connection can write the body of its reply directly."""

    __slots__ = (
        "_body",
        "_buffered",
        "_changed",
        "_connection",
        "_framing",
        "_head",
        "_method",
        "_parts",
        "_reply",
        "_source",
        "http_1_0",
        "keep_alive",
        "task",
    )

    def __init__(
        self,
        connection: ClientConnection,
        method: str,
        *,
        http_1_0: bool,
        keep_alive: bool,
        awaits_continue: bool,
    ) -> None:
        self._connection = connection
        self._method = method
        self.http_1_0 = http_1_0
        #: True if the connection stays open after the reply; the app's headers may set it to False.
        self.keep_alive = keep_alive
        self.task: asyncio.Task[None] | None = None
        self._body: states.BodyState = states.AWAITS_CONTINUE if awaits_continue else states.ARRIVING
        self._parts: list[bytes] = []
        self._buffered = 0
        self._changed: asyncio.Event | None = None  # set when there is more of the body, or will be no more
        self._reply: states.ReplyState = states.WAITING
        self._head: bytes | None = None  # not written yet, so that a body in the same step shares its write
        self._framing = NO_BODY  # CHUNKED, UNTIL_CLOSE, NO_BODY, or the bytes left of a body with a length
        self._source: Connection | None = None

    def _on(self, event: states.ReplyEvent) -> None:
        try:
            self._reply = states.REPLY[self._reply][event]
        except KeyError:
            raise states.InvalidTransition(self._reply, event) from None

    async def run(self, app: ASGIApp, scope: Scope) -> None:
        """Run `app` for this request. If it fails or sends no complete reply, answer with an error or break off."""
        try:
            await app(scope, self.receive, self.send)
            if self._reply is states.WAITING:
                name = Exchange.of(scope).request_id
                logger.error("no_reply", extra={"fields": {"request_id": name, "path": scope["path"]}})
                self._connection.refuse(InternalError("the router gave no answer"), name)
        except Exception as error:  # `RouterApp` answers all errors itself, so this is a bug in it
            logger.error("internal_error", exc_info=error)
            if self._reply is states.WAITING:
                self._connection.refuse(
                    InternalError("the router failed; its log has the details"), Exchange.of(scope).request_id
                )
        finally:
            if self._reply in states.UNFINISHED:
                self._connection.break_off(self)

    # Called by the app

    async def receive(self) -> Message:
        """Return the next part of the body (ASGI), or `http.disconnect` after a disconnect or the end of the reply."""
        while self._reply in states.UNFINISHED:
            if self._parts or self._body is states.WHOLE:
                return self._next_part()
            if self._body is states.AWAITS_CONTINUE:
                self._body = states.ARRIVING
                self._connection.write_continue()
            if self._changed is None:
                self._changed = asyncio.Event()
            self._changed.clear()
            self._connection.resume_reading()  # may set `_changed` at once
            await self._changed.wait()
        return {"type": "http.disconnect"}

    def _next_part(self) -> Message:
        body = self._parts[0] if len(self._parts) == 1 else b"".join(self._parts)
        self._parts.clear()
        self._buffered = 0
        if self._body is states.WHOLE:
            self._body = states.READ
        return {"type": "http.request", "body": body, "more_body": self._body is not states.READ}

    def send(self, message: Message) -> Awaitable[None]:
        """Write a message of the reply (ASGI). After a disconnect, messages are ignored.

        Raises:
            InvalidFraming: the head or the length of the body is invalid, so that the reply's end would be ambiguous.
            InvalidTransition: the order of the messages violates ASGI.
            RuntimeError: the type of a message violates ASGI.
        """
        if self._connection.write_paused and self._reply is not states.LOST:
            return self._send_later(message)
        kind = message["type"]
        if kind == "http.response.body":
            if self._reply is states.BEGUN:
                self._write(message.get("body", b""), not message.get("more_body", False))
            else:
                self._on(states.PART)
        elif kind == "http.response.start":
            if self._reply is states.WAITING:
                self._begin(message)
            else:
                self._on(states.START)
        else:
            raise RuntimeError(f"an HTTP reply has no message {kind!r}")
        return self._connection.sent

    async def _send_later(self, message: Message) -> None:
        await self._connection.writable()
        await self.send(message)

    def _begin(self, message: Message) -> None:
        # A client that got no `100 Continue` may next send the body or another request, which cannot be told apart (RFC
        # 9110 section 10.1.1). So the connection is closed.
        self._head, self._framing, self.keep_alive = reply_head(
            message["status"],
            message.get("headers", ()),
            method=self._method,
            http_1_0=self.http_1_0,
            keep_alive=self.keep_alive and self._body is not states.AWAITS_CONTINUE,
        )
        self._on(states.START)
        if self._body is states.AWAITS_CONTINUE:
            self._body = states.ARRIVING
        self._connection.flush_soon(self)

    def _write(self, data: bytes, last: bool) -> None:
        head, self._head = self._head, None
        pieces, framing = [] if head is None else [head], self._framing
        if framing >= 0:
            left = framing - len(data)
            if left < 0 or (last and left):
                raise InvalidFraming("a reply's body is not as long as its Content-Length says")
            self._framing = left
            pieces.append(data)
        elif framing == CHUNKED:
            if data:
                pieces += (b"%x\r\n" % len(data), data, CRLF)
            if last:
                pieces.append(LAST_CHUNK)
        elif framing == UNTIL_CLOSE:
            pieces.append(data)
        if len(data) <= INLINE_BODY:
            self._connection.transport.write(b"".join(pieces))
        else:
            self._connection.transport.writelines(pieces)
        if self._connection.write_paused:
            self._connection.count_backlog()
        if last:
            self._on(states.END)
            if self._changed is not None:
                self._changed.set()
            self._connection.reply_ended(self)

    # Called by the worker's connection, once `http.response.start` was sent

    def write(self, data: bytes) -> None:
        """Write the next bytes of the reply's body directly, without `send`. Its end is sent as an ASGI message."""
        if self._reply is not states.LOST:
            self._write(data, False)

    def set_source(self, source: Connection | None) -> None:
        """Set the source to pause while the client reads slowly; None when writing has ended."""
        self._source = source
        if source is not None and self._connection.write_paused:
            source.pause()

    # Called by the connection

    def feed(self, data: bytes) -> None:
        """Buffer more bytes of the body for the app."""
        if self._reply is states.ENDED:
            return
        self._body = states.ARRIVING  # also if the client did not wait for `100 Continue`
        self._parts.append(data)
        self._buffered += len(data) + PART
        if self._changed is not None:
            self._changed.set()
        if self._buffered > HIGH_WATER:
            self._connection.pause_reading()

    def complete(self) -> None:
        """Mark the body as complete."""
        self._body = states.WHOLE
        if self._changed is not None:
            self._changed.set()

    def flush(self) -> None:
        """Write the head if it was held back and no body followed in the same step."""
        head, self._head = self._head, None
        if head is not None and self._reply is not states.LOST:
            self._connection.transport.write(head)

    @property
    def awaits_continue(self) -> bool:
        """True while the client waits for `100 Continue` before it sends the body."""
        return self._body is states.AWAITS_CONTINUE

    @property
    def whole(self) -> bool:
        """True if the last byte of the body has arrived."""
        return self._body in (states.WHOLE, states.READ)

    @property
    def begun(self) -> bool:
        """True if the reply has begun: its head was, or soon will be, written."""
        return self._reply is not states.WAITING

    @property
    def ends_with_connection(self) -> bool:
        """True if the end of the connection marks the end of the reply's body."""
        return self._framing == UNTIL_CLOSE

    def slowed(self, paused: bool) -> None:
        """Pause or resume the source of the reply."""
        if self._source is not None:
            (self._source.pause if paused else self._source.resume)()

    def lost(self) -> None:
        """Mark the client as disconnected; `receive` returns `http.disconnect` from now on."""
        self._on(states.LOSS)
        self._parts.clear()
        if self._changed is not None:
            self._changed.set()
