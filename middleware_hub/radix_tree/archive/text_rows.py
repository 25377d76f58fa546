"""Rows of experts of texts on the disk (`--state-rows`): a record, which is a large blob, for each generation and kind.
It has the generation's own rows alone where those go on from another record of its family.

A sweep deletes the records that no generation needs: it has the rows in memory, or another record that stays goes on
from its record.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, MutableMapping
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, NamedTuple
from weakref import WeakKeyDictionary

from miles_router.middlewares.rows import (
    RowChannel,
    TrajectoryRows,
    are_kept,
    can_be_written,
    generation_of_rows,
    number_of_rows,
    parent_of,
    read_rows,
    written_rows,
)
from miles_router.middlewares.state import Changes
from miles_router.trajectory.rows import AlignedRows, RowKind

if TYPE_CHECKING:
    from middleware_hub.radix_tree.archive.families import Family
    from middleware_hub.radix_tree.entry import Entry

#: What an entry has whose rows were written, and are not there.
ROWS_ARE_GONE = TrajectoryRows(None, "they were let go of for want of room before the router was restarted")


class _StoredRows(NamedTuple):
    parent: int | None  # the number of the record that it goes on from
    nbytes: int


@dataclass
class FamilyRows:
    """The records of one family by their numbers, which are on the disk or on their way."""

    records: dict[int, _StoredRows] = field(default_factory=dict)
    #: Those that are not durable yet, and those that are gone until the disk knows that.
    unsaved: dict[int, AlignedRows] = field(default_factory=dict)
    gone: set[int] = field(default_factory=set)
    #: Bytes of all records; of a family that is not in memory its head tells them.
    nbytes: int = 0
    #: Whether all of them are to go, though the disk alone knows which they are.
    stale: bool = False

    def changes(self) -> Changes:
        """Return what makes the disk have the unsaved ones, and those that are gone no more."""
        parents = {number: record.parent for number, record in self.records.items()}
        put = {number: (rows, _serial(parents[number])) for number, rows in self.unsaved.items()}
        written = {n: written_rows(*each) for n, each in put.items() if can_be_written(*each)}  # memory has them still
        return {**written, **dict.fromkeys(self.gone)}


def _serial(number: int | None) -> int | None:
    return None if number is None else generation_of_rows(number)[1]


class RowsRead(NamedTuple):
    """A record that was read."""

    taken: TrajectoryRows
    record: _StoredRows


class TextRows:
    """The records of all families.

    Args:
        channels: where rows are kept in memory; they say how many bytes there may be.
        write: whether rows of new generations are written.
    """

    def __init__(self, channels: Mapping[RowKind, RowChannel], *, write: bool) -> None:
        self.channels = channels
        self.write = write
        self.nbytes = 0  # of all records
        self._places: WeakKeyDictionary[AlignedRows, tuple[Family, int]] = WeakKeyDictionary()

    @property
    def are_kept(self) -> bool:
        """Whether a layer keeps rows in memory. Without one, the disk keeps those that it has, and none are read."""
        return are_kept(self.channels)

    @property
    def max_bytes(self) -> int:
        """Of all records: what memory may have of rows. Where no layer keeps any, they stay as they are."""
        return sum(channel.max_bytes for channel in self.channels.values()) or sys.maxsize

    def count(self, family: Family, nbytes: int) -> None:
        """Count bytes of records that come or go."""
        family.rows.nbytes += nbytes
        self.nbytes += nbytes

    def add(self, family: Family, entry: Entry) -> None:
        """Plan to write the rows of a generation that was recorded."""
        for kind, taken in entry.rows.items() if self.write else ():
            rows = taken.rows
            if rows is None:
                continue
            owner, parent = self._places.get(rows.parent, (None, None)) if rows.parent is not None else (None, None)
            if owner is not family or parent not in family.rows.records:
                parent = None
            if can_be_written(rows, _serial(parent)):
                nbytes = rows.nbytes if parent is not None else sum(each.nbytes for each in rows.line)
                self._add(family, number_of_rows(kind, entry.serial), _StoredRows(parent, nbytes), rows)
                family.rows.unsaved[number_of_rows(kind, entry.serial)] = rows

    def _add(self, family: Family, number: int, record: _StoredRows, rows: AlignedRows | None) -> None:
        family.rows.records[number] = record
        self.count(family, record.nbytes)
        if rows is not None:
            self._places[rows] = family, number

    def family_of(self, rows: AlignedRows) -> Family | None:
        """Return the family that has a record of rows that memory has let go of."""
        return self._places.get(rows, (None, 0))[0]

    def sweep(self, family: Family) -> None:
        """Let go of the records of a family that no generation needs. Rows of a kind that no layer keeps now stay."""
        records, needed = family.rows.records, set[int]()
        for number in records:
            kind, serial = generation_of_rows(number)
            entry, kept = family.entries.get(serial), kind in self.channels and self.channels[kind].hold is not None
            rows = None if entry is None or kind not in entry.rows else entry.rows[kind].rows
            if entry is None or (kept and (rows is None or not (rows.held or len(rows) == rows.start))):
                continue
            place: int | None = number
            while place is not None and place not in needed:
                needed.add(place)
                place = records[place].parent
        for number in records.keys() - needed:
            self.count(family, -records.pop(number).nbytes)
            family.rows.unsaved.pop(number, None)
            family.rows.gone.add(number)

    def forget(self, family: Family) -> None:
        """Plan to delete all records of a family that is not in memory."""
        self.count(family, -family.rows.nbytes)
        family.rows.stale = True

    def read(self, blobs: MutableMapping[int, bytes], ids: Mapping[int, str]) -> Iterator[tuple[int, RowsRead]]:
        """Read records in the order of their generations, one in each step, which takes its blob away.

        Args:
            ids: by serial, those that name the rows of their generations.

        Raises:
            IndexError, KeyError, ValueError: they are none.
        """
        known: dict[int, TrajectoryRows] = {}

        def before(kind: RowKind, serial: int) -> TrajectoryRows:
            return known.get(number_of_rows(kind, serial), ROWS_ARE_GONE)

        for number in sorted(blobs):
            kind, serial = generation_of_rows(number)
            data = blobs.pop(number)
            parent = parent_of(data)
            known[number] = read_rows(data, kind, partial(before, kind), self.channels, ids.get(serial))
            parent = None if parent is None else number_of_rows(kind, parent)
            yield number, RowsRead(known[number], _StoredRows(parent, len(data)))

    def restore(self, family: Family, read: Mapping[int, RowsRead]) -> None:
        """Count the records of a family that were read in this order, and let go of those that nothing needs."""
        if self.are_kept:
            self.count(family, -family.rows.nbytes)
            for number, (taken, record) in read.items():
                parent = record.parent if record.parent in family.rows.records else None
                self._add(family, number, record._replace(parent=parent), taken.rows)
            self.sweep(family)
        family.rows.stale = False
