"""The names of what a process holds, in a file that its successor reads: what was held when it ended was lost.

The file has a place of 8 bytes for each name, with a hash of it, or 0. It is mapped into memory, so a name costs no
system call, and what was written is there however the process ends.
"""

from __future__ import annotations

import mmap
import os
from collections import OrderedDict
from hashlib import blake2b
from pathlib import Path

from miles_router.middlewares.owners import HeldNames

HASH = 8
FREE = bytes(HASH)


class KeptNames(HeldNames):
    """Names in a file. `capacity` is how many are held at most; as many lost ones are remembered besides, the newest.

    Raises:
        OSError: the file cannot be made.
    """

    def __init__(self, path: Path, capacity: int) -> None:
        places = 2 * capacity
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            os.ftruncate(file, places * HASH)  # sparse: only what is used takes memory
            self._map = mmap.mmap(file, places * HASH)
        finally:
            os.close(file)
        self._lost: OrderedDict[bytes, int] = OrderedDict()
        self._held: dict[bytes, int] = {}
        self._free: list[int] = []
        self._end = 0  # of all places that were ever taken
        self._read()

    def _read(self) -> None:
        kept = self._map[:].rstrip(b"\0")
        self._end = -(-len(kept) // HASH) * HASH
        for at in range(0, self._end, HASH):
            if (found := self._map[at : at + HASH]) == FREE:
                self._free.append(at)
            else:
                self._lost[found] = at

    def add(self, name: str) -> None:
        """As `HeldNames.add`."""
        hashed = _hashed(name)
        if hashed in self._held:
            return
        at = self._lost.pop(hashed, None)
        if at is None:
            at = self._place()
        self._map[at : at + HASH] = hashed
        self._held[hashed] = at

    def _place(self) -> int:
        if self._free:
            return self._free.pop()
        if self._end == len(self._map):
            return self._lost.popitem(last=False)[1]
        self._end += HASH
        return self._end - HASH

    def remove(self, name: str) -> None:
        """As `HeldNames.remove`."""
        hashed = _hashed(name)
        at = self._held.pop(hashed, None)
        if at is None:
            at = self._lost.pop(hashed, None)
        if at is not None:
            self._map[at : at + HASH] = FREE
            self._free.append(at)

    def was_lost(self, name: str) -> bool:
        """As `HeldNames.was_lost`."""
        return bool(self._lost) and _hashed(name) in self._lost


def _hashed(name: str) -> bytes:
    hashed = blake2b(name.encode(), digest_size=HASH).digest()
    return hashed if hashed != FREE else b"\1" * HASH
