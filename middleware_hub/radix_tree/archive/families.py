"""Families of entries on the disk: a family is all entries that descend from one root text.

A family is the unit that is loaded and stored. The index finds the families that a text may need.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator, Sequence
from hashlib import blake2b
from typing import Any

import numpy as np
import numpy.typing as npt
import orjson

from middleware_hub.radix_tree.archive.entry_rows import parent_in_family
from middleware_hub.radix_tree.archive.text_rows import FamilyRows
from middleware_hub.radix_tree.cache import ENTRY_CHARGE
from middleware_hub.radix_tree.entry import Entry

KIND = "family"
#: Prefix of owners' names in the store. Ids of sessions do not contain this character.
OWNERS = "|text-"
#: The index hashes this many first characters of a root. Texts that equal the root so far and then diverge load its
#: family in vain.
ROOT_CHARS = 65536
#: An odd number of 64 bits without a pattern, the base of the hash.
_BASE = np.uint64(0x9E3779B97F4A7C15)
#: Bytes of a root's hash.
DIGEST = 16


class Family:
    """All recorded entries that descend from one root text, stored under one owner.

    Args:
        owner: the owner's name in the store, made from a digest of the root text.
        slot: the owner's slot, one of this process's slots. Two slots may have families of the same root text, so only
            owner and slot together identify a family.
        chars: the number of characters of the root text that `number` is a hash of.
        loaded: whether its entries are in memory; True for a new family.
    """

    def __init__(self, owner: str, slot: int, chars: int, number: int, *, loaded: bool) -> None:
        self.owner, self.slot = owner, slot
        #: `number` is the hash of the root's first `chars` characters.
        self.chars, self.number = chars, number
        self.loaded = loaded
        #: Whether entries on the disk that are not in `entries` must be deleted. Their serials must be read first.
        self.stale = False
        #: Held during a commit or a load.
        self.lock = asyncio.Lock()
        #: By serial: the entries in memory, and those of them that are not durable yet.
        self.entries: dict[int, Entry] = {}
        self.unsaved: dict[int, Entry] = {}
        #: By serial: ids of evicted generations that are still on the disk.
        self.gone: dict[int, str] = {}
        #: The captured rows of its generations.
        self.rows = FamilyRows()
        #: Tokens on the disk, plus `ENTRY_CHARGE` for each entry.
        self.tokens = 0
        #: The serial of the newest entry; the newest weight version and its rank.
        self.serial, self.rank = 0, 0
        self.version: str | None = None

    @classmethod
    def of(cls, text: str, slots: Sequence[int]) -> Family:
        """Create a new family for this root text, in one of these slots."""
        number = int(prefix_numbers(text[:ROOT_CHARS])[-1])
        digest = blake2b(text.encode("utf-8", "surrogatepass"), digest_size=DIGEST).digest()
        slot = slots[digest[0] % len(slots)]
        return cls(OWNERS + digest.hex(), slot, min(len(text), ROOT_CHARS), number, loaded=True)

    @classmethod
    def read(cls, owner: str, slot: int, head: bytes) -> Family:
        """Read a family's head from the disk; its entries are not loaded.

        Raises:
            KeyError, ValueError: the bytes are not a family's head.
        """
        known: dict[str, Any] = orjson.loads(head)
        family = cls(owner, slot, known["chars"], known["number"], loaded=False)
        family.tokens, family.serial = known["tokens"], known["serial"]
        family.version, family.rank = known["version"], known["rank"]
        family.rows.nbytes = known["row_bytes"]
        return family

    def head(self) -> bytes:
        """Return the family's head: all that is known of a family before it is loaded."""
        names = ("chars", "number", "tokens", "serial", "version", "rank")
        known = {name: getattr(self, name) for name in names}
        return orjson.dumps({"kind": KIND, "row_bytes": self.rows.nbytes, **known})

    @property
    def name(self) -> tuple[int, str]:
        """The key of the family, unique in this process."""
        return self.slot, self.owner

    def add(self, entry: Entry) -> int:
        """Add an entry that is in memory; return its charge in tokens."""
        entry.family = self
        self.entries[entry.serial] = entry
        self.serial = max(self.serial, entry.serial)
        version = next((version for _, _, version in reversed(entry.runs) if version is not None), None)
        if version is not None and entry.rank >= self.rank:
            self.version, self.rank = version, entry.rank
        return charge(entry)

    def remove(self, entry: Entry) -> int:
        """Remove an evicted entry; return its charge in tokens."""
        del self.entries[entry.serial]
        self.unsaved.pop(entry.serial, None)
        self.gone[entry.serial] = entry.rid
        return charge(entry)


def charge(entry: Entry) -> int:
    """Return the tokens that an entry costs on the disk. A prefix shared with another family is written again."""
    return ENTRY_CHARGE + entry.charge + (entry.reused if parent_in_family(entry) is None else 0)


class RootIndex:
    """An index of the families that are on the disk and not in memory, least recently written first."""

    def __init__(self) -> None:
        self._families: dict[tuple[int, str], Family] = {}
        self._by_number: dict[int, list[Family]] = {}
        self._lengths: Counter[int] = Counter()
        self._sorted: npt.NDArray[np.int64] | None = None

    def __len__(self) -> int:
        return len(self._families)

    def __iter__(self) -> Iterator[Family]:
        return iter(self._families.values())

    def add(self, family: Family) -> None:
        """Add the family that was written last."""
        self._families[family.name] = family
        self._by_number.setdefault(family.number, []).append(family)
        self._lengths[family.chars] += 1
        self._sorted = None

    def remove(self, family: Family) -> None:
        del self._families[family.name]
        same = self._by_number[family.number]
        same.remove(family)
        if not same:
            del self._by_number[family.number]
        self._lengths[family.chars] -= 1
        if not self._lengths[family.chars]:
            del self._lengths[family.chars]
            self._sorted = None

    def matching(self, text: str) -> list[Family]:
        """Return the families whose root this text begins with; hash collisions and long roots can add others."""
        if not self._families:
            return []
        if self._sorted is None:
            self._sorted = np.array(sorted(self._lengths), dtype=np.int64)
        lengths = self._sorted[: int(np.searchsorted(self._sorted, len(text), side="right"))]
        if not len(lengths):
            return []
        numbers = prefix_numbers(text[: int(lengths[-1])])[lengths].tolist()
        families = []
        for length, number in zip(lengths.tolist(), numbers, strict=True):
            families += [each for each in self._by_number.get(number, ()) if each.chars == length]
        return families


class _Powers:
    """Powers of the hash's base modulo 2**64, computed on demand."""

    def __init__(self) -> None:
        self._known = np.ones(1, dtype=np.uint64)

    def first(self, count: int) -> npt.NDArray[np.uint64]:
        if len(self._known) < count:
            self._known = np.cumprod(np.append(np.uint64(1), np.full(max(count, 4096), _BASE)), dtype=np.uint64)
        return self._known[:count]


_powers = _Powers()


def prefix_numbers(text: str) -> npt.NDArray[np.uint64]:
    """Return a hash for each prefix of a text, the empty one first: a polynomial hash modulo 2**64."""
    codes = np.frombuffer(text.encode("utf-32-le", "surrogatepass"), dtype="<u4").astype(np.uint64) + np.uint64(1)
    return np.append(np.uint64(0), np.cumsum(codes * _powers.first(len(codes)), dtype=np.uint64))
