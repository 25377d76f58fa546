"""The store that the event loop asks: five calls, carried out by one thread of files."""

from __future__ import annotations

import asyncio
import os
import sys
import time
from collections import Counter, deque
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from miles_router.errors import ConfigError, StateError, StateHeld
from miles_router.slots import ALL_SLOTS, CONTROL, slot_of
from miles_router.state.blobs import Blobs, Changes, Sync
from miles_router.state.journal import LARGE, SMALL, Journal
from miles_router.state.writer import Job, Writer

#: Bytes that a blob weighs beside its content while it waits.
BLOB = 256
NOTHING: Blobs = MappingProxyType({})
#: Bytes of changes that wait to be written; who comes with more waits for room.
MAX_WAITING = 64 * 1024 * 1024
#: Seconds for which a busy event loop keeps the interpreter from the writer's thread, which needs it between any two
#: statements. CPython's own 5 ms make a commit beside a busy loop take 8.
SWITCH_INTERVAL = 0.0005


class StateStore:
    """Blobs by owner, in the journals of a directory. A slot's journal is opened at its first touch, and locked while
    this process runs: what one process has open, no other can open.

    An owner's slot is `slot_of(owner)`, unless `slot` says another. Changes of one slot are made in the order of the
    calls. A commit whose caller is cancelled is made all the same, unless it still waited for room.

    Raises (all coroutines):
        StateHeld: another running router has the slot.
        StateForeign, StateDamaged: its file is somebody else's or of another format; has lost what was acknowledged.
        StateFull: no room; nothing that was held is lost, reads go on, and so do commits once there is room.
        StateOutdated: a younger epoch has the slot.
        StateError: anything else that the system says.
    """

    def __init__(self, directory: Path, sync: Sync = "process", *, shared: bool = False) -> None:
        """
        Args:
            shared: whether routers on other machines have the directory, too. Then no file is locked, and only slots
                that were claimed may be changed.

        Raises:
            ConfigError: the directory cannot be made, or not be written.
        """
        try:
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"state_dir: {directory}: cannot be made: {error.strerror}") from None
        if not os.access(directory, os.R_OK | os.W_OK | os.X_OK):
            raise ConfigError(f"state_dir: {directory}: may not be read and written by this user")
        self.directory, self.sync = directory, sync
        #: Those that this process may open; `CONTROL` is for the one that knows who the workers are.
        self.slots: Collection[int] = ALL_SLOTS
        #: Bytes of changes that wait to be written.
        self.waiting = 0
        #: Commits that are durable, those that were refused by type, and bytes of changes.
        self.commits, self.refused, self.written = 0, Counter[str](), 0
        #: Hears how many seconds each commit took.
        self.observe: Callable[[float], None] = lambda seconds: None
        self._held: deque[Job] = deque()
        self._touched: set[int] = set()
        self._writer = Writer(directory, sync, self._over, shared=shared)
        sys.setswitchinterval(min(SWITCH_INTERVAL, sys.getswitchinterval()))

    def check(self) -> None:
        """Before anything runs: whether the router's own slot can be opened.

        Raises:
            ConfigError: another running router has it, or its file cannot be used.
        """
        try:
            Journal(self._writer.path(CONTROL), self.sync).close()
        except StateError as error:
            raise ConfigError(f"state_dir: {error}") from None

    async def append(
        self, owner: str, blobs: Changes, *, large: Changes = NOTHING, slot: int | None = None, anew: bool = False
    ) -> None:
        """Put blobs of an owner under their numbers, all or none; return when that is durable. They replace what stood
        there, so that a commit whose outcome is unknown may be repeated; None deletes. `anew`: in place of all that the
        owner had."""
        size = sum(BLOB + len(each or b"") for changes in (blobs, large) for each in changes.values())
        await self._in_transaction(owner, slot, lambda journal: journal.append(owner, blobs, large, anew=anew), size)

    async def delete(self, owner: str, *, slot: int | None = None, large_alone: bool = False) -> None:
        """Delete all blobs of an owner; return when that is durable. The disk has their room back some time after."""
        await self._in_transaction(owner, slot, lambda journal: journal.delete(owner, large_alone=large_alone), BLOB)

    async def load(self, owner: str, *, large: bool = False, slot: int | None = None) -> Blobs:
        """Return the blobs of an owner, or the large ones, in the order of their numbers; none for an unknown owner."""
        slot = slot_of(owner) if slot is None else slot
        if not self.exists(slot):
            return NOTHING
        blobs: Blobs = await self._ask(slot, lambda journal: journal.load(owner, LARGE if large else SMALL))
        return blobs

    async def owners(self, slot: int, *, after: str = "", limit: int = 1000) -> list[tuple[str, bytes]]:
        """Return a page of the owners in a slot that have a head, in their order behind `after`, with it; fewer than
        `limit` are the last."""
        if not self.exists(slot):
            return []
        page: list[tuple[str, bytes]] = await self._ask(slot, lambda journal: journal.owners(after, limit))
        return page

    async def claim(self, slot: int, epoch: int | None = None) -> int:
        """Open a slot and take it over for an epoch, by default the one behind its last, and return it. Commits of an
        older epoch are refused from now on, in every process. An unclaimed slot stays in the epoch that it has."""
        entered: int = await self._ask(slot, lambda journal: journal.claim(epoch))
        return entered

    def exists(self, slot: int) -> bool:
        """Return whether anything was ever held in this slot. Opens nothing."""
        return slot in self._touched or self._writer.path(slot).exists()

    def has(self, owner: str) -> bool:
        """Return whether this process may open the slot of an owner."""
        return slot_of(owner) in self.slots

    async def close(self) -> None:
        """Do what waits, and let go of all slots."""
        await asyncio.get_running_loop().run_in_executor(None, self._writer.end)

    async def _in_transaction(self, owner: str, slot: int | None, work: Callable[[Journal], None], size: int) -> None:
        answer, began = asyncio.get_running_loop().create_future(), time.perf_counter()
        try:
            await self._done(Job(slot_of(owner) if slot is None else slot, work, answer, commits=True, size=size))
        except StateError as error:
            self.refused[error.type] += 1
            raise
        self.commits += 1
        self.written += size
        self.observe(time.perf_counter() - began)

    async def _ask(self, slot: int, work: Callable[[Journal], Any]) -> Any:
        return await self._done(Job(slot, work, asyncio.get_running_loop().create_future()))

    async def _done(self, job: Job) -> Any:
        if job.slot not in self.slots:
            raise StateHeld(f"slot {job.slot} is another process's of this router")
        self._touched.add(job.slot)
        if self._held or self._too_much(job):
            self._held.append(job)
        else:
            self._give(job)
        try:
            return await job.answer
        finally:
            if job in self._held:  # whoever leaves takes along what was not given to the writer yet
                self._held.remove(job)

    def _too_much(self, job: Job) -> bool:
        return bool(self.waiting) and self.waiting + job.size > MAX_WAITING

    def _give(self, job: Job) -> None:
        self.waiting += job.size
        self._writer.add(job)

    def _over(self, jobs: Sequence[Job]) -> None:
        self.waiting -= sum(job.size for job in jobs)
        while self._held and not self._too_much(self._held[0]):
            self._give(self._held.popleft())
