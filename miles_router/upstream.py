"""The only module that talks to workers: HTTP/1.1 over kept-alive connections, errors translated in one place.

    Upstream    per worker a stack of idle connections; opens, reuses, retires them
    Connection  one socket: writes a request, frames the reply (RFC 9112), pauses reading when the reader is slow
    Reply       what one exchange delivers: status, headers, then body chunks exactly as they arrive

Headers and bodies stay bytes from socket to socket. Nothing is decompressed, decoded or re-ordered.
"""

from __future__ import annotations

import asyncio
import ssl
import time
from collections import deque
from typing import Any, cast

import httptools

from miles_router import tasks
from miles_router.errors import UpstreamBroken, UpstreamInvalidResponse, UpstreamTimeout, UpstreamUnreachable
from miles_router.headers import RawHeaders
from miles_router.worker_url import WorkerUrl

#: A reader this far behind (bytes) stops the worker from sending more, and lets it go on at half.
HIGH_WATER = 2 * 1024 * 1024
#: Bytes taken from a socket at once. Measured on 16 MB replies: 256 kB, the event loop's own size, costs 1.4 times the
#: CPU of 1 MB, nearly all of it in system calls; beyond, little is left to gain.
READ_BYTES = 1024 * 1024
#: Chunks that piled up are handed over as one up to this size: fewer writes, and never a second copy of a big body.
JOIN_LIMIT = 64 * 1024
#: A reply head larger than this (bytes) is not one.
MAX_HEAD_BYTES = 256 * 1024
#: Request bodies up to this size share one write with their head.
INLINE_BODY = 64 * 1024
BODILESS = frozenset({204, 304})
MAX_STATUS = 599
#: An idle connection older than this (seconds) is retired; SGLang's server closes its own side after 5.
IDLE_SECONDS = 60.0


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

    def __init__(self, pool: Upstream, address: WorkerUrl) -> None:
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


class Upstream:
    """Opens exchanges with workers. `max_connections` bounds those running at once (0: no bound); more wait."""

    def __init__(self, *, connect_timeout: float = 5.0, max_connections: int = 0) -> None:
        self._connect_timeout = connect_timeout
        self._slots = asyncio.Semaphore(max_connections) if max_connections else None
        self._idle: dict[str, deque[Connection]] = {}
        self._open: set[Connection] = set()
        self._tls: ssl.SSLContext | None = None
        self._closed = False
        #: Where every connection's bytes arrive. One is enough: the event loop fills it and empties it in one step.
        self.read_buffer = memoryview(bytearray(READ_BYTES))

    async def open(self, address: WorkerUrl, method: str, target: bytes, headers: RawHeaders, body: bytes) -> Reply:
        """Send a request and wait for the head of its reply. `headers` are end-to-end ones, without Host and length.

        Raises:
            UpstreamUnreachable: no connection, or it was lost before a reply began.
            UpstreamInvalidResponse: the worker does not speak HTTP.
        """
        head = _head(address, method, target, headers, body)
        if self._slots is None:
            return await self._exchange(address, method, head, body)
        await self._slots.acquire()
        try:
            reply = await self._exchange(address, method, head, body)
        except BaseException:
            self.slot_freed()
            raise
        reply.holds_slot = True
        return reply

    async def fetch(
        self, address: WorkerUrl, path: str, *, headers: RawHeaders, timeout: float, limit: int = 1 << 20
    ) -> tuple[int, bytes]:
        """GET `path` and read the whole answer: `(status, body)`. Needs no slot: a worker full of requests is alive.

        Raises:
            UpstreamTimeout: it took longer than `timeout` seconds.
            UpstreamError: as `open`, or the body was cut or is longer than `limit` bytes.
        """
        try:
            return await asyncio.wait_for(self._fetch(address, path, headers, limit), timeout)
        except asyncio.TimeoutError:
            raise UpstreamTimeout(f"{address.url}{path} did not answer within {timeout:g} s") from None

    async def _fetch(self, address: WorkerUrl, path: str, headers: RawHeaders, limit: int) -> tuple[int, bytes]:
        target = path.encode()
        reply = await self._exchange(address, "GET", _head(address, "GET", target, headers, b""), b"")
        try:
            return reply.status, await reply.read_all(limit)
        finally:
            reply.close()

    async def close(self) -> None:
        """Break off everything; later exchanges are refused."""
        self._closed = True
        for connection in tuple(self._open):
            connection.abort()
        self._idle.clear()

    async def _exchange(self, address: WorkerUrl, method: str, head: bytes, body: bytes) -> Reply:
        connection = self._take_idle(address)
        if connection is not None:
            try:
                return await self._first_bytes(connection, method, head, body)
            except UpstreamUnreachable:
                # A kept connection that dies before its reply was most likely closed by the worker while idle; only a
                # new connection can tell that from a dead worker.
                pass
        return await self._first_bytes(await self._connect(address), method, head, body)

    async def _first_bytes(self, connection: Connection, method: str, head: bytes, body: bytes) -> Reply:
        reply = connection.send(head, body, head_request=method == "HEAD")
        try:
            await reply.head()
        except BaseException:
            connection.abort()
            raise
        return reply

    async def _connect(self, address: WorkerUrl) -> Connection:
        if self._closed:
            raise UpstreamUnreachable("the router is shutting down")
        # Not asyncio.wait_for: before Python 3.12 it can swallow a cancellation that arrives together with the result.
        task = tasks.spawn(self._dial(address), name=f"connect {address.url}")
        try:
            await asyncio.wait({task}, timeout=self._connect_timeout)
        except asyncio.CancelledError:
            _abandon(task)
            raise
        if not task.done():
            _abandon(task)
            raise UpstreamUnreachable(f"{address.url} took no connection in {self._connect_timeout:g} s", refused=True)
        connection: Connection | OSError = task.result()
        if isinstance(connection, OSError):
            raise UpstreamUnreachable(f"{address.url} takes no connection: {connection}", refused=True)
        return connection

    async def _dial(self, address: WorkerUrl) -> Connection | OSError:
        loop = asyncio.get_running_loop()
        if address.tls and self._tls is None:
            self._tls = ssl.create_default_context()
        try:
            _, connection = await loop.create_connection(
                lambda: Connection(self, address), address.host, address.port, ssl=self._tls if address.tls else None
            )
        except OSError as error:
            return error
        self._open.add(connection)
        return connection

    def _take_idle(self, address: WorkerUrl) -> Connection | None:
        idle = self._idle.get(address.url)
        while idle:
            connection = idle.pop()
            if connection.usable:
                return connection
        return None

    # What connections call

    def keep(self, address: WorkerUrl, connection: Connection) -> None:
        """An idle connection for the next request to `address`."""
        if self._closed or not connection.usable:
            connection.abort()
            return
        idle = self._idle.get(address.url)
        if idle is None:
            idle = self._idle[address.url] = deque()
        connection.idle_since = now = time.monotonic()
        idle.append(connection)
        if now - idle[0].idle_since > IDLE_SECONDS:
            idle.popleft().abort()

    def forget(self, address: WorkerUrl, connection: Connection) -> None:
        """A connection was lost."""
        self._open.discard(connection)
        idle = self._idle.get(address.url)
        if idle and connection in idle:
            idle.remove(connection)

    def slot_freed(self) -> None:
        """One of the `max_connections` slots is free again."""
        if self._slots is not None:
            self._slots.release()


def _abandon(task: asyncio.Task[Connection | OSError]) -> None:
    """Nobody waits for this connection any more: stop dialling, and drop it if it was made all the same."""
    task.cancel()
    task.add_done_callback(_drop_made)


def _drop_made(task: asyncio.Task[Connection | OSError]) -> None:
    if not task.cancelled() and isinstance(made := task.result(), Connection):
        made.abort()


def _head(address: WorkerUrl, method: str, target: bytes, headers: RawHeaders, body: bytes) -> bytes:
    parts = [method.encode("ascii"), b" ", address.prefix, target, b" HTTP/1.1\r\nhost: ", address.authority, b"\r\n"]
    for name, value in headers:
        parts += (name, b": ", value, b"\r\n")
    if body or method not in ("GET", "HEAD", "OPTIONS", "DELETE", "TRACE"):
        parts += (b"content-length: ", str(len(body)).encode("ascii"), b"\r\n")
    parts.append(b"\r\n")
    return b"".join(parts)
