"""Run a schedule in real time: events that wake the jobs' waiters, and one timer for the schedule's next event."""

from __future__ import annotations

import asyncio
import math
import time

from tests.support.simulated.costs.gpu import Gpu
from tests.support.simulated.costs.schedule import Job, Schedule


class Pacer:
    """A driver that runs a schedule `time_scale` times as fast as the clock. The schedule's seconds are simulated."""

    def __init__(self, gpu: Gpu, time_scale: float = 1.0) -> None:
        if not time_scale > 0:
            raise ValueError(f"the time scale must be above 0, got {time_scale}")
        self.time_scale = time_scale
        self.schedule = Schedule(gpu)
        self._news: dict[Job, asyncio.Event] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._stopped_at: float | None = None
        self._behind = 0.0

    def enter(self, job: Job) -> None:
        """Queue a job.

        Raises:
            ValueError: it needs more memory than the GPU has.
        """
        self.schedule.enter(job, self._now())
        self._news[job] = asyncio.Event()
        self._look()

    def leave(self, job: Job) -> None:
        """Remove a job, done or not."""
        if self._news.pop(job, None) is not None:
            self.schedule.leave(job, self._now())
            self._look()

    async def news(self, job: Job) -> int:
        """Wait for a job's next milestone or `wake`. Return how many tokens it has generated."""
        event = self._news[job]
        await event.wait()
        event.clear()
        self._hear()
        return job.made

    def wake(self, job: Job) -> None:
        if event := self._news.get(job):
            event.set()

    def catch_up(self) -> None:
        """Bring the token counts of all jobs up to date."""
        self._hear()

    def stand_still(self, *, retract: bool) -> None:
        """Stop the simulated time. With `retract`, retract all jobs, so that none occupies memory."""
        if self._stopped_at is None:
            now = self._now()
            if retract:
                self.schedule.retract_all(now)
            self._stopped_at = now
            self._look()

    def go_on(self) -> None:
        """Continue the simulated time after `stand_still`."""
        if self._stopped_at is not None:
            self._behind += self._clock() - self._behind - self._stopped_at
            self._stopped_at = None
            self.schedule.resume()
            self._look()

    def _clock(self) -> float:
        return time.monotonic() * self.time_scale  # an event loop's own clock may not advance within one iteration

    def _now(self) -> float:
        return self._clock() - self._behind if self._stopped_at is None else self._stopped_at

    def _hear(self) -> None:
        for job in self.schedule.advance(self._now()):
            self.wake(job)

    def _rearm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        ends = self.schedule.ends
        if ends is not None and self._stopped_at is None:
            delay = max(0.0, (ends - self._now()) / self.time_scale)
            # Rounded up to whole milliseconds, the resolution of event loops: a timer that fires too early would be
            # set again and again.
            self._timer = asyncio.get_running_loop().call_later(math.ceil(delay * 1000) / 1000, self._look)

    def _look(self) -> None:
        """Wake the waiters of jobs at a milestone, and set the timer for the schedule's next event."""
        self._hear()
        self._rearm()
