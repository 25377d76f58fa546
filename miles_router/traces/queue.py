"""Spans on their way to whoever collects them. Nobody waits for that: what finds no room is dropped and counted."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

from miles_router.metrics import Statistics, counter, gauge

logger = logging.getLogger(__name__)

#: Seconds in which the end of the router sends what waits.
LAST_SECONDS = 5.0
SENT, FAILED, DROPPED = "sent", "failed", "dropped"
#: Sends some spans; gives what is wrong, or None.
Sender = Callable[[Sequence[bytes]], "str | None"]


class QueueBounds(NamedTuple):
    """Spans that wait at most, spans of one request, and seconds between requests of fewer."""

    waiting: int
    batch: int
    seconds: float


class TraceStatistics(Statistics, prefix="miles_router_trace"):
    """What becomes of spans."""

    spans = counter("Spans by what became of them: sent, failed or dropped.", by="outcome")
    waiting_spans = gauge("Spans that wait to be sent.")


class SpanQueue:
    """Takes spans from the event loop, and has a thread send them."""

    def __init__(self, send: Sender, bounds: QueueBounds) -> None:
        self._send = send
        self._bounds = bounds
        self._chunks: deque[tuple[bytes, int]] = deque()
        self._taken = self._gone = 0  # each is counted by one thread alone
        self._wake = threading.Event()
        self._closed = False
        self._failing = False
        self._thread = threading.Thread(target=self._run, name="traces", daemon=True)
        self.statistics = TraceStatistics(waiting_spans=lambda: self._waiting)
        for outcome in (SENT, FAILED, DROPPED):
            self.statistics.spans[outcome] = 0

    @property
    def _waiting(self) -> int:
        return self._taken - self._gone

    def put(self, spans: bytes, count: int) -> None:
        """Have some spans sent."""
        waiting = self._taken - self._gone + count
        if waiting > self._bounds.waiting:
            self.statistics.spans[DROPPED] += count
            return
        self._taken += count
        self._chunks.append((spans, count))
        if waiting >= self._bounds.batch and not self._wake.is_set():
            self._wake.set()

    def start(self) -> None:
        """Send from now on."""
        self._thread.start()

    def close(self) -> None:
        """Send what waits, but not for ever."""
        self._closed = True
        self._wake.set()
        self._thread.join(LAST_SECONDS)
        if self._thread.is_alive():
            logger.warning("traces_not_sent", extra={"fields": {"reason": "the router ends", "spans": self._waiting}})

    def _run(self) -> None:
        while not (self._closed and not self._chunks):
            woken = self._wake.wait(self._bounds.seconds)
            self._wake.clear()
            while self._chunks and (self._waiting >= self._bounds.batch or self._closed or not woken):
                self._send_batch()

    def _send_batch(self) -> None:
        batch: list[bytes] = []
        count = 0
        while self._chunks and (not count or count + self._chunks[0][1] <= self._bounds.batch):
            spans, each = self._chunks.popleft()
            batch.append(spans)
            count += each
        problem = self._send(batch)
        self._gone += count
        self.statistics.spans[SENT if problem is None else FAILED] += count
        if problem is not None and not self._failing:  # one line, however long it lasts
            logger.warning("traces_not_sent", extra={"fields": {"reason": problem}})
        elif problem is None and self._failing:
            logger.info("traces_sent_again")
        self._failing = problem is not None
