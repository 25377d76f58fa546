"""Many that wait equally long, and one timer for all of them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextvars import Context
from typing import Generic, TypeVar

Item = TypeVar("Item")


class Deadlines(Generic[Item]):
    """Calls `expired` with each item that was started `seconds` ago and not stopped since.

    A timer costs the event loop more than all else that a short request needs for its bookkeeping. Since every item
    waits equally long, the first that was started is the first to expire, and only that one needs a timer.
    """

    def __init__(
        self, seconds: float, expired: Callable[[Item], None], loop: asyncio.AbstractEventLoop | None = None
    ) -> None:
        self.loop = loop or asyncio.get_running_loop()
        self._seconds = seconds
        self._expired = expired
        self._now = self.loop.time
        self._started: dict[Item, float] = {}  # in the order in which they were started
        self._timer: asyncio.TimerHandle | None = None
        self._context = Context()  # of nobody's request

    def start(self, item: Item) -> None:
        """Let `item` expire; it must not be waiting already."""
        self._started[item] = self._now()
        if self._timer is None:
            self._set_timer(self._seconds)

    def stop(self, item: Item) -> None:
        """Forget `item`, whether or not it waits."""
        self._started.pop(item, None)

    def first(self) -> Item | None:
        """The one that has waited longest."""
        return next(iter(self._started), None)

    def _look(self) -> None:
        due = self._now() - self._seconds
        try:
            while self._started:
                item, started = next(iter(self._started.items()))
                if started > due:
                    break
                del self._started[item]
                self._expired(item)
        finally:  # a defect in one call takes the others no turn
            self._timer = None
            if self._started:
                self._set_timer(max(0.0, next(iter(self._started.values())) - due))

    def _set_timer(self, seconds: float) -> None:
        self._timer = self.loop.call_later(seconds, self._look, context=self._context)
