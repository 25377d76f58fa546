"""The ASGI side of one client request: `receive` for its body and `send` for its reply."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable
from typing import TYPE_CHECKING

from miles_router.asgi.exchange import Exchange, Message, Scope
from miles_router.errors import InternalError
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
        "_begun",
        "_body",
        "_body_received",
        "_buffered",
        "_changed",
        "_connection",
        "_gone",
        "_head",
        "_method",
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
        # The request body
        #: True while the client waits for `100 Continue` before it sends the body.
        self.awaits_continue = awaits_continue
        self._parts: list[bytes] = []
        self._buffered = 0
        self.whole = False  # the last byte has arrived
        self._body_received = False  # the app has received the last byte
        self._gone = False  # the client has disconnected
        self._changed: asyncio.Event | None = None
        # The reply
        self._begun = False
        self.ended = False
        self._head: bytes | None = None  # not written yet, so that a body in the same step shares its write
        self._body = NO_BODY  # CHUNKED, UNTIL_CLOSE, NO_BODY, or the bytes left of a body with a length
        self._source: Connection | None = None

    async def run(self, app: ASGIApp, scope: Scope) -> None:
        """Run `app` for this request. If it fails or sends no complete reply, answer with an error or break off."""
        try:
            await app(scope, self.receive, self.send)
            if not self._begun and not self._gone:
                name = Exchange.of(scope).request_id
                logger.error("no_reply", extra={"fields": {"request_id": name, "path": scope["path"]}})
                self._connection.refuse(InternalError("the router gave no answer"), name)
        except Exception as error:  # `RouterApp` answers all errors itself, so this is a bug in it
            logger.error("internal_error", exc_info=error)
            if not self._begun and not self._gone:
                self._connection.refuse(
                    InternalError("the router failed; its log has the details"), Exchange.of(scope).request_id
                )
        finally:
            if not self.ended and not self._gone:
                self._connection.break_off(self)

    # Called by the app

    async def receive(self) -> Message:
        """Return the next part of the body (ASGI), or `http.disconnect` after a disconnect or the end of the reply."""
        while not self._gone and not self.ended:
            if self._parts or (self.whole and not self._body_received):
                return self._next_part()
            if self.awaits_continue:
                self.awaits_continue = False
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
        self._body_received = self.whole
        return {"type": "http.request", "body": body, "more_body": not self.whole}

    def send(self, message: Message) -> Awaitable[None]:
        """Write a message of the reply (ASGI). After a disconnect, messages are ignored.

        Raises:
            InvalidFraming: the head or the length of the body is invalid, so that the reply's end would be ambiguous.
            RuntimeError: the order or the type of a message violates ASGI.
        """
        if self._connection.write_paused and not self._gone:
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
        return self._connection.sent

    async def _send_later(self, message: Message) -> None:
        await self._connection.writable()
        await self.send(message)

    def _begin(self, message: Message) -> None:
        # A client that got no `100 Continue` may next send the body or another request, which cannot be told apart (RFC
        # 9110 section 10.1.1). So the connection is closed.
        keep_alive = self.keep_alive and not self._connection.closing and not (self.awaits_continue and not self.whole)
        self._head, self._body, self.keep_alive = reply_head(
            message["status"],
            message.get("headers", ()),
            method=self._method,
            http_1_0=self.http_1_0,
            keep_alive=keep_alive,
        )
        self._begun, self.awaits_continue = True, False
        self._connection.flush_soon(self)

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
            self._connection.transport.write(b"".join(pieces))
        else:
            self._connection.transport.writelines(pieces)
        if self._connection.write_paused:
            self._connection.count_backlog()
        if last:
            self.ended = True
            if self._changed is not None:
                self._changed.set()
            self._connection.reply_ended(self)

    # Called by the worker's connection, once `http.response.start` was sent

    def write(self, data: bytes) -> None:
        """Write the next bytes of the reply's body directly, without `send`. Its end is sent as an ASGI message."""
        if not self._gone:
            self._write(data, False)

    def set_source(self, source: Connection | None) -> None:
        """Set the source to pause while the client reads slowly; None when writing has ended."""
        self._source = source
        if source is not None and self._connection.write_paused:
            source.pause()

    # Called by the connection

    def feed(self, data: bytes) -> None:
        """Buffer more bytes of the body for the app."""
        if self.ended:
            return
        self.awaits_continue = False  # the client did not wait
        self._parts.append(data)
        self._buffered += len(data) + PART
        if self._changed is not None:
            self._changed.set()
        if self._buffered > HIGH_WATER:
            self._connection.pause_reading()

    def complete(self) -> None:
        """Mark the body as complete."""
        self.whole = True
        if self._changed is not None:
            self._changed.set()

    def flush(self) -> None:
        """Write the head if it was held back and no body followed in the same step."""
        head, self._head = self._head, None
        if head is not None and not self._gone:
            self._connection.transport.write(head)

    @property
    def begun(self) -> bool:
        """True if the reply has begun: its head was, or soon will be, written."""
        return self._begun

    @property
    def ends_with_connection(self) -> bool:
        """True if the end of the connection marks the end of the reply's body."""
        return self._body == UNTIL_CLOSE

    def slowed(self, paused: bool) -> None:
        """Pause or resume the source of the reply."""
        if self._source is not None:
            (self._source.pause if paused else self._source.resume)()

    def lost(self) -> None:
        """Mark the client as disconnected; `receive` returns `http.disconnect` from now on."""
        self._gone = True
        self._parts.clear()
        if self._changed is not None:
            self._changed.set()
