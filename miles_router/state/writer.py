"""The one thread that touches the files of state. What waits is done together: one transaction for all commits of a
slot that lie beside each other, and nothing of a slot overtakes anything else of it."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
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
    """Something to be done with a slot's file, and who waits for it."""

    slot: int
    work: Callable[[Journal], Any]
    answer: asyncio.Future[Any]
    #: Whether it changes rows, in a transaction with those beside it.
    commits: bool = False
    size: int = 0


class Writer:
    """Begins with the first job, and ends when it is told to."""

    def __init__(self, directory: Path, sync: Sync, done: Callable[[Sequence[Job]], None], *, shared: bool) -> None:
        """
        Args:
            shared: as `Journal`.
            done: is told on the event loop which jobs are over, once for each transaction.
        """
        self._directory, self._sync, self._shared, self._done = directory, sync, shared, done
        self._files: dict[int, Journal] = {}
        #: Of shared files that were let go of: whoever was succeeded stays so when he opens one again.
        self._epochs: dict[int, int] = {}
        self._waiting: deque[Job] = deque()
        self._changed = threading.Condition()
        self._ends = False
        self._thread: threading.Thread | None = None

    def path(self, slot: int) -> Path:
        """The file of a slot."""
        return self._directory / ("control.sqlite" if slot == CONTROL else f"slot-{slot:02d}.sqlite")

    def add(self, job: Job) -> None:
        """Do it behind what waits; behind the end, refuse it."""
        with self._changed:
            ends = self._ends
            if not ends:
                self._waiting.append(job)
                self._changed.notify()
        if ends:
            self._settle([job], None, StateError(f"{self._directory}: the router has let go of it"))
        elif self._thread is None:
            self._thread = threading.Thread(target=self._run, name="state", daemon=True)
            self._thread.start()

    def end(self) -> None:
        """Do what waits, close all files, and end. Waits for that."""
        with self._changed:
            self._ends = True
            self._changed.notify()
        if self._thread is not None:
            self._thread.join()

    def _run(self) -> None:
        while True:
            slack = [file for file in self._files.values() if file.slack]
            with self._changed:
                if not self._waiting and not slack and not self._ends:
                    self._changed.wait()
                jobs, self._waiting = self._waiting, deque()
            if jobs:
                self._do(jobs)
            elif self._ends:
                break
            elif slack:
                self._vacuum(slack[0])
        for slot in [*self._files]:
            self._release(slot)

    @staticmethod
    def _vacuum(file: Journal) -> None:
        try:
            file.vacuum()
        except StateError:  # nobody waits for it, and whatever is wrong meets the next one who comes with something
            file.slack = False

    def _do(self, jobs: Sequence[Job]) -> None:
        by_slot = defaultdict(list)
        for job in jobs:
            by_slot[job.slot].append(job)
        for slot, its in by_slot.items():
            for commits, together in groupby(its, key=lambda job: job.commits):
                if commits:
                    self._commit(slot, [*together])
                else:
                    for job in together:
                        self._settle([job], *self._attempt(slot, job.work))

    def _commit(self, slot: int, jobs: list[Job]) -> None:
        result, error = self._attempt(slot, lambda file: file.transaction([job.work for job in jobs]))
        if error is not None and len(jobs) > 1:  # for one there may be room, or nothing wrong with it
            for job in jobs:
                self._commit(slot, [job])
        else:
            self._settle(jobs, result, error)

    def _attempt(self, slot: int, work: Callable[[Journal], Any]) -> tuple[Any, StateError | None]:
        try:
            file = self._files.get(slot)
            if file is None:
                file = self._files[slot] = Journal(self.path(slot), self._sync, shared=self._shared)
                if not self._shared and file.epoch >= SHARED_EPOCHS:
                    file.claim()  # routers that shared the directory, and still run, must not go on here
                file.epoch = self._epochs.get(slot, file.epoch)
            return work(file), None
        except StateError as error:
            if not isinstance(error, (StateFull, StateHeld)):
                self._release(slot)  # looked at anew when somebody next comes: what is held is known then
            return None, error
        except Exception as error:  # the edge of the thread: with it, everybody who ever waits would wait for ever
            logger.error("state_defect", exc_info=error, extra={"fields": {"file": str(self.path(slot))}})
            self._release(slot)
            return None, StateError("the router failed; its log has the details")

    def _release(self, slot: int) -> None:
        file = self._files.pop(slot, None)
        if file is not None:
            if self._shared:
                self._epochs[slot] = file.epoch
            file.close()

    def _settle(self, jobs: Sequence[Job], result: Any, error: StateError | None) -> None:
        def settle() -> None:
            for job in jobs:
                if job.answer.done():  # whoever waited has left
                    continue
                if error is not None:
                    job.answer.set_exception(error)
                else:
                    job.answer.set_result(result)
            self._done(jobs)

        try:
            jobs[0].answer.get_loop().call_soon_threadsafe(settle)
        except RuntimeError:  # the loop has ended, and with it whoever waited
            return
