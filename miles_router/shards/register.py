"""Whether a leader is the last one: what it asks before it prolongs a lease, and before it tells engines anything."""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from typing import Protocol

from miles_router.errors import StateError, StateOutdated
from miles_router.slots import CONTROL
from miles_router.state.locks import ByteLocks
from miles_router.state.store import StateStore

logger = logging.getLogger(__name__)


class Register(Protocol):
    """What leaders have in common."""

    async def claim(self) -> tuple[int, bool]:
        """Return this leader's term, which is greater than that of any leader before it, and whether there was none."""
        ...

    async def confirm(self) -> bool:
        """Return whether no later leader has claimed a term. Asked again and again."""
        ...


class Platform:
    """Of whoever starts leaders one after the other: a parent on one machine, or a StatefulSet.

    Args:
        term: how often one was started; None: leaders do not know, and the clock tells them apart.
    """

    def __init__(self, term: int | None = None) -> None:
        self._term = term

    async def claim(self) -> tuple[int, bool]:
        """See `Register`."""
        return (time.time_ns() // 1_000_000, False) if self._term is None else (self._term, self._term == 1)

    async def confirm(self) -> bool:
        """See `Register`."""
        return True


class Stored:
    """The state directory that all leaders share: each takes the control slot over, and finds by a commit whether
    another one has done so since."""

    def __init__(self, store: StateStore) -> None:
        self._store = store
        self._locks = ByteLocks(store.directory)
        self._term: int

    async def claim(self) -> tuple[int, bool]:
        """See `Register`. The byte at the term stays locked, by which shards find out what locks are worth.

        Raises:
            StateError: the slot cannot be taken over, or nothing be locked.
        """
        self._term = await self._store.claim(CONTROL)
        if not self._locks.take(self._term):
            raise StateError(f"{self._store.directory}: another process leads in term {self._term}, too")
        return self._term, self._term == 1

    async def confirm(self) -> bool:
        """See `Register`.

        Raises:
            StateOutdated: another leader has begun.
        """
        try:
            await asyncio.to_thread(self._locks.take, self._term)  # a network file system may have lost it
            await self._store.append("lease", {1: secrets.token_bytes(8)}, slot=CONTROL)
        except StateOutdated:
            raise
        except StateError as error:
            logger.error("lease_not_prolonged", extra={"fields": {"reason": str(error)}})
            return False
        return True
