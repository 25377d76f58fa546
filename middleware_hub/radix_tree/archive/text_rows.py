"""Rows of experts of texts on the disk (`--state-rows`): a record for each generation beside its entry, with its own
rows alone where it goes on from another record of its family.

A record stays while its generation has the rows in memory, or another record goes on from it, as in memory.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, NamedTuple
from weakref import WeakKeyDictionary

from miles_router.middlewares.rows import (
    RowChannel,
    TrajectoryRows,
    can_be_written,
    key_of_rows,
    parent_of,
    read_rows,
    written_rows,
)
from miles_router.middlewares.state import Change
from miles_router.trajectory.rows import KINDS, AlignedRows, RowKind

if TYPE_CHECKING:
    from middleware_hub.radix_tree.archive.families import Family
    from middleware_hub.radix_tree.entry import Entry

ROWS = "rows"
#: What an entry has whose rows were written, and are not there.
ROWS_ARE_GONE = TrajectoryRows(None, "they were let go of for want of room before the router was restarted")


class RowName(NamedTuple):
    """What no other record of a family has: the kind, and the generation's serial."""

    kind: RowKind
    serial: int

    @property
    def key(self) -> str:
        """Of the record."""
        return key_of_rows(*self)

    @classmethod
    def of(cls, key: str) -> RowName:
        """Raises KeyError, ValueError where it is no key of a record."""
        name, _, serial = key.partition(" ")
        return cls({kind.name: kind for kind in KINDS}[name], int(serial))


def _serial(name: RowName | None) -> int | None:
    return None if name is None else name.serial


@dataclass
class _WrittenRows:
    parent: RowName | None
    nbytes: int
    wanted: bool = True  # for itself
    behind: int = 0  # records that go on from it


@dataclass
class FamilyRows:
    """The records of one family, which are on the disk or on their way."""

    records: dict[RowName, _WrittenRows] = field(default_factory=dict)
    #: Those that are not durable yet, and those that are gone until the disk knows that.
    unsaved: dict[RowName, AlignedRows] = field(default_factory=dict)
    gone: set[RowName] = field(default_factory=set)
    #: Bytes of all records; of a family that is not in memory its head tells them.
    nbytes: int = 0
    #: Whether the disk has records that are not to be held any more, and nobody knows which.
    stale: bool = False

    def add(self, name: RowName, parent: RowName | None, nbytes: int) -> None:
        """One more, behind its parent."""
        self.records[name] = _WrittenRows(parent, nbytes)
        self.nbytes += nbytes
        if parent is not None:
            self.records[parent].behind += 1

    def let_go(self, name: RowName) -> None:
        """A generation has these rows no longer."""
        record = self.records.get(name)
        if record is not None:
            record.wanted = False
        while record is not None and not (record.wanted or record.behind):
            del self.records[name]
            self.unsaved.pop(name, None)
            self.gone.add(name)
            self.nbytes -= record.nbytes
            if record.parent is None:
                return
            name = record.parent
            record = self.records[name]
            record.behind -= 1

    def changes(self, unsaved: Mapping[RowName, AlignedRows], gone: Iterable[RowName]) -> Iterator[Change]:
        """What makes the disk have these, and those no more."""
        for name, rows in unsaved.items():
            parent = _serial(self.records[name].parent)
            if can_be_written(rows, parent):  # memory has not let go of it since
                yield Change(ROWS, name.key, written_rows(rows, parent))
        for name in gone:
            yield Change(ROWS, name.key, None)


class RowsRead(NamedTuple):
    """A record that was read: the rows, what it goes on from, and its bytes."""

    taken: TrajectoryRows
    parent: RowName | None
    nbytes: int


class _FamilyRecord(NamedTuple):
    family: Family
    name: RowName


class TextRows:
    """The records of all families.

    Args:
        channels: where rows are kept in memory; they say how many bytes there may be.
        write: whether rows of new generations are written.
    """

    def __init__(self, channels: Mapping[RowKind, RowChannel], *, write: bool) -> None:
        self._channels = channels
        self.write = write
        self.nbytes = 0  # of all records
        self._places: WeakKeyDictionary[AlignedRows, _FamilyRecord] = WeakKeyDictionary()

    def listen(self, when_evicted: Callable[[AlignedRows], None]) -> None:
        """Hear of rows that memory lets go of."""
        for channel in self._channels.values():
            channel.when_evicted = when_evicted

    @property
    def max_bytes(self) -> int:
        """Of all records: what memory may have of rows. Where nobody keeps any, they stay as they are."""
        return sum(channel.max_bytes for channel in self._channels.values()) or sys.maxsize

    @contextmanager
    def changing(self, family: Family) -> Iterator[FamilyRows]:
        """While this is entered, records of a family may come and go."""
        self.nbytes -= family.rows.nbytes
        try:
            yield family.rows
        finally:
            self.nbytes += family.rows.nbytes

    def add(self, family: Family, entry: Entry) -> None:
        """A generation was recorded: its rows are to be written."""
        for kind, taken in entry.rows.items() if self.write else ():
            rows = taken.rows
            if rows is None:
                continue
            place = None if rows.parent is None else self._places.get(rows.parent)
            parent = place.name if place is not None and place.family is family else None
            if parent not in family.rows.records:
                parent = None
            if can_be_written(rows, _serial(parent)):
                name = RowName(kind, entry.serial)
                self._places[rows] = _FamilyRecord(family, name)
                nbytes = rows.nbytes if parent is not None else sum(each.nbytes for each in rows.line)
                with self.changing(family):
                    family.rows.add(name, parent, nbytes)
                family.rows.unsaved[name] = rows

    def remove(self, family: Family, serial: int) -> None:
        """A generation was evicted."""
        with self.changing(family):
            for kind in KINDS:
                family.rows.let_go(RowName(kind, serial))

    def evicted(self, rows: AlignedRows) -> Family | None:
        """Memory has let go of rows. Gives the family whose record is gone with them."""
        place = self._places.get(rows)
        if place is None or len(rows) == rows.start:  # it has none of its own: all can be read as before
            return None
        with self.changing(place.family):
            place.family.rows.let_go(place.name)
        return place.family

    def forget(self, family: Family) -> None:
        """The records of a family that is not in memory are to go."""
        with self.changing(family):
            family.rows.nbytes, family.rows.stale = 0, True

    def read(self, records: dict[RowName, bytes], ids: Mapping[int, str]) -> Iterator[tuple[RowName, RowsRead]]:
        """The rows that were written so, in the order of their generations; one step for each, which takes its record
        away.

        Args:
            ids: by serial, those that name the rows of their generations.

        Raises:
            KeyError, ValueError: they are none.
        """
        known: dict[RowName, TrajectoryRows] = {}

        def before(kind: RowKind, serial: int) -> TrajectoryRows:
            return known.get(RowName(kind, serial), ROWS_ARE_GONE)

        for name in sorted(records, key=lambda each: each.serial):
            data = records.pop(name)
            parent = parent_of(data)
            taken = read_rows(data, name.kind, partial(before, name.kind), self._channels, ids.get(name.serial))
            known[name] = taken
            yield name, RowsRead(taken, None if parent is None else RowName(name.kind, parent), len(data))

    def restore(self, family: Family, read: Mapping[RowName, RowsRead], serials: Collection[int]) -> None:
        """The records of a family were read, in this order. What no generation of these serials has, or memory had no
        room for, goes, unless others go on from it."""
        with self.changing(family):
            family.rows.nbytes, family.rows.stale = 0, False
            for name, ((rows, _), parent, nbytes) in read.items():
                family.rows.add(name, parent if parent in family.rows.records else None, nbytes)
                if rows is not None:
                    self._places[rows] = _FamilyRecord(family, name)
            for name, ((rows, _), _, _) in read.items():
                if name.serial not in serials or (rows is not None and not rows.held and len(rows) > rows.start):
                    family.rows.let_go(name)
