"""Probes: what each worker answers, told to the pool, which decides.

Every interval each worker is asked `/model_info`, which SGLang answers at once even while it is busy or paused, and
which names its weight version. `/health` generates a token: it proves that the engine works, and is slow under load and
silent while paused. So silence at `/health` proves nothing and is ignored; a quick refusal there counts as a failure;
and a quarantined worker must pass it before it returns.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import orjson

from miles_router import tasks
from miles_router.asgi.headers import RawHeaders
from miles_router.errors import UpstreamError, UpstreamTimeout, UpstreamUnreachable
from miles_router.fleet.gate import Gate
from miles_router.fleet.worker_url import WorkerUrl
from miles_router.fleet.workers import ALIVE, Transition, Worker, WorkerPool, WorkerState
from miles_router.forwarding.upstream import Upstream

logger = logging.getLogger(__name__)

#: The cheap check, newest name first; SGLang before 0.5 has only the second.
LIVENESS_PATHS = ("/model_info", "/get_model_info")
DEEP_PATH = "/health"
READY_PATH = "/ready"
UNAVAILABLE = 503
NOT_FOUND = 404
#: SGLang's `/health` gives up after 20 s and says 503, paused or busy: beyond this many seconds its word is silence.
DEEP_PATIENCE = 10.0


class HealthMonitor:
    """Runs the probes between `running()`'s enter and exit."""

    def __init__(
        self, *, pool: WorkerPool, upstream: Upstream, interval: float, timeout: float, deep_interval: float, gate: Gate
    ) -> None:
        self._pool = pool
        self._upstream = upstream
        self._interval = interval
        self._timeout = timeout
        self._deep_interval = deep_interval
        self._gate = gate
        self._deep_passed: dict[str, float] = {}
        self._probes: dict[str, asyncio.Task[None]] = {}

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Probe in the background; every probe has ended when this is left."""
        self._pool.listeners.append(self._transition)
        ticker = tasks.spawn(self._tick(), name="health checks")
        try:
            yield
        finally:
            self._pool.listeners.remove(self._transition)
            for task in (ticker, *self._probes.values()):
                await tasks.cancelled(task)

    async def _tick(self) -> None:
        while True:
            self.check_all()
            await asyncio.sleep(self._interval)

    def check_all(self) -> None:
        """Probe every worker now."""
        for worker in self._pool:
            self.check_soon(worker)

    def check_soon(self, worker: Worker) -> None:
        """Probe one worker now, unless a probe of it is under way."""
        if worker.url not in self._probes:
            task = tasks.spawn(self._probe(worker), name=f"probe {worker.url}")
            self._probes[worker.url] = task
            task.add_done_callback(lambda _: self._probes.pop(worker.url, None))

    async def is_paused(self, url: str) -> bool:
        """Whether somebody else has paused the worker at `url`, by what it says now; it takes no traffic then."""
        worker = next((worker for worker in self._pool if worker.url == url), None)
        if worker is None:
            return False
        under_way = self._probes.get(url)
        if under_way is not None:  # it may have asked before the pause
            await asyncio.wait({under_way})
        if worker.state in ALIVE and worker.state is not WorkerState.PAUSED:
            self.check_soon(worker)
            await asyncio.wait({self._probes[url]})
        return worker.state is WorkerState.PAUSED

    def _transition(self, transition: Transition) -> None:
        if transition.after is None:
            self._deep_passed.pop(transition.worker.url, None)
        elif transition.before is None:
            self.check_soon(transition.worker)

    async def _probe(self, worker: Worker) -> None:
        """Probe once; again if the weights were changed meanwhile, because what it was told of them may be the past."""
        while True:
            epoch = self._pool.weights_epoch
            await self._probe_once(worker, epoch)
            if epoch == self._pool.weights_epoch:
                return

    def _alive(self, worker: Worker, version: str | None, epoch: int) -> None:
        trusted = epoch % 2 == 0 and epoch == self._pool.weights_epoch
        self._pool.record_alive(worker, version if trusted else None)

    async def _probe_once(self, worker: Worker, epoch: int) -> None:
        silenced, pauses = self._gate.deliberate, self._gate.pauses
        try:
            version = await self._liveness(worker)
        except UpstreamError as error:
            # Silence of a fleet that was silenced proves nothing; a port that nobody listens on does.
            refused = isinstance(error, UpstreamUnreachable) and error.refused
            if refused or not (silenced or self._gate.deliberate):
                self._pool.record_failure(worker, str(error))
            return
        paused = worker.state in ALIVE and not self._gate.deliberate and await self._is_paused(worker)
        if self._gate.deliberate or self._gate.pauses != pauses:  # then the pause may be the router's own
            self._alive(worker, version, epoch)
        elif paused:
            self._alive(worker, version, epoch)
            self._pool.set_paused(worker, "paused by somebody else: /ready answers 503")
        else:
            self._pool.set_unpaused(worker)
            await self._judge(worker, version, epoch)

    async def _judge(self, worker: Worker, version: str | None, epoch: int) -> None:
        """What becomes of a worker that answers and is not paused."""
        if worker.state is WorkerState.QUARANTINED:
            self._alive(worker, version, epoch)
            await self._try_readmission(worker)
        elif not self._deep_due(worker) or (sick := await self._deep(worker)) is None:
            self._alive(worker, version, epoch)
        else:
            self._pool.record_failure(worker, sick)

    async def _liveness(self, worker: Worker) -> str | None:
        """The weight version of a worker that answers; None if it names none.

        Raises:
            UpstreamError: it does not answer, or answers with a server error.
        """
        for path in LIVENESS_PATHS:
            status, body = await self._get(worker, path, self._timeout)
            if status >= 500:
                raise UpstreamError(f"{worker.url}{path} answered {status}")
            if status != NOT_FOUND:
                break
        return _weight_version(body)

    async def _is_paused(self, worker: Worker) -> bool:
        """Whether a worker that lives says that it is not ready. SGLang says so while it is paused, and after a failed
        `/health` until one succeeds: that one is asked for here, and its silence is the proof. That of `/ready` is
        none: a busy worker is late."""
        try:
            status, _ = await self._get(worker, READY_PATH, self._timeout)
        except UpstreamError:
            return False
        if status != UNAVAILABLE:
            return False
        try:
            return await self._refusal(worker) is not None
        except UpstreamTimeout:
            return True

    async def weight_version(self, address: WorkerUrl, api_key: str | None) -> str | None:
        """The version that a worker about to be registered has; None if it cannot be asked."""
        probed = Worker(address, api_key=api_key, attributes={}, now=0.0)
        try:
            return await self._liveness(probed)
        except UpstreamError:
            return None

    def _deep_due(self, worker: Worker) -> bool:
        passed_at = self._deep_passed.setdefault(worker.url, time.monotonic())
        return bool(self._deep_interval) and time.monotonic() - passed_at >= self._deep_interval

    async def _deep(self, worker: Worker) -> str | None:
        """What a worker says against itself at the deep check, or None. One that fails is asked again at every
        interval, so that failures can be consecutive."""
        try:
            sick = await self._refusal(worker)
        except UpstreamTimeout:
            sick = None  # busy or paused: the cheap check has just passed
        if sick is None:
            self._deep_passed[worker.url] = time.monotonic()
        return sick

    async def _refusal(self, worker: Worker) -> str | None:
        """Why the deep check did not pass, or None.

        Raises:
            UpstreamTimeout: no answer came.
        """
        try:
            status, _ = await self._get(worker, DEEP_PATH, min(self._timeout, DEEP_PATIENCE))
        except UpstreamTimeout:
            raise
        except UpstreamError as error:
            return str(error)
        return f"{worker.url}{DEEP_PATH} answered {status}" if status >= 500 else None

    async def _try_readmission(self, worker: Worker) -> None:
        refused = self._pool.readmission_refused(worker)
        if refused is None:
            try:
                refused = await self._refusal(worker)
            except UpstreamTimeout as error:
                refused = str(error)
        if refused is None:
            self._pool.readmit(worker, "answers its checks again")
        else:
            self._pool.keep_out(worker, refused)

    async def _get(self, worker: Worker, path: str, timeout: float) -> tuple[int, bytes]:
        headers: RawHeaders = [(b"accept", b"application/json")]
        if worker.api_key is not None:
            headers.append((b"authorization", b"Bearer " + worker.api_key.encode()))
        return await self._upstream.fetch(worker.address, path, headers=headers, timeout=timeout)


def _weight_version(body: bytes) -> str | None:
    try:
        info = orjson.loads(body)
    except orjson.JSONDecodeError:
        return None
    version = info.get("weight_version") if isinstance(info, dict) else None
    return None if version is None else str(version)


def log_transition(transition: Transition) -> None:
    """One line for each change of a worker's state, with its reason."""
    worker = transition.worker
    after = transition.after.value if transition.after else "removed"
    in_order = transition.after in (None, WorkerState.READY, WorkerState.DRAINING)
    level = logging.INFO if in_order else logging.WARNING
    logger.log(level, f"worker_{after}", extra={"fields": {"worker": worker.url, "reason": transition.reason}})
