"""The gate and the queue for room, with each wait of a turn taken down."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from miles_router.asgi.flight import Flight
from miles_router.fleet.admission_queue import AdmissionQueue, Waiting
from miles_router.fleet.gate import Gate
from miles_router.fleet.placement.admission import Admission


@contextmanager
def _timed(who: Waiting, name: bytes) -> Iterator[None]:
    turn = who.trace if isinstance(who, Flight) else None
    begin = time.perf_counter()
    try:
        yield
    finally:
        if turn is not None:
            details = turn.detailed()
            details.waits = [*details.waits, (name, begin, time.perf_counter(), b"")]


class TracedQueue(AdmissionQueue):
    """The queue."""

    async def wait(self, who: Waiting, key: str, tokens: int, came_at: float) -> None:
        """As every queue does."""
        with _timed(who, b"queue"):
            await super().wait(who, key, tokens, came_at)


class TracedGate(Gate):
    """The gate."""

    def __init__(self, admission: Admission, *, max_held: int, timeout: float, **options: Any) -> None:
        super().__init__(admission, max_held=max_held, timeout=timeout, **options)
        self.queue = TracedQueue(admission, max_waiting=max_held, timeout=timeout, is_open=self.is_open)

    async def wait(self, who: Waiting, came_at: float | None = None) -> None:
        """As every gate does."""
        if self.closed:
            with _timed(who, b"gate"):
                await super().wait(who, came_at)
