"""Requests in flight of all processes: a table in shared memory, with a row for each data process and three cells for
each unit. Each process writes its own row alone and reads all of them, so that the least loaded unit is that of the
whole machine.

An inherited `memfd`: nothing has a name, and nothing is left behind. A cell is one aligned word, so that it is never
read half written; two processes may still choose at the same instant.

Behind the rows all processes share where keys are at home: a cell for each of their hashes, which the last one has.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterable
from hashlib import blake2b

import numpy as np

from miles_router.fleet.workers import Unit, Worker

#: Units of all workers, and one more for each worker.
COLUMNS = 65_536
#: Cells of a unit: requests, tokens, sessions.
KINDS = ("in_flight", "tokens", "sessions")
_WIDTH = len(KINDS)
_CELL = 8
#: Cells before those of the units: the process id of a process that sends requests, or 0.
_HEADER = 8
_ROW = _HEADER + _WIDTH * COLUMNS
_WHOLE_PAGES = 1 << 16
#: Keys whose home all processes know. Of a key's hash the lower bits are its cell, and the upper ones tell it apart.
HOMES = 1 << 18
_TAG, _COLUMN = 24, (1 << 17) - 1


def make_table(rows: int) -> int:
    """The descriptor of an empty table."""
    descriptor = os.memfd_create("miles-router counts", os.MFD_CLOEXEC)
    os.ftruncate(descriptor, _size(rows))
    return descriptor


def _size(rows: int) -> int:
    return -(-(rows * _ROW + HOMES) * _CELL // _WHOLE_PAGES) * _WHOLE_PAGES


def _hash(key: str) -> int:
    return int.from_bytes(blake2b(key.encode("utf-8", "surrogatepass"), digest_size=8).digest(), "big")


class _Cells:
    """Where a unit counts: its column, whether that is the unit's alone, and what this process has put there."""

    __slots__ = ("alone", "column", "in_flight", "sessions", "tokens")

    def __init__(self, column: int, alone: bool) -> None:
        self.column = column
        self.alone = alone
        self.in_flight = self.tokens = self.sessions = 0


class Counts:
    """One process's view of the table.

    Args:
        descriptor: of the table; it may be closed afterwards.
        row: that this process writes; None for one that only reads. What it reads counts on workers, too, then.
    """

    def __init__(self, descriptor: int, rows: int, row: int | None = None) -> None:
        memory = mmap.mmap(descriptor, _size(rows))
        self._cells = np.frombuffer(memory, dtype=np.int64, count=rows * _ROW).reshape(rows, _ROW)
        self._row = row
        start = 0 if row is None else row * _ROW * _CELL
        self._own = memoryview(memory)[start : start + _ROW * _CELL].cast("q")
        self._homes = memoryview(memory)[rows * _ROW * _CELL : (rows * _ROW + HOMES) * _CELL].cast("Q")
        self._others = [each for each in range(rows) if each != row]
        self._places: dict[Unit, _Cells] = {}
        self._units: dict[int, Unit] = {}
        self._blocks: dict[Worker, tuple[int, int]] = {}
        #: What was last read of the others, twice: to be compared at once, and to be read one by one.
        self._seen = np.zeros(0, dtype=np.int64)
        self._elsewhere: list[int] = []

    # Who sends requests

    @property
    def senders(self) -> list[int]:
        """The process ids of those that send requests, one for each row; 0 where there is none."""
        return [int(each) for each in self._cells[:, 0]]

    def send(self, process: int) -> None:
        """This process begins to send requests; it has this id."""
        self._own[0] = process

    def cells(self) -> list[list[int]]:
        """What this process has put into its row, for a table on another machine: columns, and the numbers there."""
        own = self._cells[self._row, _HEADER:]
        places = own.nonzero()[0]
        return [places.tolist(), own[places].tolist()]

    def put(self, row: int, cells: list[list[int]]) -> None:
        """A process on another machine has this in its row."""
        places, numbers = cells
        self._cells[row] = 0
        self._cells[row, _HEADER:][places] = numbers

    def clear(self, row: int) -> None:
        """The process of a row has ended."""
        self._cells[row] = 0

    # Which unit has which cells

    def place(self, worker: Worker, column: int, width: int) -> None:
        """The units of a worker have the cells from this column on: the whole worker, then each rank."""
        self._blocks[worker] = (column, width)
        used = _WIDTH * (column + width)
        if used > len(self._elsewhere):
            more = used - len(self._elsewhere)
            self._seen = np.concatenate([self._seen, np.zeros(more, dtype=np.int64)])
            self._elsewhere += [0] * more
        self.arrange(worker)

    def arrange(self, worker: Worker) -> None:
        """The units of a worker may be others than before. Ranks that have no cells yet count on the worker; and so do,
        for who only reads, those that it does not know."""
        if worker not in self._blocks:
            return
        column, width = self._blocks[worker]
        if self._row is None and worker.ranks and column not in self._units:
            rest = Unit(worker)
            rest.retired = True
            self._put(rest, column, alone=True)
        for unit in worker.units:
            number = 0 if unit.rank is None else 1 + unit.rank
            alone = number < width
            place = self._places.get(unit)
            wanted = column + number if alone else column
            if place is None or (place.column, place.alone) != (wanted, alone):
                self._take(unit)
                self._put(unit, wanted, alone=alone)
        if self._row is not None:
            for unit in [each for each in self._places if each.worker is worker and each.retired]:
                self._lift(unit)
                self.note(unit)

    def remove(self, worker: Worker) -> None:
        """A worker is forgotten. What it still has stays in this process's row until it ends."""
        if self._blocks.pop(worker, None) is not None:
            for unit in [each for each in self._places if each.worker is worker]:
                self._lift(unit)
                if self._row is None:
                    del self._places[unit]
                else:
                    self.note(unit)

    def _put(self, unit: Unit, column: int, *, alone: bool) -> None:
        self._places[unit] = _Cells(column, alone)
        if alone:
            if (other := self._units.get(column)) is not None:
                self._lift(other)
                self.note(other)
            self._units[column] = unit
            for kind, name in enumerate(KINDS):
                self._add(unit, name, self._elsewhere[_WIDTH * column + kind])
        self.note(unit)

    def _lift(self, unit: Unit) -> None:
        """What others have there counts on it no more."""
        column = self._places[unit].column
        if self._units.get(column) is unit:
            del self._units[column]
            for kind, name in enumerate(KINDS):
                self._add(unit, name, -self._elsewhere[_WIDTH * column + kind])

    def _take(self, unit: Unit) -> None:
        """It counts there no more."""
        if unit in self._places:
            self._lift(unit)
            self._write(self._places[unit], 0, 0, 0)
            del self._places[unit]

    def _add(self, unit: Unit, name: str, number: int) -> None:
        setattr(unit, name, getattr(unit, name) + number)
        if self._row is None and name == KINDS[0]:
            unit.worker.in_flight += number

    # Where keys are at home

    def home(self, key: str) -> Unit | None:
        """Where some process has sent the last request of a key, as far as that is known."""
        name = _hash(key)
        cell = self._homes[name % HOMES]
        return self._units.get((cell & _COLUMN) - 1) if cell and cell >> _TAG == name >> _TAG else None

    def settle(self, key: str, unit: Unit) -> None:
        """A request of a key goes to a unit."""
        place = self._places.get(unit)
        if place is not None and place.alone:
            name = _hash(key)
            self._homes[name % HOMES] = (name >> _TAG << _TAG) | (place.column + 1)

    def forget(self, key: str) -> None:
        """A key is at home nowhere."""
        name = _hash(key)
        if self._homes[name % HOMES] >> _TAG == name >> _TAG:
            self._homes[name % HOMES] = 0

    # Counting

    def note(self, unit: Unit) -> None:
        """What this process has on a unit may have changed."""
        place = self._places.get(unit)
        if place is None or self._row is None:
            return
        first = _WIDTH * place.column
        if self._units.get(place.column) is unit:
            elsewhere = self._elsewhere
            self._write(
                place,
                unit.in_flight - elsewhere[first],
                unit.tokens - elsewhere[first + 1],
                unit.sessions - elsewhere[first + 2],
            )
            return
        self._write(place, unit.in_flight, unit.tokens, unit.sessions)
        if unit.retired and not (unit.in_flight or unit.tokens or unit.sessions):
            del self._places[unit]

    def _write(self, place: _Cells, in_flight: int, tokens: int, sessions: int) -> None:
        """Several units may share a cell."""
        if self._row is None:
            return
        own, cell = self._own, _HEADER + _WIDTH * place.column
        if in_flight != place.in_flight:
            own[cell] += in_flight - place.in_flight
            place.in_flight = in_flight
        if tokens != place.tokens:
            own[cell + 1] += tokens - place.tokens
            place.tokens = tokens
        if sessions != place.sessions:
            own[cell + 2] += sessions - place.sessions
            place.sessions = sessions

    def refresh(self) -> None:
        """Count what all others have on each unit now."""
        used = len(self._elsewhere)
        if not used or not self._others:
            return
        cells = self._cells[:, _HEADER : _HEADER + used]
        if len(self._others) == 1:
            now = cells[self._others[0]].copy()
        else:
            now = np.add.reduce(cells, axis=0)
            if self._row is not None:
                now -= cells[self._row]
        changed = (now != self._seen).nonzero()[0]
        if not len(changed):
            return
        self._seen = now
        for place, number in zip(changed.tolist(), now[changed].tolist(), strict=True):
            column, kind = divmod(place, _WIDTH)
            before, self._elsewhere[place] = self._elsewhere[place], number
            unit = self._units.get(column)
            if unit is not None:
                self._add(unit, KINDS[kind], number - before)

    def is_empty(self, column: int, width: int) -> bool:
        """Whether nobody has anything there."""
        first = _HEADER + _WIDTH * column
        return not self._cells[:, first : first + _WIDTH * width].any()

    def in_flight(self, blocks: Iterable[tuple[int, int]]) -> int:
        """The requests of all processes in these columns, each a first one and how many they are."""
        starts = [(_HEADER + _WIDTH * column, _HEADER + _WIDTH * (column + width)) for column, width in blocks]
        return sum(int(self._cells[:, start:stop:_WIDTH].sum()) for start, stop in starts)
