"""Records on their way to whoever collects spans: a turn with all its spans, or an episode. Nobody waits for that: what
finds no room is dropped and counted.

Turns are written some in a row, not each at its request's end: that takes less time, and each request less code, which
has to come into the processor's caches anew. More than some are not kept as objects, for thousands push what the next
requests need out of those caches.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import Generic, NamedTuple, TypeVar

from miles_router.metrics import Statistics, counter, gauge

logger = logging.getLogger(__name__)

#: Seconds in which the end of the router sends what waits.
LAST_SECONDS = 5.0
SENT, FAILED, DROPPED = "sent", "failed", "dropped"
#: Turns that are written in a row.
_IN_A_ROW = 64
#: What is known of a turn that is over, and is not bytes.
Turn = TypeVar("Turn", bound=tuple[object, ...])
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


class SpanQueue(Generic[Turn]):
    """Takes records from the event loop, and has a thread send them.

    Args:
        write: gives the spans of some turns.
        send: sends some spans; gives what is wrong, or None.
    """

    def __init__(self, write: Callable[[Sequence[Turn]], bytes], send: Sender, bounds: QueueBounds) -> None:
        self._write_turns = write
        self._send = send
        self._bounds = bounds
        #: Turns that are over and not written. Who appends one here has them written once there are so many.
        self.turns: deque[Turn] = deque()
        self.in_a_row = min(_IN_A_ROW, bounds.batch, 1 + bounds.waiting // _IN_A_ROW)
        #: Records that are, with how many they are.
        self._written: deque[tuple[int, bytes]] = deque()
        #: Held by whoever writes, and counts it.
        self._writing = threading.Lock()
        #: Records that were written; those that were taken to be sent, and those that are gone.
        self._put = self._taken = self._gone = 0
        self._wake = threading.Event()
        self._closed = False
        self._failing = False
        self._thread = threading.Thread(target=self._run, name="traces", daemon=True)
        self.statistics = TraceStatistics(waiting_records=lambda: self.waiting)
        for outcome in (SENT, FAILED, DROPPED):
            self.statistics.records[outcome] = 0

    @property
    def waiting(self) -> int:
        """Records that wait, and those that are being sent."""
        return self._put - self._gone + len(self.turns)

    @property
    def _room(self) -> int:
        """For so many more to be written, with what is kept free for turns that are not."""
        return max(0, self._bounds.waiting - (self.in_a_row - 1) - (self._put - self._gone))

    @property
    def _left(self) -> int:
        """Those that nobody sends yet."""
        return self._put - self._taken + len(self.turns)

    def put(self, record: bytes) -> None:
        """Have what is written sent."""
        with self._writing:
            if not self._room:
                self.statistics.records[DROPPED] += 1
                return
            self._written.append((1, record))
            self._put += 1
        self._wake_for_batch()

    def write(self) -> None:
        """Write the turns that are over, and have them sent."""
        with self._writing:
            for _ in range(len(self.turns) - self._room):
                self.turns.pop()
                self.statistics.records[DROPPED] += 1
            self._write()
        self._wake_for_batch()

    def _write(self) -> None:
        turns = [self.turns.popleft() for _ in range(min(len(self.turns), self.in_a_row))]
        if turns:
            self._written.append((len(turns), self._write_turns(turns)))
            self._put += len(turns)

    def _wake_for_batch(self) -> None:
        if self._left >= self._bounds.batch and not self._wake.is_set():
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
            fields = {"reason": "the router ends", "records": self.waiting}
            logger.warning("traces_not_sent", extra={"fields": fields})

    def _run(self) -> None:
        while not (self._closed and not self._left):
            woken = self._wake.wait(self._bounds.seconds)
            self._wake.clear()
            while self._left >= self._bounds.batch or (self._closed and self._left):
                self._send_batch()
            if not woken and self._left:  # once: what comes meanwhile would go in a request for each few
                self._send_batch()

    def _send_batch(self) -> None:
        spans, size = self._batch()
        self._taken += size
        problem = self._send(spans)
        self._gone = self._taken
        self.statistics.records[SENT if problem is None else FAILED] += size
        if problem is not None and not self._failing:  # one line, however long it lasts
            logger.warning("traces_not_sent", extra={"fields": {"reason": problem}})
        elif problem is None and self._failing:
            logger.info("traces_sent_again")
        self._failing = problem is not None

    def _batch(self) -> tuple[list[bytes], int]:
        """What is sent next, and how many records that is: never none while some are left."""
        spans: list[bytes] = []
        size = 0
        while size < self._bounds.batch:
            if not self._written:
                with self._writing:  # the last ones, fewer than are written in a row
                    self._write()
            if not self._written or size + self._written[0][0] > self._bounds.batch:
                break
            count, some = self._written.popleft()
            spans.append(some)
            size += count
        return spans, size
