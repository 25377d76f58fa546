"""The queue of new sessions that wait for room. Later turns of a session do not wait here.

Room becomes free in many places of the code, without notice, so the first session in the queue polls for it. It also
wakes one other session at a time that may begin before it: each occupies its room before the next one is woken.

Sessions of training and evaluations wait in lines of their own, and take turns as the first of the queue. Neither keeps
the other waiting, however many come.
"""

from __future__ import annotations

import asyncio
import itertools
from bisect import bisect_left, insort
from collections.abc import Callable, Collection
from itertools import chain
from math import inf
from operator import attrgetter

from miles_router.asgi.exchange import Routing
from miles_router.errors import NoWorkerAvailable
from miles_router.fleet.placement.sessions import Admission

#: Seconds between two checks by the first session in the queue.
POLL_INTERVAL = 0.1


class _QueuedRequest:
    """One request in the queue."""

    __slots__ = ("key", "line", "may_check", "number", "request", "tokens", "woken")

    def __init__(self, request: Routing, key: str, tokens: int, count: int) -> None:
        self.request = request
        self.key = key
        self.tokens = tokens
        self.line = int(request.evaluation is not None)
        self.number = (request.number, count)
        #: Whether it may check for room although it is not the first.
        self.may_check = False
        self.woken: asyncio.Future[None] | None = None

    def wake(self) -> None:
        if self.woken is not None and not self.woken.done():
            self.woken.set_result(None)


_NUMBER = attrgetter("number")


class AdmissionQueue:
    """A queue of at most `max_waiting` requests of training, and as many of evaluations, each for at most `timeout`
    seconds (0: without limit)."""

    def __init__(self, admission: Admission, *, max_waiting: int, timeout: float, is_open: Callable[[], bool]) -> None:
        self._admission = admission
        self._max_waiting = max_waiting
        self._timeout = timeout
        self._is_open = is_open
        self._count = itertools.count()
        #: Training and evaluations, each in order of arrival. The head of the queue is the head of the line `_next`,
        #: which is empty only if both are.
        self._lines: tuple[list[_QueuedRequest], list[_QueuedRequest]] = ([], [])
        self._next = 0
        self._last = 0  # the line of the request that left last
        self._by_session: dict[str, list[_QueuedRequest]] = {}
        self._fewest_tokens = inf  # a lower bound of the waiting prompts' lengths, in tokens

    def __len__(self) -> int:
        return sum(map(len, self._lines))

    @property
    def _first(self) -> _QueuedRequest:
        return self._lines[self._next][0]

    def must_wait(self, key: str | None, tokens: int) -> bool:
        """Return True if a generation must wait here: it begins a session, and there is no room or others wait."""
        rules = self._admission
        if not rules.begins_session(key) or (not len(self) and rules.has_room(tokens)):
            return False
        return not rules.fits_nowhere(tokens)

    async def wait(self, request: Routing, key: str, tokens: int, arrived_at: float) -> None:
        """Wait until the session `key` may begin or has begun, or until the request is aborted and released.

        The caller must take its lease before it next awaits, because the next request checks for room after that.

        Args:
            tokens: the length of its prompt.
            arrived_at: when its wait began, in the event loop's time.

        Raises:
            NoWorkerAvailable: too many requests wait already, or this one has waited for too long.
        """
        queued = _QueuedRequest(request, key, tokens, next(self._count))
        if (waiting := len(self._lines[queued.line])) >= self._max_waiting:
            already = f"{waiting} requests wait already (--gate-max-held)"
            raise NoWorkerAvailable(f"no worker has room for this session; {already}")
        self._insert(queued)
        try:
            while not request.aborted and self._admission.begins_session(key) and not self._may_begin(queued):
                await self._wait_once(queued, arrived_at)
        finally:
            self._remove(queued)

    def release(self, requests: Collection[Routing]) -> None:
        """Wake aborted requests."""
        for queued in chain(*self._lines):
            if queued.request in requests:
                queued.wake()

    def _insert(self, queued: _QueuedRequest) -> None:
        if not len(self):
            self._next = queued.line
        insort(self._lines[queued.line], queued, key=_NUMBER)
        self._by_session.setdefault(queued.key, []).append(queued)
        self._fewest_tokens = min(self._fewest_tokens, queued.tokens)

    def _remove(self, queued: _QueuedRequest) -> None:
        line, next_line = self._lines[queued.line], 1 - queued.line
        if queued is self._first:
            self._admission.unreserve()
            self._next = next_line if self._lines[next_line] else queued.line
        del line[bisect_left(line, queued.number, key=_NUMBER)]
        self._last = queued.line
        others = self._by_session[queued.key]
        others.remove(queued)
        for other in others:  # their session may have begun with this request
            other.wake()
        if not others:
            del self._by_session[queued.key]
        if len(self):
            self._first.wake()
        else:
            self._fewest_tokens = inf

    def _may_begin(self, queued: _QueuedRequest) -> bool:
        """Return True if this request may begin now. The first in the queue also wakes another that may."""
        if queued is self._first:
            following = self._next_to_begin()
            if following is not None and following is not queued:
                following.may_check = True
                following.wake()
            return following is queued
        may_check, queued.may_check = queued.may_check, False
        return may_check and self._is_open() and self._admission.has_room(queued.tokens, spare=True)

    def _next_to_begin(self) -> _QueuedRequest | None:
        """Return the request that may begin now: the first, or else the next that fits outside the reserved units."""
        rules, first = self._admission, self._first
        if not self._is_open():
            return None
        if rules.has_room(first.tokens) or rules.fits_nowhere(first.tokens):
            return first
        rules.reserve()
        spare = rules.longest_prompt(spare=True)
        if spare < self._fewest_tokens:
            return None
        others = chain(self._lines[1 - self._last], self._lines[self._last])
        found = next((queued for queued in others if queued is not first and queued.tokens <= spare), None)
        if found is None:
            self._fewest_tokens = min(queued.tokens for queued in chain(*self._lines))
        return found

    async def _wait_once(self, queued: _QueuedRequest, arrived_at: float) -> None:
        """Wait until the request is woken, until its next check if it is the first, or until its timeout."""
        loop = asyncio.get_running_loop()
        bounds = [POLL_INTERVAL] if queued is self._first else []
        if self._timeout:
            bounds.append(arrived_at + self._timeout - loop.time())
            if bounds[-1] <= 0:
                raise NoWorkerAvailable(
                    f"no worker has room for this session; the request has waited {self._timeout:g} s (--gate-timeout)"
                )
        queued.woken = loop.create_future()
        await asyncio.wait({queued.woken}, timeout=min(bounds, default=None))
