"""The gate, at which generations wait while the fleet is paused or asleep.

It is closed for any of three reasons: the router paused the fleet, the router put the fleet to sleep, or another
program paused every worker that could answer. While it is open, passing it costs one attribute check.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, NamedTuple

from miles_router.asgi.exchange import Routing
from miles_router.engines.known import COMPUTED, GENERATION
from miles_router.errors import FleetPaused, RouterError
from miles_router.fleet.admission_queue import AdmissionQueue
from miles_router.fleet.placement.sessions import SESSION_PREFIX, Admission

if TYPE_CHECKING:
    from miles_router.shards.membership import Membership

#: Closed times that are remembered after they have ended.
REMEMBERED = 256
#: Why the gate was closed: the router's pause, its sleep, or a pause of all workers by another program.
PAUSED, ASLEEP, WORKERS_PAUSED = "paused", "asleep", "workers_paused"


def endpoint(path: str) -> str:
    """Return the engine's part of a path: the part after `/sessions/{id}` if there is one, else all of it."""
    if not path.startswith(SESSION_PREFIX):
        return path
    start = path.find("/", len(SESSION_PREFIX))
    return path[max(start, 0) :]


def generates(path: str) -> bool:
    """Return True if a request to this path generates, with or without a session in the path."""
    return endpoint(path) in GENERATION


def computes(path: str) -> bool:
    """Return True if the engine computes the reply to this path, with or without a session in the path."""
    return endpoint(path) in COMPUTED


class ClosedTime(NamedTuple):
    """A time during which the gate was closed, in Unix seconds. `end`: None while it lasts. `mode`: of a pause."""

    start: float
    end: float | None
    reason: str
    mode: str | None


class Gate:
    """A gate that holds at most `max_held` requests, each for at most `timeout` seconds (0: without limit).

    Requests pass in the order in which they arrived at the router. Aborted requests are released.
    """

    def __init__(
        self, admission: Admission, *, max_held: int, timeout: float, now: Callable[[], float] = time.time
    ) -> None:
        #: A shard's right to send, which can expire. Requests do not wait for its renewal: they fail at once.
        self.lease: Membership | None = None
        self._closed = False
        self.mode: str | None = None  # of the router's own pause
        self.paused_since: float | None = None
        self.asleep_since: float | None = None
        self.workers_paused_since: float | None = None
        #: Pauses by the router since the start.
        self.pauses = 0
        #: The number of those pauses that were in mode "abort". If this changes while a generation runs, the generation
        #: was cut.
        self.aborting_pauses = 0
        #: The last times it was closed that have ended, however short.
        self.past: deque[ClosedTime] = deque(maxlen=REMEMBERED)
        #: Called with the seconds of each wait that has ended.
        self.when_waited: Callable[[float], None] = lambda seconds: None
        self._max_held = max_held
        self._timeout = timeout
        self._now = now
        #: The waiting requests by their futures. A request may wait several times, once for each of its generations.
        self._held: dict[asyncio.Future[None], Routing] = {}
        #: The queue of new sessions that wait for room. They do not count for `max_held`, so that turns of running
        #: sessions still find a place at the gate.
        self.queue = AdmissionQueue(admission, max_waiting=max_held, timeout=timeout, is_open=self.is_open)

    @property
    def closed(self) -> bool:
        """Whether generations must wait now; checked before each write to a worker."""
        return self._closed or (self.lease is not None and not self.lease.may_act)

    @property
    def held(self) -> int:
        """The number of requests that wait, including new sessions that wait for room."""
        return len(self._held) + len(self.queue)

    @property
    def closed_by_router(self) -> bool:
        """Whether the router itself stopped the fleet, so that a silent worker is not an unhealthy one."""
        return self.paused_since is not None or self.asleep_since is not None

    def pause(self, mode: str) -> None:
        """Close the gate for a pause of the fleet."""
        self.pauses += 1
        self.aborting_pauses += mode == "abort"
        self.mode, self.paused_since = mode, self.paused_since or self._now()
        self.update()

    def resume(self) -> None:
        self._record_closed_time(PAUSED, self.paused_since)
        self.mode, self.paused_since = None, None
        self.update()

    def sleep(self) -> None:
        """Close the gate because the fleet's memory is being released."""
        self.asleep_since = self.asleep_since or self._now()
        self.update()

    def wake(self) -> None:
        """Record that the fleet's memory is allocated again."""
        self._record_closed_time(ASLEEP, self.asleep_since)
        self.asleep_since = None
        self.update()

    def workers_paused(self, paused: bool) -> None:
        """Set whether another program has paused all workers that answer."""
        if not paused:
            self._record_closed_time(WORKERS_PAUSED, self.workers_paused_since)
        self.workers_paused_since = (self.workers_paused_since or self._now()) if paused else None
        self.update()

    def times(self) -> list[ClosedTime]:
        """Return the past and present times at which the gate was or is closed."""
        now = ((PAUSED, self.paused_since), (ASLEEP, self.asleep_since), (WORKERS_PAUSED, self.workers_paused_since))
        return [*self.past, *(self._closed_time(reason, since, None) for reason, since in now if since is not None)]

    def _record_closed_time(self, reason: str, since: float | None) -> None:
        if since is not None:
            self.past.append(self._closed_time(reason, since, self._now()))

    def _closed_time(self, reason: str, since: float, end: float | None) -> ClosedTime:
        return ClosedTime(since, end, reason, self.mode if reason == PAUSED else None)

    def update(self) -> None:
        """Recompute whether the gate is closed, and let the waiting requests through if it is open."""
        self._closed = self.closed_by_router or self.workers_paused_since is not None
        if self._held and not self.closed:
            held, self._held = self._held, {}
            for waiting, _ in sorted(held.items(), key=lambda each: each[1].number):
                if not waiting.done():
                    waiting.set_result(None)

    def is_open(self) -> bool:
        """Return True if a generation may be written to a worker now."""
        return not self.closed

    def holds(self, request: Routing) -> bool:
        """Return True if a request must wait: the gate is closed, or the request waits for a weight version."""
        return self.closed or (request.evaluation is not None and request.evaluation.must_wait)

    async def wait(self, request: Routing, arrived_at: float | None = None) -> None:
        """Wait until the gate is open for the request, or until the request is aborted and released.

        Args:
            arrived_at: when its wait began, in the event loop's time; None for now.

        Raises:
            FleetPaused: too many requests wait already, or this one has waited for too long.
            WeightsChanged: it has waited for too long for a weight version.
            Unavailable: this shard's right to send has expired.
        """
        if not self.holds(request) or request.aborted:
            return
        arrived_at = asyncio.get_running_loop().time() if arrived_at is None else arrived_at
        with self.waiting(request, "gate"):
            while self.holds(request) and not request.aborted:
                await self._wait_once(request, arrived_at)

    @contextmanager
    def waiting(self, request: Routing, name: str) -> Iterator[None]:
        """Count the time within this context as waiting time of a request: at the `gate`, or in the `queue`."""
        clock = asyncio.get_running_loop().time
        request.waits, since = request.waits + 1, clock()
        try:
            yield
        finally:
            request.waits, seconds = request.waits - 1, clock() - since
            request.waited += seconds
            request.mark(name, seconds=seconds)
            self.when_waited(seconds)

    async def _wait_once(self, request: Routing, arrived_at: float) -> None:
        """Wait for the next change of the gate, an abort, or the timeout."""
        if self.lease is not None:
            self.lease.check()
        loop = asyncio.get_running_loop()
        if len(self._held) >= self._max_held:
            raise self._refusal(request, f"; {self._max_held} requests wait already (--gate-max-held)")
        left = arrived_at + self._timeout - loop.time() if self._timeout else None
        if left is not None and left <= 0:
            raise self._refusal(request, f", and this request has waited {self._timeout:g} s (--gate-timeout)")
        waiting: asyncio.Future[None] = loop.create_future()
        self._held[waiting] = request
        try:
            await asyncio.wait({waiting}, timeout=left)
        finally:
            self._held.pop(waiting, None)

    def _refusal(self, request: Routing, why: str) -> RouterError:
        if request.evaluation is not None and not self.closed:
            return request.evaluation.refusal(why=why)
        return FleetPaused(f"{self.reason()}{why}")

    def release(self, *requests: Routing) -> None:
        """Let aborted requests continue though the gate is closed or there is no room; they will not generate."""
        aborted = {*requests}
        for waiting in [waiting for waiting, holder in self._held.items() if holder in aborted]:
            del self._held[waiting]
            if not waiting.done():
                waiting.set_result(None)
        self.queue.release(aborted)

    def reason(self) -> str:
        """Return why the gate is closed, as text for an error message."""
        if self.asleep_since is not None:
            return "the fleet is asleep"
        if self.paused_since is not None:
            return f"the fleet is paused ({self.mode})"
        return "every worker is paused"

    def describe(self) -> dict[str, object]:
        """Return the gate's part of `GET /router/info`; times are Unix seconds."""
        return {
            "closed": self.closed,
            "mode": self.mode,
            "paused_since": self.paused_since,
            "asleep_since": self.asleep_since,
            "workers_paused_since": self.workers_paused_since,
            "held": self.held,
            "queued": len(self.queue),
            "pauses": self.pauses,
        }
