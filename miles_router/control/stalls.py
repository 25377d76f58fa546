"""Stalled engines: detect a worker whose HTTP server answers while its engine no longer makes progress on its
requests.

No request has a time limit, and a non-streamed reply may take an hour: silence alone proves nothing. So a worker is
suspected only when no piece of any reply has come for a while, and then its engine is asked. SGLang 0.5.23 answers
`/server_info` from its scheduler in any state (idle, busy or paused), between two steps of the model; with a long
prompt, between two chunks of it. `/health_generate` is answered when anything at all came from the scheduler. Only an
engine that is silent in all of these ways for the whole time is given up: the worker is quarantined, and its requests
end like requests on a lost worker.

Time is counted in checks, not by the clock: a router that was itself suspended for an hour must not blame the
workers.
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

#: The number of checks of a worker within the timeout.
CHECKS = 12


class _Silence:
    """The time for which a worker's engine has given no sign of life."""

    def __init__(self) -> None:
        self.silent_checks = 0  # checks in a row without a sign of life
        self.pieces = -1  # the worker's pulse at the last check
        self.paused = False  # by another program, when the worker was last asked
        self.question: asyncio.Task[None] | None = None

    def end(self) -> None:
        """Start counting from zero: there was a sign of life, or there is no reason to expect one."""
        self.silent_checks = 0
        if self.question is not None:
            self.question.cancel()
            self.question = None


class StallWatch:
    """The watch over workers with requests; it runs while `running()` is entered.

    Args:
        timeout: seconds without a sign of life after which an engine is given up; 0: never.
        excused: returns whether workers may be silent now because of a control request.
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
        """Check in the background; on exit, wait until every request to a worker has ended."""
        if not self._timeout:
            yield
            return
        watching = tasks.spawn(self._watch(), name="stall watch")
        try:
            yield
        finally:
            await tasks.cancelled(watching)
            for silence in self._silences.values():
                if silence.question is not None:
                    await tasks.cancelled(silence.question)

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(self._timeout / CHECKS)
            busy = self._pool.busy
            for worker in self._silences.keys() - busy:
                self._silences.pop(worker).end()
            for worker in busy:
                self._check(worker, self._silences.setdefault(worker, _Silence()))

    def _check(self, worker: Worker, silence: _Silence) -> None:
        pieces = worker.pulse.pieces
        has_new_pieces, silence.pieces = pieces != silence.pieces, pieces
        proved = silence.question is not None and silence.question.done()
        if has_new_pieces or proved or self._excused():
            silence.end()
            return
        if not self._upstream.is_awaiting(worker.address, worker.pulse):
            silence.end()
            return
        silence.silent_checks += 1
        if silence.silent_checks > CHECKS:
            silence.end()
            self._quarantine(worker)
        elif silence.question is None:
            silence.question = tasks.spawn(self._ask(worker, silence), name=f"ask engine {worker.url}")

    async def _ask(self, worker: Worker, silence: _Silence) -> None:
        """Return once there is a sign of life. If another program has paused the worker, wait until it reports ready: a
        weight update in that pause may keep the engine silent for long."""
        if silence.paused and await self._probes.is_unready(worker):
            return
        silence.paused = await self._probes.is_paused(worker)
        if not silence.paused:
            await self._probes.wait_for_progress(worker, self._timeout)

    def _quarantine(self, worker: Worker) -> None:
        """Quarantine the worker first, and then end its requests, so that retries go to other workers."""
        reason = f"stalled: its engine gave no sign of life for {self._timeout:g} s"
        self._pool.record_stall(worker, reason)
        lost = self._upstream.give_up(worker.address, worker.pulse, f"{worker.url} is {reason}")
        logger.warning("worker_stalled", extra={"fields": {"worker": worker.url, "requests": lost}})
