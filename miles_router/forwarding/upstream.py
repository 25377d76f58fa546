"""The only module that talks to workers: one stack of kept-alive connections for each, errors translated in one table.

Headers and bodies stay bytes from socket to socket. Nothing is decompressed, decoded or re-ordered.
"""

from __future__ import annotations

import asyncio
import errno
import ssl
import time
from collections import deque
from collections.abc import Callable

from miles_router import tasks
from miles_router.asgi.backlog import Backlog
from miles_router.asgi.headers import RawHeaders
from miles_router.errors import UpstreamTimeout, UpstreamUnreachable
from miles_router.fleet.worker_url import WorkerUrl
from miles_router.fleet.workers import Pulse, Signs, Worker
from miles_router.forwarding.connection import Connection
from miles_router.forwarding.framing import request_head
from miles_router.forwarding.processes import Processes
from miles_router.forwarding.reply import Reply

#: Bytes taken from a socket at once. Measured on 16 MB replies: 256 kB, the event loop's own size, costs 1.4 times the
#: CPU of 1 MB, nearly all of it in system calls; beyond, little is left to gain.
READ_BYTES = 1024 * 1024
#: An idle connection older than this (seconds) is retired; SGLang's server closes its own side after 5.
IDLE_SECONDS = 60.0
#: Why no connection can be made that says nothing of the worker: descriptors, memory or ports of this machine are out.
EXHAUSTED = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOBUFS, errno.EADDRNOTAVAIL})
#: Whether a request may be written now.
Admit = Callable[[], bool]


class NotAdmitted(Exception):
    """A request may not be written now; no byte of it was. For whoever gave `admit`; nobody else sees it."""


class Upstream:
    """Opens exchanges with workers. `max_connections` bounds those running at once (0: no bound); more wait."""

    def __init__(
        self, *, connect_timeout: float = 5.0, max_connections: int = 0, backlog: Backlog | None = None
    ) -> None:
        self.connect_timeout = connect_timeout
        self._slots = asyncio.Semaphore(max_connections) if max_connections else None
        self._idle: dict[str, deque[Connection]] = {}
        self._open: dict[str, set[Connection]] = {}
        self._processes = Processes()
        self._tls: ssl.SSLContext | None = None
        self._closed = False
        #: What waits for clients, over all connections.
        self.backlog = backlog or Backlog()
        #: Where every connection's bytes arrive. One is enough: the event loop fills it and empties it in one step.
        self.read_buffer = memoryview(bytearray(READ_BYTES))

    async def open(
        self,
        address: WorkerUrl,
        method: str,
        target: bytes,
        headers: RawHeaders,
        body: bytes,
        *,
        slot: bool = True,
        admit: Admit | None = None,
        pulse: Pulse | None = None,
        once: bool = False,
        fresh: bool = False,
    ) -> Reply:
        """Send a request and wait for the head of its reply. `headers` are end-to-end ones, without Host and length.
        Without `slot` it waits for none of the `max_connections`: it must get through while all are taken. `admit` is
        asked each time at the moment of writing, when nothing is left to wait for. A request with the `pulse` of an
        engine ends when that one is given up. A request that is lost on a kept connection is written again to a new
        one, but for one that is written `once`: its engine may have begun it. With `fresh` it is written to a new
        connection from the start, and not again.

        Raises:
            UpstreamUnreachable: no connection, or it was lost, or given up, before a reply began.
            UpstreamInvalidResponse: the worker does not speak HTTP.
            NotAdmitted: `admit` said no. The connection is kept.
        """
        head = request_head(method, address.prefix + target, address.authority, headers, len(body))
        if self._slots is None or not slot:
            return await self._exchange(address, method, head, body, admit, pulse, once=once, fresh=fresh)
        await self._slots.acquire()
        try:
            reply = await self._exchange(address, method, head, body, admit, pulse, once=once, fresh=fresh)
        except BaseException:
            self.slot_freed()
            raise
        reply.holds_slot = True
        return reply

    async def fetch(
        self,
        address: WorkerUrl,
        path: str,
        *,
        headers: RawHeaders,
        timeout: float,
        limit: int = 1 << 20,
        body: bytes | None = None,
    ) -> tuple[int, bytes]:
        """GET `path`, or POST `body` to it, and read the whole answer: `(status, body)`. Needs no slot: a worker full
        of requests is alive.

        Raises:
            UpstreamTimeout: it took longer than `timeout` seconds.
            UpstreamError: as `open`, or the body was cut or is longer than `limit` bytes.
        """
        try:
            work = self._fetch(address, path, headers, limit, body)
            return await tasks.within(timeout, work, name=f"fetch {address.url}{path}")
        except TimeoutError:
            raise UpstreamTimeout(f"{address.url}{path} did not answer within {timeout:g} s") from None

    async def _fetch(
        self, address: WorkerUrl, path: str, headers: RawHeaders, limit: int, body: bytes | None
    ) -> tuple[int, bytes]:
        method, sent = ("GET", b"") if body is None else ("POST", body)
        head = request_head(method, address.prefix + path.encode(), address.authority, headers, len(sent))
        reply = await self._exchange(address, method, head, sent)
        try:
            return reply.status, await reply.read_all(limit)
        finally:
            reply.close()

    def awaits(self, address: WorkerUrl, pulse: Pulse) -> bool:
        """Whether a reply is still to come from the engine with this pulse."""
        return any(connection.awaits(pulse) for connection in self._open.get(address.url, ()))

    def signs(self, worker: Worker) -> Signs:
        """Return what this process has heard of a worker's engine, and whether it waits for an answer of it."""
        now = asyncio.get_running_loop().time()
        return Signs(now - worker.pulse.heard_at, self.awaits(worker.address, worker.pulse))

    def give_up(self, address: WorkerUrl, pulse: Pulse, reason: str) -> int:
        """Break off every request that the engine with this pulse works on, as if its worker were lost; how many."""
        lost = [connection for connection in self._open.get(address.url, ()) if connection.awaits(pulse)]
        for connection in lost:
            connection.give_up(reason)
        return len(lost)

    async def close(self) -> None:
        """Break off everything; later exchanges are refused."""
        self._closed = True
        for connection in [each for connections in self._open.values() for each in connections]:
            connection.abort()
        self._idle.clear()

    async def _exchange(
        self,
        address: WorkerUrl,
        method: str,
        head: bytes,
        body: bytes,
        admit: Admit | None = None,
        pulse: Pulse | None = None,
        *,
        once: bool = False,
        fresh: bool = False,
    ) -> Reply:
        connection = None if fresh else self._take_idle(address)
        kept = connection is not None and not connection.just_made
        connection = connection or await self._connect(address)
        while True:
            if admit is not None and not admit():  # asked here, for nothing is awaited between this and the write
                self.keep(address, connection)
                raise NotAdmitted
            try:
                reply = connection.send(head, body, head_request=method == "HEAD", pulse=pulse)
                await reply.head()
            except UpstreamUnreachable as error:
                connection.abort()
                if error.given_up or not kept:
                    raise
                # A kept connection that dies before its reply was most likely closed by the worker while idle; only a
                # new connection can tell that from a dead worker.
                try:
                    connection, kept = await self._connect(address), False
                except UpstreamUnreachable as unreachable:
                    unreachable.written = True
                    raise
                if once:
                    connection.just_made = True
                    self.keep(address, connection)
                    error.kept = True
                    raise
            except BaseException:
                connection.abort()
                raise
            else:
                return reply

    async def _connect(self, address: WorkerUrl) -> Connection:
        if self._closed:
            raise UpstreamUnreachable("the router is shutting down")
        # Not `tasks.within`: a connection that is made too late has to be closed.
        task = tasks.spawn(self._dial(address), name=f"connect {address.url}")
        try:
            made = await tasks.ends_within(self.connect_timeout, task)
        except asyncio.CancelledError:
            _abandon(task)
            raise
        if not made:
            _abandon(task)
            message = f"{address.url} took no connection in {self.connect_timeout:g} s"
            raise UpstreamUnreachable(message, refused=True, timed_out=True)
        connection: Connection | OSError = task.result()
        if isinstance(connection, OSError):
            exhausted = connection.errno in EXHAUSTED
            message = f"{address.url} takes no connection: {connection}"
            raise UpstreamUnreachable(message, refused=not exhausted, exhausted=exhausted)
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
        return connection

    def _take_idle(self, address: WorkerUrl) -> Connection | None:
        idle = self._idle.get(address.url)
        while idle:
            connection = idle.pop()
            if connection.usable:
                return connection
        return None

    def process(self, address: WorkerUrl) -> int | None:
        """The number of the process at `address`, as `Processes.number`."""
        return self._processes.number(address.url)

    # What connections call

    def made(self, address: WorkerUrl, connection: Connection) -> None:
        """A connection was made."""
        self._open.setdefault(address.url, set()).add(connection)
        self._processes.connected(address.url)

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
        connections = self._open[address.url]
        connections.discard(connection)
        if not connections:
            del self._open[address.url]
        self._processes.disconnected(address.url)
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
