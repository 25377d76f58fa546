"""The workers of a pool: their table with its listeners, the lease (one request's slot on a unit), and the pace of each
unit. Pure.

The pace is a unit's seconds per output token compared with all units of the pool. They include prompts and queues at
the engine, so they vary within one unit too. The estimate therefore also learns the variance, and calls a unit slower
only when chance does not explain the difference.

A unit that is called slower gets fewer requests, down to none, and then no answer could correct the estimate. So the
verdict expires after a long silence of the unit. If the next answers are slow again, the new verdict lasts twice as
long.
"""

from __future__ import annotations

import itertools
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from math import exp, log
from typing import TYPE_CHECKING

from miles_router.errors import NotFound
from miles_router.fleet.placement.sessions import SessionHome
from miles_router.fleet.snapshot import Snapshot
from miles_router.fleet.workers import Transition, Unit, Worker, WorkerState

if TYPE_CHECKING:
    from miles_router.fleet.pool import WorkerPool


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


#: Answers after which a unit's speed is known well enough to measure only every second answer.
ENOUGH_ANSWERS = 64


class Lease:
    """A slot of one request in flight on a unit. `release` is idempotent, so that every path may call it."""

    __slots__ = ("_pool", "home", "started_at", "tokens", "unit", "worker")

    def __init__(self, pool: WorkerPool, unit: Unit, tokens: int = 0, home: SessionHome | None = None) -> None:
        self.unit = unit
        #: The worker of the unit.
        self.worker: Worker = unit.worker
        #: The length of the request's prompt; 0 if it generates nothing.
        self.tokens = tokens
        #: The home of the request's session, if it is on this unit.
        self.home = home
        self.started_at = pool.paces.now()
        self._pool: WorkerPool | None = pool
        unit.in_flight += 1
        unit.tokens += tokens
        self.worker.in_flight += 1

    @property
    def measures_pace(self) -> bool:
        """Whether the answer's duration should be measured: always for a new unit, else for every second answer."""
        measured = self.unit.measurements
        return self.tokens > 0 and (
            measured is None or measured.answers < ENOUGH_ANSWERS or self.unit.chosen_at % 2 == 1
        )

    def release(self, *, answered: bool = True, sampled: int = 0) -> None:
        """Free the slot; the second and later calls do nothing.

        Args:
            answered: the engine answered and did not refuse, so the session's prompt is in the unit's cache.
            sampled: the answer's output tokens; 0 if unknown.
        """
        pool, self._pool = self._pool, None
        if pool is not None:
            if sampled:
                pool.paces.record_answer(self.unit, self.started_at, sampled)
            pool.record_release(self, answered=answered)


#: Window of the running means in answers: of all units, and of one unit.
ALL, ONE = 50, 16
OF_ALL, OF_ONE = 1 / ALL, 1 / ONE
#: Priors, in answers: a unit begins with 2 at the common pace; the variance begins with 8 of variance 1, a factor of e.
BEGINNING, SPREADING = 2, 8
#: Answers with fewer tokens measure the prompt rather than the unit; larger token counts are not plausible.
FEWEST, MOST = 16, 1_000_000
#: The largest deviation from the mean that one answer counts with, as a logarithm: the engine may have been paused.
FURTHEST = 1.5
#: Answers of a unit before it can be called slower.
FIRST = 6
#: A unit is slower when its lag reaches 1.35 times (as a logarithm) and exceeds three standard errors (here squared).
#: It stays slower until its lag falls below 1.1 times.
SLOWER, NO_SLOWER, BY_CHANCE = 0.3, 0.1, 9.0
#: A verdict expires after 30 times the mean seconds of an answer, bounded to 5 to 600 seconds. Each confirmed verdict
#: doubles this, up to 32 times.
SILENT, SHORTEST, LONGEST, LONGER = 30.0, 5.0, 600.0, 32


class PaceMeasurements:
    """The measurements of one unit."""

    __slots__ = ("answers", "duration_factor", "expires_at", "lag")

    def __init__(self) -> None:
        self.answers = 0
        #: Logarithm of its seconds per token over the mean of all units.
        self.lag = 0.0
        #: When the verdict "slower" expires, and the factor on how long the next verdict lasts.
        self.expires_at, self.duration_factor = 0.0, 1


class PaceEstimates:
    """The speed estimates of all units of one pool, from the answers that this process has relayed."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self.now = now
        self._answers = 0
        self._mean = 0.0  # logarithm of the seconds for each token
        self._variance = 1.0  # variance of answers around their unit's mean
        self._mean_duration = 0.0  # mean seconds of an answer
        self._slower: list[Unit] = []

    def record_answer(self, unit: Unit, started_at: float, tokens: int) -> None:
        """Record an answer of `tokens` output tokens that `unit` has finished. `started_at` is in the time of `now`."""
        now = self.now()
        seconds = now - started_at
        if not FEWEST <= tokens <= MOST or seconds <= 0:
            return
        if (measured := unit.measurements) is None:
            measured = unit.measurements = PaceMeasurements()
        log_pace, answers, variance, lag = log(seconds / tokens), self._answers + 1, self._variance, measured.lag
        mean = log_pace if answers == 1 else self._mean
        log_pace = min(mean + FURTHEST, max(mean - FURTHEST, log_pace))
        weight = 1 / answers if answers < ALL else OF_ALL
        self._answers, self._mean_duration = answers, self._mean_duration + weight * (seconds - self._mean_duration)
        self._mean = mean = mean + weight * (log_pace - mean)
        deviation = log_pace - mean - lag
        self._variance = variance + (1 / (answers + SPREADING) if answers < ALL else OF_ALL) * (
            deviation * deviation - variance
        )
        measured.answers = own = measured.answers + 1
        weight = 1 / (own + BEGINNING) if own < ONE else OF_ONE
        measured.lag = lag = lag + weight * deviation
        if lag >= SLOWER or unit.pace > 1:
            self._update_verdict(unit, measured, weight)
        elif lag < NO_SLOWER:
            measured.duration_factor = 1
        if self._slower:
            self._expire_verdicts(now)

    def _update_verdict(self, unit: Unit, measured: PaceMeasurements, weight: float) -> None:
        """Set or clear the verdict of a unit whose lag is high or that is called slower, and its expiry."""
        lag = measured.lag
        if unit.pace == 1:
            if measured.answers < FIRST or lag * lag <= BY_CHANCE * self._variance * weight:
                return
            self._slower.append(unit)
        elif lag < NO_SLOWER:
            self._slower.remove(unit)
            unit.pace, measured.duration_factor = 1.0, 1
            return
        unit.pace = exp(lag)
        measured.expires_at = self.now() + measured.duration_factor * min(
            LONGEST, max(SHORTEST, SILENT * self._mean_duration)
        )

    def _expire_verdicts(self, now: float) -> None:
        """Drop the expired verdicts. The unit's lag stays just high enough that slow answers restore the verdict."""
        for unit in [unit for unit in self._slower if unit.measurements is None or unit.measurements.expires_at <= now]:
            self._slower.remove(unit)
            unit.pace = 1.0
            if (measured := unit.measurements) is not None:
                measured.lag = min(measured.lag, SLOWER)
                measured.duration_factor = min(LONGER, 2 * measured.duration_factor)
