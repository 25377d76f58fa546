"""The open journals of a directory, called by one thread.

Waiting jobs run in batches: neighbouring commits of one slot share a transaction. Jobs of one slot keep their order.
"""

from __future__ import annotations

import asyncio
import logging
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

from miles_router.errors import StateError, StateFull, StateHeld
from miles_router.slots import CONTROL
from miles_router.state.blobs import Sync
from miles_router.state.journal import SHARED_EPOCHS, Journal

logger = logging.getLogger(__name__)


@dataclass(eq=False)
class Job:
    """A call of one slot's journal, and the future on which its caller waits."""

    slot: int
    work: Callable[[Journal], Any]
    answer: asyncio.Future[Any]
    #: Whether the job changes blobs. It then runs in one transaction with neighbouring commits.
    commits: bool = False
    size: int = 0


#: A finished job, its result, and its error.
Outcome = tuple[Job, Any, StateError | None]


class Journals:
    """The journals that this process has open. For `shared` see `Journal`."""

    def __init__(self, directory: Path, sync: Sync, *, shared: bool) -> None:
        self._directory, self._sync, self._shared = directory, sync, shared
        self._open: dict[int, Journal] = {}
        #: Epochs of shared files that were closed after an error. A process that lost its slot must not get it back by
        #: reopening.
        self._epochs: dict[int, int] = {}
        #: Slots found locked by other processes in this batch. Waiting again for each job would stall all slots.
        self._held: dict[int, StateHeld] = {}

    def path(self, slot: int) -> Path:
        return self._directory / ("control.sqlite" if slot == CONTROL else f"slot-{slot:02d}.sqlite")

    @property
    def slack(self) -> bool:
        """Whether there may be free space to give back to the disk."""
        return any(journal.slack for journal in self._open.values())

    def run(self, jobs: Sequence[Job]) -> list[Outcome]:
        """Run all jobs and return their outcomes. Without jobs, give some space of deleted blobs back to the disk."""
        self._held.clear()
        if not jobs:
            self._vacuum()
        by_slot = defaultdict(list)
        for job in jobs:
            by_slot[job.slot].append(job)
        return [
            outcome
            for slot_jobs in by_slot.values()
            for commits, neighbours in groupby(slot_jobs, key=lambda job: job.commits)
            for outcome in (self._commit([*neighbours]) if commits else map(self._read, neighbours))
        ]

    def close(self) -> None:
        for slot in [*self._open]:
            self._close_slot(slot)

    def _vacuum(self) -> None:
        for journal in [journal for journal in self._open.values() if journal.slack][:1]:
            try:
                journal.vacuum()
            except StateError:  # no caller waits for a vacuum; the next job reports the error
                journal.slack = False

    def _read(self, job: Job) -> Outcome:
        return job, *self._attempt(job.slot, job.work)

    def _commit(self, jobs: list[Job]) -> Iterator[Outcome]:
        works = [job.work for job in jobs]
        result, error = self._attempt(jobs[0].slot, lambda journal: journal.transaction(works))
        if error is not None and len(jobs) > 1:  # alone, a job may fit on the disk or succeed
            for job in jobs:
                yield from self._commit([job])
        else:
            yield from ((job, result, error) for job in jobs)

    def _attempt(self, slot: int, work: Callable[[Journal], Any]) -> tuple[Any, StateError | None]:
        if slot in self._held:
            return None, self._held[slot]
        try:
            journal = self._open.get(slot)
            if journal is None:
                journal = self._open[slot] = self._opened(slot)
            return work(journal), None
        except StateHeld as error:
            self._held[slot] = error
            return None, error
        except StateError as error:
            if not isinstance(error, StateFull):
                self._close_slot(slot)  # the next job reopens the file and reads its real state
            return None, error
        except Exception as error:  # at the thread's boundary: without an answer, callers would wait forever
            logger.error("state_defect", exc_info=error, extra={"fields": {"file": str(self.path(slot))}})
            self._close_slot(slot)
            return None, StateError("the router failed; its log has the details")

    def _opened(self, slot: int) -> Journal:
        journal = Journal(self.path(slot), self._sync, shared=self._shared)
        try:
            if not self._shared and journal.epoch >= SHARED_EPOCHS:
                journal.claim()  # routers that shared the directory and still run must not commit here
        except StateError:
            journal.close()
            raise
        journal.epoch = self._epochs.get(slot, journal.epoch)
        return journal

    def _close_slot(self, slot: int) -> None:
        journal = self._open.pop(slot, None)
        if journal is not None:
            if self._shared:
                self._epochs[slot] = journal.epoch
            with suppress(StateError):  # a network file system may report a failed write only at close
                journal.close()
