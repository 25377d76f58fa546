"""Ports for processes that must be told theirs: from below those that the system gives to connections, and for one test
process of this machine at a time."""

from __future__ import annotations

import contextlib
import fcntl
import functools
import random
import socket
import tempfile
from pathlib import Path
from typing import IO

FIRST, LAST, BLOCK = 20_000, 32_000, 8
_locks: list[IO[str]] = []  # until this process ends


def free_ports(count: int) -> list[int]:
    """Ports in a row, at most `BLOCK`, that nobody listens on and no other test process is given."""
    assert count <= BLOCK
    while True:
        ports = _taken(random.SystemRandom().randrange(FIRST, LAST, BLOCK))[:count]
        with contextlib.suppress(OSError), contextlib.ExitStack() as stack:
            for port in ports:
                stack.enter_context(socket.socket()).bind(("127.0.0.1", port))
            if ports:
                return ports


def _taken(first: int) -> list[int]:
    """A block of ports; none where another process has it."""
    lock = (_directory() / str(first)).open("w")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        lock.close()
        return []
    _locks.append(lock)
    return list(range(first, first + BLOCK))


@functools.cache
def _directory() -> Path:
    directory = Path(tempfile.gettempdir()) / "miles-router-test-ports"
    directory.mkdir(exist_ok=True)
    return directory
