"""How late the event loop does what is due: everybody's requests wait that long for the work of others."""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import AsyncIterator

from miles_router.metrics.statistics import Statistics, gauge

#: Seconds between looks, and how many looks are kept: together a minute, which scrapes are mostly closer than.
INTERVAL = 0.05
KEPT = 1200


class LoopDelay(Statistics, prefix="miles_router"):
    """The worst delay of the last minute. One timer that comes late by as much as the loop was held."""

    worst = gauge("Longest that the event loop was held in the last minute.", name="loop_delay_seconds")

    def __init__(self) -> None:
        super().__init__(worst=self._worst)
        self._delays: deque[float] = deque(maxlen=KEPT)
        self._due = 0.0
        self._timer: asyncio.TimerHandle | None = None

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """While it is entered, the loop that runs it is watched."""
        loop = asyncio.get_running_loop()
        self._wait(loop)
        try:
            yield
        finally:
            assert self._timer is not None
            self._timer.cancel()
            self._timer = None

    def _wait(self, loop: asyncio.AbstractEventLoop) -> None:
        self._due = loop.time() + INTERVAL
        self._timer = loop.call_at(self._due, self._look, loop)

    def _look(self, loop: asyncio.AbstractEventLoop) -> None:
        self._delays.append(loop.time() - self._due)
        self._wait(loop)

    def _worst(self) -> float:
        """Who asks may come before the timer that is late."""
        late = asyncio.get_running_loop().time() - self._due if self._timer is not None else 0.0
        return max(0.0, late, *self._delays)
