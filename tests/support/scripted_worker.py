"""A worker made of scripted bytes on a real port: it answers, hangs, cuts and resets exactly as a test says.

    worker.always(script(reply(b"{}")))          what every request gets
    worker.next(script(HANG))                    what only the next one gets
    script(head(...), chunk(b"a"), gate, RESET)  bytes are written, events are waited for, actions end the connection

`/model_info` and `/health` are answered by scripts of their own and recorded apart, so that probes disturb nothing.
"""

from __future__ import annotations

import asyncio
import enum
import socket
import struct
from collections import deque
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from types import TracebackType
from typing import Any

from miles_router.tasks import spawn

Pairs = Iterable[tuple[str, str]]
PROBES = ("/model_info", "/get_model_info", "/health", "/ready")
#: Asked of a worker that joins, which answers 404 unless it has something `standing`.
FACTS = ("/server_info", "/get_server_info", "/openapi.json")
#: Asked of a worker that is silent, and answered so as well.
WATCHED = ("/health_generate", "/ping")
RESET_ON_CLOSE = struct.pack("ii", 1, 0)  # SO_LINGER: on, 0 seconds
LAST_CHUNK = b"0\r\n\r\n"


class Action(enum.Enum):
    """What a script does besides writing and waiting."""

    BODY = "read the request body"
    CLOSE = "close the connection in order"
    RESET = "reset the connection"
    HANG = "do nothing until the router is gone"


BODY, CLOSE, RESET, HANG = Action.BODY, Action.CLOSE, Action.RESET, Action.HANG
Step = bytes | asyncio.Event | Action


@dataclass
class Received:
    """One request as it came off the wire."""

    method: str
    target: bytes
    headers: list[tuple[bytes, bytes]]
    head: bytes
    body: bytes = b""

    def values(self, name: str) -> list[bytes]:
        return [value for key, value in self.headers if key.lower() == name.lower().encode()]

    @property
    def path(self) -> str:
        return self.target.decode("latin-1").partition("?")[0]

    @property
    def is_of_the_watch(self) -> bool:
        """Whether the router asks it itself, which it does where its requests have waited for seconds; what it forwards
        has an id."""
        return self.path in WATCHED and not self.values("x-request-id")


def head(status: int = 200, headers: Pairs = (), reason: str = "OK") -> bytes:
    return "\r\n".join([f"HTTP/1.1 {status} {reason}", *(f"{n}: {v}" for n, v in headers), "", ""]).encode("latin-1")


def reply(body: bytes = b"{}", status: int = 200, headers: Pairs = (), reason: str = "OK") -> bytes:
    return head(status, [*headers, ("Content-Length", str(len(body)))], reason) + body


def chunked_head(headers: Pairs = (), status: int = 200) -> bytes:
    return head(status, [*headers, ("Transfer-Encoding", "chunked")])


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


class Link(asyncio.StreamReaderProtocol):
    """One connection from the router, with what StreamReaderProtocol does not tell: when the other side is gone."""

    def __init__(self, worker: ScriptedWorker) -> None:
        super().__init__(asyncio.StreamReader(limit=2**22), self._met)
        self.worker = worker
        self.gone = asyncio.Event()  # the router closed or reset it, or we did
        self.busy = False
        self.served = 0
        self.task: asyncio.Task[None] | None = None
        self.reader: asyncio.StreamReader
        self.writer: asyncio.StreamWriter

    def _met(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer
        self.worker.met(self)

    def eof_received(self) -> bool:
        super().eof_received()
        self.gone.set()
        return True

    def connection_lost(self, exc: BaseException | None) -> None:
        super().connection_lost(exc)  # type: ignore[arg-type]  # typeshed wants Exception
        self.gone.set()
        self.worker.links.discard(self)

    def close(self) -> None:
        self.writer.close()

    def reset(self) -> None:
        self.writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET_ON_CLOSE)
        self.writer.transport.abort()


class Visit:
    """One request and the means to answer it."""

    def __init__(self, link: Link, request: Received) -> None:
        self.link = link
        self.request = request
        self.ended = False
        self._body_read = False

    async def write(self, data: bytes) -> None:
        """Write and wait until the router has taken most of it.

        Raises:
            ConnectionError: the router is gone.
        """
        self.link.writer.write(data)
        await self.link.writer.drain()

    async def read_body(self) -> bytes:
        if not self._body_read:
            self._body_read = True
            self.request.body = await _read_body(self.link.reader, self.request)
        return self.request.body

    async def run(self, steps: Iterable[Step]) -> None:
        """Do what a script says; the body is read before its first other step unless the script begins otherwise."""
        for step in steps:
            if isinstance(step, bytes):
                await self.write(step)
            elif isinstance(step, asyncio.Event):
                await self._either(step)
            elif step is BODY:
                await self.read_body()
            else:
                await self._end(step)

    async def _either(self, event: asyncio.Event) -> None:
        """Wait for `event`, or raise if the router goes first."""
        waits = [spawn(event.wait(), name="script event"), spawn(self.link.gone.wait(), name="script gone")]
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()
        if not event.is_set():
            raise ConnectionResetError("the router went first")

    async def _end(self, action: Action) -> None:
        self.ended = True
        if action is HANG:
            await self.link.gone.wait()
        elif action is RESET:
            self.link.reset()
        else:
            self.link.close()


Behaviour = Callable[[Visit], Awaitable[None]]


def script(*steps: Step) -> Behaviour:
    return lambda visit: visit.run((BODY, *steps))


def unread(*steps: Step) -> Behaviour:
    """Do `steps` without reading the request body, unless BODY is one of them."""
    return lambda visit: visit.run(steps)


class ScriptedWorker:
    """`async with ScriptedWorker() as worker:` listens on a free port of the loopback interface."""

    def __init__(self) -> None:
        self.requests: list[Received] = []
        self.visits: list[Visit] = []
        self.probes: list[Received] = []
        self.crashes: list[BaseException] = []  # defects of a script, for the test's teardown to raise
        self.connections = 0  # ever accepted
        self.links: set[Link] = set()  # open now
        self.model_info: Behaviour = script(reply(b'{"model_path": "scripted", "weight_version": "1"}'))
        self.health: Behaviour = script(reply(b""))
        # Bound for as long as the worker lives, so that nobody takes its port while it refuses.
        self._held = socket.socket()
        self._held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._held.bind(("127.0.0.1", 0))
        self.port: int = self._held.getsockname()[1]
        self._binding = asyncio.Lock()
        self.standing: dict[str, Behaviour] = {}  # by path: what is answered whenever it is asked, and not listed
        self._always: Behaviour = script(reply())
        self._next: deque[Behaviour] = deque()
        self._server: asyncio.Server | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def always(self, behaviour: Behaviour) -> ScriptedWorker:
        """What every request gets that `next` says nothing about."""
        self._always = behaviour
        return self

    def next(self, *behaviours: Behaviour) -> ScriptedWorker:
        """What the next requests get, one behaviour each."""
        self._next.extend(behaviours)
        return self

    @property
    def busy(self) -> int:
        """Connections with a request in progress."""
        return sum(link.busy for link in self.links)

    async def listen(self) -> None:
        async with self._binding:
            if self._server is None:
                loop = asyncio.get_running_loop()
                self._server = await loop.create_server(lambda: Link(self), "127.0.0.1", self.port, backlog=2048)

    def refuse(self) -> None:
        """Take no connection any more; those that exist stay."""
        if self._server is not None:
            self._server.close()
            self._server = None

    def kill(self) -> None:
        """As a killed process: refuse, and reset everything."""
        self.refuse()
        for link in tuple(self.links):
            link.reset()

    async def __aenter__(self) -> ScriptedWorker:
        await self.listen()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.refuse()
        self._held.close()
        tasks = [link.task for link in self.links if link.task is not None]
        for link in tuple(self.links):
            link.writer.transport.abort()
        for task in tasks:
            task.cancel()  # what a test that failed would have let go on
        if tasks:
            await asyncio.wait(tasks)

    def met(self, link: Link) -> None:
        self.links.add(link)
        self.connections += 1
        link.task = spawn(self._serve(link), name="scripted worker")
        link.task.add_done_callback(self._done)

    def _done(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (crash := task.exception()) is not None:
            self.crashes.append(crash)

    async def _serve(self, link: Link) -> None:
        try:
            while await self._serve_one(link):
                pass
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            link.busy = False
            link.writer.close()

    async def _serve_one(self, link: Link) -> bool:
        received = await _read_head(link.reader)
        link.busy = True
        link.served += 1
        visit = Visit(link, received)
        await self._behaviour(visit)(visit)
        if not visit.ended:
            await visit.read_body()
        link.busy = False
        return not visit.ended

    def _behaviour(self, visit: Visit) -> Behaviour:
        received = visit.request
        if received.method == "GET" and received.path in PROBES:
            self.probes.append(received)
            return self.health if received.path == "/health" else self.model_info
        if received.path in self.standing:
            return self.standing[received.path]
        if received.method == "GET" and (received.path in FACTS or received.is_of_the_watch):
            return script(reply(b"", 404))
        self.requests.append(received)
        self.visits.append(visit)
        return self._next.popleft() if self._next else self._always


async def _read_head(reader: asyncio.StreamReader) -> Received:
    raw = await reader.readuntil(b"\r\n\r\n")
    first, *lines = raw[:-4].split(b"\r\n")
    method, target, _ = first.split(b" ")
    pairs = [(name, value.strip()) for name, _, value in (line.partition(b":") for line in lines)]
    return Received(method.decode(), target, pairs, raw)


async def _read_body(reader: asyncio.StreamReader, received: Received) -> bytes:
    length: Any = received.values("content-length")
    assert not received.values("transfer-encoding"), "the router sends buffered bodies with their length"
    return await reader.readexactly(int(length[0])) if length else b""
