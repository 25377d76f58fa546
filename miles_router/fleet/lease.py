"""The lease: one request's slot on a unit. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

from miles_router.fleet.placement.homes import SessionHome
from miles_router.fleet.workers import Unit, Worker

if TYPE_CHECKING:
    from miles_router.fleet.pool import WorkerPool

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
