"""How a new version takes the place of an old one: on SIGUSR2 the supervisor drains all, and becomes the command that
is installed then. It keeps its sockets, so that clients who come meanwhile wait in them and nobody is refused.

Two versions never run beside each other: there is one control plane, and one holder of what outlives the processes.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
from collections.abc import Iterable
from typing import NamedTuple, NoReturn

#: An environment variable: the descriptors of the sockets on the router's port, and behind a slash the processes' own.
KEPT = "_MILES_ROUTER_SOCKETS"
#: Looks at the settings and imports all middlewares.
LOOK = "middlewares"


class Sockets(NamedTuple):
    """What clients connect to: a socket for each process on the router's port, and one on a port of its own."""

    shared: list[socket.socket]
    own: list[socket.socket]

    def close(self) -> None:
        """Take no more clients."""
        for each in (*self.shared, *self.own):
            each.close()


def kept() -> Sockets:
    """What the supervisor before this one has left in this process; nothing, at a first start."""
    shared, _, own = os.environ.pop(KEPT, "").partition("/")
    return Sockets(*([socket.socket(fileno=int(each)) for each in text.split(",") if each] for text in (shared, own)))


async def refusal() -> str | None:
    """Why the command that is installed now would not start; None: it would."""
    arguments = sys.argv[1:]
    before = sys.orig_argv[1 : len(sys.orig_argv) - len(arguments)]
    looking = await asyncio.create_subprocess_exec(
        sys.executable,
        *(*before, LOOK, *arguments),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.PIPE,
    )
    _, said = await looking.communicate()
    return said.decode(errors="replace").strip() or f"status {looking.returncode}" if looking.returncode else None


def become_the_next(sockets: Sockets) -> NoReturn:
    """Be the command that is installed now, in this process and with these sockets."""
    for each in (*sockets.shared, *sockets.own):
        each.set_inheritable(True)
    os.environ[KEPT] = f"{_named(sockets.shared)}/{_named(sockets.own)}"
    signal.signal(signal.SIGUSR2, signal.SIG_IGN)  # until the next one listens to it
    os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])


def _named(sockets: Iterable[socket.socket]) -> str:
    return ",".join(str(each.fileno()) for each in sockets)
