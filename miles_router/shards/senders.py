"""Which processes of one machine may send requests: a cell for each in a file that all have mapped.

Who is connected does not say it: one whose connection is lost still sends. Reading it takes no descriptor, so that it
can be read where there are none left.
"""

from __future__ import annotations

import mmap
import os
from pathlib import Path

CELL = 8


class Senders:
    """One process's view of the file in the directory of the router's processes.

    Args:
        count: of processes, for the one that makes the file.
    """

    def __init__(self, directory: Path, count: int | None = None) -> None:
        with (directory / "senders").open("r+b" if count is None else "w+b") as file:
            if count is not None:
                file.truncate(count * CELL)
            self._cells = memoryview(mmap.mmap(file.fileno(), 0)).cast("q")  # a cell is one word: never half written

    def begin(self, index: int) -> None:
        """Note that this process, which has this index, may send from now on."""
        self._cells[index] = os.getpid()

    def end(self, index: int) -> None:
        """Note that the process with this index has ended."""
        self._cells[index] = 0

    def process(self, index: int) -> int:
        """Return the id of the process with this index; 0 where there is none."""
        return int(self._cells[index])
