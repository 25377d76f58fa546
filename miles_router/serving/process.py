"""One process of a router that has several: the control plane, or one that takes requests. The supervisor starts it."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import pickle
import signal
import socket
import sys
from argparse import Namespace
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import uvloop

from miles_router import log, tasks
from miles_router.app import create_app
from miles_router.cluster.control.data import DataDuty
from miles_router.cluster.control.plane import ControlDuty
from miles_router.cluster.control.senders import Senders
from miles_router.cluster.nodes.duty import MachineDuty
from miles_router.cluster.nodes.leases import Seat
from miles_router.cluster.nodes.machines import Machine, Machines
from miles_router.cluster.nodes.membership import Membership
from miles_router.cluster.nodes.plane import MachinesDuty, end_process
from miles_router.cluster.owners.ownership import ClusterOwners
from miles_router.cluster.peers import Peers
from miles_router.errors import ConfigError
from miles_router.fleet.affinity import Affinity
from miles_router.serving.server import raise_file_limit, serve_at
from miles_router.settings.config import RouterConfig

#: What the supervisor is told by a process that does its part; whatever else it is told is why it cannot.
READY = b"ready"
#: And by one that must not stand still, every so many seconds: that it goes on.
ALIVE, BEAT = b"\0", 1.0
#: The status of a control plane that another one, elsewhere, has succeeded: it is not started again.
SUCCEEDED = 3
PR_SET_PDEATHSIG = 1
#: Run by a new interpreter, with the descriptor of what it reads: where modules are, then its assignment.
START = (
    "import os, pickle, sys; given = os.fdopen(int(sys.argv[1]), 'rb'); sys.path[:] = pickle.load(given); "
    "from miles_router.serving.process import main; main(given)"
)


@dataclass(frozen=True)
class Assignment:
    """Where a process stands among those of its router, and what it has inherited."""

    config: RouterConfig
    args: Namespace | None
    #: The number of the process that started it.
    supervisor: int
    #: Of the router's sockets; only its user sees into it.
    directory: Path
    #: Its number among those that take requests; None: it is the control plane.
    index: int | None
    #: No other process of this router has, or had, this number.
    generation: int
    #: Descriptors: where the supervisor is told, and the socket that it listens on.
    status: int
    listener: int | None = None
    #: And the one on which it alone listens.
    own: int | None = None
    #: Where each process that takes requests is reached so.
    urls: tuple[str, ...] = ()
    #: Of several machines: this one; for the control plane, all of them.
    node: Machine | Machines | None = None


def main(given: IO[bytes]) -> None:
    """Do what the supervisor has written."""
    with given:
        assigned: Assignment = pickle.load(given)
    end_with(assigned.supervisor)
    config = assigned.config
    log.configure(config.log_level, config.log_format)
    raise_file_limit()
    status = 0
    try:
        if assigned.index is None:
            _decide(assigned)
        else:
            _serve(assigned, assigned.index)
    except ConfigError as error:
        _tell(assigned, str(error).encode())
        status = 2
    finally:
        log.flush()
    sys.exit(status)


def end_with(supervisor: int) -> None:
    """Have the system kill this process when its supervisor ends, however that comes."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl")
    if os.getppid() != supervisor:  # it has ended before
        os._exit(1)


def _tell(assigned: Assignment, text: bytes) -> None:
    os.write(assigned.status, text)


async def _show_life(assigned: Assignment) -> None:
    os.set_blocking(assigned.status, False)
    while True:
        with contextlib.suppress(BlockingIOError):  # a supervisor that is stopped has enough to read
            _tell(assigned, ALIVE)
        await asyncio.sleep(BEAT)


def _serve(assigned: Assignment, index: int) -> None:
    """Take requests."""
    shown = assigned.node is None and not assigned.config.public_url
    peers = Peers(index, assigned.config.processes, assigned.directory, assigned.urls, shown=shown)
    affinity = Affinity(assigned.config.affinity_names)
    duty: DataDuty
    if isinstance(assigned.node, Machine):
        seat = Seat(assigned.node.life, assigned.node.index, index)
        membership = Membership(
            assigned.node, seat, generation=assigned.generation, fenced=_kill_this, surplus=end_process
        )
        duty = MachineDuty(membership, peers, affinity)
        owners: ClusterOwners = duty.owners
    else:
        duty = DataDuty(peers, generation=assigned.generation)
        owners = ClusterOwners(peers, affinity, Senders(assigned.directory).sends)
    app = create_app(assigned.config, args=assigned.args, duty=duty, owners=owners)
    own = None if assigned.own is None else socket.socket(fileno=assigned.own)
    listener = socket.socket(fileno=assigned.listener)

    def started() -> None:
        _tell(assigned, READY)
        if assigned.node is not None:  # who stands still has lost its leases
            tasks.spawn(_show_life(assigned), name="show life")

    serve_at(app, listener, started, own=own)


def _decide(assigned: Assignment) -> None:
    """Be the control plane."""
    duty = _control(assigned)
    app = duty.edge = create_app(assigned.config, args=assigned.args, duty=duty)
    if app.router.store is not None and assigned.node is None:
        app.router.store.check()

    async def run() -> None:
        stop = asyncio.Event()
        for each in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(each, stop.set)
        showing = tasks.spawn(_show_life(assigned), name="show life")
        try:
            async with app.running():
                _tell(assigned, READY)
                await stop.wait()
        finally:
            await tasks.cancelled(showing)

    _run(run)


def _control(assigned: Assignment) -> ControlDuty:
    machines = assigned.node
    if not isinstance(machines, Machines):
        return ControlDuty(assigned.directory)
    return MachinesDuty(assigned.directory, machines, socket.socket(fileno=assigned.listener), _succeeded)


def _succeeded() -> None:
    """End at once: another control plane decides."""
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
