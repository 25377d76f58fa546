"""The processes of one machine that may send requests: a memory-mapped file with a cell for each process.

Connections do not show this: a process whose connection is lost still sends. Reading the map needs no file descriptor,
so it also works when none is left.
"""

from __future__ import annotations

import mmap
import os
from pathlib import Path

CELL = 8


class ProcessTable:
    """One process's view of the file in the directory of the router's processes.

    Args:
        count: the number of processes, given by the process that creates the file.
    """

    def __init__(self, directory: Path, count: int | None = None) -> None:
        with (directory / "senders").open("r+b" if count is None else "w+b") as file:
            if count is not None:
                file.truncate(count * CELL)
            self._cells = memoryview(mmap.mmap(file.fileno(), 0)).cast("q")  # a cell is one word: never half written

    def record_start(self, index: int) -> None:
        """Record that this process, with this index, may send from now on."""
        self._cells[index] = os.getpid()

    def record_end(self, index: int) -> None:
        """Record that the process with this index has ended."""
        self._cells[index] = 0

    def process_id(self, index: int) -> int:
        """Return the id of the process with this index, or 0 if there is none."""
        return int(self._cells[index])
