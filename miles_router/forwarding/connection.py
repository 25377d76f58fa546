"""One HTTP/1.1 connection to a worker: writes requests, finds the end of replies, and applies backpressure.

Framing follows RFC 9112. Body bytes are passed on unchanged.
"""

from __future__ import annotations

import asyncio
import socket
from typing import TYPE_CHECKING, Any, cast

import httptools

from miles_router.asgi.backlog import MAX_BACKLOG
from miles_router.asgi.wire import (
    CHUNKED,
    INLINE_BODY,
    MAX_REPLY_HEAD,
    MAX_STATUS,
    NO_BODY,
    UNTIL_CLOSE,
    ChunkOverhead,
    InvalidFraming,
    RawHeaders,
    reply_body,
)
from miles_router.errors import UpstreamBroken, UpstreamError, UpstreamUnreachable
from miles_router.fleet.worker_url import WorkerUrl
from miles_router.fleet.workers import Pulse
from miles_router.forwarding.reply import Reply

if TYPE_CHECKING:
    from miles_router.forwarding.upstream import Upstream

#: Unread bytes of one reply at which reading from the worker pauses; it resumes at half.
HIGH_WATER = 2 * 1024 * 1024
#: Bytes to read at once, and the high-water mark, while the backlog of all slow clients is above its limit.
SMALL_READ = 16 * 1024
#: From this status on a reply may come from the engine's HTTP process alone and does not show that the engine works.
FIRST_ERROR_STATUS = 400
#: A machine that loses power closes no connection. The kernel probes after 30 s of silence and closes the connection,
#: which fails the request, a minute later.
KEEPALIVE = (
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 30),
    (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 10),
    (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 6),
)


class Connection(asyncio.BufferedProtocol):
    """A connection to a worker, used by one request at a time."""

    def __init__(self, pool: Upstream, address: WorkerUrl) -> None:
        self._pool = pool
        self._address = address
        self._transport: asyncio.Transport | None = None
        self._loop: asyncio.AbstractEventLoop
        self._parser: Any = None
        self._reply: Reply | None = None
        self._pulse: Pulse | None = None  # counts signs of life of the engine; None if the request needs no engine work
        self._headers: RawHeaders = []
        self._head_bytes = 0
        self._in_head = True  # the headers that arrive belong to the reply's head, not to its trailers
        self._is_head_request = False  # the request was HEAD
        self._body = NO_BODY
        self._remaining = 0  # bytes of a Content-Length body still to come
        self._past_parser = False  # the rest of a Content-Length body bypasses the parser
        self._excess: ChunkOverhead | None = None  # for a chunked body
        self._reusable = False
        self._reading_paused = False
        self.idle_since = 0.0
        #: True for an unused connection that replaced a lost one: if it is lost too, the worker is down.
        self.just_made = False

    # Requests and replies

    def send(self, head: bytes, body: bytes, *, head_request: bool, pulse: Pulse | None = None) -> Reply:
        """Write one request and return its reply, which has not begun. `pulse` counts the body pieces that arrive.

        Raises:
            UpstreamUnreachable: the connection was lost before use, for example in the backlog of a dying worker.
        """
        if self._transport is None:
            raise UpstreamUnreachable(f"{self._address.url} closed the connection before it was used", refused=True)
        assert self._reply is None
        self.just_made = False
        if self._parser is None:
            self._parser = httptools.HttpResponseParser(self)
        self._reply = Reply(self, self._loop, self._pool.backlog)
        self._pulse = pulse
        self._headers, self._head_bytes, self._in_head = [], 0, True
        self._is_head_request = head_request
        self._body, self._remaining, self._past_parser, self._excess = NO_BODY, 0, False, None
        self._reusable = False
        if len(body) <= INLINE_BODY:
            self._transport.write(head + body)
        else:
            self._transport.writelines((head, body))
        return self._reply

    def end_reply(self, reply: Reply) -> None:
        """End the reply: keep the connection for reuse if the exchange is complete, else close it."""
        if self._reply is reply:
            self._reply = None
            if reply.complete and self._reusable and not self._unsent():
                if self._reading_paused:
                    self.resume()
                self._pool.keep(self._address, self)
            else:
                self.abort()
        if reply.holds_slot:
            self._pool.release_slot()

    def is_awaiting(self, pulse: Pulse) -> bool:
        """Return True if the engine with this pulse still owes (a part of) the reply."""
        return self._pulse is pulse and self._reply is not None and not self._reply.complete

    def give_up(self, reason: str) -> None:
        """Fail the current reply with `reason` and close the connection."""
        reply = self._reply
        if reply is not None and not reply.complete:
            reply._fail(UpstreamBroken(reason) if reply.head_seen else UpstreamUnreachable(reason, given_up=True))
        self.abort()

    def _unsent(self) -> bool:
        """Return True if bytes of the request are not sent yet, because the worker replied before it read them all."""
        return self._transport is not None and self._transport.get_write_buffer_size() > 0

    def abort(self) -> None:
        """Close the connection at once."""
        if self._transport is not None:
            self._transport.abort()

    def is_usable(self) -> bool:
        """Return True if the connection is open."""
        return self._transport is not None and not self._transport.is_closing()

    def reader_caught_up(self, buffered: int) -> None:
        """Resume reading if at most half the high-water mark is still buffered."""
        if self._reading_paused and buffered <= self._high_water() // 2:
            self.resume()

    def pause(self) -> None:
        """Read nothing from the worker until `resume`."""
        if not self._reading_paused and self._transport is not None:
            self._reading_paused = True
            self._transport.pause_reading()
            if self._reply is not None:
                self._reply.was_paused = True

    def resume(self) -> None:
        """Continue reading from the worker."""
        if self._reading_paused and self._transport is not None and not self._transport.is_closing():
            self._reading_paused = False
            self._transport.resume_reading()

    # asyncio.BufferedProtocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's transports are not subclasses of it
        self._loop = asyncio.get_running_loop()
        sock = transport.get_extra_info("socket")
        if sock is not None:  # None: closed already, `connection_lost` follows
            for level, option, value in KEEPALIVE:
                sock.setsockopt(level, option, value)
        self._pool.made(self._address, self)

    def get_buffer(self, sizehint: int) -> memoryview:
        pool = self._pool
        return pool.read_buffer if pool.backlog.size <= MAX_BACKLOG else pool.read_buffer[:SMALL_READ]

    def buffer_updated(self, nbytes: int) -> None:
        reply = self._reply
        if reply is None:  # bytes without a request: the next reply could not be told apart from them
            self.abort()
            return
        if reply.complete:  # bytes after the end of the reply
            self._reusable = False
            return
        data = self._pool.read_buffer[:nbytes]
        if self._past_parser:
            self._receive_raw(reply, bytes(data))
        else:
            self._parse(reply, data)
        reply._wake()

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        self._pool.forget(self._address, self)
        reply = self._reply
        if reply is None or reply.complete:
            return
        if not reply.head_seen:
            reply._fail(UpstreamUnreachable(f"{self._address.url} closed the connection before it replied"))
        elif self._body == UNTIL_CLOSE and exc is None:
            reply.complete = True
            reply._wake()
        else:
            reply._fail(UpstreamBroken(f"{self._address.url} closed the connection inside a reply"))

    # Framing

    def _parse(self, reply: Reply, data: memoryview) -> None:
        excess = self._excess
        try:
            self._parser.feed_data(data)
            if excess is not None:
                excess.count_received(len(data))
        except (httptools.HttpParserError, httptools.HttpParserUpgrade, InvalidFraming) as error:
            reply.complete |= reply.head_seen and self._is_head_request
            if not reply.complete:
                self._invalid(reply, f"{self._address.url} sent invalid HTTP: {error.__context__ or error}")
            self._reusable = False
            return
        if not reply.head_seen:
            self._head_bytes += len(data)
            if self._head_bytes > MAX_REPLY_HEAD:
                self._invalid(reply, f"{self._address.url} sent a reply head of more than {MAX_REPLY_HEAD} bytes")
        elif self._is_head_request:
            if not reply.complete:
                # The parser waits for a body that HEAD replies announce and never send.
                reply.complete, self._parser = True, None
        elif self._remaining:
            self._past_parser, self._parser = True, None

    def _invalid(self, reply: Reply, message: str) -> None:
        reply._fail(UpstreamBroken(message) if reply.head_seen else UpstreamError(message))
        self.abort()

    def _receive_raw(self, reply: Reply, data: bytes) -> None:
        if len(data) > self._remaining:
            data = data[: self._remaining]
            self._reusable = False
        self._remaining -= len(data)
        if data:
            self._deliver(reply, data)
        if not self._remaining:
            reply.complete = True

    def _deliver(self, reply: Reply, data: bytes) -> None:
        if self._pulse is not None and reply.status < FIRST_ERROR_STATUS:
            self._pulse.pieces += 1
            self._pulse.last_piece_at = self._loop.time()
        buffered = reply._add(data)
        if buffered > SMALL_READ and reply._sink is None and buffered > self._high_water():
            self.pause()

    def _high_water(self) -> int:
        return HIGH_WATER if self._pool.backlog.size <= MAX_BACKLOG else SMALL_READ

    # httptools callbacks

    def on_message_begin(self) -> None:
        if self._reply is not None and self._reply.head_seen:
            self._reusable = False  # a second message follows the reply

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._in_head:  # else it is a trailer, which is dropped
            self._headers.append((name.lower(), value.rstrip()))  # the parser leaves whitespace behind it

    def on_headers_complete(self) -> None:
        status = self._parser.get_status_code()
        reply = self._reply
        if reply is None or reply.head_seen:
            return
        if status < 200:  # 100 Continue, 103 Early Hints: the final reply follows
            self._headers = []
            return
        if status > MAX_STATUS:
            raise InvalidFraming(f"{status} is not a valid status of a reply")
        self._in_head = False
        self._body = reply_body(status, self._headers, to_head=self._is_head_request)
        self._remaining = max(0, self._body)
        self._excess = ChunkOverhead() if self._body == CHUNKED else None
        # Bytes after a reply to HEAD cannot be told apart from the next reply.
        self._reusable = self._parser.should_keep_alive() and not self._is_head_request
        reply.status, reply.headers, reply.head_seen = status, self._headers, True

    def on_body(self, data: bytes) -> None:
        reply = self._reply
        if reply is None or reply.complete:
            return
        if self._body == NO_BODY:
            self._reusable = False  # a body where this reply must not have one
            return
        if self._excess is not None:
            self._excess.count_body(len(data))
        elif self._remaining:
            self._remaining -= len(data)
        self._deliver(reply, data)

    def on_message_complete(self) -> None:
        if self._reply is not None and self._reply.head_seen:
            self._reply.complete = True
