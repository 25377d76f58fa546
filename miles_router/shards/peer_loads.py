"""Requests in flight at other processes, and how placement accounts for them.

Ten times a second each process receives the loads of all others. In between, all of them would choose the same least
busy unit. So before each of its own choices, a process simulates choices of the others. Their number is the recent
ratio of the others' choices to its own. Simulated choices are dropped at the next update, and after one second without
an update, because requests end meanwhile.
"""

from __future__ import annotations

import heapq
import math
import random
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple, TypeAlias

from miles_router.fleet.pool import WorkerPool
from miles_router.fleet.workers import Unit

#: Requests in flight, tokens, sessions.
Load: TypeAlias = tuple[int, int, int]
NO_LOAD: Load = (0, 0, 0)
#: The weight of the last tenth of a second in the moving average of choices; and the average below which it is
#: ignored.
WEIGHT, FEW = 0.3, 0.01
#: Seconds without an update after which no choices are simulated; and the number of unit groups with a heap.
STALE, GROUPS = 1.0, 4
#: One worker on the wire: its leases, including leases of ranks that it no longer has, and `[rank, *load]` of each unit
#: with a load.
WorkerLoad: TypeAlias = tuple[int, Sequence[Sequence[int | None]]]


class PoolLoad(NamedTuple):
    """The load of one process in one pool, or the sum over several processes.

    Attributes:
        choices: placement choices since the process started.
        workers: by URL.
        processes: the number of processes in this sum.
    """

    choices: int
    workers: Mapping[str, WorkerLoad]
    processes: int = 1


def sum_loads(pool_loads: Iterable[PoolLoad]) -> PoolLoad:
    """Return the sum of several loads."""
    choices, processes, in_flight = 0, 0, dict[str, int]()
    units: dict[str, dict[int | None, Load]] = {}
    for pool_load in pool_loads:
        choices, processes = choices + pool_load.choices, processes + pool_load.processes
        for url, (leases, loads) in pool_load.workers.items():
            in_flight[url] = in_flight.get(url, 0) + leases
            known = units.setdefault(url, {})
            for rank, *load in loads:
                known[rank] = _sum(known.get(rank, NO_LOAD), load)
    return PoolLoad(
        choices,
        {url: (n, [[rank, *load] for rank, load in units[url].items() if any(load)]) for url, n in in_flight.items()},
        processes,
    )


def subtract_load(pool_load: PoolLoad, part: PoolLoad) -> PoolLoad:
    """Return a load minus a part of it."""
    workers = {
        url: (-leases, [[rank, *_sum(NO_LOAD, load, -1)] for rank, *load in loads])
        for url, (leases, loads) in part.workers.items()
    }
    return sum_loads([pool_load, PoolLoad(-part.choices, workers, -part.processes)])


def _sum(load: Load, other: Sequence[int | None], sign: int = 1) -> Load:
    a, b, c = other
    return load[0] + sign * (a or 0), load[1] + sign * (b or 0), load[2] + sign * (c or 0)


class PeerLoads:
    """The loads of other processes in one pool. They are added to the units, so every policy sees them."""

    def __init__(self, pool: WorkerPool, now: Callable[[], float] = time.monotonic) -> None:
        self._pool = pool
        pool.simulate_others = self.simulate_others
        self._now = now
        self._updated_at = -math.inf
        #: Loads added to units: those reported, and simulated requests.
        self._added: dict[Unit, Load] = {}
        self._simulated: dict[Unit, int] = {}
        self._choices = 0
        #: Average choices in a tenth of a second: of this process, and of all others together.
        self._own_pace = self._others_pace = 0.0
        self._choices_before = (0, 0)
        self._other_processes = 0
        #: Simulated choices before each own choice, and the fraction carried over.
        self._others_per_choice = 0.0
        self._due = 0.0
        #: A heap of units by load, for each group chosen from since the last update.
        self._heaps: dict[int, tuple[Sequence[Unit], list[tuple[int, float, Unit]]]] = {}

    def own_load(self) -> PoolLoad:
        """Return this process's own load, without reported and simulated loads."""
        self._pool.homes.expire()  # otherwise homes would not expire without requests
        workers: dict[str, WorkerLoad] = {}
        for worker in self._pool.known:
            loads = [(unit.rank, self._own(unit)) for unit in worker.units]
            units = [[rank, *load] for rank, load in loads if load != NO_LOAD]
            if worker.in_flight or units:
                workers[worker.url] = (worker.in_flight, units)
        return PoolLoad(self._choices, workers)

    def update(self, others: PoolLoad) -> None:
        """Replace the reported loads of all other processes."""
        self._drop_simulated()
        self._updated_at = self._now()
        for unit, load in self._added.items():
            _add(unit, load, -1)
        self._added = {}
        self._pool.leases_elsewhere = sum(leases for leases, _ in others.workers.values())
        for url, (_, loads) in others.workers.items():
            worker = self._pool.find(url)
            units = {} if worker is None else {unit.rank: unit for unit in worker.units}
            for rank, *numbers in loads:
                if rank in units:  # otherwise one of the two processes does not know the worker's ranks yet
                    self._added[units[rank]] = load = _sum(NO_LOAD, numbers)
                    _add(units[rank], load, 1)
        self._learn_pace(others)

    def _own(self, unit: Unit) -> Load:
        in_flight = unit.in_flight - self._simulated.get(unit, 0)
        return _sum((in_flight, unit.tokens, unit.sessions), self._added.get(unit, NO_LOAD), -1)

    def _drop_simulated(self) -> None:
        for unit, count in self._simulated.items():
            unit.in_flight -= count
        self._simulated = {}
        self._heaps.clear()

    def _learn_pace(self, others: PoolLoad) -> None:
        own, theirs = self._choices - self._choices_before[0], others.choices - self._choices_before[1]
        self._choices_before = self._choices, others.choices
        if others.processes == self._other_processes:  # after a change, `theirs` counts choices since a process started
            self._own_pace += WEIGHT * (own - self._own_pace)
            self._others_pace += WEIGHT * (max(0, theirs) - self._others_pace)
        self._other_processes = others.processes
        evenly = float(others.processes)
        known = self._own_pace > FEW
        self._others_per_choice = min(evenly, self._others_pace / self._own_pace) if known else evenly
        self._due = random.random() * self._others_per_choice

    def simulate_others(self, units: Sequence[Unit]) -> None:
        """Simulate what the others choose among these units before this process chooses."""
        self._choices += 1
        if self._now() - self._updated_at > STALE:
            self._drop_simulated()
            return
        due, self._due = self._due, self._due % 1 + self._others_per_choice
        if due < 1:
            return
        _, heap = self._heaps.get(id(units)) or self._heap(units)
        for _ in range(int(due)):
            while heap[0][0] < _busy(heap[0][2]):
                unit = heap[0][2]
                heapq.heapreplace(heap, (_busy(unit), random.random(), unit))
            unit = heap[0][2]
            unit.in_flight += 1
            self._simulated[unit] = self._simulated.get(unit, 0) + 1
            heapq.heapreplace(heap, (_busy(unit), random.random(), unit))

    def _heap(self, units: Sequence[Unit]) -> tuple[Sequence[Unit], list[tuple[int, float, Unit]]]:
        if len(self._heaps) == GROUPS:  # drop groups of older snapshots
            self._heaps.clear()
        heap = [(_busy(unit), random.random(), unit) for unit in units]
        heapq.heapify(heap)
        made = self._heaps[id(units)] = units, heap  # keeps `units` alive: otherwise another list could get its id
        return made


def _busy(unit: Unit) -> int:
    return unit.in_flight + unit.sessions


def _add(unit: Unit, load: Load, sign: int) -> None:
    unit.in_flight += sign * load[0]
    unit.tokens += sign * load[1]
    unit.sessions += sign * load[2]
