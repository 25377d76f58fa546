"""Whether the file system of a directory that several machines share keeps locks between them: a leader locks a byte,
and a shard that can lock the same one knows that it does not."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

from miles_router.errors import StateError


class ByteLocks:
    """The locks of this process on the bytes of a file, which it has until it ends or closes the file.

    Raises (all methods):
        StateError: the file cannot be opened, or its file system has no locks.
    """

    def __init__(self, directory: Path) -> None:
        self._path = directory / "locks"
        try:
            self._file = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise StateError(f"{self._path}: {error.strerror or error}") from None

    def take(self, byte: int, *, beside_others: bool = False) -> bool:
        """Lock a byte; return False where another process has it.

        Args:
            beside_others: other processes may have it so, too.
        """
        kind = fcntl.LOCK_SH if beside_others else fcntl.LOCK_EX
        try:
            fcntl.lockf(self._file, kind | fcntl.LOCK_NB, 1, byte)
        except (BlockingIOError, PermissionError):  # POSIX leaves open which one of both it is
            return False
        except OSError as error:
            raise StateError(f"{self._path}: no byte can be locked: {error.strerror or error}") from None
        return True

    def close(self) -> None:
        """Let go of all of them."""
        os.close(self._file)
