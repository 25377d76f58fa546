"""The supervisor of a router with several processes: it starts them, restarts those that die, and stops all.

It serves no requests and makes no decisions, so that little can make it fail. Each shard has its own socket on the
router's port (SO_REUSEPORT). The supervisor keeps these sockets open: when a shard dies, new connections wait in its
socket for its successor.
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
from miles_router.shards.process_table import ProcessTable
from miles_router.shards.topology import Shard, Shards

logger = logging.getLogger(__name__)

#: The first and the longest delay (seconds) before a process that dies repeatedly is restarted; it doubles each time.
FIRST_DELAY, MAX_DELAY = 0.1, 5.0
#: After STABLE_SECONDS of work, the count of deaths starts again at 1. A count above MAX_QUICK_DEATHS is an error.
STABLE_SECONDS, MAX_QUICK_DEATHS = 10.0, 3
#: Number of checks, one per `BEAT` seconds, without a sign of life after which a process is killed.
MAX_SILENT_CHECKS = 10
#: Seconds after `shutdown_timeout` at which the remaining processes are killed.
KILL_AFTER = 10.0
STATUS_BYTES = 4096
#: The host at which the processes reach each other.
LOOPBACK = "127.0.0.1"
#: The directory for the router's sockets is in memory, so that it needs no disk.
MEMORY = Path("/dev/shm")


def supervise(config: RouterConfig, args: Namespace | None) -> None:
    """Serve with several processes until SIGTERM or SIGINT; requests in flight get `shutdown_timeout` s to finish.

    Raises:
        ConfigError: a setting is invalid.
        SystemExit: status 1, if a process could not be started or did not stop in order.
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
    """Create two listening sockets for each shard: one on the router's port and one on a port of its own."""
    # First without SO_REUSEPORT, to find out that the port is free: with it, two routers could share one port.
    with listen(config.host, config.port) as alone:
        port = alone.getsockname()[1]
    shared = [listen(config.host, port, shared=True) for _ in range(config.processes)]
    return Sockets(shared, [listen(own_host, 0) for _ in range(config.processes)])


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()


class Sockets(NamedTuple):
    """The listening sockets, by shard: on the router's port (`shared`) and on a port of the shard's own (`own`)."""

    shared: list[socket.socket]
    own: list[socket.socket]

    def close(self) -> None:
        for each in (*self.shared, *self.own):
            each.close()

    def urls(self) -> tuple[str, ...]:
        """Return the URL of each shard's own port, for use on this machine."""
        return tuple(f"http://{_host_and_port(*each.getsockname()[:2])}" for each in self.own)


def _host_and_port(host: str, port: int) -> str:
    """Return `host:port` for the URL of a socket; loopback for a socket that is bound to all addresses."""
    host = {"0.0.0.0": LOOPBACK, "::": "::1"}.get(host, host)
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


class Child:
    """The state of one process. An `index` of None means the leader."""

    def __init__(self, index: int | None) -> None:
        self.index = index
        self.name = "leader" if index is None else f"shard {index}"
        self.running: subprocess.Popen[bytes] | None = None
        self.watched: list[int] = []
        self.status_text = b""
        #: The time (`time.monotonic`) when it reported that it works.
        self.ready_at: float | None = None
        #: Checks since its last sign of life; None before the first one.
        self.silent_checks: int | None = None
        #: Deaths in a row with less than STABLE_SECONDS of work in between.
        self.deaths = 0

    @property
    def ready(self) -> bool:
        return self.ready_at is not None


class Supervisor:
    """A supervisor of the processes of one router."""

    def __init__(
        self,
        config: RouterConfig,
        args: Namespace | None,
        sockets: Sockets,
        directory: Path,
    ) -> None:
        #: The configuration error that prevents the start.
        self.refusal: str | None = None
        #: True if a process did not start, or did not stop in order.
        self.failed = False
        self._config = config
        self._args = args
        self._sockets = sockets
        self._table = ProcessTable(directory, config.processes)
        self._shards = Shards(config.processes)
        self._directory = directory
        self._generation = 0
        self._leader = Child(None)
        self._shard_children = [Child(index) for index in range(config.processes)]
        self._children = [self._leader, *self._shard_children]
        self._shown = False
        self._ending = False
        self._timers: set[asyncio.TimerHandle] = set()

    async def run(self) -> None:
        """Start all processes; return when all have ended."""
        self._loop = asyncio.get_running_loop()
        self._all_ended = asyncio.Event()
        for each in (signal.SIGTERM, signal.SIGINT):
            self._loop.add_signal_handler(each, self._stop)
        watching = tasks.spawn(self._watch(), name="signs of life")
        try:
            for child in self._children:
                self._start(child)
            await self._all_ended.wait()
        finally:
            await tasks.cancelled(watching)
            for timer in self._timers:
                timer.cancel()
            for child in self._children:
                if child.running is not None:
                    _end(child.running)

    # Starting

    def _start(self, child: Child) -> None:
        """Start the process.

        Raises:
            OSError: the system has no memory, descriptor or process left.
        """
        self._generation += 1
        running, read = spawn(
            Assignment(
                config=self._config,
                args=self._args,
                place=self._shards if child.index is None else self._shard(child.index),
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
        child.running, child.ready_at, child.silent_checks, child.status_text = running, None, None, b""
        child.watched = [ended, read]
        self._loop.add_reader(read, self._read_status, child, read)
        self._loop.add_reader(ended, self._handle_exit, child)

    def _shard(self, index: int) -> Shard:
        urls = self._sockets.urls()
        return Shard(self._shards, index, self._directory, urls[index], shown=not self._config.public_url, urls=urls)

    def _read_status(self, child: Child, status: int) -> None:
        text = os.read(status, STATUS_BYTES)
        if not text:
            self._loop.remove_reader(status)
        if ALIVE in text:
            child.silent_checks = 0
        child.status_text += text.replace(ALIVE, b"")
        if child.status_text == READY and not child.ready:
            child.ready_at = time.monotonic()
        if child.ready and not self._shown and all(each.ready for each in self._children):
            self._shown = True
            address = self._sockets.shared[0].getsockname()
            log.show(banner(self._config, address))

    async def _watch(self) -> None:
        """Kill processes without signs of life, so that they are restarted. No other process would notice."""
        while True:
            await asyncio.sleep(BEAT)
            for child in self._children:
                if child.running is None or child.silent_checks is None:
                    continue
                child.silent_checks += 1
                if child.silent_checks == MAX_SILENT_CHECKS:
                    logger.error("process_hangs", extra={"fields": {"process": child.name}})
                    child.running.kill()

    # Ending

    def _handle_exit(self, child: Child) -> None:
        """Handle the end of a process: continue stopping, give up the start, or restart it."""
        assert child.running is not None
        if child.index is not None:
            self._table.record_end(child.index)  # before `wait` frees its process id for reuse
        status = child.running.wait()
        read = child.watched[1]
        with contextlib.suppress(BlockingIOError):
            os.set_blocking(read, False)
            self._read_status(child, read)
        for each in child.watched:
            self._loop.remove_reader(each)
            os.close(each)
        child.running = None
        if self._ending:
            # A process that is still starting, or has finished its work, may die of SIGTERM.
            self.failed |= child.ready and status not in (0, -signal.SIGTERM)
            self._continue_stopping()
        elif not self._shown:
            self._give_up(child, status)
        else:
            self._start_again(child, status)

    def _give_up(self, child: Child, status: int) -> None:
        """Stop, because a process could not start. The first process that reports a reason determines the error."""
        if self._all_ended.is_set():
            return
        if child.status_text and not child.ready:
            self.refusal = self.refusal or child.status_text.decode(errors="replace")
        else:
            logger.error("process_did_not_start", extra={"fields": {"process": child.name, "status": status}})
            self.failed = True
        self._all_ended.set()

    def _start_again(self, child: Child, status: int) -> None:
        lasted = child.ready_at is not None and time.monotonic() - child.ready_at >= STABLE_SECONDS
        child.deaths = 1 if lasted else child.deaths + 1
        wait = 0.0 if child.deaths == 1 else min(MAX_DELAY, FIRST_DELAY * 2 ** (child.deaths - 2))
        again = child.deaths > MAX_QUICK_DEATHS
        fields = {"process": child.name, "status": status, "again_in": wait, "in_a_row": child.deaths}
        event = "process_dies_again_and_again" if again else "process_died"
        logger.log(logging.ERROR if again else logging.WARNING, event, extra={"fields": fields})
        self._timers.add(self._loop.call_later(wait, self._start_unless_ending, child))

    def _start_unless_ending(self, child: Child) -> None:
        if self._ending:
            return
        try:
            self._start(child)
        except OSError as error:  # no memory or descriptors: try again later, they may become free
            fields = {"process": child.name, "reason": str(error), "again_in": MAX_DELAY}
            logger.error("process_not_started", extra={"fields": fields})
            self._timers.add(self._loop.call_later(MAX_DELAY, self._start_unless_ending, child))

    def _stop(self) -> None:
        self._sockets.close()  # or clients would still connect to them
        self._drain()

    def _drain(self) -> None:
        """Stop all processes. A second call sends SIGTERM again, on which the shards stop without waiting."""
        first, self._ending = not self._ending, True
        if first:
            patience = self._config.shutdown_timeout + KILL_AFTER
            self._timers.add(self._loop.call_later(patience, self._kill_all))
        for child in self._shard_children:
            if child.running is not None:
                child.running.terminate()
        self._continue_stopping()

    def _continue_stopping(self) -> None:
        """Stop the leader when all shards have ended."""
        if all(child.running is None for child in self._shard_children):
            if self._leader.running is None:
                self._all_ended.set()
            else:
                self._leader.running.terminate()

    def _kill_all(self) -> None:
        for child in self._children:
            if child.running is not None:
                logger.error("process_does_not_end", extra={"fields": {"process": child.name}})
                child.running.kill()
