"""POSIX byte locks that test whether a shared file system locks across machines.

The leader locks a byte. A shard that can lock the same byte knows that locks do not work here.
"""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

from miles_router.errors import StateError


class ByteLocks:
    """The locks that this process holds on bytes of one file, until the process ends or closes the file.

    Raises (all methods):
        StateError: the file cannot be opened, or its file system has no locks.
    """

    def __init__(self, directory: Path) -> None:
        self._path = directory / "locks"
        try:
            self._file = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise StateError(f"{self._path}: {error.strerror or error}") from None

    def lock(self, byte: int, *, shared: bool = False) -> bool:
        """Lock a byte. Return False if another process holds the lock.

        Args:
            shared: take a shared lock, which other processes may also hold.
        """
        kind = fcntl.LOCK_SH if shared else fcntl.LOCK_EX
        try:
            fcntl.lockf(self._file, kind | fcntl.LOCK_NB, 1, byte)
        except (BlockingIOError, PermissionError):  # POSIX allows either error for a lock held elsewhere
            return False
        except OSError as error:
            raise StateError(f"{self._path}: this file system cannot lock a byte: {error.strerror or error}") from None
        return True

    def close(self) -> None:
        """Release all locks."""
        os.close(self._file)
