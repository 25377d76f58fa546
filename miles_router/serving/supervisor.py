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
import pickle
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from argparse import Namespace
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from miles_router import log, tasks
from miles_router.cluster.control.senders import Senders
from miles_router.cluster.nodes.machines import Machine, Machines
from miles_router.errors import ConfigError
from miles_router.serving.process import ALIVE, BEAT, READY, START, SUCCEEDED, Assignment
from miles_router.serving.server import banner, listen, raise_file_limit
from miles_router.settings.config import RouterConfig

logger = logging.getLogger(__name__)

#: Seconds before what dies at once is started again: the first time, and at most.
SOON, LATEST = 0.1, 5.0
#: Seconds that a process must have done its part to have died by chance; as often it may die sooner before that is an
#: error.
LASTING, CHANCES = 10.0, 3
#: Looks, one in `BEAT` seconds, without a sign of life of a process that gives them, until it is killed.
SILENT = 10
#: Seconds beside `shutdown_timeout` in which all must have ended.
SPARE = 10.0
STATUS_BYTES = 4096
#: Where processes reach each other on one machine.
LOOPBACK = "127.0.0.1"
#: A directory in memory: nothing of the router touches the disk.
MEMORY = Path("/dev/shm")


def supervise(
    config: RouterConfig,
    args: Namespace | None,
    part: Machine | Machines | None = None,
    listening: Callable[[int], None] = lambda port: None,
) -> None:
    """Serve with several processes until SIGTERM or SIGINT; requests in flight get `shutdown_timeout` seconds.

    Args:
        part: where the router has several machines, what is done here: the requests of one of them, or the control
            plane of all.
        listening: hears the port, before anything is served.

    Raises:
        ConfigError: a setting that cannot be used.
        SystemExit: with 1, where a process could not be started, or not ended in order.
    """
    raise_file_limit()
    with contextlib.ExitStack() as held:
        count = 1 if isinstance(part, Machines) else config.processes
        shown = part is None and not config.public_url
        sockets = _listeners(config, count, own_host=config.host if shown else LOOPBACK)
        held.callback(sockets.close)
        port = sockets.shared[0].getsockname()[1]
        listening(port)
        if isinstance(part, Machine):
            part = replace(part, url=f"http://{part.host}:{port}")
        supervisor = _supervised(config, args, sockets, part)
    if supervisor.refusal is not None:
        raise ConfigError(supervisor.refusal)
    if supervisor.failed:
        sys.exit(1)


def _supervised(
    config: RouterConfig,
    args: Namespace | None,
    sockets: Sockets,
    part: Machine | Machines | None,
) -> Supervisor:
    with contextlib.ExitStack() as held:
        directory = Path(tempfile.mkdtemp(prefix="miles-router-", dir=MEMORY if MEMORY.is_dir() else None))
        held.callback(shutil.rmtree, directory, ignore_errors=True)
        supervisor = Supervisor(config, args, sockets, directory, part)
        asyncio.run(supervisor.run())
        log.flush()
        return supervisor


def _listeners(config: RouterConfig, count: int, own_host: str) -> Sockets:
    """Listen for each process on the router's port, which nobody has beside them, and on a port of its own."""
    with listen(config.host, config.port) as alone:  # a shared one would be shared with another router, too
        port = alone.getsockname()[1]
    shared = [listen(config.host, port, shared=True) for _ in range(count)]
    return Sockets(shared, [listen(own_host, 0) for _ in range(count)])


def _pipe(reading: contextlib.ExitStack, writing: contextlib.ExitStack) -> tuple[int, int]:
    """A pipe's ends, each of which is closed with its stack."""
    ends = os.pipe()
    for stack, end in zip((reading, writing), ends, strict=True):
        stack.callback(os.close, end)
    return ends


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
    """A process, and what is known of it. `index` None: the control plane."""

    def __init__(self, index: int | None) -> None:
        self.index = index
        self.name = "control" if index is None else f"data {index}"
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
        part: Machine | Machines | None,
    ) -> None:
        #: Why the router cannot start, where that is for the user to change.
        self.refusal: str | None = None
        #: Whether something went otherwise than it should.
        self.failed = False
        self._config = config
        self._args = args
        self._sockets = sockets
        self._senders = Senders(directory, config.processes)
        self._part = part
        #: Only the control plane of several machines is run here.
        self._decides = isinstance(part, Machines)
        self._directory = directory
        self._generation = 0
        self._control = Child(None)
        self._data = [Child(index) for index in range(config.processes)]
        if self._decides:
            self._data.clear()
        self._children = [*([] if isinstance(part, Machine) else [self._control]), *self._data]
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
        with contextlib.ExitStack() as kept, contextlib.ExitStack() as given:
            (theirs, write), (read, status) = _pipe(given, kept), _pipe(kept, given)
            text, inherited = self._assigned(child, status)
            running = subprocess.Popen(
                [sys.executable, "-c", START, str(theirs)],
                pass_fds=[theirs, *inherited],
                stdin=subprocess.DEVNULL,
                start_new_session=True,  # Ctrl-C is for the supervisor, which tells them
            )
            kept.callback(_end, running)
            ended = os.pidfd_open(running.pid)
            kept.pop_all()
        with os.fdopen(write, "wb") as pipe, contextlib.suppress(BrokenPipeError):
            pipe.write(text)
        child.running, child.ready_at, child.silent, child.told = running, None, None, b""
        child.watched = [ended, read]
        self._loop.add_reader(read, self._hear, child, read)
        self._loop.add_reader(ended, self._ended, child)

    def _assigned(self, child: Child, status: int) -> tuple[bytes, list[int]]:
        """What it reads, and the descriptors that it inherits."""
        self._generation += 1
        shared, own_ones = self._sockets
        listener = None if child.index is None and not self._decides else shared[child.index or 0].fileno()
        own = None if child.index is None else own_ones[child.index].fileno()
        assigned = Assignment(
            config=self._config,
            args=self._args,
            supervisor=os.getpid(),
            directory=self._directory,
            index=child.index,
            generation=self._generation,
            status=status,
            listener=listener,
            own=own,
            urls=self._sockets.urls(),
            node=self._part,
        )
        try:
            text = pickle.dumps(sys.path) + pickle.dumps(assigned)
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            raise ConfigError(f"processes: the settings cannot be given to another process: {error}") from None
        return text, [each for each in (status, listener, own) if each is not None]

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
            log.show(f"control plane {address[1]}" if self._decides else banner(self._config, address))

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
        status = child.running.wait()
        read = child.watched[1]
        with contextlib.suppress(BlockingIOError):
            os.set_blocking(read, False)
            self._hear(child, read)
        for each in child.watched:
            self._loop.remove_reader(each)
            os.close(each)
        child.running = None
        if child.index is not None:
            self._senders.end(child.index)
        if self._ending:
            # Who still starts, or has done all, dies of the order to end.
            self.failed |= child.ready and status not in (0, -signal.SIGTERM)
            self._go_on_ending()
        elif self._decides and status == SUCCEEDED:
            self.failed = True
            self._over.set()
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
        """The control plane ends behind those that follow it."""
        if all(child.running is None for child in self._data):
            if self._control.running is None:
                self._over.set()
            else:
                self._control.running.terminate()

    def _kill_all(self) -> None:
        for child in self._children:
            if child.running is not None:
                logger.error("process_does_not_end", extra={"fields": {"process": child.name}})
                child.running.kill()
