"""The table of a pool's workers, and the listeners for its changes. Pure."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterator, Sequence

from miles_router.errors import NotFound
from miles_router.fleet.snapshot import Snapshot
from miles_router.fleet.workers import Transition, Worker, WorkerState


class WorkerTable:
    """The registered workers, by normal URL, in order of registration."""

    def __init__(self) -> None:
        self._workers: dict[str, Worker] = {}
        self._leaving: dict[str, Worker] = {}  # removed, with requests still in flight
        #: The numbers of further registrations.
        self.serials = itertools.count(1)
        #: Leases held by other processes, as far as they have reported them.
        self.leases_elsewhere = 0
        self.snapshot = Snapshot()
        self.listeners: list[Callable[[Transition], None]] = []
        #: Called after the fleet's weight version may have changed.
        self.when_settled: Callable[[], None] = lambda: None

    def __iter__(self) -> Iterator[Worker]:
        return iter(tuple(self._workers.values()))

    def __len__(self) -> int:
        return len(self._workers)

    def __repr__(self) -> str:
        states = Counter(worker.state for worker in self)
        counts = ", ".join(f"{states[state]} {state.value}" for state in WorkerState)
        return f"<WorkerPool {counts}; in flight: {self.in_flight}>"

    @property
    def routable(self) -> Sequence[Worker]:
        """The workers that new requests may go to."""
        return [worker for worker in self if worker.state is WorkerState.READY]

    @property
    def known(self) -> Sequence[Worker]:
        """All workers, including removed ones with requests still in flight."""
        return [*self, *self._leaving.values()]

    @property
    def busy(self) -> Sequence[Worker]:
        """The workers with requests in flight, including removed ones."""
        return [worker for worker in self.known if worker.in_flight]

    @property
    def in_flight(self) -> int:
        """Leases held on all workers, including removed ones, by all processes."""
        return sum(worker.in_flight for worker in self.known) + self.leases_elsewhere

    def get(self, name: str) -> Worker:
        """Return the worker with this normal URL or id.

        Raises:
            NotFound: no such worker is registered.
        """
        worker = self._workers.get(name) or next((w for w in self if w.address.id == name), None)
        if worker is None:
            raise NotFound(f"no worker {name!r} is registered")
        return worker

    def find(self, url: str) -> Worker | None:
        """Return the worker at a normal URL, or None. Removed workers with requests in flight are found too."""
        return self._workers.get(url) or self._leaving.get(url)

    def version_of(self, url: str | None) -> str | None:
        """Return the last known weight version of the worker at a normal URL, or None."""
        worker = self._workers.get(url) or self._leaving.get(url) if url else None  # `find`, inlined for speed
        return None if worker is None else worker.weight_version

    # Changes

    def replace_all(self, members: Sequence[Worker], transitions: Sequence[Transition]) -> None:
        """Replace all workers by `members`, whose states another process has decided.

        Args:
            transitions: the transitions that listeners get, after a removal for each worker that is gone.
        """
        workers = {worker.url: worker for worker in members}
        gone = [worker for worker in self if workers.get(worker.url) is not worker]
        for worker in gone:
            worker.serial = 0
            if worker.in_flight:
                self._leaving[worker.url] = worker
        for worker in members:
            if self._leaving.get(worker.url) is worker:
                del self._leaving[worker.url]
        self.serials = itertools.count(max((worker.serial for worker in members), default=0) + 1)
        self._workers = workers
        self._publish()
        for transition in [*(Transition(worker, worker.state, None, "removed") for worker in gone), *transitions]:
            self._notify(transition)

    def _register(self, worker: Worker) -> Worker:
        self._workers[worker.url] = worker
        worker.serial = next(self.serials)
        return worker

    def _publish(self) -> None:
        self.snapshot = Snapshot.of(self.snapshot.number + 1, self._workers.values())

    def _notify(self, transition: Transition) -> None:
        for listener in self.listeners:
            listener(transition)
