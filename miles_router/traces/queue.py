"""Records of turns and episodes on their way to whoever collects their spans. Nobody waits for that: what finds no room
is dropped and counted.

Spans are written by the thread that sends them, many in a row: in the midst of a request that takes thrice the time.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

from miles_router.metrics import Statistics, counter, gauge

logger = logging.getLogger(__name__)

#: Seconds in which the end of the router sends what waits.
LAST_SECONDS = 5.0
#: Records that are written before the event loop may go on.
IN_A_ROW = 32
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


class TraceRecord(Protocol):
    """A turn or an episode that is over."""

    def spans(self) -> bytes:
        """Its spans, written."""
        ...


class SpanQueue:
    """Takes records from the event loop, and has a thread write and send their spans."""

    def __init__(self, send: Sender, bounds: QueueBounds) -> None:
        self._send = send
        self._bounds = bounds
        self._records: deque[TraceRecord] = deque()
        self._taken = self._gone = 0  # each is counted by one thread alone
        self._wake = threading.Event()
        self._closed = False
        self._failing = False
        self._thread = threading.Thread(target=self._run, name="traces", daemon=True)
        self.statistics = TraceStatistics(waiting_records=lambda: self._waiting)
        for outcome in (SENT, FAILED, DROPPED):
            self.statistics.records[outcome] = 0

    @property
    def _waiting(self) -> int:
        return self._taken - self._gone

    def put(self, record: TraceRecord) -> None:
        """Have its spans sent."""
        waiting = self._taken - self._gone + 1
        if waiting > self._bounds.waiting:
            self.statistics.records[DROPPED] += 1
            return
        self._taken += 1
        self._records.append(record)
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
            logger.warning("traces_not_sent", extra={"fields": {"reason": "the router ends", "records": self._waiting}})

    def _run(self) -> None:
        while not (self._closed and not self._records):
            woken = self._wake.wait(self._bounds.seconds)
            self._wake.clear()
            while self._records and (self._waiting >= self._bounds.batch or self._closed or not woken):
                self._send_batch()

    def _send_batch(self) -> None:
        batch: list[bytes] = []
        while self._records and len(batch) < self._bounds.batch:
            batch.append(self._records.popleft().spans())
            if not len(batch) % IN_A_ROW:
                time.sleep(0)  # requests go before
        problem = self._send(batch)
        self._gone += len(batch)
        self.statistics.records[SENT if problem is None else FAILED] += len(batch)
        if problem is not None and not self._failing:  # one line, however long it lasts
            logger.warning("traces_not_sent", extra={"fields": {"reason": problem}})
        elif problem is None and self._failing:
            logger.info("traces_sent_again")
        self._failing = problem is not None
