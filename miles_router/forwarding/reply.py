"""A worker's reply: status, headers, then chunks of the body exactly as they arrive."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Protocol

from miles_router.asgi.backlog import Backlog
from miles_router.asgi.wire import RawHeaders
from miles_router.errors import UpstreamError

if TYPE_CHECKING:
    from miles_router.forwarding.connection import Connection
    from miles_router.serving.client_request import ClientRequest

#: Waiting chunks are joined if together they have at most this many bytes: fewer writes, but no copy of a big body.
JOIN_LIMIT = 64 * 1024
#: Bytes at the end of each of the last two pieces that are kept after reading.
END = 4096
#: An observer: it gets a piece of a body, and returns True when it needs no more.
Observer = Callable[[bytes], bool]


class CountsBytes(Protocol):
    """A counter of the body bytes sent to clients."""

    bytes_out: int


class Reply:
    """One reply as it arrives. Call `read` until it returns b"", then (or earlier) `close`."""

    __slots__ = (
        "_backlog",
        "_buffered",
        "_chunks",
        "_connection",
        "_error",
        "_last",
        "_loop",
        "_metrics",
        "_observers",
        "_sink",
        "_waiter",
        "complete",
        "head_seen",
        "headers",
        "holds_slot",
        "status",
        "was_paused",
    )

    def __init__(self, connection: Connection, loop: asyncio.AbstractEventLoop, backlog: Backlog) -> None:
        self.status = 0
        self.headers: RawHeaders = []
        self.head_seen = False
        self.complete = False  # every byte has arrived, but not necessarily been read
        self.was_paused = False  # reading was paused for a slow client, so the end time is not the worker's
        self.holds_slot = False  # it takes one of the `max_connections`
        self._last = (b"", b"")  # the ends of the last two pieces that arrived
        self._connection: Connection | None = connection
        self._chunks: deque[bytes] = deque()
        self._buffered = 0
        self._waiter: asyncio.Future[None] | None = None
        self._error: Exception | None = None
        self._sink: ClientRequest | None = None
        self._observers: list[Observer] = []
        self._loop = loop
        self._backlog = backlog

    @property
    def exhausted(self) -> bool:
        """True when every byte has arrived and was read."""
        return self.complete and not self._chunks

    @property
    def end(self) -> bytes:
        """The ends of the last two pieces that arrived, whether read or not.

        Two, because the end event of a stream may arrive as a piece of its own. Empty if reading was paused for a slow
        client: the time of the end then shows nothing about the worker.
        """
        return b"" if self.was_paused else b"".join(self._last)

    def arrival(self) -> asyncio.Future[None]:
        """Return a future that completes when more arrives, or the reply ends or fails. Only one reader may wait.

        Raises:
            UpstreamUnreachable: the connection was lost before the head was complete.
            UpstreamError: the worker did not send valid HTTP.
            UpstreamBroken: the connection was lost inside the body.
        """
        if self._error is not None:
            raise self._error
        self._waiter = self._loop.create_future()
        return self._waiter

    async def read(self) -> bytes:
        """Wait for the next bytes of the body and return them; b"" after the last.

        Raises:
            UpstreamBroken: the connection was lost inside the body.
        """
        while not self._chunks:
            if self.complete:
                return b""
            await self.arrival()
        return self.read_available()

    async def peek(self) -> bytes:
        """Wait for the first bytes of the body and return them without consuming them; b"" for an empty body.

        Raises:
            UpstreamBroken: the connection was lost before the first bytes.
        """
        while not self._chunks and not self.complete:
            await self.arrival()
        return self._chunks[0] if self._chunks else b""

    async def pipe_to(self, sink: ClientRequest, metrics: CountsBytes) -> None:
        """Write the body to `sink` as it arrives, without waking a task for each piece. The bytes that arrive together
        with the end of the body are left for `read`.

        Raises:
            UpstreamBroken: the connection was lost inside the body.
        """
        assert self._connection is not None
        self._sink, self._metrics = sink, metrics
        try:
            self._write_to_sink()
            self._connection.resume()  # from now on the sink pauses and resumes the connection
            sink.set_source(self._connection)
            while not self.complete:
                await self.arrival()
        finally:
            self._sink = None
            sink.set_source(None)

    def read_available(self) -> bytes:
        """Return bytes that have arrived and were not read yet, without waiting; b"" if there are none."""
        if not self._chunks:
            return b""
        chunk = self._next_chunk()
        if self.was_paused and self._connection is not None:
            self._connection.reader_caught_up(self._buffered)
        return chunk

    def _next_chunk(self) -> bytes:
        if len(self._chunks) > 1 and self._buffered <= JOIN_LIMIT:
            chunk = b"".join(self._chunks)
            self._chunks.clear()
        else:
            chunk = self._chunks.popleft()
        self._buffered -= len(chunk)
        self._backlog.size -= len(chunk)
        return chunk

    def observe(self, observer: Observer) -> None:
        """Call `observer` with each unread and each future piece of the body, until it returns True."""
        if not any(observer(chunk) for chunk in self._chunks):
            self._observers.append(observer)

    async def read_all(self, limit: int) -> bytes:
        """Read and return the rest of the body.

        Raises:
            UpstreamError: the rest is longer than `limit` bytes.
        """
        return await read_whole(self.read, limit)

    def close(self) -> None:
        """End the reply. A complete reply frees its connection for the next request; an incomplete one closes it, which
        makes the worker stop generating. Idempotent."""
        connection, self._connection = self._connection, None
        if connection is not None:
            self._chunks.clear()
            self._backlog.size -= self._buffered
            self._buffered = 0
            connection.end_reply(self)

    def _write_to_sink(self) -> None:
        """Write all waiting chunks to the sink."""
        while self._chunks and self._sink is not None:
            data = self._next_chunk()
            self._metrics.bytes_out += len(data)
            self._sink.write(data)

    # Called by the connection

    def _add(self, data: bytes) -> int:
        self._chunks.append(data)
        if self._observers:
            self._observers = [observer for observer in self._observers if not observer(data)]
        self._last = (self._last[1], data[-END:])
        self._buffered += len(data)
        self._backlog.size += len(data)
        return self._buffered

    def _wake(self) -> None:
        if self._sink is not None and not self.complete:
            self._write_to_sink()
            if self._error is None:
                return
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def _fail(self, error: Exception) -> None:
        self._error = self._error or error  # the first error is the cause of later ones
        self._wake()


async def read_whole(read: Callable[[], Awaitable[bytes]], limit: int) -> bytes:
    """Call `read` until it returns b"", and return the joined chunks.

    Raises:
        UpstreamError: the chunks are longer than `limit` bytes.
    """
    parts, size = [], 0
    while chunk := await read():
        parts.append(chunk)
        size += len(chunk)
        if size > limit:
            raise UpstreamError(f"the reply is longer than {limit} bytes")
    return b"".join(parts)
