"""Records on their way to whoever collects spans: a turn with all its spans, or an episode. Nobody waits for that: what
finds no room is dropped and counted.

A record is bytes: kept as objects, thousands of turns push what the next requests need out of the processor's caches.
"""

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
    """Records that wait at most, records of one request, and seconds between requests of fewer."""

    waiting: int
    batch: int
    seconds: float


class TraceStatistics(Statistics, prefix="miles_router_trace"):
    """What becomes of records: of a turn with all its spans, or of an episode."""

    records = counter("Turns and episodes by what became of their spans: sent, failed or dropped.", by="outcome")
    waiting_records = gauge("Turns and episodes whose spans wait to be sent.")


class SpanQueue:
    """Takes records from the event loop, and has a thread send them."""

    def __init__(self, send: Sender, bounds: QueueBounds) -> None:
        self._send = send
        self._bounds = bounds
        self._records: deque[bytes] = deque()
        #: How many may wait beside those that are being sent.
        self._room = bounds.waiting
        self._wake = threading.Event()
        self._closed = False
        self._failing = False
        self._thread = threading.Thread(target=self._run, name="traces", daemon=True)
        self.statistics = TraceStatistics(waiting_records=lambda: self._waiting)
        for outcome in (SENT, FAILED, DROPPED):
            self.statistics.records[outcome] = 0

    @property
    def _waiting(self) -> int:
        return len(self._records) + self._bounds.waiting - self._room

    def put(self, record: bytes) -> None:
        """Have it sent."""
        records = self._records
        if len(records) >= self._room:
            self.statistics.records[DROPPED] += 1
            return
        records.append(record)
        if len(records) >= self._bounds.batch and not self._wake.is_set():
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
            logger.warning("traces_not_sent", extra={"fields": {"reason": "the router ends", "records": self._waiting}})

    def _run(self) -> None:
        while not (self._closed and not self._records):
            woken = self._wake.wait(self._bounds.seconds)
            self._wake.clear()
            while len(self._records) >= self._bounds.batch or (self._closed and self._records):
                self._send_batch()
            if not woken and self._records:  # once: what comes meanwhile would go in a request for each few
                self._send_batch()

    def _send_batch(self) -> None:
        size = min(len(self._records), self._bounds.batch)
        batch = [self._records.popleft() for _ in range(size)]
        self._room -= size  # only now: what is counted twice takes the room of what comes meanwhile
        problem = self._send(batch)
        self._room = self._bounds.waiting
        self.statistics.records[SENT if problem is None else FAILED] += len(batch)
        if problem is not None and not self._failing:  # one line, however long it lasts
            logger.warning("traces_not_sent", extra={"fields": {"reason": problem}})
        elif problem is None and self._failing:
            logger.info("traces_sent_again")
        self._failing = problem is not None
