"""Captured rows of texts on the disk (`--state-rows`): one large blob, a record, for each generation and kind. A record
repeats no rows of another record of its family that it continues.

A sweep deletes the records that are not needed. A record is needed while memory has its generation's rows, or while a
needed record continues it.
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

#: The rows of an entry whose record is not on the disk any more.
ROWS_ARE_GONE = TrajectoryRows(None, "they were evicted before the router was restarted")


class _StoredRows(NamedTuple):
    parent: int | None  # the number of the record that it continues
    nbytes: int


@dataclass
class FamilyRows:
    """The records of one family, by number, that are on the disk or unsaved."""

    records: dict[int, _StoredRows] = field(default_factory=dict)
    #: Records that are not durable yet, and deleted records that the disk still has.
    unsaved: dict[int, AlignedRows] = field(default_factory=dict)
    gone: set[int] = field(default_factory=set)
    #: Bytes of all records; read from the head while the family is not in memory.
    nbytes: int = 0
    #: Whether all records on the disk are to be deleted; their numbers are not known.
    stale: bool = False

    def changes(self) -> Changes:
        """Return the changes that write unsaved records and delete evicted records."""
        parents = {number: record.parent for number, record in self.records.items()}
        put = {number: (rows, _serial(parents[number])) for number, rows in self.unsaved.items()}
        # Only rows that memory still has can be written.
        written = {n: written_rows(*each) for n, each in put.items() if can_be_written(*each)}
        return {**written, **dict.fromkeys(self.gone)}


def _serial(number: int | None) -> int | None:
    return None if number is None else generation_of_rows(number)[1]


class RowsRead(NamedTuple):
    """The result of reading one record."""

    taken: TrajectoryRows
    record: _StoredRows


class TextRows:
    """The rows on the disk of all families.

    Args:
        channels: the channels that keep rows in memory; their limits are the disk's limit, too.
        write: whether rows of new generations are written.
    """

    def __init__(self, channels: Mapping[RowKind, RowChannel], *, write: bool) -> None:
        self.channels = channels
        self.write = write
        self.nbytes = 0  # of all records
        self._places: WeakKeyDictionary[AlignedRows, tuple[Family, int]] = WeakKeyDictionary()

    @property
    def are_kept(self) -> bool:
        """Whether a layer keeps rows in memory. Without one, the records on the disk stay and are not read."""
        return are_kept(self.channels)

    @property
    def max_bytes(self) -> int:
        """The limit of bytes of all records, as for rows in memory; unlimited without a layer that keeps rows."""
        return sum(channel.max_bytes for channel in self.channels.values()) or sys.maxsize

    def count(self, family: Family, nbytes: int) -> None:
        """Count bytes of records that were added or (negative) deleted."""
        family.rows.nbytes += nbytes
        self.nbytes += nbytes

    def add(self, family: Family, entry: Entry) -> None:
        """Schedule the rows of a recorded generation for writing."""
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
        return self._places.get(rows, (None, 0))[0]

    def sweep(self, family: Family) -> None:
        """Schedule the deletion of records that are not needed. Keep records of a kind that no layer of this process
        handles."""
        records, needed = family.rows.records, set[int]()
        for number in records:
            kind, serial = generation_of_rows(number)
            entry, kept = family.entries.get(serial), kind in self.channels and self.channels[kind].hold is not None
            rows = None if entry is None or kind not in entry.rows else entry.rows[kind].rows
            if entry is None or (kept and (rows is None or not (rows.held or len(rows) == rows.start))):
                continue
            ancestor: int | None = number
            while ancestor is not None and ancestor not in needed:
                needed.add(ancestor)
                ancestor = records[ancestor].parent
        for number in records.keys() - needed:
            self.count(family, -records.pop(number).nbytes)
            family.rows.unsaved.pop(number, None)
            family.rows.gone.add(number)

    def forget(self, family: Family) -> None:
        """Schedule the deletion of all records of a family that is not in memory."""
        self.count(family, -family.rows.nbytes)
        family.rows.stale = True

    def read(self, blobs: MutableMapping[int, bytes], ids: Mapping[int, str]) -> Iterator[tuple[int, RowsRead]]:
        """Read records in the order of their generations, one per step; remove each from `blobs`.

        Args:
            ids: by serial, the ids under which rows are registered.

        Raises:
            IndexError, KeyError, ValueError: a blob is not a record.
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
        """Count the records that were read for a family, and schedule the deletion of records that are not needed."""
        if self.are_kept:
            self.count(family, -family.rows.nbytes)
            for number, (taken, record) in read.items():
                parent = record.parent if record.parent in family.rows.records else None
                self._add(family, number, record._replace(parent=parent), taken.rows)
            self.sweep(family)
        family.rows.stale = False
