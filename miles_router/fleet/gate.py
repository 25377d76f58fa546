"""Where generation waits while the fleet is paused or asleep. The router's own knowledge of what it did to the fleet.

Closed for any of three reasons: the router paused the fleet, put it to sleep, or every worker that could answer was
paused behind its back. While it is open, passing it costs one attribute check.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple, Protocol

from miles_router.engines.known import COMPUTED, GENERATION
from miles_router.errors import FleetPaused
from miles_router.fleet.admission_queue import AdmissionQueue, Waiting
from miles_router.fleet.affinity import SESSION_PREFIX
from miles_router.fleet.placement.admission import Admission

#: Pauses that are remembered when they are over.
REMEMBERED = 256
#: Why the gate was closed: by the router's pause or sleep, or as all workers were paused by somebody else.
PAUSED, ASLEEP, WORKERS_PAUSED = "paused", "asleep", "workers_paused"


def endpoint(path: str) -> str:
    """The engine's part of a path: all of it, or what stands behind the session."""
    return path[path.find("/", len(SESSION_PREFIX)) :] if path.startswith(SESSION_PREFIX) else path


def generates(path: str) -> bool:
    """Whether a request to this path generates, by itself or within a session."""
    return endpoint(path) in GENERATION


def computes(path: str) -> bool:
    """Whether the engine itself works on a request to this path, by itself or within a session."""
    return endpoint(path) in COMPUTED


class ClosedTime(NamedTuple):
    """When the gate was closed for one reason, in Unix seconds; `end` is None while it is. `mode`: of a pause."""

    start: float
    end: float | None
    reason: str
    mode: str | None


class ActsUnderLease(Protocol):
    """What a router of several machines may do only while its leader is heard: `shards.membership.Membership`."""

    @property
    def is_fresh(self) -> bool:
        """Whether it may send generations."""
        ...

    def check(self) -> None:
        """Raises NodeUnleased where it may not."""
        ...


class Gate:
    """Holds at most `max_held` requests, each for at most `timeout` seconds (0: as long as it takes).

    They are let through in the order in which they came to the router. Who is aborted waits no longer.
    """

    def __init__(
        self, admission: Admission, *, max_held: int, timeout: float, now: Callable[[], float] = time.time
    ) -> None:
        #: Where a shard's right to send can run out; nobody waits for that here.
        self.lease: ActsUnderLease | None = None
        self._closed = False
        self.mode: str | None = None  # of the router's own pause
        self.paused_since: float | None = None
        self.asleep_since: float | None = None
        self.workers_paused_since: float | None = None
        #: How often it was paused since the start,
        self.pauses = 0
        #: and how often so that what ran was aborted; a generation during which this changed was cut.
        self.cuts = 0
        #: When it was closed, the last times that are over; however short, and whoever looked.
        self.past: deque[ClosedTime] = deque(maxlen=REMEMBERED)
        #: Hears how many seconds each wait took that is over.
        self.when_waited: Callable[[float], None] = lambda seconds: None
        self._max_held = max_held
        self._timeout = timeout
        self._now = now
        #: What each waits for, and who it is; one request may wait several times, once for each of its generations.
        self._held: dict[asyncio.Future[None], Waiting] = {}
        #: Where new sessions wait for room. They take nobody's place here: what runs may have to wait here too.
        self.queue = AdmissionQueue(admission, max_waiting=max_held, timeout=timeout, is_open=self.is_open)

    @property
    def closed(self) -> bool:
        """Whether no generation may be sent; asked at each write."""
        return self._closed or (self.lease is not None and not self.lease.is_fresh)

    @property
    def held(self) -> int:
        """Requests that wait, those for room among them."""
        return len(self._held) + len(self.queue)

    @property
    def deliberate(self) -> bool:
        """Whether the router itself made the fleet silent, so that silence says nothing about health."""
        return self.paused_since is not None or self.asleep_since is not None

    def pause(self, mode: str) -> None:
        """The fleet is being paused."""
        self.pauses += 1
        self.cuts += mode == "abort"
        self.mode, self.paused_since = mode, self.paused_since or self._now()
        self.update()

    def resume(self) -> None:
        """The fleet goes on."""
        self._over(PAUSED, self.paused_since)
        self.mode, self.paused_since = None, None
        self.update()

    def sleep(self) -> None:
        """The fleet's memory is being released."""
        self.asleep_since = self.asleep_since or self._now()
        self.update()

    def wake(self) -> None:
        """The fleet's memory is back."""
        self._over(ASLEEP, self.asleep_since)
        self.asleep_since = None
        self.update()

    def workers_paused(self, paused: bool) -> None:
        """Whether all workers that answer were paused by somebody else."""
        if not paused:
            self._over(WORKERS_PAUSED, self.workers_paused_since)
        self.workers_paused_since = (self.workers_paused_since or self._now()) if paused else None
        self.update()

    def times(self) -> list[ClosedTime]:
        """When it was closed, and since when it is."""
        now = ((PAUSED, self.paused_since), (ASLEEP, self.asleep_since), (WORKERS_PAUSED, self.workers_paused_since))
        return [*self.past, *(self._closed_time(reason, since, None) for reason, since in now if since is not None)]

    def _over(self, reason: str, since: float | None) -> None:
        if since is not None:
            self.past.append(self._closed_time(reason, since, self._now()))

    def _closed_time(self, reason: str, since: float, end: float | None) -> ClosedTime:
        return ClosedTime(since, end, reason, self.mode if reason == PAUSED else None)

    def update(self) -> None:
        """What it knows may be other than before."""
        self._closed = self.deliberate or self.workers_paused_since is not None
        if self._held and not self.closed:
            held, self._held = self._held, {}
            for waiting, _ in sorted(held.items(), key=lambda each: each[1].number):
                if not waiting.done():
                    waiting.set_result(None)

    def is_open(self) -> bool:
        """Whether a generation may be written to a worker now."""
        return not self.closed

    async def wait(self, who: Waiting, came_at: float | None = None) -> None:
        """Wait until the gate is open, or `who` is aborted and released.

        Args:
            came_at: since when it waits, in the event loop's time, where that is not now.

        Raises:
            FleetPaused: too many wait already, or this one has waited for too long.
        """
        if not self.closed or who.aborted:
            return
        came_at = asyncio.get_running_loop().time() if came_at is None else came_at
        with self.waiting(who, "gate"):
            while self.closed and not who.aborted:
                await self._hold(who, came_at)

    @contextmanager
    def waiting(self, who: Waiting, name: str) -> Iterator[None]:
        """While this is entered, `who` waits: at the `gate`, or in the `queue` for room."""
        clock = asyncio.get_running_loop().time
        who.waits, since = who.waits + 1, clock()
        try:
            yield
        finally:
            who.waits, seconds = who.waits - 1, clock() - since
            who.waited += seconds
            who.mark(name, seconds=seconds)
            self.when_waited(seconds)

    async def _hold(self, who: Waiting, came_at: float) -> None:
        """Wait until somebody changes something."""
        if self.lease is not None:
            self.lease.check()
        loop = asyncio.get_running_loop()
        if len(self._held) >= self._max_held:
            raise FleetPaused(f"{self.reason()}; {self._max_held} requests wait already (--gate-max-held)")
        left = came_at + self._timeout - loop.time() if self._timeout else None
        if left is not None and left <= 0:
            raise FleetPaused(f"{self.reason()}, and this request has waited {self._timeout:g} s (--gate-timeout)")
        waiting: asyncio.Future[None] = loop.create_future()
        self._held[waiting] = who
        try:
            await asyncio.wait({waiting}, timeout=left)
        finally:
            self._held.pop(waiting, None)

    def release(self, *those: Waiting) -> None:
        """Let these go on although the gate is closed or there is no room: they were aborted and will not generate."""
        aborted = {*those}
        for waiting in [waiting for waiting, holder in self._held.items() if holder in aborted]:
            del self._held[waiting]
            if not waiting.done():
                waiting.set_result(None)
        self.queue.release(aborted)

    def reason(self) -> str:
        """Why it is closed, in words."""
        if self.asleep_since is not None:
            return "the fleet is asleep"
        if self.paused_since is not None:
            return f"the fleet is paused ({self.mode})"
        return "every worker is paused"

    def describe(self) -> dict[str, object]:
        """What `GET /router/info` shows; times are Unix seconds."""
        return {
            "closed": self.closed,
            "mode": self.mode,
            "paused_since": self.paused_since,
            "asleep_since": self.asleep_since,
            "workers_paused_since": self.workers_paused_since,
            "held": self.held,
            "pauses": self.pauses,
        }
