"""Leadership: whether a leader is the last one.

A leader asks before it renews a lease and before it sends control requests to engines.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time

from miles_router.errors import StateError, StateOutdated
from miles_router.slots import CONTROL
from miles_router.state.locks import ByteLocks
from miles_router.state.store import StateStore

logger = logging.getLogger(__name__)


class Leadership:
    """The right to lead, which a later leader takes over.

    On this platform leaders start one after the other: a parent on one machine, or a StatefulSet.

    Args:
        term: how often a leader was started. None if that is unknown; the clock then provides the term.
    """

    def __init__(self, term: int | None) -> None:
        self._started = term

    async def claim(self) -> tuple[int, bool]:
        """Return this leader's term, greater than every earlier leader's term, and whether this leader is the first."""
        return (time.time_ns() // 1_000_000, False) if self._started is None else (self._started, self._started == 1)

    async def confirm(self) -> bool:
        """Return whether no later leader has claimed a term. May be called repeatedly."""
        return True


class StoredLeadership(Leadership):
    """Leadership recorded in the state directory that all leaders share.

    Each leader takes over the control slot. A commit then shows whether a later leader has done so.
    """

    def __init__(self, store: StateStore) -> None:
        self._store = store
        self._locks = ByteLocks(store.directory)
        self._term: int

    async def claim(self) -> tuple[int, bool]:
        """Take over the control slot, and lock the byte at the term, with which shards test whether locks work.

        Raises:
            StateError: the slot cannot be taken over, or the byte cannot be locked.
        """
        self._term = await self._store.claim(CONTROL)
        if not self._locks.lock(self._term):
            raise StateError(f"{self._store.directory}: another leader runs with the same term {self._term}")
        return self._term, self._term == 1

    async def confirm(self) -> bool:
        """Commit to the control slot; return False if the commit fails.

        Raises:
            StateOutdated: another leader has begun.
        """
        try:
            await asyncio.to_thread(self._locks.lock, self._term)  # a network file system may have lost the lock
            await self._store.append("lease", {1: secrets.token_bytes(8)}, slot=CONTROL)
        except StateOutdated:
            raise
        except StateError as error:
            logger.error("lease_not_renewed", extra={"fields": {"reason": str(error)}})
            return False
        return True
