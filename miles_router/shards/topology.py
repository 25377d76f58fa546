"""The shards of a router, as each process knows them."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from miles_router.slots import SLOTS

#: Seconds of a lease, if shards run on several machines.
LEASE = 8.0
#: The name of the leader's socket in the directory of a machine's processes.
SOCKET = "leader"


@dataclass(frozen=True)
class Shards:
    """All shards of one router.

    Attributes:
        count: the number of shards; fixed while the router runs.
        lease: seconds for which a shard may act without hearing from the leader. Infinite on one machine, where the
            parent sees a shard end before it starts the next.
        secret: known only to the leader and the shards, which prove to each other that they know it.
        shared_state: all processes use the same state directory.
    """

    count: int
    lease: float = math.inf
    secret: str = field(default="", repr=False)
    shared_state: bool = False

    @property
    def local(self) -> bool:
        """Whether all shards run on one machine."""
        return math.isinf(self.lease)

    def owner_of(self, slot: int) -> int:
        """Return the index of the shard that owns a slot."""
        return slot % self.count


@dataclass(frozen=True)
class Shard:
    """One shard, independent of the process that serves as it.

    Attributes:
        index: from 0.
        directory: survives each process of this shard; only this user may enter it. On one machine all shards share it.
            It lies in memory (`/dev/shm`) if nothing may touch the disk.
        url: reaches this shard alone, at least from the other shards.
        urls: the URLs of all shards, if they never change. A request to a shard without a process then
            waits until one starts.
        leader: on several machines, `host:port`, or a file that contains it.
        shown: whether clients may see the `url`.
    """

    shards: Shards
    index: int
    directory: Path
    url: str
    leader: str | Path = ""
    shown: bool = True
    urls: Sequence[str] = ()

    @property
    def slots(self) -> frozenset[int]:
        """The slots that this shard owns."""
        return frozenset(slot for slot in range(SLOTS) if self.shards.owner_of(slot) == self.index)


def clock() -> float:
    """Return seconds of a clock that also runs while the process is stopped or the machine sleeps."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)
