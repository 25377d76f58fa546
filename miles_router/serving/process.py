"""One process of a router with several processes: the leader or a shard. On one machine the supervisor starts it."""

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
from miles_router.fleet.placement.sessions import Affinity
from miles_router.pools.registrations import check_state
from miles_router.serving.server import raise_file_limit, serve_at
from miles_router.settings.config import RouterConfig
from miles_router.shards.leader import LeaderRole
from miles_router.shards.membership import Membership
from miles_router.shards.owners import ShardOwners
from miles_router.shards.process_table import ProcessTable
from miles_router.shards.shard import ShardRole
from miles_router.shards.topology import Shard, Shards

#: A process writes it to its status pipe when it works. Any other text is the reason why it cannot start.
READY = b"ready"
#: The sign of life that a process then writes, and the seconds between two of them.
ALIVE, BEAT = b"\0", 1.0
#: The exit status of a leader after another leader has taken over.
SUCCEEDED = 3
PR_SET_PDEATHSIG = 1
#: The program of a new process. From the pipe in its argument it reads `sys.path` and its `Assignment`, pickled.
START = (
    "import os, pickle, sys; given = os.fdopen(int(sys.argv[1]), 'rb'); sys.path[:] = pickle.load(given); "
    "from miles_router.serving.process import main; main(given)"
)


@dataclass(frozen=True)
class Assignment:
    """The role of a process in a router, and the descriptors that it inherits.

    Attributes:
        place: a `Shard` for a shard, `Shards` for the leader.
        parent: the process id of its parent; it is killed when the parent ends.
        generation: the number of processes that its parent has started, with this one.
        directory: the directory with the router's sockets; only for the leader on one machine.
        listener: descriptor of the socket to listen on.
        own: descriptor of a second listening socket that no other process uses.
        status: descriptor of the pipe to its parent (`READY`, `ALIVE`, or an error).
    """

    config: RouterConfig
    args: Namespace | None
    place: Shards | Shard
    parent: int
    generation: int
    status: int = -1
    directory: Path | None = None
    listener: int | None = None
    own: int | None = None


def spawn(assigned: Assignment, output: IO[bytes] | None = None) -> tuple[subprocess.Popen[bytes], int]:
    """Start a process for an assignment. Return it and the reading end of its status pipe.

    Args:
        assigned: the assignment; `status` is set here.
        output: the file for its stdout and stderr; None: the stdout and stderr of this process.

    Raises:
        ConfigError: the settings cannot be pickled.
        OSError: the system has no memory, descriptor or process left.
    """
    with contextlib.ExitStack() as kept, contextlib.ExitStack() as given:
        (theirs, write), (read, status) = _pipe(given, kept), _pipe(kept, given)
        assigned = replace(assigned, status=status)
        try:
            text = pickle.dumps(sys.path) + pickle.dumps(assigned)
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            raise ConfigError(f"processes: the settings cannot be passed to another process: {error}") from None
        inherited = [each for each in (status, assigned.listener, assigned.own) if each is not None]
        running = subprocess.Popen(
            [sys.executable, "-c", START, str(theirs)],
            pass_fds=[theirs, *inherited],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,  # Ctrl-C reaches only the parent, which then stops its children
        )
        kept.pop_all()
    with os.fdopen(write, "wb") as pipe, contextlib.suppress(BrokenPipeError):
        pipe.write(text)
    return running, read


def _pipe(reading: contextlib.ExitStack, writing: contextlib.ExitStack) -> tuple[int, int]:
    """Return a pipe's reading and writing end; each is closed with its stack."""
    ends = os.pipe()
    for stack, end in zip((reading, writing), ends, strict=True):
        stack.callback(os.close, end)
    return ends


def main(given: IO[bytes]) -> None:
    """Run the assignment that the parent writes to the pipe. Called by `START` in the new process."""
    with given:
        assigned: Assignment = pickle.load(given)
    die_with_parent(assigned.parent)
    config, place = assigned.config, assigned.place
    log.configure(config.log_level, config.log_format)
    raise_file_limit()
    listener, own = (None if each is None else socket.socket(fileno=each) for each in (assigned.listener, assigned.own))
    status = 0

    def report_alive() -> asyncio.Task[None]:
        return tasks.spawn(_report_alive(assigned), name="show life")

    def ready() -> None:
        _report(assigned, READY)

    def started() -> None:
        ready()
        report_alive()

    try:
        if isinstance(place, Shard):
            assert listener is not None
            serve_shard(config, assigned.args, place, listener, own, started)
        else:
            term = assigned.generation if place.local else None
            run_leader(config, assigned.args, place, assigned.directory, listener, term, report_alive, ready)
    except ConfigError as error:
        _report(assigned, str(error).encode())
        status = 2
    finally:
        log.flush()
    sys.exit(status)


def die_with_parent(parent: int) -> None:
    """Make the kernel kill this process when its parent ends, for whatever reason."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl")
    if os.getppid() != parent:  # the parent ended before the call
        os._exit(1)


def _report(assigned: Assignment, text: bytes) -> None:
    os.write(assigned.status, text)


async def _report_alive(assigned: Assignment) -> None:
    os.set_blocking(assigned.status, False)
    while True:
        with contextlib.suppress(BlockingIOError):  # the pipe is full while the supervisor is stopped
            _report(assigned, ALIVE)
        await asyncio.sleep(BEAT)


def serve_shard(
    config: RouterConfig,
    args: Namespace | None,
    shard: Shard,
    listener: socket.socket,
    own: socket.socket | None = None,
    started: Callable[[], None] = lambda: None,
) -> None:
    """Run a shard until SIGTERM or SIGINT.

    Raises:
        ConfigError: a setting is invalid.
    """
    membership = Membership(shard, os.getpid(), _kill_this)
    is_running: Callable[[int], bool] = lambda other: membership.url_of(other) is not None  # noqa: E731  # as a value
    if shard.shards.local:
        table = ProcessTable(shard.directory)
        membership.before_start = partial(table.record_start, shard.index)
        is_running = lambda other: table.process_id(other) != 0  # noqa: E731
    affinity = Affinity(config.affinity_names)
    owners = ShardOwners(shard, affinity, url_of=membership.url_of, is_running=is_running, check=membership.check)
    membership.on_shard_lost = owners.forwarding.abort_requests
    app = create_app(config, args=args, role=ShardRole(membership), owners=owners)
    serve_at(app, listener, started, own=own)


def run_leader(
    config: RouterConfig,
    args: Namespace | None,
    shards: Shards,
    directory: Path | None,
    listener: socket.socket | None,
    term: int | None,
    background: Callable[[], asyncio.Task[None]] | None = None,
    ready: Callable[[], None] = lambda: None,
) -> None:
    """Run the leader until SIGTERM or SIGINT.

    Args:
        directory, listener, term: see `LeaderRole`.
        background: starts a task that is cancelled when the leader stops.
        ready: called once the leader works.

    Raises:
        ConfigError: a setting is invalid.
    """
    role = LeaderRole(shards, directory=directory, listener=listener, term=term, on_replaced=_succeeded)
    app = role.edge = create_app(config, args=args, role=role)
    if app.router.store is not None and not shards.shared_state:
        check_state(app.router.store, config.model_id)

    async def run() -> None:
        stop = asyncio.Event()
        for each in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(each, stop.set)
        running = None if background is None else background()
        try:
            async with app.running():
                ready()
                await stop.wait()
        finally:
            if running is not None:
                await tasks.cancelled(running)

    _run(run)


def _succeeded() -> None:
    """Exit at once, because another leader has taken over."""
    log.flush()
    os._exit(SUCCEEDED)


def _kill_this() -> None:
    """Kill this process at once, because its state may be out of date."""
    log.flush()
    os.kill(os.getpid(), signal.SIGKILL)


def _run(work: Callable[[], object]) -> None:
    loop = uvloop.new_event_loop()
    try:
        loop.run_until_complete(work())
    finally:
        loop.close()
