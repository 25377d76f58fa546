"""One process of a router that has several: the leader, or a shard. On one machine the supervisor starts it."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import pickle
import signal
import socket
import subprocess
import sys
from argparse import Namespace
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import IO

import uvloop

from miles_router import log, tasks
from miles_router.app import create_app
from miles_router.errors import ConfigError
from miles_router.fleet.affinity import Affinity
from miles_router.serving.server import raise_file_limit, serve_at
from miles_router.settings.config import RouterConfig
from miles_router.shards.leader import LeaderDuty
from miles_router.shards.membership import Membership
from miles_router.shards.owners import ShardOwners
from miles_router.shards.places import Seat, Shards
from miles_router.shards.senders import Senders
from miles_router.shards.shard import ShardDuty

#: What the supervisor is told by a process that does its part; whatever else it is told is why it cannot.
READY = b"ready"
#: And every so many seconds: that it goes on.
ALIVE, BEAT = b"\0", 1.0
#: The status of a leader that another one, elsewhere, has succeeded.
SUCCEEDED = 3
PR_SET_PDEATHSIG = 1
#: Run by a new interpreter, with the descriptor of what it reads: where modules are, then its assignment.
START = (
    "import os, pickle, sys; given = os.fdopen(int(sys.argv[1]), 'rb'); sys.path[:] = pickle.load(given); "
    "from miles_router.serving.process import main; main(given)"
)


@dataclass(frozen=True)
class Assignment:
    """A process's part of a router, and what it has inherited.

    Attributes:
        place: the seat of a shard; of the leader, all of them.
        parent: the id of the process that started it, with which it ends.
        generation: no other process of this router on this machine has, or had, it.
        directory: of the leader of one machine: where the router's sockets are.
        listener, own, status: descriptors: the socket that it listens on, another on which it alone listens, and where
            its parent is told.
    """

    config: RouterConfig
    args: Namespace | None
    place: Shards | Seat
    parent: int
    generation: int
    status: int = -1
    directory: Path | None = None
    listener: int | None = None
    own: int | None = None


def spawn(assigned: Assignment, output: IO[bytes] | None = None) -> tuple[subprocess.Popen[bytes], int]:
    """Start a process that does its part, and return it and the descriptor of what it tells.

    Args:
        assigned: its `status` is made here.
        output: where it logs; None: where this process does.

    Raises:
        ConfigError: the settings cannot be given to another process.
        OSError: the system has no room for it.
    """
    with contextlib.ExitStack() as kept, contextlib.ExitStack() as given:
        (theirs, write), (read, status) = _pipe(given, kept), _pipe(kept, given)
        assigned = replace(assigned, status=status)
        try:
            text = pickle.dumps(sys.path) + pickle.dumps(assigned)
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            raise ConfigError(f"processes: the settings cannot be given to another process: {error}") from None
        inherited = [each for each in (status, assigned.listener, assigned.own) if each is not None]
        running = subprocess.Popen(
            [sys.executable, "-c", START, str(theirs)],
            pass_fds=[theirs, *inherited],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,  # Ctrl-C is for the parent, which tells them
        )
        kept.pop_all()
    with os.fdopen(write, "wb") as pipe, contextlib.suppress(BrokenPipeError):
        pipe.write(text)
    return running, read


def _pipe(reading: contextlib.ExitStack, writing: contextlib.ExitStack) -> tuple[int, int]:
    """Return a pipe's ends, each of which is closed with its stack."""
    ends = os.pipe()
    for stack, end in zip((reading, writing), ends, strict=True):
        stack.callback(os.close, end)
    return ends


def main(given: IO[bytes]) -> None:
    """Do what the parent has written."""
    with given:
        assigned: Assignment = pickle.load(given)
    end_with(assigned.parent)
    config, place = assigned.config, assigned.place
    log.configure(config.log_level, config.log_format)
    raise_file_limit()
    listener, own = (None if each is None else socket.socket(fileno=each) for each in (assigned.listener, assigned.own))
    status = 0

    def show_life() -> asyncio.Task[None]:
        return tasks.spawn(_show_life(assigned), name="show life")

    def ready() -> None:
        _tell(assigned, READY)

    def started() -> None:
        ready()
        show_life()

    try:
        if isinstance(place, Seat):
            assert listener is not None
            serve_shard(config, assigned.args, place, assigned.generation, listener, own, started)
        else:
            term = assigned.generation if place.local else None
            run_leader(config, assigned.args, place, assigned.directory, listener, term, show_life, ready)
    except ConfigError as error:
        _tell(assigned, str(error).encode())
        status = 2
    finally:
        log.flush()
    sys.exit(status)


def end_with(parent: int) -> None:
    """Have the system kill this process when the one that started it ends, however that comes."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl")
    if os.getppid() != parent:  # it has ended before
        os._exit(1)


def _tell(assigned: Assignment, text: bytes) -> None:
    os.write(assigned.status, text)


async def _show_life(assigned: Assignment) -> None:
    os.set_blocking(assigned.status, False)
    while True:
        with contextlib.suppress(BlockingIOError):  # a supervisor that is stopped has enough to read
            _tell(assigned, ALIVE)
        await asyncio.sleep(BEAT)


def serve_shard(
    config: RouterConfig,
    args: Namespace | None,
    seat: Seat,
    generation: int,
    listener: socket.socket,
    own: socket.socket | None = None,
    started: Callable[[], None] = lambda: None,
) -> None:
    """Take requests in a seat, until SIGTERM or SIGINT.

    Raises:
        ConfigError: a setting that cannot be used.
    """
    local = seat.shards.local
    membership = Membership(seat, os.getpid(), _kill_this)
    is_there: Callable[[int], bool] = lambda other: membership.url_of(other) is not None  # noqa: E731  # as a value
    if local:
        senders = Senders(seat.directory)
        membership.begins = partial(senders.begin, seat.index)
        is_there = lambda other: senders.process(other) != 0  # noqa: E731
    affinity = Affinity(config.affinity_names)
    check = None if local else membership.check
    owners = ShardOwners(seat, affinity, url_of=membership.url_of, is_there=is_there, check=check)
    membership.lost = owners.lost
    app = create_app(config, args=args, duty=ShardDuty(membership, generation=generation), owners=owners)
    serve_at(app, listener, started, own=own)


def run_leader(
    config: RouterConfig,
    args: Namespace | None,
    shards: Shards,
    directory: Path | None,
    listener: socket.socket | None,
    term: int | None,
    beside: Callable[[], asyncio.Task[None]] | None = None,
    ready: Callable[[], None] = lambda: None,
) -> None:
    """Lead, until SIGTERM or SIGINT.

    Args:
        directory, listener, term: as of `LeaderDuty`.
        beside: starts what runs as long as it does.
        ready: called once it decides.

    Raises:
        ConfigError: a setting that cannot be used.
    """
    duty = LeaderDuty(shards, directory=directory, listener=listener, term=term, ended=_succeeded)
    app = duty.edge = create_app(config, args=args, duty=duty)
    if app.router.store is not None and not shards.shared_state:
        app.router.store.check()

    async def run() -> None:
        stop = asyncio.Event()
        for each in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(each, stop.set)
        running = None if beside is None else beside()
        try:
            async with app.running():
                ready()
                await stop.wait()
        finally:
            if running is not None:
                await tasks.cancelled(running)

    _run(run)


def _succeeded() -> None:
    """End at once: another leader decides."""
    log.flush()
    os._exit(SUCCEEDED)


def _kill_this() -> None:
    """End at once: what this process knows may be no longer true."""
    log.flush()
    os.kill(os.getpid(), signal.SIGKILL)


def _run(work: Callable[[], object]) -> None:
    loop = uvloop.new_event_loop()
    try:
        loop.run_until_complete(work())
    finally:
        loop.close()
