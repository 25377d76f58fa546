"""Where generation waits while the fleet is paused or asleep. The router's own knowledge of what it did to the fleet.

Closed for any of three reasons: the router paused the fleet, put it to sleep, or every worker that could answer was
paused behind its back. While it is open, passing it costs one attribute check.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Protocol

from miles_router.engines.paths import COMPUTED, GENERATION
from miles_router.errors import FleetFull, FleetPaused

#: Seconds after which whoever is first looks again whether there is room: what frees it has many places.
GLANCE = 0.1
#: What stands before an engine's own path in a request of a session: `/sessions/{id}/...`.
SESSION_PREFIX = "/sessions/"


def endpoint(path: str) -> str:
    """The engine's part of a path: all of it, or what stands behind the session."""
    return path[path.find("/", len(SESSION_PREFIX)) :] if path.startswith(SESSION_PREFIX) else path


def generates(path: str) -> bool:
    """Whether a request to this path generates, by itself or within a session."""
    return endpoint(path) in GENERATION


def computes(path: str) -> bool:
    """Whether the engine itself works on a request to this path, by itself or within a session."""
    return endpoint(path) in COMPUTED


class Waiting(Protocol):
    """Who waits: a request, which may be aborted meanwhile."""

    aborted: bool

    @property
    def number(self) -> int:
        """Lower for one that came before."""
        ...


class Gate:
    """Holds at most `max_held` requests, each for at most `timeout` seconds (0: as long as it takes).

    They are let through in the order in which they came to the router. Who is aborted waits no longer.
    """

    def __init__(self, *, max_held: int, timeout: float, now: Callable[[], float] = time.time) -> None:
        self.closed = False
        self.mode: str | None = None  # of the router's own pause
        self.paused_since: float | None = None
        self.asleep_since: float | None = None
        self.workers_paused_since: float | None = None
        #: How often it was paused since the start,
        self.pauses = 0
        #: and how often so that what ran was aborted; a generation during which this changed was cut.
        self.cuts = 0
        self._max_held = max_held
        self._timeout = timeout
        self._now = now
        #: What each waits for, and who it is; one request may wait several times, once for each of its generations.
        self._held: dict[asyncio.Future[None], Waiting] = {}
        #: Those that wait for room, in the order of coming.
        self._queue: dict[object, Waiting] = {}

    @property
    def held(self) -> int:
        """Requests that wait."""
        return len(self._held)

    @property
    def queued(self) -> bool:
        """Whether somebody waits for room."""
        return bool(self._queue)

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
        self.mode, self.paused_since = None, None
        self.update()

    def sleep(self) -> None:
        """The fleet's memory is being released."""
        self.asleep_since = self.asleep_since or self._now()
        self.update()

    def wake(self) -> None:
        """The fleet's memory is back."""
        self.asleep_since = None
        self.update()

    def workers_paused(self, paused: bool) -> None:
        """Whether all workers that answer were paused by somebody else."""
        self.workers_paused_since = (self.workers_paused_since or self._now()) if paused else None
        self.update()

    def update(self) -> None:
        """What it knows may be other than before."""
        self.closed = self.deliberate or self.workers_paused_since is not None
        if self._held and not self.closed:
            held, self._held = self._held, {}
            for waiting, _ in sorted(held.items(), key=lambda each: each[1].number):
                if not waiting.done():
                    waiting.set_result(None)

    def is_open(self) -> bool:
        """Whether a generation may be written to a worker now."""
        return not self.closed

    async def wait(self, who: Waiting) -> None:
        """Wait until the gate is open, or `who` is aborted and released.

        Raises:
            FleetPaused: too many wait already, or this one has waited for too long.
        """
        came_at = asyncio.get_running_loop().time()
        while self.closed and not who.aborted:
            await self._hold(who, came_at, FleetPaused, self.reason())

    async def wait_for_room(self, who: Waiting, has_room: Callable[[], bool]) -> None:
        """Wait until a worker has room, in the order of coming; or until `who` is aborted and released. Whoever returns
        takes the room before anybody else looks.

        Raises:
            FleetFull: too many wait already, or this one has waited for too long.
        """
        came_at = asyncio.get_running_loop().time()
        turn = object()
        self._queue[turn] = who
        try:
            while not who.aborted and (next(iter(self._queue)) is not turn or not has_room()):
                first = next(iter(self._queue)) is turn
                await self._hold(who, came_at, FleetFull, "no worker has room for it", GLANCE if first else None)
        finally:
            del self._queue[turn]
            self._wake_next()

    def _wake_next(self) -> None:
        """Whoever is first in the queue now looks whether there is room."""
        first = next(iter(self._queue.values()), None)
        for waiting, holder in self._held.items():
            if holder is first and not waiting.done():
                waiting.set_result(None)

    async def _hold(
        self, who: Waiting, came_at: float, error: type[FleetPaused], reason: str, glance: float | None = None
    ) -> None:
        """Wait until somebody changes something, or for `glance` seconds."""
        loop = asyncio.get_running_loop()
        if len(self._held) >= self._max_held:
            raise error(f"{reason}; {self._max_held} requests wait already (--gate-max-held)")
        left = came_at + self._timeout - loop.time() if self._timeout else None
        if left is not None and left <= 0:
            raise error(f"{reason}, and this request has waited {self._timeout:g} s (--gate-timeout)")
        waiting: asyncio.Future[None] = loop.create_future()
        self._held[waiting] = who
        try:
            bounds = [each for each in (left, glance) if each is not None]
            await asyncio.wait({waiting}, timeout=min(bounds, default=None))
        finally:
            self._held.pop(waiting, None)

    def release(self, who: Waiting) -> None:
        """Let one request go on although the gate is closed: it was aborted and will not generate."""
        for waiting in [waiting for waiting, holder in self._held.items() if holder is who]:
            del self._held[waiting]
            if not waiting.done():
                waiting.set_result(None)

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
