"""The pool of the control plane, which decides, and that of a data process, which only follows."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from miles_router.cluster.control.state import SharedPool
from miles_router.cluster.control.table import COLUMNS, Counts
from miles_router.errors import BadRequest
from miles_router.fleet.lease import Lease
from miles_router.fleet.placement.contract import Policy
from miles_router.fleet.worker_url import WorkerUrl
from miles_router.fleet.workers import Unit, Worker, WorkerState

#: Seconds after which every process that lives has heard that a worker's cells are no longer its own.
_HEARD = 60.0


class Columns:
    """Which columns of the table are taken, by all pools of a router."""

    def __init__(self, counts: Counts, now: Callable[[], float] = time.monotonic) -> None:
        self._counts = counts
        self._now = now
        self._next = 0
        self._free: deque[tuple[float, int, int]] = deque()

    @property
    def room(self) -> bool:
        """Whether a worker finds some."""
        return self._next < COLUMNS or any(each[2] == 1 and self._is_free(each) for each in self._free)

    def take(self, width: int) -> tuple[int, int] | None:
        """Some that nobody has: the first one, and the width; None where there are none."""
        if self._next + width <= COLUMNS:
            self._next += width
            return self._next - width, width
        for each in tuple(self._free):
            if each[2] == width and self._is_free(each):
                self._free.remove(each)
                return each[1:]
        return None

    def _is_free(self, freed: tuple[float, int, int]) -> bool:
        freed_at, column, width = freed
        return self._now() - freed_at > _HEARD and self._counts.is_empty(column, width)

    def give_back(self, block: tuple[int, int]) -> None:
        """Nobody is sent there any more."""
        self._free.append((self._now(), *block))

    def taken(self, block: tuple[int, int]) -> None:
        """These were taken before this process was there."""
        self._next = max(self._next, sum(block))


class DecidingPool(SharedPool):
    """The pool of the control plane. It sends nothing itself: what is in flight it reads in the table."""

    def __init__(self, counts: Counts, columns: Columns, serial: Callable[[], int], **settings: Any) -> None:
        super().__init__(counts, **settings)
        self._columns = columns
        self._serial = serial

    def restore(self) -> None:
        """It has followed what was decided before this process was there, and decides from now on. An update of the
        weights that was under way then may have taken effect."""
        for worker in self:
            self._columns.taken(self.blocks[worker])
        if self.weights_epoch or any(worker.caches.number for worker in self):
            self.weights_epoch += 1 + (self.weights_epoch + 1) % 2
            self._change_caches(self)

    def _publish(self) -> None:
        for worker in self._workers.values():
            if worker not in self.serials:
                self.serials[worker] = self._serial()
            if worker not in self.blocks:
                self._move_cells(worker, self._columns.take(1))
        super()._publish()

    def add(
        self,
        address: WorkerUrl,
        *,
        api_key: str | None = None,
        attributes: Mapping[str, object] | None = None,
        weight_version: str | None = None,
    ) -> Worker:
        """As `WorkerPool.add`.

        Raises:
            BadRequest: there are more workers than can be counted.
        """
        self._check_room(address)
        return super().add(address, api_key=api_key, attributes=attributes, weight_version=weight_version)

    def expect(self, address: WorkerUrl) -> Worker:
        """As `WorkerPool.expect`. Raises as `add`."""
        self._check_room(address)
        return super().expect(address)

    def _check_room(self, address: WorkerUrl) -> None:
        if self.find(address.url) is None and not self._columns.room:
            raise BadRequest(f"the workers of this router have {COLUMNS} units; it takes no more")

    def _move_cells(self, worker: Worker, block: tuple[int, int] | None) -> None:
        """Have a worker counted there; where it was before if there is no room."""
        if block is not None:
            if (before := self.blocks.get(worker)) is not None:
                self._columns.give_back(before)
            self.blocks[worker] = block
            self.counts.place(worker, *block)

    def set_ranks(self, worker: Worker, count: int, fault: str | None = None) -> bool:
        """As `WorkerPool.set_ranks`."""
        changed = super().set_ranks(worker, count, fault)
        if changed and worker in self.blocks:
            self._move_cells(worker, self._columns.take(1 + len(worker.ranks)))
        return changed

    def remove(self, worker: Worker, reason: str = "removed") -> None:
        """As `WorkerPool.remove`. Until everybody has heard of it, it may still get requests."""
        if self._workers.get(worker.url) is worker:
            super().remove(worker, reason)
            del self.serials[worker]
            self._leaving[worker.url] = worker

    def drain(self, worker: Worker, when_idle: Callable[[], None]) -> None:
        """As `WorkerPool.drain`. Whether it is idle is seen once everybody has heard of it."""
        if worker.state is not WorkerState.DRAINING:
            self._move(worker, WorkerState.DRAINING, "drain requested", before=worker.state)
        self._when_idle.setdefault(worker.url, []).append(when_idle)

    @property
    def ending(self) -> list[Worker]:
        """Workers that get nothing new."""
        return [*(each for each in self if each.state is WorkerState.DRAINING), *self._leaving.values()]

    def settle(self, workers: Iterable[Worker]) -> None:
        """Everybody has heard that these get nothing new: those without requests are gone."""
        self.counts.refresh()
        for worker in workers:
            if worker.in_flight:
                continue
            if worker.state is WorkerState.DRAINING and worker in self.ending:
                self._drained(worker)  # also where it was removed meanwhile: who drains it waits for that
            elif self._leaving.get(worker.url) is worker:
                del self._leaving[worker.url]
            if self.find(worker.url) is not worker and worker in self.blocks:
                self._columns.give_back(self.blocks.pop(worker))
                self.counts.remove(worker)


class FollowingPool(SharedPool):
    """The pool of a data process. What it sees of workers it reports, and it decides nothing.

    Args:
        report: `(what, worker, reason)`.
    """

    def __init__(self, counts: Counts, report: Callable[[str, Worker, str], None], **settings: Any) -> None:
        super().__init__(counts, **settings)
        self._settling = True  # for ever: which weights are the fleet's is decided elsewhere
        #: Tells the control plane.
        self.report = report

    def record_failure(self, worker: Worker, reason: str) -> None:
        """As `WorkerPool.record_failure`, but that somebody else counts."""
        worker.failures += 1
        self._forget_engine(worker)
        self.report("failure", worker, reason)

    def _forget_engine(self, worker: Worker) -> None:
        worker.forget_engine()
        self._publish()

    def record_stall(self, worker: Worker, reason: str) -> None:
        """As `WorkerPool.record_stall`. It is out here at once, and everywhere as soon as that is decided."""
        super().record_stall(worker, reason)
        self.report("stall", worker, reason)

    def _choose(
        self,
        policy: Policy,
        key: str | None,
        candidates: Sequence[Unit],
        at_home: Sequence[Unit],
        tokens: int,
        body: bytes,
    ) -> Lease:
        lease = super()._choose(policy, key, candidates, at_home, tokens, body)
        self.counts.note(lease.unit)  # what others have was counted where homes expired
        return lease

    def released(self, lease: Lease, *, answered: bool) -> None:
        """As `WorkerPool.released`."""
        super().released(lease, answered=answered)
        self.counts.note(lease.unit)

    def _drained(self, worker: Worker) -> None:
        """Others may have requests there."""
