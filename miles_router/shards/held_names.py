"""The names that a process holds, in a file that its successor reads to learn what was lost.

The file has an 8-byte cell for each name, with its hash, or 0. It is memory-mapped, so adding a name costs no system
call and survives any end of the process.
"""

from __future__ import annotations

import mmap
from collections import OrderedDict
from hashlib import blake2b
from pathlib import Path

from miles_router.middlewares.owners import HeldNames

HASH = 8
FREE = bytes(HASH)


class MappedHeldNames(HeldNames):
    """Held names in a memory-mapped file.

    At most `capacity` names are held. The newest `capacity` lost names are remembered too.

    Raises:
        OSError: the file cannot be created.
    """

    def __init__(self, path: Path, capacity: int) -> None:
        places = 2 * capacity
        with path.open("a+b") as file:
            file.truncate(places * HASH)  # sparse: only used pages take memory
            self._map = mmap.mmap(file.fileno(), places * HASH)
        self._lost: OrderedDict[bytes, int] = OrderedDict()
        self._held: dict[bytes, int] = {}
        self._free: list[int] = []
        self._end = 0  # the end of all cells ever used
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
        hashed = _hashed(name)
        if hashed in self._held:
            return
        at = self._lost.pop(hashed, None)
        if at is None:
            at = self._allocate_cell()
        self._map[at : at + HASH] = hashed
        self._held[hashed] = at

    def _allocate_cell(self) -> int:
        if self._free:
            return self._free.pop()
        if self._end == len(self._map):
            return self._lost.popitem(last=False)[1]
        self._end += HASH
        return self._end - HASH

    def remove(self, name: str) -> None:
        hashed = _hashed(name)
        at = self._held.pop(hashed, None)
        if at is None:
            at = self._lost.pop(hashed, None)
        if at is not None:
            self._map[at : at + HASH] = FREE
            self._free.append(at)

    def was_lost(self, name: str) -> bool:
        return bool(self._lost) and _hashed(name) in self._lost


def _hashed(name: str) -> bytes:
    hashed = blake2b(name.encode(), digest_size=HASH).digest()
    return hashed if hashed != FREE else b"\1" * HASH
