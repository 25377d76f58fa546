"""Waiting for what must happen, with one bound for all tests.

No test that passes waits for it in full, so it costs nothing. It is long enough for a machine that does ten other
things at once.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, TypeVar

from miles_router.tasks import within

#: Seconds.
PATIENCE = 120.0
STEP = 0.005

Result = TypeVar("Result")


async def until(condition: Callable[[], object], what: str | Callable[[], str], *, deadline: float = PATIENCE) -> float:
    """Wait until `condition()` is true and say how many seconds that took. `what` it waits for may be a function that
    says so once the wait was in vain."""
    start = time.monotonic()
    while not condition():
        if time.monotonic() - start > deadline:
            raise AssertionError(f"after {deadline:g} s still not: {what if isinstance(what, str) else what()}")
        await asyncio.sleep(STEP)
    return time.monotonic() - start


async def soon(awaitable: Awaitable[Result]) -> Result:
    """What it gives.

    Raises:
        TimeoutError: not within `PATIENCE`; it is cancelled then.
    """

    async def waiting() -> Result:
        return await awaitable

    # Not `asyncio.wait_for`, which before Python 3.12 may lose a cancellation: who was cancelled would wait on.
    return await within(PATIENCE, waiting(), name="what comes soon")


async def settled(steps: int = 10) -> None:
    """Let everything run that can."""
    for _ in range(steps):
        await asyncio.sleep(0)


class Clock:
    """A clock that a test sets."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def at_once(work: Coroutine[Any, Any, Result]) -> Result:
    """What work gives that has nothing to wait for, without an event loop; it may let others go on (`sleep(0)`)."""
    try:
        while work.send(None) is None:
            pass
    except StopIteration as end:
        result: Result = end.value
        return result
    work.close()
    raise AssertionError("it waits for something")
