"""Families of entries: all that descend from one root text. And which families a text may find."""

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
#: In front of owners' names: sessions' ids have no such character.
OWNERS = "|text-"
#: Of a root, characters that tell which texts begin with it. What begins as it does and goes on otherwise is looked at
#: in vain.
ROOT_CHARS = 65536
#: An odd number of 64 bits without a pattern, the base of the hash.
_BASE = np.uint64(0x9E3779B97F4A7C15)
#: Bytes of a root's hash.
DIGEST = 16


class Family:
    """One owner in the store.

    Args:
        slot: where it lies there, a slot of the process that has it. Two may have families of one root, so that only
            owner and slot together are a family's name.
        loaded: whether its entries are in memory; a new family has none.
    """

    def __init__(self, owner: str, slot: int, chars: int, number: int, *, loaded: bool) -> None:
        self.owner, self.slot = owner, slot
        #: So many characters of the root have this number.
        self.chars, self.number = chars, number
        self.loaded = loaded
        #: Whether the disk has entries that are not to be held any more, and nobody knows which.
        self.stale = False
        #: One commit, or load, at a time.
        self.lock = asyncio.Lock()
        #: Entries in memory, and those of them that are not durable yet, by serial.
        self.entries: dict[int, Entry] = {}
        self.unsaved: dict[int, Entry] = {}
        #: The ids of generations that were evicted, by serial, until the disk knows that.
        self.gone: dict[int, str] = {}
        #: The rows of its generations.
        self.rows = FamilyRows()
        #: Tokens on the disk, with `ENTRY_CHARGE` for each entry.
        self.tokens = 0
        #: The newest entry's, and the newest weight version with its rank.
        self.serial, self.rank = 0, 0
        self.version: str | None = None

    @classmethod
    def of(cls, text: str, slots: Sequence[int]) -> Family:
        """A new family of this root text, in one of these slots."""
        number = int(prefix_numbers(text[:ROOT_CHARS])[-1])
        digest = blake2b(text.encode("utf-8", "surrogatepass"), digest_size=DIGEST).digest()
        slot = slots[digest[0] % len(slots)]
        return cls(OWNERS + digest.hex(), slot, min(len(text), ROOT_CHARS), number, loaded=True)

    @classmethod
    def read(cls, owner: str, slot: int, head: bytes) -> Family:
        """A family on the disk.

        Raises:
            KeyError, ValueError: its head is none.
        """
        known: dict[str, Any] = orjson.loads(head)
        family = cls(owner, slot, known["chars"], known["number"], loaded=False)
        family.tokens, family.serial = known["tokens"], known["serial"]
        family.version, family.rank = known["version"], known["rank"]
        family.rows.nbytes = known["row_bytes"]
        return family

    def head(self) -> bytes:
        """What is known of it before it is loaded."""
        names = ("chars", "number", "tokens", "serial", "version", "rank")
        known = {name: getattr(self, name) for name in names}
        return orjson.dumps({"kind": KIND, "row_bytes": self.rows.nbytes, **known})

    @property
    def name(self) -> tuple[int, str]:
        """What no other family of this process has."""
        return self.slot, self.owner

    def add(self, entry: Entry) -> int:
        """An entry in memory is one of it. Gives its tokens."""
        entry.family = self
        self.entries[entry.serial] = entry
        self.serial = max(self.serial, entry.serial)
        version = next((version for _, _, version in reversed(entry.runs) if version is not None), None)
        if version is not None and entry.rank >= self.rank:
            self.version, self.rank = version, entry.rank
        return charge(entry)

    def remove(self, entry: Entry) -> int:
        """An entry was evicted. Gives its tokens."""
        del self.entries[entry.serial]
        self.unsaved.pop(entry.serial, None)
        self.gone[entry.serial] = entry.rid
        return charge(entry)


def charge(entry: Entry) -> int:
    """Tokens of an entry on the disk: what it shares with another family is written again."""
    return ENTRY_CHARGE + (len(entry) if parent_in_family(entry) is None else entry.own)


class RootIndex:
    """Families that are on the disk and not in memory, in the order in which they were written last."""

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
        """One that was written behind all others."""
        self._families[family.name] = family
        self._by_number.setdefault(family.number, []).append(family)
        self._lengths[family.chars] += 1
        self._sorted = None

    def remove(self, family: Family) -> None:
        """It is in memory, or gone."""
        del self._families[family.name]
        same = self._by_number[family.number]
        same.remove(family)
        if not same:
            del self._by_number[family.number]
        self._lengths[family.chars] -= 1
        if not self._lengths[family.chars]:
            del self._lengths[family.chars]
            self._sorted = None

    def within(self, text: str) -> list[Family]:
        """Those whose root this text begins with; rarely others."""
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
    """Powers of the base modulo 2**64, as many as were wanted so far."""

    def __init__(self) -> None:
        self._known = np.ones(1, dtype=np.uint64)

    def first(self, count: int) -> npt.NDArray[np.uint64]:
        """The first `count`."""
        if len(self._known) < count:
            self._known = np.cumprod(np.append(np.uint64(1), np.full(max(count, 4096), _BASE)), dtype=np.uint64)
        return self._known[:count]


_powers = _Powers()


def prefix_numbers(text: str) -> npt.NDArray[np.uint64]:
    """A number for each beginning of a text, the empty one first: equal for equal beginnings, and rarely for others (a
    polynomial hash modulo 2**64)."""
    codes = np.frombuffer(text.encode("utf-32-le", "surrogatepass"), dtype="<u4").astype(np.uint64) + np.uint64(1)
    return np.append(np.uint64(0), np.cumsum(codes * _powers.first(len(codes)), dtype=np.uint64))
