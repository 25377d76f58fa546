"""What a request holds while a unit has it. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

from miles_router.fleet.placement.homes import SessionHome
from miles_router.fleet.workers import Unit, Worker

if TYPE_CHECKING:
    from miles_router.fleet.pool import WorkerPool

#: Answers after which it is known how fast a unit is.
KNOWN = 64


class Lease:
    """One in-flight slot on a unit. `release` is idempotent, so that every path may call it."""

    __slots__ = ("_pool", "begun", "home", "tokens", "unit")

    def __init__(self, pool: WorkerPool, unit: Unit, tokens: int = 0, home: SessionHome | None = None) -> None:
        self.unit = unit
        #: Those of its prompt.
        self.tokens = tokens
        #: Its session's, where that is here.
        self.home = home
        self.begun = pool.paces.now()
        self._pool: WorkerPool | None = pool
        unit.in_flight += 1
        unit.tokens += tokens
        unit.worker.in_flight += 1

    @property
    def worker(self) -> Worker:
        """Whose unit it is."""
        return self.unit.worker

    @property
    def tells(self) -> bool:
        """Whether how long its answer takes is of use: of a unit that is known, one in two is."""
        learned = self.unit.learned
        return self.tokens > 0 and (learned is None or learned.answers < KNOWN or self.unit.chosen_at % 2 == 1)

    def release(self, *, answered: bool = True, sampled: int = 0) -> None:
        """Give the slot back; the second and later calls do nothing.

        Args:
            answered: its request was, and not with a refusal, so that its session holds what it asked with.
            sampled: tokens of its answer; 0 where it does not tell.
        """
        pool, self._pool = self._pool, None
        if pool is not None:
            if sampled:
                pool.paces.note(self.unit, self.begun, sampled)
            pool.released(self, answered=answered)
