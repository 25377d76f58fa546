"""Write sessions to the state store, and restore them."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Collection, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any
from weakref import WeakValueDictionary

import orjson

from middleware_hub.openai_session.archive.head import heads_in, summary_of
from middleware_hub.openai_session.archive.listing import HeldLines
from middleware_hub.openai_session.archive.steps import Saved, Unsaved, read_session
from middleware_hub.openai_session.sessions.session import Session
from middleware_hub.openai_session.sessions.store import ID, SessionStore
from miles_router.errors import StateError
from miles_router.middlewares import Pace, Router, cancelled, spawn
from miles_router.middlewares.rows import are_kept
from miles_router.middlewares.state import StateStore

logger = logging.getLogger(__name__)

#: The shortest interval between searches for idle stored sessions, in seconds.
LOOK = 1.0


class SessionArchive:
    """Stored sessions of this process. Without a state store, every method does nothing.

    Args:
        now: returns Unix seconds.
        clock: the monotonic clock of the sessions.
    """

    def __init__(
        self,
        sessions: SessionStore,
        router: Router,
        now: Callable[[], float],
        clock: Callable[[], float],
    ) -> None:
        self._sessions = sessions
        self._store = router.store
        self._with_rows, self._channels = router.config.state_rows, router.rows
        self._now, self._clock = now, clock
        self._began = now()
        self._saved: dict[str, Saved] = {}
        self._locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()  # locks in use
        self._deleted_on_disk: set[str] = set()  # sessions already deleted on disk and still in memory
        self._forgetting: dict[str, asyncio.Task[None]] = {}
        #: Stored sessions that are not in memory, for lists.
        self.lines = HeldLines(router.store, self._is_elsewhere, sessions.bounds.sessions)
        if self._store is not None:
            sessions.when_deleted = self._delete_soon

    async def save(self, session: Session) -> None:
        """Write the changes of a session; return when they are durable.

        Raises:
            StateError: writing failed. The session stays in memory, and its next change tries again.
        """
        if self._store is None:
            return
        async with self._lock(session.id):
            await self._wait_until_deleted(session.id)
            if session.ending.status.is_forgotten:
                return
            saved = self._saved.get(session.id)
            unsaved = Unsaved(session, saved or Saved(), with_rows=self._with_rows)
            if unsaved.blobs:  # this removes blobs that an earlier session of this name may have left
                await self._store.append(session.id, unsaved.blobs, large=unsaved.large, replace_all=saved is None)
            if not session.ending.status.is_forgotten:
                self._saved[session.id] = unsaved.after_append()

    def save_soon(self, session: Session) -> None:
        """Save a session in the background. After a failure, its next change tries again."""
        if self._store is not None and not session.ending.status.is_forgotten:
            spawn(self._try_to_save(session), name=f"save {session.id}")

    async def _try_to_save(self, session: Session) -> None:
        try:
            await self.save(session)
        except StateError as error:
            fields = {"session_id": session.id, "reason": str(error)}
            logger.warning("session_not_saved", extra={"fields": fields})

    def is_saved(self, session: Session) -> bool:
        """Return whether all turns of a session are stored."""
        saved = self._saved.get(session.id)
        return self._store is None or len(session.turns) == (0 if saved is None else saved.turns)

    async def load(self, session_id: str) -> None:
        """Restore a stored session to memory, unless it is there.

        Raises:
            StateError: the session cannot be read.
            TooManySessions: there is no room in memory.
        """
        if self._store is None or session_id in self._sessions or not ID.fullmatch(session_id):
            return
        if not self._store.has(session_id):  # another process may own it
            return
        async with self._lock(session_id):
            await self._wait_until_deleted(session_id)
            blobs = {} if session_id in self._sessions else await self._store.load(session_id)
            large = await self._store.load(session_id, large=True) if blobs and are_kept(self._channels) else {}
            if not blobs or session_id in self._sessions:
                return
            try:
                session, saved = read_session(
                    session_id,
                    blobs,
                    {**large},
                    self._channels,
                    now=self._now(),
                    clock=self._clock(),
                    equal=self._sessions.equal,
                )
            except (KeyError, IndexError, TypeError, ValueError) as error:
                raise StateError(f"session {session_id!r} cannot be read: {error!r}") from error
            self._sessions.restore(session)
            self._saved[session_id] = saved
            self.lines.drop(session_id)

    async def load_all(self, wanted: Callable[[dict[str, Any]], bool]) -> None:
        """Restore all sessions whose head satisfies `wanted`.

        Raises:
            StateError: a session cannot be read.
            TooManySessions: there is no room in memory.
        """
        pace = Pace()
        async for session_id, head in self._heads():
            if wanted(orjson.loads(head)):
                await self.load(session_id)
            await pace.step()

    async def summaries(self) -> list[dict[str, Any]]:
        """Return the lines of `GET /sessions` for stored sessions that are not in memory."""
        return [summary_of(*each) async for each in self._heads()]

    @asynccontextmanager
    async def deleting(self, sessions: Sequence[Session]) -> AsyncIterator[None]:
        """Delete sessions durably on disk, then run the block, which must delete them in memory at once. If one
        deletion fails, all these sessions are saved again.

        Raises:
            StateError: a session could not be deleted.
        """
        if self._store is None:
            yield
            return
        async with AsyncExitStack() as locks:
            for session_id in sorted(session.id for session in sessions):
                await locks.enter_async_context(self._lock(session_id))  # waiting saves then find it deleted
            there = [session for session in sessions if not session.ending.status.is_forgotten]
            await self._delete_all(self._store, there)
            names = {session.id for session in there}
            self._deleted_on_disk |= names
            try:
                yield
            finally:
                self._deleted_on_disk -= names

    async def _delete_all(self, store: StateStore, sessions: Sequence[Session]) -> None:
        deletes = [store.delete(session.id) for session in sessions]
        try:
            results = await asyncio.gather(*deletes, return_exceptions=True)
            for failure in (each for each in results if each is not None):
                raise failure
        except BaseException:
            for session in sessions:
                self._saved.pop(session.id, None)
                self.save_soon(session)
            raise

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Expire idle stored sessions that are not in memory while the block runs."""
        idle = self._sessions.bounds.idle_timeout
        if self._store is None or not idle:
            yield
            return
        looking = spawn(self._expire(idle), name="expire held sessions")
        try:
            yield
        finally:
            await cancelled(looking)

    async def _expire(self, idle: float) -> None:
        assert self._store is not None
        while True:
            await asyncio.sleep(max(LOOK, idle / 4))
            for slot in self._store.slots:
                try:
                    await self._expire_in(slot, idle)
                except StateError as error:
                    logger.warning("stored_sessions_not_expired", extra={"fields": {"reason": str(error)}})

    async def _expire_in(self, slot: int, idle: float) -> None:
        async for session_id, head in self._heads((slot,)):
            used_at = max(orjson.loads(head)["used_at"], self._began)
            if used_at < self._now() - idle:
                async with self._lock(session_id):  # a load at this moment counts as a use
                    if session_id not in self._sessions:
                        self._sessions.statistics.expired += 1
                        self._delete_soon(session_id)

    async def _heads(self, slots: Collection[int] | None = None) -> AsyncIterator[tuple[str, bytes]]:
        if self._store is None:
            return
        for slot in self._store.slots if slots is None else slots:
            async for session_id, head in heads_in(self._store, slot):
                if not self._is_elsewhere(session_id):
                    yield session_id, head

    def _is_elsewhere(self, session_id: str) -> bool:
        return session_id in self._sessions or session_id in self._forgetting

    def _delete_soon(self, session_id: str) -> None:
        """Delete a session on disk in the background; later operations on its name wait for that."""
        self._saved.pop(session_id, None)
        self.lines.drop(session_id)
        if session_id in self._deleted_on_disk:
            return
        task = self._forgetting[session_id] = spawn(self._delete(session_id), name=f"forget {session_id}")
        task.add_done_callback(lambda done: self._deletion_done(session_id, done))

    async def _delete(self, session_id: str) -> None:
        assert self._store is not None
        try:
            await self._store.delete(session_id)
        except StateError as error:  # the session remains readable and expires later
            fields = {"session_id": session_id, "reason": str(error)}
            logger.warning("session_not_deleted", extra={"fields": fields})

    def _deletion_done(self, session_id: str, task: asyncio.Task[None]) -> None:
        if self._forgetting.get(session_id) is task:
            del self._forgetting[session_id]

    async def _wait_until_deleted(self, session_id: str) -> None:
        task = self._forgetting.get(session_id)
        if task is not None:
            await asyncio.shield(task)

    def _lock(self, session_id: str) -> asyncio.Lock:
        lock = self._locks.get(session_id)
        if lock is None:
            lock = self._locks[session_id] = asyncio.Lock()
        return lock
