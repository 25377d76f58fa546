"""Lines for lists of stored sessions that are not in memory, taken from their heads. Each slot is read once, when a
list is requested for the first time after this process received the slot. No session is loaded."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any

import orjson

from middleware_hub.openai_session.archive.head import heads_in, line_of
from miles_router.errors import StateError
from miles_router.middlewares import Pace
from miles_router.middlewares.episodes import EpisodePlace, EpisodeShelf
from miles_router.middlewares.state import StateStore

logger = logging.getLogger(__name__)


class HeldLines:
    """Lines of this process's stored sessions.

    Args:
        is_elsewhere: returns whether a session is in memory, or is being deleted.
        most: the maximum number of lines; the newest sessions are kept.
    """

    def __init__(self, store: StateStore | None, is_elsewhere: Callable[[str], bool], most: int) -> None:
        self._store = store
        self._is_elsewhere = is_elsewhere
        self._most = most
        self._shelf = EpisodeShelf[bytes]()
        self._places: dict[str, EpisodePlace] = {}
        self._read: set[int] = set()
        self._unreadable: set[int] = set()
        self._dropped: set[str] = set()  # sessions dropped while a slot is read
        self._reading = asyncio.Lock()

    async def newest(self, before: EpisodePlace | None, most: int) -> list[bytes]:
        """Read new slots, then return at most `most` lines behind `before`, as `EpisodeShelf.newest` does."""
        if self._store is not None and not self._read.issuperset(self._store.slots):
            async with self._reading:
                for slot in [slot for slot in self._store.slots if slot not in self._read]:
                    await self._try_to_read(self._store, slot)
        return self._shelf.newest(before, most)

    def drop(self, session_id: str) -> None:
        """Remove the line of a session that is now in memory or deleted."""
        place = self._places.pop(session_id, None)
        if place is not None:
            self._shelf.remove(place)
        elif self._reading.locked():
            self._dropped.add(session_id)

    async def _try_to_read(self, store: StateStore, slot: int) -> None:
        try:
            lines = await self._lines(store, slot)
        except StateError as error:  # lists show the readable slots, and the next list tries again
            if slot not in self._unreadable:
                self._unreadable.add(slot)
                logger.warning("stored_sessions_not_listed", extra={"fields": {"slot": slot, "reason": str(error)}})
            return
        self._read.add(slot)
        for place, line in lines:
            if place[1] not in self._dropped and not self._is_elsewhere(place[1]):
                self._add(place, line)

    async def _lines(self, store: StateStore, slot: int) -> list[tuple[EpisodePlace, bytes]]:
        self._dropped.clear()
        lines: list[tuple[EpisodePlace, bytes]] = []
        pace = Pace()
        async for session_id, head in heads_in(store, slot):
            lines.append(_line(session_id, head))
            await pace.step()
        return lines

    def _add(self, place: EpisodePlace, line: bytes) -> None:
        self._shelf.add(place, line)
        self._places[place[1]] = place
        if len(self._shelf) > self._most:
            oldest = self._shelf.oldest()
            self._shelf.remove(oldest)
            del self._places[oldest[1]]


def _line(session_id: str, head: bytes) -> tuple[EpisodePlace, bytes]:
    try:
        line: dict[str, Any] = line_of(session_id, head)
    except (KeyError, ValueError) as error:
        raise StateError(f"the head of session {session_id!r} cannot be read: {error!r}") from error
    return (line["started_at"], session_id), orjson.dumps(line)
