"""Write recorded texts to the store, read them back, and delete them.

An entry that is evicted from memory is deleted from the store: once its family is loaded, an entry is in both or in
neither. The disk has a limit of its own, which matters for families that no request has loaded since the start.
"""

from __future__ import annotations

import asyncio
import logging
from collections import defaultdict
from collections.abc import AsyncIterator, Coroutine, Iterable, Iterator
from contextlib import asynccontextmanager, contextmanager
from hashlib import blake2b
from typing import Any

from middleware_hub.radix_tree.archive.entry_rows import (
    parent_in_family,
    read_entry,
    write_entry,
)
from middleware_hub.radix_tree.archive.families import OWNERS, Family, RootIndex
from middleware_hub.radix_tree.archive.text_rows import RowsRead, TextRows
from middleware_hub.radix_tree.cache import RadixTreeCache, RestoredEntry
from middleware_hub.radix_tree.entry import Entry
from middleware_hub.radix_tree.statistics import ArchiveStatistics
from miles_router.errors import StateError
from miles_router.middlewares import Pace, spawn
from miles_router.middlewares.rows import number_of_rows
from miles_router.middlewares.state import SLOTS, StateStore, header_of
from miles_router.trajectory.rows import AlignedRows

logger = logging.getLogger(__name__)

HEAD = 0
#: Owners that map a generation's id to its family; they are stored next to the families of the same slot.
RID_OWNERS = "|rid-"
#: The disk may hold this many times `max_tokens`: each family on it repeats what families share in memory.
DISK = 8


class TextArchive:
    """The entries on the disk. Without a store, its methods do nothing."""

    def __init__(self, cache: RadixTreeCache, store: StateStore | None, rows: TextRows, *, max_tokens: int) -> None:
        self._cache = cache
        self._rows = rows
        self._store = store
        self._slots = () if store is None else sorted(set(store.slots) & set(range(SLOTS)))
        self._max_tokens = DISK * max_tokens
        self.tokens = 0  # of all families, counted like `Family.tokens`
        self._families: dict[tuple[int, str], Family] = {}
        self._index = RootIndex()
        self._opened = store is None
        self._opening = asyncio.Lock()
        self._earlier_serial = 0  # the last serial that an earlier process recorded
        self._dirty: dict[tuple[int, str], Family] = {}  # families with something to delete from the disk
        self._sweeping: asyncio.Task[None] | None = None
        self.statistics = ArchiveStatistics(
            families=lambda: len(self._families), tokens=lambda: self.tokens, row_bytes=lambda: rows.nbytes
        )
        if store is not None:
            cache.when_evicted.append(self._evicted)
            for channel in rows.channels.values():
                channel.when_evicted = self._evicted_rows

    # Reading

    async def load(self, text: str) -> None:
        """Bring into memory all entries that a look-up of this text may need.

        Raises:
            StateError: the store cannot be read.
        """
        with self._counting_failures():
            if not self._opened:
                await self._open()
            if self._index:
                for family in self._index.matching(text):
                    await self._load_family(family)

    async def load_rid(self, rid: str) -> None:
        """Bring the newest generation with this id into memory. Raises the same errors as `load`."""
        with self._counting_failures():
            await self._load_rid(rid)

    @contextmanager
    def _counting_failures(self) -> Iterator[None]:
        try:
            yield
        except StateError as error:
            self.statistics.failed[error.label] += 1
            raise

    async def _load_rid(self, rid: str) -> None:
        if not self._opened:
            await self._open()
        known = self._cache.peek_rid(rid)
        if self._store is None or not self._index or (known is not None and known.serial > self._earlier_serial):
            return
        digest = _digest(rid)
        places = [self._store.load(_rid_owner(digest), slot=slot) for slot in self._slots]
        serial, name = -1, (-1, "")
        for slot, blobs in zip(self._slots, await asyncio.gather(*places), strict=True):
            for number, blob in blobs.items():
                named, _, owner = blob.decode().partition(" ")
                if named == digest and number > serial:
                    serial, name = number, (slot, owner)
        family = self._families.get(name)
        if family is not None and not family.loaded:
            await self._load_family(family)

    async def _open(self) -> None:
        async with self._opening:
            if self._opened or self._store is None:
                return
            found = []
            for slot in self._slots:
                async for owner, head in self._store.owners(slot, after=OWNERS):
                    if not owner.startswith(OWNERS):  # owners are sorted: the rest of the slot belongs to other layers
                        break
                    found.append(self._read_head(owner, slot, head))
            found.sort(key=lambda family: family.serial)
            for family in found:
                self._families[family.name] = family
                self._index.add(family)
                self.tokens += family.tokens
                self._rows.nbytes += family.rows.nbytes
                self._cache.continue_after(family.serial, family.version, family.rank)
                self._earlier_serial = family.serial
            self._opened = True
            self._enforce_limits()

    @staticmethod
    def _read_head(owner: str, slot: int, head: bytes) -> Family:
        try:
            return Family.read(owner, slot, head)
        except (KeyError, TypeError, ValueError) as error:
            raise StateError(f"texts {owner!r} cannot be read: {error!r}") from error

    async def _load_family(self, family: Family) -> None:
        async with family.lock:
            if family.loaded:
                return
            entries, rows = await self._read(family)
            self._index.remove(family)
            self._count(family, -family.tokens)
            family.loaded = True
            restored: dict[int, Entry] = {}
            with self._cache.eviction_paused():  # evict only once the family is complete
                for each in entries:
                    parent = None if each.parent is None else restored[each.parent]
                    entry = restored[each.serial] = self._cache.restore(each, parent)
                    for kind in entry.rows:
                        if (read := rows.get(number_of_rows(kind, entry.serial))) is not None:
                            entry.rows = {**entry.rows, kind: read.taken}
                    self._count(family, family.add(entry))
                    # An entry with another parent no longer protects its old one from eviction: write it again.
                    if parent is not None and entry.parent is not parent:
                        family.unsaved[entry.serial] = entry
                self._rows.restore(family, rows)
            self.statistics.loaded += len(restored)
            if family.rows.gone:
                self._schedule_sweep(family)

    async def _read(self, family: Family) -> tuple[list[RestoredEntry], dict[int, RowsRead]]:
        """Read a family's entries, and the rows of its generations by the number of their record."""
        assert self._store is not None
        found = await self._store.load(family.owner, slot=family.slot)
        records = {}
        if self._rows.are_kept:
            records = {**await self._store.load(family.owner, large=True, slot=family.slot)}
        entries: dict[int, RestoredEntry] = {}
        rows: dict[int, RowsRead] = {}
        pace = Pace()
        try:
            for serial in (number for number in found if number != HEAD):
                entries[serial] = read_entry(serial, found[serial], entries)
                await pace.step()
            newest = {each.record.rid: serial for serial, each in entries.items()}
            ids = {serial: rid for rid, serial in newest.items() if self._cache.peek_rid(rid) is None}
            for number, each_rows in self._rows.read(records, ids):
                rows[number] = each_rows
                await pace.step()
        except (KeyError, IndexError, TypeError, ValueError) as error:
            raise StateError(f"texts {family.owner!r} cannot be read: {error!r}") from error
        return list(entries.values()), rows

    def _count(self, family: Family, tokens: int) -> None:
        family.tokens += tokens
        self.tokens += tokens

    # Writing

    def add(self, entry: Entry, before: Entry | None, prompt: str) -> None:
        """Add a recorded entry to the family of `before`, which it continues, or to the family of its new prompt.

        `save` makes it durable.
        """
        if self._store is None or entry.node is None:  # evicted at once
            return
        family = (before.family if before is not None else None) or Family.of(prompt, self._slots)
        # The family may have been deleted meanwhile, or another request may have created it.
        family = self._families.setdefault(family.name, family)
        assert family.loaded, "the family of a text must be loaded before the text is recorded"
        self._count(family, family.add(entry))
        family.unsaved[entry.serial] = entry
        self._rows.add(family, entry)
        self._enforce_limits()

    async def save(self, entries: Iterable[Entry]) -> None:
        """Return when these entries are durable.

        Raises:
            StateError: an entry could not be written. It stays in memory; the next commit of its family includes it.
        """
        families = {entry.family.name: entry.family for entry in entries if entry.family is not None}
        await _gather(self._save(family) for family in families.values())

    async def _save(self, family: Family) -> None:
        async with family.lock:
            if family.unsaved:
                await self._commit(family)

    async def _commit(self, family: Family) -> None:
        """Make a family's present state durable.

        Ids are written before the entries that they lead to, and deleted after them.
        """
        assert self._store is not None
        put, gone, store, slot = dict(family.unsaved), dict(family.gone), self._store, family.slot
        rows, rows_gone = dict(family.rows.unsaved), set(family.rows.gone)
        coming, going = defaultdict[str, dict[int, bytes]](dict), defaultdict[str, dict[int, None]](dict)
        for serial, entry in put.items():
            digest = _digest(entry.rid)
            coming[_rid_owner(digest)][serial] = f"{digest} {family.owner}".encode()
        for serial, rid in gone.items():
            going[_rid_owner(_digest(rid))][serial] = None
        works = [store.append(owner, changes, slot=slot) for owner, changes in coming.items()]
        if family.rows.stale:  # delete first: the unsaved rows are written behind it
            works.append(store.delete(family.owner, slot=slot, large_alone=True))
        if family.entries or not family.loaded:
            entries = {serial: self._entry_bytes(entry) for serial, entry in put.items()}
            blobs = {HEAD: family.head(), **entries, **dict.fromkeys(gone)}
            works.append(store.append(family.owner, blobs, large=family.rows.changes(), slot=slot))
        else:
            works.append(store.delete(family.owner, slot=slot))
        await _gather([*works, *(store.append(owner, changes, slot=slot) for owner, changes in going.items())])
        for serial, entry in put.items():
            if family.unsaved.get(serial) is entry:
                del family.unsaved[serial]
        for number in rows:
            family.rows.unsaved.pop(number, None)
        for serial in gone:
            family.gone.pop(serial, None)
        family.rows.gone -= rows_gone
        family.rows.stale = False

    def _entry_bytes(self, entry: Entry) -> bytes:
        parent = parent_in_family(entry)
        parent_text = None if parent is None else self._cache.whole_text_of(parent)
        return write_entry(entry, self._cache.whole_text_of(entry), parent_text, with_rows=self._rows.write)

    # Deleting

    def _evicted(self, entry: Entry) -> None:
        if entry.family is not None:
            self._count(entry.family, -entry.family.remove(entry))
            self._schedule_sweep(entry.family)

    def _evicted_rows(self, rows: AlignedRows) -> None:
        family = self._rows.family_of(rows)
        if family is not None:
            self._schedule_sweep(family)

    def _enforce_limits(self) -> None:
        """Delete the oldest families that are not loaded, down to the disk's limit; then evict from memory.

        Rows on the disk are limited to what memory may hold of rows. Their deletion deletes no texts.
        """
        for family in list(self._index) if self._rows.nbytes > self._rows.max_bytes else ():
            if self._rows.nbytes > self._rows.max_bytes and family.rows.nbytes and not family.lock.locked():
                self._rows.forget(family)
                self._schedule_sweep(family)
        for family in list(self._index) if self.tokens > self._max_tokens else ():
            if self.tokens <= self._max_tokens:
                return
            if not family.lock.locked():  # else a request is loading it
                self._index.remove(family)
                self._count(family, -family.tokens)
                family.loaded = family.stale = True
                self._rows.forget(family)
                self._schedule_sweep(family)
        while self.tokens > self._max_tokens and self._cache.evict_one():
            pass

    def _schedule_sweep(self, family: Family) -> None:
        self._dirty[family.name] = family
        if self._sweeping is None or self._sweeping.done():
            self._sweeping = spawn(self._sweep(), name="delete texts")

    async def _sweep(self) -> None:
        while self._dirty:
            dirty, self._dirty = list(self._dirty.values()), {}
            for result in await asyncio.gather(*map(self._sweep_family, dirty), return_exceptions=True):
                if isinstance(result, StateError):  # the family's next commit or sweep tries again
                    logger.warning("texts_not_deleted", extra={"fields": {"reason": str(result)}})
                elif isinstance(result, BaseException):
                    raise result

    async def _sweep_family(self, family: Family) -> None:
        async with family.lock:
            if family.stale:
                await self._list_stale(family)
            self._rows.sweep(family)
            if family.gone or family.rows.gone or family.rows.stale:
                await self._commit(family)
            if family.loaded and not family.entries and not family.gone and self._families.get(family.name) is family:
                del self._families[family.name]

    async def _list_stale(self, family: Family) -> None:
        assert self._store is not None
        for serial, blob in (await self._store.load(family.owner, slot=family.slot)).items():
            if serial != HEAD and serial not in family.entries:
                family.gone[serial] = header_of(blob)[0]["rid"]
        family.stale = False

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """At exit, wait until evicted entries are deleted from the disk."""
        try:
            yield
        finally:
            if self._sweeping is not None:
                await asyncio.wait({self._sweeping})


def _digest(rid: str) -> str:
    return blake2b(rid.encode("utf-8", "surrogatepass"), digest_size=8).hexdigest()


def _rid_owner(digest: str) -> str:
    return RID_OWNERS + digest[:2]


async def _gather(works: Iterable[Coroutine[Any, Any, None]]) -> None:
    """Start all coroutines in order and wait for all. Raise the first failure."""
    for result in await asyncio.gather(*works, return_exceptions=True):
        if isinstance(result, BaseException):
            raise result
