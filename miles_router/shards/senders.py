"""A register of the processes of one machine that may send requests: a memory-mapped file with a cell for each process.

Connections do not show that: a process whose connection is lost still sends. Reading the map needs no file descriptor,
so it also works when none is left.
"""

from __future__ import annotations

import mmap
import os
from pathlib import Path

CELL = 8


class Senders:
    """One process's view of the file in the directory of the router's processes.

    Args:
        count: the number of processes, given by the process that creates the file.
    """

    def __init__(self, directory: Path, count: int | None = None) -> None:
        with (directory / "senders").open("r+b" if count is None else "w+b") as file:
            if count is not None:
                file.truncate(count * CELL)
            self._cells = memoryview(mmap.mmap(file.fileno(), 0)).cast("q")  # a cell is one word: never half written

    def begin(self, index: int) -> None:
        """Record that this process, with this index, may send from now on."""
        self._cells[index] = os.getpid()

    def end(self, index: int) -> None:
        """Record that the process with this index has ended."""
        self._cells[index] = 0

    def process(self, index: int) -> int:
        """Return the id of the process with this index, or 0 if there is none."""
        return int(self._cells[index])
