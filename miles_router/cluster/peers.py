"""The processes of one router on one machine, as each of them knows them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from miles_router.slots import SLOTS


@dataclass(frozen=True)
class Peers:
    """Which of how many processes this one is.

    Attributes:
        index: from 0.
        count: of all.
        directory: where they find each other; only this user may enter it. It outlives each of them, and lies in memory
            (`/dev/shm`) where nothing is to touch the disk.
        urls: where each of them alone is reached.
        shown: whether clients may know that.
    """

    index: int
    count: int
    directory: Path
    urls: Sequence[str] = ()
    shown: bool = True

    @property
    def others(self) -> tuple[int, ...]:
        """The indices of all but this one."""
        return tuple(index for index in range(self.count) if index != self.index)

    @property
    def slots(self) -> frozenset[int]:
        """Those that are dealt to this one."""
        return frozenset(slot for slot in range(SLOTS) if self.owner_of(slot) == self.index)

    def owner_of(self, slot: int) -> int:
        """The process to which a slot is dealt."""
        return slot % self.count
