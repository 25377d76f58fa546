"""The HTTP client for workers: a pool of kept-alive connections per worker. Only this module talks to workers.

Headers and bodies stay bytes from socket to socket: nothing is decompressed, decoded or reordered.
"""

from __future__ import annotations

import asyncio
import errno
import itertools
import ssl
import time
from collections import deque
from collections.abc import Callable, Coroutine
from typing import Any

from miles_router import tasks
from miles_router.asgi.backlog import Backlog
from miles_router.asgi.wire import RawHeaders, request_head
from miles_router.errors import UpstreamTimeout, UpstreamUnreachable
from miles_router.fleet.worker_url import WorkerUrl
from miles_router.fleet.workers import Pulse, Worker, WorkerActivity
from miles_router.forwarding.connection import Connection
from miles_router.forwarding.reply import Reply


class Processes:
    """A map from a worker's URL to a number for the process there, which shows restarts.

    The kernel closes all connections of a process that ends. So while at least one connection to an address stays open
    without a gap, the same process is there. A number is valid from the first open connection until the last one
    closes; a later process gets another number.
    """

    def __init__(self) -> None:
        self._open: dict[str, int] = {}
        self._numbers: dict[str, int] = {}
        self._next = itertools.count(1)

    def connected(self, url: str) -> None:
        """Count a new connection to `url`; the first one gives the process there a new number."""
        if url not in self._open:
            self._open[url], self._numbers[url] = 0, next(self._next)
        self._open[url] += 1

    def disconnected(self, url: str) -> None:
        """Count a lost connection."""
        self._open[url] -= 1
        if not self._open[url]:
            del self._open[url], self._numbers[url]

    def number(self, url: str) -> int | None:
        """Return the number of the process at `url`; None if no connection is open, because it is unknown then."""
        return self._numbers.get(url)


#: Bytes read from a socket at once. Measured on 16 MB replies: 256 kB (the event loop's default) costs 1.4 times the
#: CPU of 1 MB, nearly all of it in system calls; larger sizes gain little.
READ_BYTES = 1024 * 1024
#: Seconds after which an idle connection is closed; SGLang's server closes its own side after 5.
IDLE_SECONDS = 60.0
#: Errors of connecting that are no fault of the worker: this machine has no descriptor, memory or port left.
EXHAUSTED = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOBUFS, errno.EADDRNOTAVAIL})
#: Returns True if a request may be written now.
Admit = Callable[[], bool]


class NotAdmitted(Exception):
    """`admit` returned False, so no byte of the request was written. Only the caller that passed `admit` gets it."""


class Upstream:
    """A client for all workers.

    Args:
        max_connections: maximum number of requests in progress; further ones wait. 0: no limit.
    """

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
        #: The bytes that wait for clients, over all connections.
        self.backlog = backlog or Backlog()
        #: The read buffer shared by all connections. The event loop fills and empties it in one step.
        self.read_buffer = memoryview(bytearray(READ_BYTES))

    def open(
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
    ) -> Coroutine[Any, Any, Reply]:
        """Send a request and wait for the head of its reply.

        A request that is lost on a kept-alive connection is written again on a new connection, except with `once`.

        Args:
            headers: end-to-end headers, without Host and Content-Length.
            slot: take one of the `max_connections`. False for requests that must pass while all are taken.
            admit: called directly before each write, with no `await` in between.
            pulse: of the engine that works on the request. `give_up` with this pulse breaks the request off.
            once: do not write the request again, because the engine may have begun to work on it. A new connection is
                made and kept for the caller's next attempt (`UpstreamUnreachable.kept`).
            fresh: write to a new connection, and do not write again.

        Raises:
            UpstreamUnreachable: the connection failed, or was lost or given up before a reply began.
            UpstreamError: the worker did not send valid HTTP.
            NotAdmitted: `admit` returned False. The connection is kept.
        """
        head = request_head(method, address.prefix + target, address.authority, headers, len(body))
        if self._slots is None or not slot:
            return self._exchange(address, method, head, body, admit, pulse, once=once, fresh=fresh)
        return self._exchange_in_slot(self._slots, address, method, head, body, admit, pulse, once=once, fresh=fresh)

    async def _exchange_in_slot(
        self,
        slots: asyncio.Semaphore,
        address: WorkerUrl,
        method: str,
        head: bytes,
        body: bytes,
        admit: Admit | None,
        pulse: Pulse | None,
        *,
        once: bool,
        fresh: bool,
    ) -> Reply:
        """Call `_exchange` in one of the `max_connections` slots, which is released when the reply is closed."""
        await slots.acquire()
        try:
            reply = await self._exchange(address, method, head, body, admit, pulse, once=once, fresh=fresh)
        except BaseException:
            self.release_slot()
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
        """GET `path`, or POST `body` to it. Return status and body of the answer.

        Takes no `max_connections` slot, so that checks also reach a fully loaded worker.

        Args:
            timeout: seconds for the whole exchange.
            limit: maximum bytes of the answer's body.

        Raises:
            UpstreamTimeout: it took longer than `timeout` seconds.
            UpstreamError: an error of `open`, or the body was cut or is longer than `limit` bytes.
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

    def is_awaiting(self, address: WorkerUrl, pulse: Pulse) -> bool:
        """Return True if a request waits for its reply, or the rest of it, from the engine process at `address` whose
        reply pieces `pulse` counts."""
        return any(connection.is_awaiting(pulse) for connection in self._open.get(address.url, ()))

    def activity(self, worker: Worker) -> WorkerActivity:
        """Return the worker's signs of life that this process has seen."""
        now = asyncio.get_running_loop().time()
        return WorkerActivity(now - worker.pulse.last_piece_at, self.is_awaiting(worker.address, worker.pulse))

    def give_up(self, address: WorkerUrl, pulse: Pulse, reason: str) -> int:
        """Break off every request that the engine with this pulse works on, as if the worker were lost.

        Return the number of requests.
        """
        lost = [connection for connection in self._open.get(address.url, ()) if connection.is_awaiting(pulse)]
        for connection in lost:
            connection.give_up(reason)
        return len(lost)

    async def close(self) -> None:
        """Close all connections; later requests are refused."""
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
            if admit is not None and not admit():  # here, because no `await` lies between this and the write
                self.keep(address, connection)
                raise NotAdmitted
            try:
                reply = connection.send(head, body, head_request=method == "HEAD", pulse=pulse)
                while not reply.head_seen:
                    await reply.arrival()
            except UpstreamUnreachable as error:
                connection.abort()
                if error.given_up or not kept:
                    raise
                # If a kept-alive connection is lost before the reply, the worker most likely closed it while idle. Only
                # a new connection shows whether the worker is dead.
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
        # Not `tasks.within`, because a connection that is made too late must be closed.
        task = tasks.spawn(self._dial(address), name=f"connect {address.url}")
        try:
            made = await tasks.ends_within(self.connect_timeout, task)
        except asyncio.CancelledError:
            _abandon(task)
            raise
        if not made:
            _abandon(task)
            message = f"{address.url} accepted no connection within {self.connect_timeout:g} s"
            raise UpstreamUnreachable(message, refused=True, timed_out=True)
        connection: Connection | OSError = task.result()
        if isinstance(connection, OSError):
            exhausted = connection.errno in EXHAUSTED
            message = f"cannot connect to {address.url}: {connection}"
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
            if connection.is_usable():
                return connection
        return None

    def process(self, address: WorkerUrl) -> int | None:
        """Return the number of the process at `address`; None if no connection is open (see `Processes`)."""
        return self._processes.number(address.url)

    # Called by connections

    def made(self, address: WorkerUrl, connection: Connection) -> None:
        """Register a new connection."""
        self._open.setdefault(address.url, set()).add(connection)
        self._processes.connected(address.url)

    def keep(self, address: WorkerUrl, connection: Connection) -> None:
        """Keep an idle connection for the next request to `address`, or close it if it is unusable."""
        if self._closed or not connection.is_usable():
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
        """Remove a lost connection."""
        connections = self._open[address.url]
        connections.discard(connection)
        if not connections:
            del self._open[address.url]
        self._processes.disconnected(address.url)
        idle = self._idle.get(address.url)
        if idle and connection in idle:
            idle.remove(connection)

    def release_slot(self) -> None:
        """Release one `max_connections` slot."""
        if self._slots is not None:
            self._slots.release()


def _abandon(task: asyncio.Task[Connection | OSError]) -> None:
    """Cancel connecting, and close the connection if it is made nevertheless."""
    task.cancel()
    task.add_done_callback(_drop_made)


def _drop_made(task: asyncio.Task[Connection | OSError]) -> None:
    if not task.cancelled() and isinstance(made := task.result(), Connection):
        made.abort()
