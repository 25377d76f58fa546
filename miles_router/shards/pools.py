"""The pool of the leader, which decides, and that of a shard, which only follows."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from miles_router.fleet.workers import Worker, WorkerState
from miles_router.shards.peer_loads import NOTHING, PeerLoads, Row
from miles_router.shards.state import SharedPool


class DecidingPool(SharedPool):
    """The pool of the leader. It sends nothing itself: what is in flight it is told."""

    def __init__(self, serial: Callable[[], int], **settings: Any) -> None:
        super().__init__(**settings)
        self._serial = serial

    def restore(self) -> None:
        """It has followed what was decided before this process was there, and decides from now on. An update of the
        weights that was under way then may have taken effect."""
        if self.weights_epoch or any(worker.caches.number for worker in self):
            self.weights_epoch += 1 + (self.weights_epoch + 1) % 2
            self._change_caches(self)

    def _publish(self) -> None:
        for worker in self._workers.values():
            if worker not in self.serials:
                self.serials[worker] = self._serial()
        super()._publish()

    def counted(self, everywhere: Row) -> None:
        """All processes together have this in flight."""
        for worker in self.known:
            worker.in_flight, loads = everywhere.workers.get(worker.url, (0, ()))
            told = {rank: load for rank, *load in loads}
            for unit in worker.units:
                unit.in_flight, unit.tokens, unit.sessions = (each or 0 for each in told.get(unit.rank, NOTHING))

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
        """Everybody has heard that these get nothing new, and told since what it has: those without requests are
        gone."""
        for worker in workers:
            if worker.in_flight:
                continue
            if worker.state is WorkerState.DRAINING and worker in self.ending:
                self._drained(worker)  # also where it was removed meanwhile: who drains it waits for that
            elif self._leaving.get(worker.url) is worker:
                del self._leaving[worker.url]


class FollowingPool(SharedPool):
    """The pool of a shard. What it sees of workers it reports, and it decides nothing.

    Args:
        report: `(what, worker, reason)`.
    """

    def __init__(self, report: Callable[[str, Worker, str], None], **settings: Any) -> None:
        super().__init__(**settings)
        #: What others have.
        self.peer_loads = PeerLoads(self)
        self.let_others_choose = self.peer_loads.let_others_choose
        self._settling = True  # for ever: which weights are the fleet's is decided elsewhere
        #: Tells the leader.
        self.report = report

    @property
    def in_flight(self) -> int:
        """Leases of all processes, as far as this one was told of the others."""
        return super().in_flight + self.peer_loads.leases

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

    def _drained(self, worker: Worker) -> None:
        """Others may have requests there."""
