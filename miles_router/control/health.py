"""Health checks: probe each worker, and report the results to the pool, which decides the worker's state.

Every interval each worker is asked for `/model_info`. SGLang answers that at once even while busy or paused, and the
answer contains the weight version. `/health` generates a token: it proves that the engine works, but it is slow under
load and silent while paused. So a timeout of `/health` is ignored, a quick error there counts as a failure, and a
quarantined worker must pass it before it returns.

A check that times out proves nothing while bytes of generations still arrive from the same worker.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

from miles_router import tasks
from miles_router.control.probes import Probes
from miles_router.errors import PartlyFailed, StateError, UpstreamError, UpstreamTimeout, UpstreamUnreachable
from miles_router.fleet.fleet import Fleet
from miles_router.fleet.workers import ALIVE, Transition, Worker, WorkerActivity, WorkerState

logger = logging.getLogger(__name__)

#: Rounds of probes in one interval while a worker gets no traffic only because of its weight version.
ROUNDS = 8
#: Seconds between checks of workers that never answered, and the seconds that a starting router waits for them.
UNREACHED_INTERVAL, FIRST_CHECKS_TIMEOUT = 1.0, 2.0
#: Least seconds between checks of all workers after a changed weight version: two engines behind one address would
#: otherwise change it at each probe.
RECHECK_INTERVAL = 1.0


class HealthMonitor:
    """The health checks of one fleet; they run while `running()` is entered."""

    def __init__(
        self,
        fleet: Fleet,
        probes: Probes,
        activity: Callable[[Worker], Awaitable[WorkerActivity]],
        *,
        interval: float,
        deep_interval: float,
    ) -> None:
        #: Returns the signs of life of a worker that did not answer.
        self.activity = activity
        #: Returns whether another program has paused the worker at a URL. A shard asks the leader.
        self.is_paused: Callable[[str], Awaitable[bool]] = self.probe_is_paused
        self._excused: set[Worker] = set()  # silent workers that stay routable because requests run on them
        self._fleet = fleet
        self._pool = fleet.pool
        self._gate = fleet.gate
        self._probes = probes
        self._interval = interval
        self._deep_interval = deep_interval
        self._deep_passed: dict[str, float] = {}
        self._running: dict[str, asyncio.Task[None]] = {}
        self._new_workers: set[Worker] = set()  # workers that have joined and not answered yet
        self._first_check_task: asyncio.Task[None] | None = None  # asks workers that never answered
        self._rechecked_at = -math.inf  # when a changed version last made all workers be checked

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Probe in the background; on exit, wait until every probe has ended."""
        unsubscribe = self._fleet.subscribe(self._transition)
        self._new_workers.update(self._pool)
        ticker = tasks.spawn(self._tick(), name="health checks")
        try:
            self._start_first_checks()
            yield
        finally:
            unsubscribe()
            expecting = () if self._first_check_task is None else (self._first_check_task,)
            for task in (ticker, *expecting, *self._running.values()):
                await tasks.cancelled(task)

    async def first_checks(self) -> None:
        """Return once each worker that never answered was checked, or after `FIRST_CHECKS_TIMEOUT` seconds."""
        for worker in self._unreached():
            self.check_soon(worker)
        if checks := [self._running[worker.url] for worker in self._unreached()]:
            await asyncio.wait(checks, timeout=FIRST_CHECKS_TIMEOUT)

    def _unreached(self) -> list[Worker]:
        return [worker for worker in self._pool if worker.state is WorkerState.UNREACHED]

    def _start_first_checks(self) -> None:
        """Start frequent checks of the workers that never answered, if there are any."""
        if self._unreached() and (self._first_check_task is None or self._first_check_task.done()):
            self._first_check_task = tasks.spawn(self._ask_unreached(), name="first answers")

    async def _ask_unreached(self) -> None:
        while unreached := self._unreached():
            for worker in unreached:
                self.check_soon(worker)
            await asyncio.sleep(min(UNREACHED_INTERVAL, self._interval / ROUNDS))

    async def _tick(self) -> None:
        """Check all workers once in an interval, and more often while workers wait for the fleet's weight version."""
        while True:
            self.check_all()
            for _ in range(ROUNDS):
                await asyncio.sleep(self._interval / ROUNDS)
                if self._pool.has_stragglers:
                    break

    def check_all(self) -> None:
        for worker in self._pool:
            self.check_soon(worker)

    async def sampling_version(self, worker: Worker) -> str | None:
        """Return the weight version that the worker samples with now, or None if it is not known."""
        return await self._probes.sampling_version(worker)

    def check_soon(self, worker: Worker) -> None:
        """Start a probe of the worker now, unless one is in progress."""
        if worker.url not in self._running:
            task = tasks.spawn(self._probe(worker), name=f"probe {worker.url}")
            self._running[worker.url] = task
            task.add_done_callback(lambda _: self._running.pop(worker.url, None))

    async def probe_is_paused(self, url: str) -> bool:
        """Probe the worker at `url`, and return whether another program has paused it; it gets no traffic then."""
        worker = self._pool.find(url)
        if worker is None:
            return False
        under_way = self._running.get(url)
        if under_way is not None:  # that probe may have been answered before the pause
            await asyncio.wait({under_way})
        if worker.state in ALIVE and worker.state is not WorkerState.PAUSED:
            self.check_soon(worker)
            await asyncio.wait({self._running[url]})
        return worker.state is WorkerState.PAUSED

    def _transition(self, transition: Transition) -> None:
        if transition.after is None:
            self._deep_passed.pop(transition.worker.url, None)
            self._new_workers.discard(transition.worker)
            self._excused.discard(transition.worker)
        elif transition.before is None or (
            transition.after is WorkerState.UNREACHED and transition.before is not WorkerState.UNREACHED
        ):
            self._new_workers.add(transition.worker)
            self.check_soon(transition.worker)
            self._start_first_checks()
        elif (transition.before, transition.after) == (WorkerState.QUARANTINED, WorkerState.READY):
            self._fleet.ask_for_facts(transition.worker)

    async def _probe(self, worker: Worker) -> None:
        """Probe once, and again if the weights were changed meanwhile: the version that the worker reported may be
        outdated."""
        failed = worker.failures > 0
        while True:
            epoch = self._pool.weights_epoch
            try:
                await self._probe_once(worker, epoch)
            except UpstreamError:
                return
            if epoch == self._pool.weights_epoch:
                break
        if not worker.failures and (worker in self._new_workers or failed or worker.facts is None):
            self._new_workers.discard(worker)
            self._fleet.ask_for_facts(worker)

    def _record_alive(self, worker: Worker, version: str | None, epoch: int) -> None:
        trusted = self._trusted(epoch)
        changed = trusted and None not in (version, worker.weight_version) and version != worker.weight_version
        self._pool.record_alive(worker, version if trusted else None)
        if changed and time.monotonic() - self._rechecked_at >= min(RECHECK_INTERVAL, self._interval / ROUNDS):
            # Another program updates the engines directly; other workers may have the new version too.
            self._rechecked_at = time.monotonic()
            self.check_all()

    def _trusted(self, epoch: int) -> bool:
        """Return whether a weight version that a worker reported in this epoch is still its version now."""
        return epoch % 2 == 0 and epoch == self._pool.weights_epoch

    async def _probe_once(self, worker: Worker, epoch: int) -> None:
        """Probe a worker, and record the result in the pool.

        Raises:
            UpstreamError: this machine has no free connection, so the probe says nothing about the worker.
        """
        silenced, pauses = self._gate.closed_by_router, self._gate.pauses
        try:
            facts = await self._probes.liveness(worker)
        except UpstreamError as error:
            if error.exhausted:
                raise
            # A timeout proves nothing while the fleet is paused or asleep; a refused connection does.
            refused = isinstance(error, UpstreamUnreachable) and error.refused
            if not refused and (silenced or self._gate.closed_by_router):
                return
            if isinstance(error, UpstreamTimeout) or (isinstance(error, UpstreamUnreachable) and error.timed_out):
                await self.record_silence(worker, str(error), self._interval + self._probes.timeout)
            else:
                self._pool.record_failure(worker, str(error))
            return
        self._excused.discard(worker)
        version = facts.weight_version
        self._fleet.forget_if_contradicted(worker, facts)
        if worker.state is WorkerState.UNREACHED and (refusal := await self._let_join(worker, version, epoch)):
            self._pool.record_failure(worker, refusal)
            return
        paused = worker.state in ALIVE and not self._gate.closed_by_router and await self._is_paused(worker)
        if self._gate.closed_by_router or self._gate.pauses != pauses:  # then the pause may be the router's own
            self._record_alive(worker, version, epoch)
        elif paused:
            self._record_alive(worker, version, epoch)
            self._pool.set_paused(worker, "paused by another program: the worker reports that it is not ready")
        else:
            self._pool.set_unpaused(worker)
            await self._update_state(worker, version, epoch)

    async def _let_join(self, worker: Worker, version: str | None, epoch: int) -> str | None:
        """Let a worker that answers for the first time join the fleet. Return the reason if it cannot join, else
        None."""
        try:
            await self._fleet.join_configured(worker, version if self._trusted(epoch) else None)
        except (PartlyFailed, StateError, UpstreamUnreachable) as error:
            return str(error)
        return None

    async def record_silence(self, worker: Worker, reason: str, seconds: float) -> None:
        """Record a failure of a worker that did not answer in time, unless its silence is excused.

        It is excused if bytes of its generations arrived in the last `seconds`. It is also excused if requests run on
        the worker and no other routable worker has its role.
        """
        if worker.state is WorkerState.UNREACHED:  # no request runs there, so no process can know a sign of life
            self._pool.record_failure(worker, reason)
            return
        activity = await self.activity(worker)
        out = worker.state is WorkerState.QUARANTINED
        if out or not self._pool.snapshot.excuses_silence(worker, activity, seconds):
            self._excused.discard(worker)
            self._pool.record_failure(worker, reason)
        elif activity.silent_seconds <= seconds:
            self._pool.record_alive(worker, None)
        elif worker not in self._excused:
            self._excused.add(worker)
            logger.warning("worker_silent", extra={"fields": {"worker": worker.url, "reason": reason}})

    async def _update_state(self, worker: Worker, version: str | None, epoch: int) -> None:
        """Update the state of a worker that answers and is not paused."""
        if worker.state is WorkerState.QUARANTINED:
            self._record_alive(worker, version, epoch)
            await self._try_readmission(worker)
        elif not self._deep_due(worker) or (failure := await self._deep_check_failure(worker)) is None:
            self._record_alive(worker, version, epoch)
        else:
            self._pool.record_failure(worker, failure)

    async def _is_paused(self, worker: Worker) -> bool:
        """Return whether a live worker is paused. SGLang reports "not ready" while it is paused, and also after a
        failed `/health` until one succeeds. So `/health` is asked here: only a paused worker does not answer it."""
        if not await self._probes.is_unready(worker):
            return False
        try:
            return await self._probes.deep_check_failure(worker) is not None
        except UpstreamTimeout:
            return True

    def _deep_due(self, worker: Worker) -> bool:
        passed_at = self._deep_passed.setdefault(worker.url, time.monotonic())
        return bool(self._deep_interval) and time.monotonic() - passed_at >= self._deep_interval

    async def _deep_check_failure(self, worker: Worker) -> str | None:
        """Run the deep check, and return the reason if the worker failed it. After a failure it runs at every interval,
        so that failures can be consecutive."""
        try:
            failure = await self._probes.deep_check_failure(worker)
        except UpstreamTimeout:
            failure = None  # busy or paused; the cheap check has just passed
        if failure is None:
            self._deep_passed[worker.url] = time.monotonic()
            self._fleet.ask_for_facts(worker)  # the process may have been replaced between two probes
        return failure

    async def _try_readmission(self, worker: Worker) -> None:
        refused = self._pool.readmission_refused(worker)
        if refused is None:
            try:
                refused = await self._probes.deep_check_failure(worker)
            except UpstreamTimeout as error:
                refused = worker.reason if worker.stalled else str(error)
        if refused is None:
            self._pool.readmit(worker, "answers its checks again")
        else:
            self._pool.set_quarantine_reason(worker, refused)
