"""One HTTP/1.1 connection to a worker, and what comes back on it. Framing after RFC 9112; bytes stay as they are.

Connection  one socket: writes a request, frames the reply, pauses reading when the reader is slow
Reply       what one exchange delivers: status, headers, then body chunks exactly as they arrive
"""

from __future__ import annotations

import asyncio
import socket
from collections import deque
from typing import Any, Protocol, cast

import httptools

from miles_router.asgi.headers import RawHeaders
from miles_router.errors import UpstreamBroken, UpstreamInvalidResponse, UpstreamUnreachable
from miles_router.fleet.worker_url import WorkerUrl

#: A reader this far behind (bytes) stops the worker from sending more, and lets it go on at half.
HIGH_WATER = 2 * 1024 * 1024
#: Chunks that piled up are handed over as one up to this size: fewer writes, and never a second copy of a big body.
JOIN_LIMIT = 64 * 1024
#: A reply head larger than this (bytes) is not one.
MAX_HEAD_BYTES = 256 * 1024
#: Request bodies up to this size share one write with their head.
INLINE_BODY = 64 * 1024
#: A worker whose machine loses its power says nothing more. The kernel asks after 30 s of silence, and gives up the
#: connection, and with it the request, a minute later.
KEEPALIVE = (
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 30),
    (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 10),
    (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 6),
)
BODILESS = frozenset({204, 304})
MAX_STATUS = 599


class Home(Protocol):
    """Where a connection belongs: `upstream.Upstream`."""

    #: Where the bytes of every connection arrive. One is enough: the event loop fills it and empties it in one step.
    read_buffer: memoryview

    def made(self, address: WorkerUrl, connection: Connection) -> None:
        """The connection was made; it will be forgotten once."""
        ...

    def keep(self, address: WorkerUrl, connection: Connection) -> None:
        """The connection is idle."""
        ...

    def forget(self, address: WorkerUrl, connection: Connection) -> None:
        """The connection was lost."""
        ...

    def slot_freed(self) -> None:
        """An exchange that counted against the bound has ended."""
        ...


class Reply:
    """One reply as it arrives. Read with `read` until it gives b"", then (or earlier) `close`."""

    __slots__ = (
        "_buffered",
        "_chunks",
        "_connection",
        "_error",
        "_loop",
        "_waiter",
        "complete",
        "head_seen",
        "headers",
        "holds_slot",
        "status",
    )

    def __init__(self, connection: Connection) -> None:
        self.status = 0
        self.headers: RawHeaders = []
        self.head_seen = False
        self.complete = False  # every byte has arrived (not: has been read)
        self.holds_slot = False  # one of the `max_connections`
        self._connection: Connection | None = connection
        self._chunks: deque[bytes] = deque()
        self._buffered = 0
        self._waiter: asyncio.Future[None] | None = None
        self._error: Exception | None = None
        self._loop = asyncio.get_running_loop()

    @property
    def exhausted(self) -> bool:
        """Every byte has arrived and was read."""
        return self.complete and not self._chunks

    async def head(self) -> None:
        """Wait for status and headers.

        Raises:
            UpstreamUnreachable: the connection was lost before.
            UpstreamInvalidResponse: what came is not HTTP.
        """
        while not self.head_seen:
            await self._more()

    async def read(self) -> bytes:
        """The next bytes of the body as soon as there are any; b"" after the last.

        Raises:
            UpstreamBroken: the connection was lost inside the body.
        """
        while not self._chunks:
            if self.complete:
                return b""
            await self._more()
        return self.take()

    def take(self) -> bytes:
        """The bytes that have arrived and were not read yet, without waiting; b"" if there are none."""
        if not self._chunks:
            return b""
        if len(self._chunks) > 1 and self._buffered <= JOIN_LIMIT:
            chunk = b"".join(self._chunks)
            self._chunks.clear()
        else:
            chunk = self._chunks.popleft()
        self._buffered -= len(chunk)
        if self._connection is not None:
            self._connection.reader_caught_up(self._buffered)
        return chunk

    async def read_all(self, limit: int) -> bytes:
        """The rest of the body.

        Raises:
            UpstreamInvalidResponse: it is longer than `limit` bytes.
        """
        parts = []
        size = 0
        while chunk := await self.read():
            parts.append(chunk)
            size += len(chunk)
            if size > limit:
                raise UpstreamInvalidResponse(f"the reply is longer than {limit} bytes")
        return b"".join(parts)

    def close(self) -> None:
        """Done with this reply: a complete one frees its connection for the next, a partial one breaks it off, which
        tells the worker to stop generating. Calling it again does nothing."""
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.done_with(self)

    async def _more(self) -> None:
        if self._error is not None:
            raise self._error
        self._waiter = self._loop.create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None

    # What the connection calls

    def _add(self, data: bytes) -> int:
        self._chunks.append(data)
        self._buffered += len(data)
        return self._buffered

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def _fail(self, error: Exception) -> None:
        self._error = error
        self._wake()


class Connection(asyncio.BufferedProtocol):
    """One socket to a worker, one exchange at a time."""

    def __init__(self, pool: Home, address: WorkerUrl) -> None:
        self._pool = pool
        self._address = address
        self._transport: asyncio.Transport | None = None
        self._parser: Any = None
        self._reply: Reply | None = None
        self._headers: RawHeaders = []
        self._head_bytes = 0
        self._remaining: int | None = None  # bytes of a Content-Length body still to come
        self._raw = False  # past the parser: the rest of a Content-Length body is passed on untouched
        self._until_close = False
        self._expect_no_body = False
        self._reusable = False
        self._reading_paused = False
        self.idle_since = 0.0

    # The exchange

    def send(self, head: bytes, body: bytes, *, head_request: bool) -> Reply:
        """Write one request and give the reply that will come.

        Raises:
            UpstreamUnreachable: the connection was lost since it was made, as when a dying worker's backlog took it.
        """
        if self._transport is None:
            raise UpstreamUnreachable(f"{self._address.url} closed the connection before it was used", refused=True)
        assert self._reply is None
        if self._parser is None:
            self._parser = httptools.HttpResponseParser(self)
        self._reply = Reply(self)
        self._headers, self._head_bytes = [], 0
        self._remaining, self._raw = None, False
        self._until_close, self._reusable = False, False
        self._expect_no_body = head_request
        if len(body) <= INLINE_BODY:
            self._transport.write(head + body)
        else:
            self._transport.write(head)
            self._transport.write(body)
        return self._reply

    def done_with(self, reply: Reply) -> None:
        """The reader is finished with its reply: keep the connection if nothing is left on it, else break it off."""
        if self._reply is reply:
            self._reply = None
            if reply.complete and self._reusable and not self._unsent():
                self._resume_reading()
                self._pool.keep(self._address, self)
            else:
                self.abort()
        if reply.holds_slot:
            self._pool.slot_freed()

    def _unsent(self) -> bool:
        """A reply came before the worker had read its request: what is left of that would hold up the next one."""
        return self._transport is not None and self._transport.get_write_buffer_size() > 0

    def abort(self) -> None:
        """Drop the connection at once."""
        if self._transport is not None:
            self._transport.abort()

    @property
    def usable(self) -> bool:
        """Open and idle."""
        return self._transport is not None and not self._transport.is_closing()

    def reader_caught_up(self, buffered: int) -> None:
        """The reader took bytes; let the worker go on once half the high-water mark is free."""
        if self._reading_paused and buffered <= HIGH_WATER // 2:
            self._resume_reading()

    def _resume_reading(self) -> None:
        if self._reading_paused and self._transport is not None and not self._transport.is_closing():
            self._reading_paused = False
            self._transport.resume_reading()

    # asyncio.BufferedProtocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's transports are no subclass
        sock = transport.get_extra_info("socket")
        for level, option, value in KEEPALIVE:
            sock.setsockopt(level, option, value)
        self._pool.made(self._address, self)

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._pool.read_buffer

    def buffer_updated(self, nbytes: int) -> None:
        data = bytes(self._pool.read_buffer[:nbytes])
        reply = self._reply
        if reply is None:  # nobody asked: whatever this is, the connection can no longer be trusted
            self.abort()
        elif self._raw:
            self._raw_body(reply, data)
        else:
            self._parse(reply, data)
        if reply is not None:
            reply._wake()

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        self._pool.forget(self._address, self)
        reply = self._reply
        if reply is None or reply.complete:
            return
        if not reply.head_seen:
            reply._fail(UpstreamUnreachable(f"{self._address.url} closed the connection before it replied"))
        elif self._until_close and exc is None:
            reply.complete = True
            reply._wake()
        else:
            reply._fail(UpstreamBroken(f"{self._address.url} closed the connection inside a reply"))

    # Framing

    def _parse(self, reply: Reply, data: bytes) -> None:
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            if not reply.complete:
                self._invalid(reply, f"{self._address.url} sent no valid HTTP: {error}")
            self._reusable = False
            return
        if not reply.head_seen:
            self._head_bytes += len(data)
            if self._head_bytes > MAX_HEAD_BYTES:
                self._invalid(reply, f"{self._address.url} sent a reply head of more than {MAX_HEAD_BYTES} bytes")
        elif self._expect_no_body:
            if not reply.complete:
                # The parser waits for a body that HEAD replies announce and never send.
                reply.complete, self._parser = True, None
        elif self._remaining:
            self._raw, self._parser = True, None

    def _invalid(self, reply: Reply, message: str) -> None:
        reply._fail(UpstreamBroken(message) if reply.head_seen else UpstreamInvalidResponse(message))
        self.abort()

    def _raw_body(self, reply: Reply, data: bytes) -> None:
        assert self._remaining is not None
        if len(data) > self._remaining:
            data = data[: self._remaining]
            self._reusable = False
        self._remaining -= len(data)
        if data:
            self._deliver(reply, data)
        if not self._remaining:
            reply.complete = True

    def _deliver(self, reply: Reply, data: bytes) -> None:
        if reply._add(data) > HIGH_WATER and not self._reading_paused and self._transport is not None:
            self._reading_paused = True
            self._transport.pause_reading()

    # httptools callbacks

    def on_message_begin(self) -> None:
        if self._reply is not None and self._reply.head_seen:
            self._reusable = False  # bytes that nobody asked for follow the reply

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._reply is not None and not self._reply.head_seen:  # else a trailer, which is no header
            self._headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        status = self._parser.get_status_code()
        reply = self._reply
        if reply is None or reply.head_seen:
            return
        if status < 200:  # 100 Continue, 103 Early Hints: the reply itself is still to come
            self._headers = []
            return
        if status > MAX_STATUS:
            self._invalid(reply, f"{self._address.url} answered with the status {status}, which is none")
            return
        reply.status, reply.headers, reply.head_seen = status, self._headers, True
        self._reusable = self._parser.should_keep_alive()
        chunked = False
        for name, value in self._headers:
            if name == b"content-length":
                self._remaining = int(value)
            elif name == b"transfer-encoding":
                chunked = True
        self._expect_no_body = self._expect_no_body or status in BODILESS
        if chunked:
            self._remaining = None
        self._until_close = not chunked and self._remaining is None and not self._expect_no_body

    def on_body(self, data: bytes) -> None:
        reply = self._reply
        if reply is None or reply.complete or self._expect_no_body:
            return
        if self._remaining is not None:
            self._remaining -= len(data)
        self._deliver(reply, data)

    def on_message_complete(self) -> None:
        if self._reply is not None and self._reply.head_seen:
            self._reply.complete = True
