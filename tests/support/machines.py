"""A router of several machines, all of which are this one: a leader, and a shard on each."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import secrets
import signal
import socket
import sqlite3
import subprocess
import tempfile
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import orjson

from miles_router.serving.process import ALIVE, READY, Assignment, spawn
from miles_router.serving.server import listen
from miles_router.settings.config import RouterConfig
from miles_router.shards.topology import Shard, Shards
from tests.support.http import RawReply, ask
from tests.support.running_router import QUIETLY
from tests.support.waiting import STEP, until

JSON = [("Content-Type", "application/json")]
HOST = "127.0.0.1"


class Part:
    """A process, and what it has said."""

    def __init__(self, log: Path, listener: socket.socket) -> None:
        self.listener = listener
        self.url = f"http://{HOST}:{listener.getsockname()[1]}"
        self.process: subprocess.Popen[bytes]
        self._log = log
        self._status = -1

    def start(self, assigned: Assignment) -> None:
        """Start it with what a supervisor would give it."""
        with self._log.open("ab") as file:
            self.process, self._status = spawn(replace(assigned, listener=self.listener.fileno()), file)
        os.set_blocking(self._status, False)

    async def serves(self) -> None:
        """Until it does its part."""
        told = b""

        def ready() -> bool:
            nonlocal told
            with contextlib.suppress(BlockingIOError):
                told += os.read(self._status, 4096).replace(ALIVE, b"")
            assert self.process.poll() is None, (told, self.log())
            return told == READY

        await until(ready, "it does its part")

    def log(self) -> str:
        """What it has written."""
        return self._log.read_text(encoding="utf-8")

    def send(self, kind: signal.Signals) -> None:
        """Send it a signal; wait for its end if that is one."""
        self.process.send_signal(kind)
        if kind == signal.SIGKILL:
            self.process.wait()

    def close(self) -> None:
        """End it."""
        if self._status >= 0:
            self.process.send_signal(signal.SIGCONT)
            self.process.kill()
            self.process.wait()
            os.close(self._status)
        self.listener.close()

    async def ask(self, method: str, target: str, **fields: Any) -> RawReply:
        """One request on a connection of its own."""
        return await ask(self.url, method, target, JSON, orjson.dumps(fields) if method == "POST" else None)

    async def answers(self, method: str, target: str, status: int = 200, **fields: Any) -> RawReply:
        """The first answer with this status; a 503 is asked again."""
        while (answer := await self.ask(method, target, **fields)).status == 503:  # noqa: ASYNC110  # each look is a request
            await asyncio.sleep(STEP)
        assert answer.status == status, (answer, self.log())
        return answer


class Wire:
    """Stands before a port, and keeps what is sent there.

    Attributes:
        whole: cleared, it takes connections and bytes, and nothing comes out of it: a network that is lost.
    """

    def __init__(self, port: int) -> None:
        self.address = ""
        self.sent = bytearray()
        self.whole = asyncio.Event()
        self.whole.set()
        self._port = port

    async def take(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One connection."""
        there, back = await asyncio.open_connection(HOST, self._port)
        relaying = [self._relay(reader, back, self.sent), self._relay(there, writer, bytearray())]
        await asyncio.gather(*relaying, return_exceptions=True)

    async def _relay(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, kept: bytearray) -> None:
        try:
            while data := await reader.read(65536):
                kept += data
                await self.whole.wait()
                writer.write(data)
        finally:
            await self.whole.wait()
            writer.close()


@contextlib.asynccontextmanager
async def wired(listener: socket.socket) -> AsyncIterator[Wire]:
    """A wire to whoever listens there."""
    wire = Wire(listener.getsockname()[1])
    server = await asyncio.start_server(wire.take, HOST, 0)
    wire.address = f"{HOST}:{server.sockets[0].getsockname()[1]}"
    try:
        yield wire
    finally:
        wire.whole.set()
        server.close()


async def stand_still(control: Part, state: Path) -> None:
    """Stop a leader, though not within a commit: nobody else could take its slot over."""
    control.send(signal.SIGSTOP)
    while _commits(state):
        control.send(signal.SIGCONT)
        await asyncio.sleep(STEP)
        control.send(signal.SIGSTOP)


def _commits(state: Path) -> bool:
    """Whether somebody is within a commit to what belongs to the router as a whole."""
    with contextlib.closing(sqlite3.connect(state / "control.sqlite", isolation_level=None, timeout=0)) as connection:
        try:
            connection.execute("BEGIN IMMEDIATE")
        except sqlite3.OperationalError:
            return True
        connection.execute("ROLLBACK")
        return False


def term(state: Path) -> int:
    """Of the leader that decides."""
    with contextlib.closing(sqlite3.connect(state / "control.sqlite")) as connection:
        epoch: int = connection.execute("SELECT epoch FROM slot").fetchone()[0]
        return epoch


class RunningMachines:
    """The leader, and a shard on each machine, which all share a state directory."""

    def __init__(self, directory: Path, stack: contextlib.ExitStack, count: int, lease: float, config: Any) -> None:
        self._directory = directory
        self.shards = Shards(count, lease, secrets.token_hex(16), shared_state=True)
        self._generations = itertools.count(1)
        self._config = RouterConfig(**{**QUIETLY, "host": HOST, **config})
        self._stack = stack
        self.control = self.part("control")
        self.nodes = [self.part(f"node-{index}") for index in range(count)]

    def part(self, name: str) -> Part:
        """A place for a process."""
        part = Part(self._directory / f"{name}.log", listen(HOST, 0))
        self._stack.callback(part.close)
        return part

    async def start(self) -> None:
        """Start all."""
        self.start_control()
        for index in range(len(self.nodes)):
            self.start_node(index)
        for part in (self.control, *self.nodes):
            await part.serves()

    def start_control(self) -> None:
        """Start the leader, again if it was there."""
        self._file().write_text(f"{HOST}:{self.control.listener.getsockname()[1]}", encoding="ascii")
        self.control.start(self._assigned(self.shards))

    def start_node(self, index: int, control: str | None = None, **changed: Any) -> None:
        """Start the shard of a machine.

        Args:
            control: where it reaches the leader, if not as all others.
            changed: settings that are not those of the others.
        """
        part, file = self.nodes[index], self._file()
        if control is not None:
            file = self._directory / f"control-{index}"
            file.write_text(control, encoding="ascii")
        directory = Path(self._stack.enter_context(tempfile.TemporaryDirectory(prefix="machine-")))
        part.start(self._assigned(Shard(self.shards, index, directory, part.url, file), **changed))

    async def replace(self, index: int) -> Part:
        """Start this shard elsewhere, as a platform does that takes its machine for lost."""
        before, self.nodes[index] = self.nodes[index], self.part(f"node-{index}-{next(self._generations)}")
        self.start_node(index)
        await self.nodes[index].serves()
        return before

    def _file(self) -> Path:
        return self._directory / "control"

    def _assigned(self, place: Shards | Shard, **changed: Any) -> Assignment:
        return Assignment(replace(self._config, **changed), None, place, os.getpid(), next(self._generations))


@contextlib.asynccontextmanager
async def machines(count: int = 2, *, lease: float, **settings: Any) -> AsyncIterator[RunningMachines]:
    """So many machines."""
    with contextlib.ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="machines-")))
        made = RunningMachines(directory, stack, count, lease, settings)
        await made.start()
        yield made
