"""Opens many SSE streams at once and counts their events, cheaply enough to leave the CPU to what is measured."""

from __future__ import annotations

import asyncio
import contextlib
import time
from array import array
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import cast

from tests.benchmarks.sse_backend import MARK

CONNECT_TIMEOUT = 30.0


@dataclass
class Tally:
    """What all streams of one run saw; nothing is counted before `recording` is set."""

    expected: int
    open: int = 0
    bad: int = 0
    events: int = 0
    recording: bool = False
    gaps: array[float] = field(default_factory=lambda: array("d"))
    settled: asyncio.Event = field(default_factory=asyncio.Event)  # every stream is open, or one has failed


class StreamClient(asyncio.Protocol):
    """One stream: sends the request, then counts marks and the time between arrivals."""

    def __init__(self, request: bytes, tally: Tally) -> None:
        self.request = request
        self.tally = tally
        self.started = False
        self.last = 0.0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        cast(asyncio.Transport, transport).write(self.request)  # uvloop's does not inherit it

    def data_received(self, data: bytes) -> None:
        tally = self.tally
        if not self.started:
            self.started = True
            tally.open += 1
            tally.bad += not data.startswith(b"HTTP/1.1 200 ")
            if tally.bad or tally.open == tally.expected:
                tally.settled.set()
        count = data.count(MARK)
        if not count:
            return
        now = time.perf_counter()
        if tally.recording:
            tally.events += count
            tally.gaps.append(now - self.last)
            if count > 1:  # events that arrived glued together have no gap between them
                tally.gaps.extend([0.0] * (count - 1))
        self.last = now

    def connection_lost(self, error: Exception | None) -> None:
        self.tally.open -= 1
        self.tally.bad += self.tally.recording


@dataclass(frozen=True)
class StreamResult:
    events: int
    seconds: float
    bad: int
    gaps_ms: list[float]


async def _streams(
    port: int, request: bytes, count: int, warmup: float, seconds: float, on_edge: Callable[[], None]
) -> StreamResult:
    loop = asyncio.get_running_loop()
    tally = Tally(count)
    transports = [
        (await loop.create_connection(lambda: StreamClient(request, tally), "127.0.0.1", port))[0] for _ in range(count)
    ]
    with contextlib.suppress(asyncio.TimeoutError):
        await asyncio.wait_for(tally.settled.wait(), CONNECT_TIMEOUT)
    await asyncio.sleep(warmup)
    missing = count - tally.open
    on_edge()
    tally.recording = True
    begin = time.perf_counter()
    await asyncio.sleep(seconds)
    elapsed = time.perf_counter() - begin
    tally.recording = False
    on_edge()
    for transport in transports:
        transport.abort()
    return StreamResult(tally.events, elapsed, tally.bad + missing, sorted(gap * 1e3 for gap in tally.gaps))


def run_streams(
    port: int, request: bytes, count: int, warmup: float, seconds: float, on_edge: Callable[[], None]
) -> StreamResult:
    """Count the events of `count` streams for `seconds`; `on_edge` is called when the counting begins and ends."""
    import uvloop

    result: StreamResult = uvloop.run(_streams(port, request, count, warmup, seconds, on_edge))
    return result
