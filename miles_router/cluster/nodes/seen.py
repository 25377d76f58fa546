"""What was shown to this machine once, so that nobody can show it again. Each process has a file in memory, writes it
alone, and reads those of all: who writes before he reads finds out what another has taken at the same instant.

Time is counted in beats, and a generation of cells is used anew for each: so nothing grows, and what is older than the
beats that are believed is forgotten. The files outlive processes: what one has taken its successor does not take again.
"""

from __future__ import annotations

import mmap
import os
from itertools import islice

from miles_router.cluster.peers import Peers

#: Beats of which everything is remembered, and cells for what one process takes within one of them.
BEATS, CELLS = 8, 1 << 16
#: Cells that are looked at for a place.
TRIES = 64
_CELL = 8
#: The first cell of a generation says of which beat it is, plus one.
_GENERATION = 1 + CELLS


class Seen:
    """As one process sees it."""

    def __init__(self, peers: Peers) -> None:
        self._own = _cells(peers, peers.index)
        self._others = [_cells(peers, each) for each in peers.others]

    def takes(self, beat: int, tag: int) -> bool:
        """Whether something is shown for the first time.

        Args:
            tag: of 64 bits, which nobody can choose.

        Raises:
            OverflowError: there is no room for more within this beat.
        """
        tag = tag or 1
        start = self._begin(beat)
        for at in _places(start, tag):
            if self._own[at] == tag:
                return False
            if not self._own[at]:
                self._own[at] = tag
                return not any(_has(other, start, beat, tag) for other in self._others)
        raise OverflowError("too much at once")

    def _begin(self, beat: int) -> int:
        start = beat % BEATS * _GENERATION
        if self._own[start] != beat + 1:
            self._own[start] = 0
            self._own[start + 1 : start + _GENERATION] = memoryview(bytes(CELLS * _CELL)).cast("Q")
            self._own[start] = beat + 1
        return start


def _places(start: int, tag: int) -> islice[int]:
    first = tag % CELLS
    return islice((start + 1 + (first + step) % CELLS for step in range(CELLS)), TRIES)


def _has(cells: memoryview, start: int, beat: int, tag: int) -> bool:
    if cells[start] != beat + 1:
        return False
    for at in _places(start, tag):
        if cells[at] == tag:
            return True
        if not cells[at]:
            return False
    return False


def _cells(peers: Peers, index: int) -> memoryview:
    size = BEATS * _GENERATION * _CELL
    file = os.open(peers.directory / f"seen-{index}", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        os.ftruncate(file, size)  # sparse: only what is used takes memory
        return memoryview(mmap.mmap(file, size)).cast("Q")
    finally:
        os.close(file)
