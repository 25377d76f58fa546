"""Stalled engines: a worker whose HTTP process answers while nothing moves behind it, and requests wait in it.

No request has a time limit, and a whole answer may take an hour: silence alone proves nothing. So a worker with
requests is suspected only when no piece of any of them has come for a while, and then its engine is asked. SGLang
0.5.23 answers `/server_info` from its scheduler, in whatever state that is, idle, busy or paused, between two steps of
the model; with a long prompt, between two chunks of it. `/health_generate` is answered when anything at all came from
the scheduler. Only an engine that is silent in all of these ways for the whole time is given up: it is quarantined, and
its requests end as those of a lost worker.

Time is counted in looks, not by the clock: a router that was stopped itself for an hour blames nobody.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from miles_router import tasks
from miles_router.control.probes import Probes
from miles_router.fleet.fleet import Fleet
from miles_router.fleet.workers import Worker
from miles_router.forwarding.upstream import Upstream

logger = logging.getLogger(__name__)

#: As often a worker is looked at within the time after which it is given up.
LOOKS = 12


class _Silence:
    """How long nothing has been heard of a worker's engine."""

    def __init__(self) -> None:
        self.looks = 0  # that found no sign of life, in a row
        self.beats = -1  # of its pulse at the last of them
        self.paused = False  # by somebody else, when it was last asked
        self.question: asyncio.Task[None] | None = None

    def end(self) -> None:
        """There was a sign of life, or there is no reason to expect one."""
        self.looks = 0
        if self.question is not None:
            self.question.cancel()
            self.question = None


class StallWatch:
    """Looks at workers with requests between `running()`'s enter and exit.

    Args:
        timeout: seconds without a sign of life after which an engine is given up; 0: never.
        excused: whether workers may be silent now for what they were told to do.
    """

    def __init__(
        self,
        fleet: Fleet,
        probes: Probes,
        upstream: Upstream,
        *,
        timeout: float,
        excused: Callable[[], bool],
    ) -> None:
        self._pool = fleet.pool
        self._probes = probes
        self._upstream = upstream
        self._timeout = timeout
        self._excused = excused
        self._silences: dict[Worker, _Silence] = {}

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Look in the background; every question has ended when this is left."""
        if not self._timeout:
            yield
            return
        looking = tasks.spawn(self._look_on(), name="stall watch")
        try:
            yield
        finally:
            await tasks.cancelled(looking)
            for silence in self._silences.values():
                if silence.question is not None:
                    await tasks.cancelled(silence.question)

    async def _look_on(self) -> None:
        while True:
            await asyncio.sleep(self._timeout / LOOKS)
            busy = self._pool.busy
            for worker in self._silences.keys() - busy:
                self._silences.pop(worker).end()
            for worker in busy:
                self._look(worker, self._silences.setdefault(worker, _Silence()))

    def _look(self, worker: Worker, silence: _Silence) -> None:
        beats = worker.pulse.beats
        heard, silence.beats = beats != silence.beats, beats
        proved = silence.question is not None and silence.question.done()
        if heard or proved or self._excused():
            silence.end()
            return
        if not self._upstream.is_awaiting(worker.address, worker.pulse):
            silence.end()
            return
        silence.looks += 1
        if silence.looks > LOOKS:
            silence.end()
            self._give_up(worker)
        elif silence.question is None:
            silence.question = tasks.spawn(self._ask(worker, silence), name=f"ask engine {worker.url}")

    async def _ask(self, worker: Worker, silence: _Silence) -> None:
        """Return once there is a sign of life. A pause by somebody else lasts until it says that it is ready: an update
        within it may keep the engine silent for long."""
        if silence.paused and await self._probes.is_unready(worker):
            return
        silence.paused = await self._probes.is_paused(worker)
        if not silence.paused:
            await self._probes.moves(worker, self._timeout)

    def _give_up(self, worker: Worker) -> None:
        """First it takes nothing new, then what it has is lost: so a retry goes elsewhere."""
        reason = f"stalled: its engine gave no sign of life for {self._timeout:g} s"
        self._pool.record_stall(worker, reason)
        lost = self._upstream.give_up(worker.address, worker.pulse, f"{worker.url} is {reason}")
        logger.warning("worker_stalled", extra={"fields": {"worker": worker.url, "requests": lost}})
