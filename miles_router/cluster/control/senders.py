"""Which processes of one machine send requests: a file for each, in the directory of the router's processes.

Who is connected does not say it: one whose connection is lost still sends.
"""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

PREFIX = "sends-"


class Senders:
    """The files in a directory."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def begin(self, index: int) -> None:
        """Note that this process, which has this index, is about to send."""
        unnamed = self._directory / f"begins-{index}"
        unnamed.write_text(str(os.getpid()), encoding="ascii")
        unnamed.rename(self._directory / f"{PREFIX}{index}")

    def end(self, index: int) -> None:
        """Note that the process with this index has ended."""
        (self._directory / f"{PREFIX}{index}").unlink(missing_ok=True)

    def processes(self) -> list[int]:
        """Return the process ids of those that send."""
        found = []
        for path in self._directory.glob(f"{PREFIX}*"):
            with suppress(FileNotFoundError):  # it has ended since
                found.append(int(path.read_text(encoding="ascii")))
        return found
