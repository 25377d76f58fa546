"""The queue of new sessions that wait for room. Later turns of a session do not wait here.

Room becomes free in many places of the code, without notice, so the first session in the queue polls for it. It also
wakes one other session at a time that may begin before it: each occupies its room before the next one is woken.
"""

from __future__ import annotations

import asyncio
import itertools
from bisect import bisect_left, insort
from collections.abc import Callable, Collection
from math import inf
from operator import attrgetter

from miles_router.asgi.request_routing import Routing
from miles_router.errors import NoWorkerAvailable
from miles_router.fleet.placement.admission import Admission

#: Seconds between two checks by the first session in the queue.
GLANCE = 0.1


class _Newcomer:
    """The place of one request in the queue."""

    __slots__ = ("called", "key", "number", "tokens", "who", "woken")

    def __init__(self, who: Routing, key: str, tokens: int, count: int) -> None:
        self.who = who
        self.key = key
        self.tokens = tokens
        self.number = (who.number, count)
        #: Whether it may check for room although it is not the first.
        self.called = False
        self.woken: asyncio.Future[None] | None = None

    def wake(self) -> None:
        if self.woken is not None and not self.woken.done():
            self.woken.set_result(None)


_NUMBER = attrgetter("number")


class AdmissionQueue:
    """A queue of at most `max_waiting` requests, each for at most `timeout` seconds (0: without limit)."""

    def __init__(self, admission: Admission, *, max_waiting: int, timeout: float, is_open: Callable[[], bool]) -> None:
        self._admission = admission
        self._max_waiting = max_waiting
        self._timeout = timeout
        self._is_open = is_open
        self._count = itertools.count()
        self._order: list[_Newcomer] = []
        self._of: dict[str, list[_Newcomer]] = {}  # by session
        self._least = inf  # a lower bound of the waiting prompts' lengths, in tokens

    def __len__(self) -> int:
        return len(self._order)

    def must_wait(self, key: str | None, tokens: int) -> bool:
        """Return True if a generation must wait here: it begins a session, and there is no room or others wait."""
        rules = self._admission
        if not rules.begins(key) or (not self._order and rules.has_room(tokens)):
            return False
        return not rules.fits_nowhere(tokens)

    async def wait(self, who: Routing, key: str, tokens: int, came_at: float) -> None:
        """Wait until the session `key` may begin or has begun, or until the request is aborted and released.

        The caller must take its lease before it next awaits, because the next request checks for room after that.

        Args:
            who: the request.
            tokens: the length of its prompt.
            came_at: when its wait began, in the event loop's time.

        Raises:
            NoWorkerAvailable: too many requests wait already, or this one has waited for too long.
        """
        if len(self._order) >= self._max_waiting:
            waiting = f"{len(self._order)} requests wait already (--gate-max-held)"
            raise NoWorkerAvailable(f"no worker has room for this session; {waiting}")
        place = _Newcomer(who, key, tokens, next(self._count))
        self._enter(place)
        try:
            while not who.aborted and self._admission.begins(key) and not self._goes(place):
                await self._hold(place, came_at)
        finally:
            self._leave(place)

    def release(self, those: Collection[Routing]) -> None:
        """Wake aborted requests."""
        for place in self._order:
            if place.who in those:
                place.wake()

    def _enter(self, place: _Newcomer) -> None:
        insort(self._order, place, key=_NUMBER)
        self._of.setdefault(place.key, []).append(place)
        self._least = min(self._least, place.tokens)

    def _leave(self, place: _Newcomer) -> None:
        at = bisect_left(self._order, place.number, key=_NUMBER)
        if at == 0:
            self._admission.unreserve()
        del self._order[at]
        others = self._of[place.key]
        others.remove(place)
        for other in others:  # their session may have begun with this request
            other.wake()
        if not others:
            del self._of[place.key]
        if self._order:
            self._order[0].wake()
        else:
            self._least = inf

    def _goes(self, place: _Newcomer) -> bool:
        """Return True if this request may begin now. The first in the queue also wakes another that may."""
        if place is self._order[0]:
            following = self._next()
            if following is not None and following is not place:
                following.called = True
                following.wake()
            return following is place
        called, place.called = place.called, False
        return called and self._is_open() and self._admission.has_room(place.tokens, spare=True)

    def _next(self) -> _Newcomer | None:
        """Return the request that may begin now: the first, or else the next that fits outside the reserved units."""
        rules, first = self._admission, self._order[0]
        if not self._is_open():
            return None
        if rules.has_room(first.tokens) or rules.fits_nowhere(first.tokens):
            return first
        rules.reserve()
        spare = rules.most(spare=True)
        if spare < self._least:
            return None
        found = next((place for place in self._order if place is not first and place.tokens <= spare), None)
        if found is None:
            self._least = min(place.tokens for place in self._order)
        return found

    async def _hold(self, place: _Newcomer, came_at: float) -> None:
        """Wait until the request is woken, until its next check if it is the first, or until its timeout."""
        loop = asyncio.get_running_loop()
        bounds = [GLANCE] if place is self._order[0] else []
        if self._timeout:
            bounds.append(came_at + self._timeout - loop.time())
            if bounds[-1] <= 0:
                raise NoWorkerAvailable(
                    f"no worker has room for this session; the request has waited {self._timeout:g} s (--gate-timeout)"
                )
        place.woken = loop.create_future()
        await asyncio.wait({place.woken}, timeout=min(bounds, default=None))
