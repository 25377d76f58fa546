"""Polling with a deadline, for what no event announces."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

DEADLINE = 5.0  # seconds; generous, because the machine may be busy, and never waited for in full by a test that passes
STEP = 0.005


async def until(condition: Callable[[], object], what: str, *, deadline: float = DEADLINE) -> float:
    """Wait until `condition()` is true and say how many seconds that took.

    Raises:
        AssertionError: it is still false after `deadline` seconds.
    """
    start = time.monotonic()
    while not condition():
        if time.monotonic() - start > deadline:
            raise AssertionError(f"after {deadline:g} s still not: {what}")
        await asyncio.sleep(STEP)
    return time.monotonic() - start
