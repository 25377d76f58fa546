"""What a process knows of the machines of its router."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from pathlib import Path

#: Seconds of a lease.
LEASE = 8.0


@dataclass(frozen=True)
class Machines:
    """How many there are, and what all of them know.

    Attributes:
        count: machines.
        processes: that take requests, on each.
        secret: known to them alone.
        lease: seconds for which a process may act without hearing from the control plane.
    """

    count: int
    processes: int
    secret: str = field(repr=False)
    lease: float = LEASE


@dataclass(frozen=True)
class Machine:
    """One of the machines, as its processes know it.

    Attributes:
        index: its number.
        life: of whoever starts its processes; no other has, or had, it.
        host: by which the others reach it.
        url: where they do; known once it listens.
        control: a file that says where the control plane listens.
    """

    machines: Machines
    index: int
    life: str
    host: str
    control: Path
    url: str = ""


def clock() -> float:
    """Seconds that go on while a process is stopped, or its machine asleep."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)
