"""The asyncio interface to stored state: five calls, executed by one file thread, which has the open journals of a
directory.

Waiting jobs run in batches: neighbouring commits of one slot share a transaction. Jobs of one slot keep their order.
"""

from __future__ import annotations

import asyncio
import logging
import os
import sys
import time
from collections import Counter, defaultdict, deque
from collections.abc import AsyncIterator, Callable, Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from types import MappingProxyType
from typing import Any

from miles_router.errors import ConfigError, StateError, StateFull, StateHeld
from miles_router.slots import ALL_SLOTS, CONTROL, slot_of
from miles_router.state.blobs import Blobs, Changes, Sync
from miles_router.state.journal import LARGE, SHARED_EPOCHS, SMALL, Journal

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


#: Bytes counted for each waiting blob in addition to its content.
BLOB = 256
NOTHING: Blobs = MappingProxyType({})
#: Bytes of changes handed to the thread at once; further changes wait in the queue.
MAX_WAITING = 64 * 1024 * 1024
#: Seconds (`sys.setswitchinterval`) for which a busy event loop keeps the interpreter from the writer's thread. The
#: thread needs the interpreter between any two statements. With CPython's default of 5 ms, a commit beside a busy loop
#: takes 8 ms.
SWITCH_INTERVAL = 0.0005


class StateStore:
    """A store of blobs by owner, in the journals of one directory.

    A slot's journal is opened at its first use. It stays locked while this process runs, so no other process can open
    it.

    An owner's slot is `slot_of(owner)` unless `slot` is given. Changes to one slot are applied in call order. If the
    caller is cancelled, the commit still happens. The exception is a commit that still waits while more than
    `MAX_WAITING` bytes wait: that commit is dropped.

    Raises (all coroutines):
        StateHeld: another running router has the slot.
        StateError: the slot's file is not the router's, or has another format.
        StateError: the slot's file lacks acknowledged commits.
        StateFull: the disk is full. Stored data is intact, reads work, and commits work again once there is room.
        StateOutdated: a newer epoch has the slot.
        StateError: any other error of the system.
    """

    def __init__(self, directory: Path, sync: Sync = "process", *, shared: bool = False) -> None:
        """Create the directory if needed.

        Args:
            shared: routers on other machines use the directory too. Files are then not locked, and only claimed slots
                may be changed.

        Raises:
            ConfigError: the directory cannot be created or written.
        """
        try:
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"state_dir: {directory}: the directory cannot be created: {error.strerror}") from None
        if not os.access(directory, os.R_OK | os.W_OK | os.X_OK):
            raise ConfigError(f"state_dir: {directory}: this user may not read and write it")
        self.directory, self.sync = directory, sync
        #: The slots that this process may open; `CONTROL` is for the process that decides the workers.
        self.slots: Collection[int] = ALL_SLOTS
        #: Bytes of changes that the thread is writing.
        self.waiting = 0
        #: Durable commits, refused commits by error type, and bytes of changes written.
        self.commits, self.refused, self.written = 0, Counter[str](), 0
        #: Called with the seconds that each commit took.
        self.observe: Callable[[float], None] = lambda seconds: None
        self._touched: set[int] = set()
        self._queue: deque[Job] = deque()
        self._journals = Journals(directory, sync, shared=shared)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="state")  # its thread starts with the first job
        self._working: asyncio.Future[list[Outcome]] | None = None
        self._closed = False
        sys.setswitchinterval(min(SWITCH_INTERVAL, sys.getswitchinterval()))

    def check(self, owner: str = "") -> Blobs:
        """Check, before anything runs, that the router's own slot can be opened. Return the blobs of an owner in it.

        Raises:
            ConfigError: another running router has it, or its file cannot be used.
        """
        try:
            with closing(Journal(self._journals.path(CONTROL), self.sync)) as journal:
                return journal.load(owner)
        except StateError as error:
            raise ConfigError(f"state_dir: {error}") from None

    async def append(
        self,
        owner: str,
        blobs: Changes,
        *,
        large: Changes = NOTHING,
        slot: int | None = None,
        replace_all: bool = False,
    ) -> None:
        """Write blobs of an owner under their numbers, all or none. Return when they are durable.

        A blob replaces an older one of the same number, so a commit with unknown outcome may be repeated. None
        deletes. With `replace_all`, the blobs replace everything that the owner had.
        """
        size = sum(BLOB + len(each or b"") for changes in (blobs, large) for each in changes.values())
        await self._in_transaction(
            owner, slot, lambda journal: journal.append(owner, blobs, large, replace_all=replace_all), size
        )

    async def delete(self, owner: str, *, slot: int | None = None, large_alone: bool = False) -> None:
        """Delete all blobs of an owner, or only the large ones. Return when that is durable.

        The disk space is given back some time later.
        """
        await self._in_transaction(owner, slot, lambda journal: journal.delete(owner, large_alone=large_alone), BLOB)

    async def load(self, owner: str, *, large: bool = False, slot: int | None = None) -> Blobs:
        """Return the blobs of an owner, or its large blobs, ordered by number. Empty for an unknown owner."""
        slot = slot_of(owner) if slot is None else slot
        if not self.exists(slot):
            return NOTHING
        blobs: Blobs = await self._ask(slot, lambda journal: journal.load(owner, LARGE if large else SMALL))
        return blobs

    async def owners(self, slot: int, *, after: str = "", page: int = 1000) -> AsyncIterator[tuple[str, bytes]]:
        """Yield (owner, head) of each owner in a slot that has a head, ordered by name and starting after `after`.

        `page` owners are read at a time.
        """
        while self.exists(slot) and (found := await self._page(slot, after, page)):
            after = found[-1][0]
            for each in found:
                yield each

    async def claim(self, slot: int, epoch: int | None = None) -> int:
        """Open a slot, take it over for an epoch, and return the epoch. The default is the slot's last epoch plus one.

        Afterwards commits of an older epoch are refused, in every process. A slot that is not claimed keeps its epoch.
        """
        claimed: int = await self._ask(slot, lambda journal: journal.claim(epoch))
        return claimed

    def exists(self, slot: int) -> bool:
        """Return whether the slot was ever used. Opens nothing."""
        return slot in self._touched or self._journals.path(slot).exists()

    def has(self, owner: str) -> bool:
        """Return whether this process may open the owner's slot."""
        return slot_of(owner) in self.slots

    async def close(self) -> None:
        """Finish all waiting jobs, then release all slots."""
        self._closed = True
        while self._working is not None:
            await asyncio.wait({self._working})
            await asyncio.sleep(0)  # let its done callback hand over the jobs that still wait
        await asyncio.get_running_loop().run_in_executor(self._thread, self._journals.close)
        self._thread.shutdown()

    async def _page(self, slot: int, after: str, limit: int) -> list[tuple[str, bytes]]:
        found: list[tuple[str, bytes]] = await self._ask(slot, lambda journal: journal.owners(after, limit))
        return found

    async def _in_transaction(self, owner: str, slot: int | None, work: Callable[[Journal], None], size: int) -> None:
        began = time.perf_counter()
        try:
            await self._ask(slot_of(owner) if slot is None else slot, work, commits=True, size=size)
        except StateError as error:
            self.refused[error.label] += 1
            raise
        self.commits += 1
        self.written += size
        self.observe(time.perf_counter() - began)

    async def _ask(self, slot: int, work: Callable[[Journal], Any], *, commits: bool = False, size: int = 0) -> Any:
        if slot not in self.slots:
            raise StateHeld(f"slot {slot} belongs to another process of this router")
        if self._closed:
            raise StateError(f"{self.directory}: the router has closed its state")
        self._touched.add(slot)
        job = Job(slot, work, asyncio.get_running_loop().create_future(), commits, size)
        self._queue.append(job)
        self._start_jobs()
        try:
            return await job.answer
        except asyncio.CancelledError:
            if job in self._queue and sum(each.size for each in self._queue) > MAX_WAITING:
                self._queue.remove(job)
            raise

    def _start_jobs(self) -> None:
        """Hand waiting jobs to the thread, up to `MAX_WAITING` bytes, unless the thread is busy."""
        if self._working is not None or not (self._queue or (self._journals.slack and not self._closed)):
            return
        jobs: list[Job] = []
        while self._queue and (not jobs or self.waiting + self._queue[0].size <= MAX_WAITING):
            jobs.append(self._queue.popleft())
            self.waiting += jobs[-1].size
        self._working = asyncio.get_running_loop().run_in_executor(self._thread, self._journals.run, jobs)
        self._working.add_done_callback(self._finish_jobs)

    def _finish_jobs(self, working: asyncio.Future[list[Outcome]]) -> None:
        self._working, self.waiting = None, 0
        self._start_jobs()
        for job, result, error in working.result():
            if job.answer.done():  # the caller was cancelled
                continue
            if error is not None:
                job.answer.set_exception(error)
            else:
                job.answer.set_result(result)
