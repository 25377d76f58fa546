"""Many that wait equally long, and one timer for all of them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextvars import Context
from typing import Generic, TypeVar

from miles_router.tasks import LOOKS

Item = TypeVar("Item")


class Deadlines(Generic[Item]):
    """Calls `expired` with each item that was started `seconds` ago and not stopped since.

    A timer costs the event loop more than all else that a short request needs for its bookkeeping. Since every item
    waits equally long, one timer serves them all: it looks several times within that time. Time is counted in looks,
    so that a stop of this process itself is not taken for the idleness of others.
    """

    def __init__(
        self, seconds: float, expired: Callable[[Item], None], loop: asyncio.AbstractEventLoop | None = None
    ) -> None:
        self.loop = loop or asyncio.get_running_loop()
        self._between = seconds / LOOKS
        self._expired = expired
        self._looks = 0
        self._started: dict[Item, int] = {}  # in the order in which they were started, each at which look
        self._timer: asyncio.TimerHandle | None = None
        self._context = Context()  # of nobody's request

    def start(self, item: Item) -> None:
        """Let `item` expire; it must not be waiting already."""
        self._started[item] = self._looks
        if self._timer is None:
            self._set_timer()

    def stop(self, item: Item) -> None:
        """Forget `item`, whether or not it waits."""
        self._started.pop(item, None)

    def first(self) -> Item | None:
        """The one that has waited longest."""
        return next(iter(self._started), None)

    def _look(self) -> None:
        due = self._looks - LOOKS  # the first look after an item's start may have come at once
        self._looks += 1
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
                self._set_timer()

    def _set_timer(self) -> None:
        self._timer = self.loop.call_later(self._between, self._look, context=self._context)
