"""The seats of a router's shards, as each of its processes knows them."""

from __future__ import annotations

import math
import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from miles_router.slots import SLOTS

#: Seconds of a lease, where shards run on several machines.
LEASE = 8.0
#: The name of the leader's socket, in the directory of one machine's processes.
SOCKET = "leader"


@dataclass(frozen=True)
class Shards:
    """All shards of one router.

    Attributes:
        count: how many; fixed while the router runs.
        lease: seconds for which a shard may act without hearing from the leader; infinite on one machine, where
            whoever starts a shard sees the one before it end.
        secret: known to the leader and the shards alone; they show each other that they know it.
        shared_state: all have the same state directory.
    """

    count: int
    lease: float = math.inf
    secret: str = field(default="", repr=False)
    shared_state: bool = False

    @property
    def local(self) -> bool:
        """Whether all run on one machine."""
        return math.isinf(self.lease)

    def owner_of(self, slot: int) -> int:
        """Return the seat that a slot belongs to."""
        return slot % self.count


@dataclass(frozen=True)
class Seat:
    """One of them.

    Attributes:
        index: from 0.
        directory: outlives each process in this seat, and only this user may enter it. On one machine it is that of all
            seats, and lies in memory (`/dev/shm`) where nothing is to touch the disk.
        url: where this seat alone is reached, by the others at least.
        urls: the same of all seats, where that never changes: whoever asks there waits until somebody is in the seat.
        leader: on several machines, `host:port`, or a file that says so.
        shown: whether clients may know the `url`.
    """

    shards: Shards
    index: int
    directory: Path
    url: str
    leader: str | Path = ""
    shown: bool = True
    urls: Sequence[str] = ()

    @property
    def others(self) -> tuple[int, ...]:
        """The indices of all but this one."""
        return tuple(index for index in range(self.shards.count) if index != self.index)

    @property
    def slots(self) -> frozenset[int]:
        """Those that belong to it."""
        return frozenset(slot for slot in range(SLOTS) if self.shards.owner_of(slot) == self.index)


def chance_generation() -> int:
    """Return a number for a process of which nobody counts how many were started before it."""
    return secrets.randbits(31)


def clock() -> float:
    """Return seconds that go on while a process is stopped, or its machine asleep."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)
