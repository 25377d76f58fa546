"""Keeps the processes of one router running: it holds their sockets, starts them, starts again what dies, and ends all.

It takes no request and decides nothing, so that there is little that could end it. Each process that takes requests has
a socket of its own on the router's port (SO_REUSEPORT), and the supervisor holds it too: clients of one that died wait
in it for the next.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from argparse import Namespace
from pathlib import Path
from typing import NamedTuple

from miles_router import log, tasks
from miles_router.errors import ConfigError
from miles_router.serving.process import ALIVE, BEAT, READY, Assignment, spawn
from miles_router.serving.server import banner, listen, raise_file_limit
from miles_router.settings.config import RouterConfig
from miles_router.shards.places import Seat, Shards
from miles_router.shards.senders import Senders

logger = logging.getLogger(__name__)

#: Seconds before what dies at once is started again: the first time, and at most.
SOON, LATEST = 0.1, 5.0
#: Seconds that a process must have done its part to have died by chance; as often it may die sooner before that is an
#: error.
LASTING, CHANCES = 10.0, 3
#: Looks, one in `BEAT` seconds, without a sign of life of a process that has given one, until it is killed.
SILENT = 10
#: Seconds beside `shutdown_timeout` in which all must have ended.
SPARE = 10.0
STATUS_BYTES = 4096
#: Where processes reach each other on one machine.
LOOPBACK = "127.0.0.1"
#: A directory in memory: nothing of the router touches the disk.
MEMORY = Path("/dev/shm")


def supervise(config: RouterConfig, args: Namespace | None) -> None:
    """Serve with several processes until SIGTERM or SIGINT; requests in flight get `shutdown_timeout` seconds.

    Raises:
        ConfigError: a setting that cannot be used.
        SystemExit: with 1, where a process could not be started, or not ended in order.
    """
    raise_file_limit()
    with contextlib.ExitStack() as held:
        sockets = _listeners(config, own_host=LOOPBACK if config.public_url else config.host)
        held.callback(sockets.close)
        directory = Path(tempfile.mkdtemp(prefix="miles-router-", dir=MEMORY if MEMORY.is_dir() else None))
        held.callback(shutil.rmtree, directory, ignore_errors=True)
        supervisor = Supervisor(config, args, sockets, directory)
        asyncio.run(supervisor.run())
        log.flush()
    if supervisor.refusal is not None:
        raise ConfigError(supervisor.refusal)
    if supervisor.failed:
        sys.exit(1)


def _listeners(config: RouterConfig, own_host: str) -> Sockets:
    """Listen for each process on the router's port, which nobody has beside them, and on a port of its own."""
    with listen(config.host, config.port) as alone:  # a shared one would be shared with another router, too
        port = alone.getsockname()[1]
    shared = [listen(config.host, port, shared=True) for _ in range(config.processes)]
    return Sockets(shared, [listen(own_host, 0) for _ in range(config.processes)])


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()


class Sockets(NamedTuple):
    """What is connected to: a socket for each process on the router's port, and one on a port of its own."""

    shared: list[socket.socket]
    own: list[socket.socket]

    def close(self) -> None:
        """Take no more connections."""
        for each in (*self.shared, *self.own):
            each.close()

    def urls(self) -> tuple[str, ...]:
        """Return where each process alone is reached from this machine."""
        return tuple(f"http://{_reached(*each.getsockname()[:2])}" for each in self.own)


def _reached(host: str, port: int) -> str:
    """Return host and port of a URL for a socket that is bound there."""
    host = {"0.0.0.0": LOOPBACK, "::": "::1"}.get(host, host)
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


class Child:
    """A process, and what is known of it. `index` None: the leader."""

    def __init__(self, index: int | None) -> None:
        self.index = index
        self.name = "leader" if index is None else f"shard {index}"
        self.running: subprocess.Popen[bytes] | None = None
        self.watched: list[int] = []
        self.told = b""
        #: When it was ready to do its part.
        self.ready_at: float | None = None
        #: Looks since its last sign of life; None: it has given none yet.
        self.silent: int | None = None
        #: How often in a row it has died soon.
        self.deaths = 0

    @property
    def ready(self) -> bool:
        """Whether it does its part."""
        return self.ready_at is not None


class Supervisor:
    """Runs the processes of one router."""

    def __init__(
        self,
        config: RouterConfig,
        args: Namespace | None,
        sockets: Sockets,
        directory: Path,
    ) -> None:
        #: Why the router cannot start, where that is for the user to change.
        self.refusal: str | None = None
        #: Whether something went otherwise than it should.
        self.failed = False
        self._config = config
        self._args = args
        self._sockets = sockets
        self._senders = Senders(directory, config.processes)
        self._shards = Shards(config.processes)
        self._directory = directory
        self._generation = 0
        self._leader = Child(None)
        self._data = [Child(index) for index in range(config.processes)]
        self._children = [self._leader, *self._data]
        self._shown = False
        self._ending = False
        self._timers: set[asyncio.TimerHandle] = set()

    async def run(self) -> None:
        """Return when all processes have ended."""
        self._loop = asyncio.get_running_loop()
        self._over = asyncio.Event()
        for each in (signal.SIGTERM, signal.SIGINT):
            self._loop.add_signal_handler(each, self._stop)
        watching = tasks.spawn(self._watch(), name="signs of life")
        try:
            for child in self._children:
                self._start(child)
            await self._over.wait()
        finally:
            await tasks.cancelled(watching)
            for timer in self._timers:
                timer.cancel()
            for child in self._children:
                if child.running is not None:
                    _end(child.running)

    # Starting

    def _start(self, child: Child) -> None:
        """Start it. Raises OSError where the system has no room for it."""
        self._generation += 1
        running, read = spawn(
            Assignment(
                config=self._config,
                args=self._args,
                place=self._shards if child.index is None else self._seat(child.index),
                parent=os.getpid(),
                generation=self._generation,
                directory=self._directory,
                listener=None if child.index is None else self._sockets.shared[child.index].fileno(),
                own=None if child.index is None else self._sockets.own[child.index].fileno(),
            )
        )
        try:
            ended = os.pidfd_open(running.pid)
        except OSError:
            os.close(read)
            _end(running)
            raise
        child.running, child.ready_at, child.silent, child.told = running, None, None, b""
        child.watched = [ended, read]
        self._loop.add_reader(read, self._hear, child, read)
        self._loop.add_reader(ended, self._ended, child)

    def _seat(self, index: int) -> Seat:
        urls = self._sockets.urls()
        return Seat(self._shards, index, self._directory, urls[index], shown=not self._config.public_url, urls=urls)

    def _hear(self, child: Child, status: int) -> None:
        text = os.read(status, STATUS_BYTES)
        if not text:
            self._loop.remove_reader(status)
        if ALIVE in text:
            child.silent = 0
        child.told += text.replace(ALIVE, b"")
        if child.told == READY and not child.ready:
            child.ready_at = time.monotonic()
        if child.ready and not self._shown and all(each.ready for each in self._children):
            self._shown = True
            address = self._sockets.shared[0].getsockname()
            log.show(banner(self._config, address))

    async def _watch(self) -> None:
        """Kill what stands still: nobody else would notice, and what it should do nobody does."""
        while True:
            await asyncio.sleep(BEAT)
            for child in self._children:
                if child.running is None or child.silent is None:
                    continue
                child.silent += 1
                if child.silent == SILENT:
                    logger.error("process_stands_still", extra={"fields": {"process": child.name}})
                    child.running.kill()

    # Ending

    def _ended(self, child: Child) -> None:
        """A process has ended: by order, because it cannot start, or by accident."""
        assert child.running is not None
        if child.index is not None:
            self._senders.end(child.index)  # before its id can be another process's
        status = child.running.wait()
        read = child.watched[1]
        with contextlib.suppress(BlockingIOError):
            os.set_blocking(read, False)
            self._hear(child, read)
        for each in child.watched:
            self._loop.remove_reader(each)
            os.close(each)
        child.running = None
        if self._ending:
            # Who still starts, or has done all, dies of the order to end.
            self.failed |= child.ready and status not in (0, -signal.SIGTERM)
            self._go_on_ending()
        elif not self._shown:
            self._give_up(child, status)
        else:
            self._start_again(child, status)

    def _give_up(self, child: Child, status: int) -> None:
        """The router cannot start; the first that says so says why."""
        if self._over.is_set():
            return
        if child.told and not child.ready:
            self.refusal = self.refusal or child.told.decode(errors="replace")
        else:
            logger.error("process_did_not_start", extra={"fields": {"process": child.name, "status": status}})
            self.failed = True
        self._over.set()

    def _start_again(self, child: Child, status: int) -> None:
        lasted = child.ready_at is not None and time.monotonic() - child.ready_at >= LASTING
        child.deaths = 1 if lasted else child.deaths + 1
        wait = 0.0 if child.deaths == 1 else min(LATEST, SOON * 2 ** (child.deaths - 2))
        again = child.deaths > CHANCES
        fields = {"process": child.name, "status": status, "again_in": wait, "in_a_row": child.deaths}
        event = "process_dies_again_and_again" if again else "process_died"
        logger.log(logging.ERROR if again else logging.WARNING, event, extra={"fields": fields})
        self._timers.add(self._loop.call_later(wait, self._start_unless_ending, child))

    def _start_unless_ending(self, child: Child) -> None:
        if self._ending:
            return
        try:
            self._start(child)
        except OSError as error:  # no memory, no descriptors: others may give some back
            fields = {"process": child.name, "reason": str(error), "again_in": LATEST}
            logger.error("process_not_started", extra={"fields": fields})
            self._timers.add(self._loop.call_later(LATEST, self._start_unless_ending, child))

    def _stop(self) -> None:
        self._sockets.close()  # or clients would still connect
        self._drain()

    def _drain(self) -> None:
        """End all; a second signal does not wait."""
        first, self._ending = not self._ending, True
        if first:
            patience = self._config.shutdown_timeout + SPARE
            self._timers.add(self._loop.call_later(patience, self._kill_all))
        for child in self._data:
            if child.running is not None:
                child.running.terminate()
        self._go_on_ending()

    def _go_on_ending(self) -> None:
        """The leader ends behind those that follow it."""
        if all(child.running is None for child in self._data):
            if self._leader.running is None:
                self._over.set()
            else:
                self._leader.running.terminate()

    def _kill_all(self) -> None:
        for child in self._children:
            if child.running is not None:
                logger.error("process_does_not_end", extra={"fields": {"process": child.name}})
                child.running.kill()
