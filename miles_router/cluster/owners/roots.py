"""Which process has the texts that begin with a root. No I/O.

A text that goes on from a held one begins with that one's root, whatever stands behind; so whoever knows the roots
finds its process without a key, and prompts that share a long beginning still have a root each.
"""

from __future__ import annotations

import struct
from bisect import insort
from collections import Counter, OrderedDict
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from miles_router.middlewares.roots import BLOCK, DIGEST, Root, encoded, hash_of

#: How much of a process's share is forgotten with each new root, so that the last few hundred count.
FORGOTTEN = 1 / 256
_PACKED = struct.Struct(f"<{DIGEST}s{DIGEST}sIB?")


class RootChange(NamedTuple):
    """A root has this owner now, or has no owner any more."""

    root: Root
    owner: int
    added: bool


class Roots:
    """The directory, in each process a replica.

    Args:
        count: processes.
        mine: the index of this one.
        limit: roots of one process; those that it has used least recently go first (kept as an attribute).
    """

    def __init__(self, count: int, mine: int, limit: int) -> None:
        self._count = count
        self._mine = mine
        self.limit = limit
        self._owners: dict[bytes, tuple[Root, int]] = {}
        self._lengths: dict[bytes, Counter[int]] = {}  # of the roots with the same whole blocks
        self._ends: list[int] = []  # of whole blocks of all roots, in order,
        self._ending: Counter[int] = Counter()  # and how many roots have each
        self._own: OrderedDict[bytes, None] = OrderedDict()  # least recently used first
        self._share = [0.0] * count
        self._longest = 0
        #: Of processes that have ended: the roots that their successors have not told of yet.
        self._doubted: dict[int, dict[bytes, Root]] = {}

    def __len__(self) -> int:
        return len(self._owners)

    def find(self, text: str) -> tuple[Root, int] | None:
        """The longest root with which a text begins, and its owner."""
        data = memoryview(encoded(text[: self._longest]))
        hasher, at, best = hash_of(b""), 0, None
        for end in self._ends:
            if end > len(data):
                break
            hasher.update(data[at:end])
            at = end
            for length in self._lengths.get(hasher.digest(), ()):
                if length <= len(data) and (best is None or length > best[0].length):
                    whole = hasher.copy()
                    whole.update(data[at:length])
                    best = self._owners.get(whole.digest(), best)
        return best

    def owner(self, root: Root) -> int | None:
        """Whose a root is."""
        found = self._owners.get(root.digest)
        return None if found is None else found[1]

    def use(self, root: Root) -> None:
        """A root of this process was asked for."""
        if root.digest in self._own:
            self._own.move_to_end(root.digest)

    def least(self) -> int:
        """The process that was given the fewest of the last roots."""
        return min(range(self._count), key=lambda index: (self._share[index], (index - self._mine) % self._count))

    def give(self, roots: Iterable[Root], owner: int) -> list[RootChange]:
        """Give roots that have no owner to a process. What all others are to be told."""
        changes = [RootChange(root, owner, True) for root in dict.fromkeys(roots) if root.digest not in self._owners]
        for change in changes:
            self.apply(change)
        return changes

    def apply(self, change: RootChange) -> None:
        """A change that this or another process made. Of two owners of one root, given at the same time, all take the
        one with the lower index."""
        root, owner, added = change
        before = self._owners.get(root.digest)
        self._doubted.get(owner, {}).pop(root.digest, None)
        if not added:
            if before is not None and before[1] == owner:
                self._remove(root)
            return
        if before is not None:
            if before[1] <= owner:
                return
            self._remove(root)
        self._owners[root.digest] = root, owner
        self._lengths.setdefault(root.blocks, Counter())[root.length] += 1
        end = _end_of(root)
        if end not in self._ending:
            insort(self._ends, end)
        self._ending[end] += 1
        self._longest = max(self._longest, root.length)
        self._share = [share * (1 - FORGOTTEN) for share in self._share]
        self._share[owner] += 1
        if owner == self._mine:
            self._own[root.digest] = None

    def evicted(self) -> list[RootChange]:
        """Forget this process's roots beyond the limit. What all others are to be told."""
        changes = []
        while len(self._own) > self.limit:
            digest, _ = self._own.popitem(last=False)
            changes.append(RootChange(self._owners[digest][0], self._mine, False))
            self._remove(changes[-1].root)
        return changes

    def own(self) -> list[RootChange]:
        """This process's roots, for one that does not know them."""
        return [RootChange(self._owners[digest][0], self._mine, True) for digest in self._own]

    def lose(self, owner: int) -> None:
        """A process has ended, and its texts with it. The next one is given no more roots than others."""
        for root, whose in list(self._owners.values()):
            if whose == owner:
                self._remove(root)
        others = [share for index, share in enumerate(self._share) if index != owner]
        self._share[owner] = sum(others) / len(others) if others else 0.0

    def doubt(self, owner: int) -> None:
        """A process has ended, and its successor will tell which of its texts it has; until then they are its own."""
        self._doubted[owner] = {root.digest: root for root, whose in self._owners.values() if whose == owner}

    def settle(self, owner: int) -> None:
        """It has told of all."""
        for root in self._doubted.pop(owner, {}).values():
            self.apply(RootChange(root, owner, False))

    def _remove(self, root: Root) -> None:
        del self._owners[root.digest]
        self._own.pop(root.digest, None)
        lengths = self._lengths[root.blocks]
        lengths[root.length] -= 1
        if not lengths[root.length]:
            del lengths[root.length]
        if not lengths:
            del self._lengths[root.blocks]
        end = _end_of(root)
        self._ending[end] -= 1
        if not self._ending[end]:
            del self._ending[end]
            self._ends.remove(end)


def _end_of(root: Root) -> int:
    """Where its last whole block ends."""
    return root.length // BLOCK * BLOCK


def pack(changes: Iterable[RootChange]) -> bytes:
    """Changes for other processes."""
    return b"".join(_PACKED.pack(*root, owner, added) for root, owner, added in changes)


def unpack(data: bytes | memoryview) -> Iterator[RootChange]:
    """What `pack` has packed."""
    for digest, blocks, length, owner, added in _PACKED.iter_unpack(data):
        yield RootChange(Root(digest, blocks, length), owner, added)


PACKED_SIZE = _PACKED.size
