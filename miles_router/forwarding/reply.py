"""What one exchange with a worker delivers: status, headers, then chunks of the body exactly as they arrive."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Protocol

from miles_router.asgi.backlog import Backlog
from miles_router.asgi.headers import RawHeaders
from miles_router.asgi.outlet import Sink, Source
from miles_router.errors import UpstreamInvalidResponse

#: Chunks that piled up are handed over as one up to this size: fewer writes, and never a second copy of a big body.
JOIN_LIMIT = 64 * 1024
#: Bytes of a piece that are kept once it was read.
END = 4096
#: Is shown a piece of a body, and says whether it has seen enough.
Look = Callable[[bytes], bool]


class CountsBytes(Protocol):
    """Counts the bytes of bodies that clients were given."""

    bytes_out: int


class ReplySource(Source, Protocol):
    """Where a reply comes from: `connection.Connection`."""

    def reader_caught_up(self, buffered: int) -> None:
        """The reader took bytes, and is behind by `buffered` of them."""
        ...

    def done_with(self, reply: Reply) -> None:
        """The reader is finished with its reply."""
        ...


class Reply:
    """One reply as it arrives. Read with `read` until it gives b"", then (or earlier) `close`."""

    __slots__ = (
        "_backlog",
        "_buffered",
        "_chunks",
        "_connection",
        "_error",
        "_last",
        "_looks",
        "_loop",
        "_metrics",
        "_sink",
        "_waiter",
        "complete",
        "head_seen",
        "headers",
        "held_up",
        "holds_slot",
        "status",
    )

    def __init__(self, connection: ReplySource, loop: asyncio.AbstractEventLoop, backlog: Backlog) -> None:
        self.status = 0
        self.headers: RawHeaders = []
        self.head_seen = False
        self.complete = False  # every byte has arrived (not: has been read)
        self.held_up = False  # for its reader, so that its worker may have been done before
        self.holds_slot = False  # one of the `max_connections`
        self._last = (b"", b"")  # pieces that have arrived
        self._connection: ReplySource | None = connection
        self._chunks: deque[bytes] = deque()
        self._buffered = 0
        self._waiter: asyncio.Future[None] | None = None
        self._error: Exception | None = None
        self._sink: Sink | None = None
        self._looks: list[Look] = []
        self._loop = loop
        self._backlog = backlog

    @property
    def exhausted(self) -> bool:
        """Every byte has arrived and was read."""
        return self.complete and not self._chunks

    @property
    def end(self) -> bytes:
        """The end of the body as far as that has arrived, and others may have read it: of its last two pieces, since
        that a stream is over may come as one of its own. Nothing where it was held up: its time is not its worker's."""
        return b"" if self.held_up else b"".join(self._last)

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

    async def begun(self) -> bytes:
        """The first bytes of the body, which stay to be read; b"" where it has none.

        Raises:
            UpstreamBroken: the connection was lost before.
        """
        while not self._chunks and not self.complete:
            await self._more()
        return self._chunks[0] if self._chunks else b""

    async def pour(self, sink: Sink, metrics: CountsBytes) -> None:
        """Write the body to `sink` as it arrives, without waking anybody for it; what arrives together with its end is
        left to `read`.

        Raises:
            UpstreamBroken: the connection was lost inside the body.
        """
        assert self._connection is not None
        self._sink, self._metrics = sink, metrics
        try:
            self._flow()
            self._connection.resume()  # from now on only the client's pace counts
            sink.fed_by(self._connection)
            while not self.complete:
                await self._more()
        finally:
            self._sink = None
            sink.fed_by(None)

    def take(self) -> bytes:
        """The bytes that have arrived and were not read yet, without waiting; b"" if there are none."""
        if not self._chunks:
            return b""
        chunk = self._next()
        if self.held_up and self._connection is not None:
            self._connection.reader_caught_up(self._buffered)
        return chunk

    def _next(self) -> bytes:
        if len(self._chunks) > 1 and self._buffered <= JOIN_LIMIT:
            chunk = b"".join(self._chunks)
            self._chunks.clear()
        else:
            chunk = self._chunks.popleft()
        self._buffered -= len(chunk)
        self._backlog.size -= len(chunk)
        return chunk

    def show(self, look: Look) -> None:
        """Show each piece of the body until `look` has seen enough: those that have arrived, then each as it does."""
        if not any(look(chunk) for chunk in self._chunks):
            self._looks.append(look)

    async def read_all(self, limit: int) -> bytes:
        """The rest of the body.

        Raises:
            UpstreamInvalidResponse: it is longer than `limit` bytes.
        """
        return await read_whole(self.read, limit)

    def close(self) -> None:
        """Done with this reply: a complete one frees its connection for the next, a partial one breaks it off, which
        tells the worker to stop generating. Calling it again does nothing."""
        connection, self._connection = self._connection, None
        if connection is not None:
            self._chunks.clear()
            self._backlog.size -= self._buffered
            self._buffered = 0
            connection.done_with(self)

    def _more(self) -> asyncio.Future[None]:
        """What to await for more of the reply, its end or its failure; one reader waits at a time."""
        if self._error is not None:
            raise self._error
        self._waiter = self._loop.create_future()
        return self._waiter

    def _flow(self) -> None:
        """Give the sink what has arrived."""
        while self._chunks and self._sink is not None:
            data = self._next()
            self._metrics.bytes_out += len(data)
            self._sink.write(data)

    # What the connection calls

    def _add(self, data: bytes) -> int:
        self._chunks.append(data)
        if self._looks:
            self._looks = [look for look in self._looks if not look(data)]
        self._last = (self._last[1], data[-END:])
        self._buffered += len(data)
        self._backlog.size += len(data)
        return self._buffered

    def _wake(self) -> None:
        if self._sink is not None and not self.complete:
            self._flow()
            if self._error is None:
                return
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def _fail(self, error: Exception) -> None:
        self._error = self._error or error  # what follows from the first says less
        self._wake()


async def read_whole(read: Callable[[], Awaitable[bytes]], limit: int) -> bytes:
    """Read chunks until an empty one; return them as one.

    Raises:
        UpstreamInvalidResponse: they are longer than `limit` bytes.
    """
    parts, size = [], 0
    while chunk := await read():
        parts.append(chunk)
        size += len(chunk)
        if size > limit:
            raise UpstreamInvalidResponse(f"the reply is longer than {limit} bytes")
    return b"".join(parts)
