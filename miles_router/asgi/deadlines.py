"""One timer for many items that all have the same timeout."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextvars import Context
from typing import Generic, TypeVar

from miles_router.tasks import LOOKS

Item = TypeVar("Item")


class Deadlines(Generic[Item]):
    """A timeout shared by many items: calls `expired` with each item started `seconds` ago and not stopped since.

    One event loop timer per item would cost more than the rest of a short request's bookkeeping. One timer serves all
    items: it ticks `LOOKS` times within `seconds`, and age is counted in ticks. So a pause of this process itself does
    not expire items.
    """

    def __init__(
        self, seconds: float, expired: Callable[[Item], None], loop: asyncio.AbstractEventLoop | None = None
    ) -> None:
        self.loop = loop or asyncio.get_running_loop()
        self._interval = seconds / LOOKS
        self._expired = expired
        self._ticks = 0
        self._started: dict[Item, int] = {}  # item -> the tick at which it was started, oldest first
        self._timer: asyncio.TimerHandle | None = None
        self._context = Context()  # empty, so that the timer keeps no context variables of a request

    def start(self, item: Item) -> None:
        """Start the timeout of `item`, which must not be running already."""
        self._started[item] = self._ticks
        if self._timer is None:
            self._set_timer()

    def stop(self, item: Item) -> None:
        """Cancel the timeout of `item`; do nothing if it is not running."""
        self._started.pop(item, None)

    def oldest(self) -> Item | None:
        """Return the item that was started first, or None."""
        return next(iter(self._started), None)

    def _tick(self) -> None:
        limit = self._ticks - LOOKS  # the first tick may come right after an item was started, so it does not count
        self._ticks += 1
        try:
            while self._started:
                item, started = next(iter(self._started.items()))
                if started > limit:
                    break
                del self._started[item]
                self._expired(item)
        finally:  # an exception in one call must not stop the timer of the other items
            self._timer = None
            if self._started:
                self._set_timer()

    def _set_timer(self) -> None:
        self._timer = self.loop.call_later(self._interval, self._tick, context=self._context)
