"""The delay of the event loop: how long a single callback blocks all requests of the process."""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import AsyncIterator

from miles_router.metrics.metrics import Statistics, gauge

#: Seconds between measurements, and how many are kept: together one minute, more than the usual scrape interval.
INTERVAL = 0.05
KEPT = 1200


class LoopDelay(Statistics, prefix="miles_router"):
    """The longest delay of the last minute, measured by one timer that fires late when the loop is blocked."""

    worst = gauge("Longest time that the event loop was blocked in the last minute.", name="loop_delay_seconds")

    def __init__(self) -> None:
        super().__init__(worst=self._worst)
        self._delays: deque[float] = deque(maxlen=KEPT)
        self._due = 0.0
        self._timer: asyncio.TimerHandle | None = None

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Measure the running event loop within this context."""
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
        """Return the longest delay, including the delay so far of a timer that is late and has not fired yet."""
        late = asyncio.get_running_loop().time() - self._due if self._timer is not None else 0.0
        return max(0.0, late, *self._delays)
