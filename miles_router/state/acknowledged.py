"""The count of a slot's acknowledged commits, in a file of its own: written behind each commit, before anybody is told
of it. A slot with fewer commits has lost some. Without the file nothing is known, and nothing refused."""

from __future__ import annotations

import os
import struct
from pathlib import Path

from miles_router.errors import StateDamaged
from miles_router.state.blobs import Sync

#: The count, and its complement: a torn or foreign file is no count.
_COUNT = struct.Struct("<QQ")
_MASK = (1 << 64) - 1


class Acknowledged:
    """The count of one slot.

    Raises:
        OSError: the file cannot be opened or read.
        StateDamaged: its content is no count.
    """

    def __init__(self, path: Path, sync: Sync) -> None:
        self.path = path
        self._durable = sync == "machine"
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            self.count = self._read()
        except BaseException:
            self.close()
            raise

    def _read(self) -> int | None:
        content = os.pread(self._file, _COUNT.size + 1, 0)
        if not content:
            return None
        if len(content) == _COUNT.size:
            count, complement = _COUNT.unpack(content)
            if count == complement ^ _MASK:
                return int(count)
        raise StateDamaged(f"{self.path}: it is no count of commits. Remove it to go on without one")

    def write(self, count: int) -> None:
        """Record that this many commits are acknowledged from now on."""
        os.pwrite(self._file, _COUNT.pack(count, count ^ _MASK), 0)
        if self._durable:
            os.fdatasync(self._file)

    def close(self) -> None:
        os.close(self._file)
