"""Background tasks that are named, referenced until they end, and logged when they crash; time limits; and `Pace`, for
long computations on the event loop."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Coroutine, Sequence
from typing import Any, TypeVar

logger = logging.getLogger(__name__)

#: Seconds for which work in steps may block the event loop at a time.
HOLD = 0.002
#: The number of waits into which a time limit is divided. When the router process itself is stopped (SIGSTOP, a
#: suspended machine), only one of them expires, so the task is not blamed for the router's own stop.
LOOKS = 10

Result = TypeVar("Result")

_running: set[asyncio.Task[Any]] = set()


def spawn(work: Coroutine[Any, Any, Any], *, name: str) -> asyncio.Task[Any]:
    """Start `work` as a task and keep a strong reference to it; the event loop holds only weak ones (CPython docs)."""
    task = asyncio.get_running_loop().create_task(work, name=name)
    _running.add(task)
    task.add_done_callback(_finished)
    return task


def _finished(task: asyncio.Task[Any]) -> None:
    _running.discard(task)
    if not task.cancelled() and (error := task.exception()) is not None:
        logger.error("task_crashed", exc_info=error, extra={"fields": {"task": task.get_name()}})


async def together(works: Sequence[Coroutine[Any, Any, None]], *, name: str) -> None:
    """Run all of `works` concurrently. The first failure, or cancellation of the caller, cancels all others.

    Raises:
        BaseException: the first failure.
    """
    if len(works) == 1:
        await works[0]
    if len(works) < 2:
        return
    running = [asyncio.get_running_loop().create_task(work, name=f"{name} {i}") for i, work in enumerate(works)]
    try:
        done, _ = await asyncio.wait(running, return_when=asyncio.FIRST_EXCEPTION)
    finally:
        for task in running:
            task.cancel()
        await asyncio.wait(running)
    for task in done:
        task.result()


async def within(seconds: float, work: Coroutine[Any, Any, Result], *, name: str) -> Result:
    """Return the result of `work`, which may take `seconds` seconds.

    Before Python 3.12 `asyncio.wait_for` may swallow a cancellation that arrives together with the result; this
    function does not.

    Raises:
        TimeoutError: the work took longer. It has been cancelled and has ended.
    """
    task = asyncio.get_running_loop().create_task(work, name=name)
    try:
        if not await ends_within(seconds, task):
            raise TimeoutError(f"{name} took longer than {seconds:g} s")
        return task.result()
    finally:
        if not task.done():
            await cancelled(task)
        if not task.cancelled():
            task.exception()  # mark the exception as retrieved: after a timeout or cancellation the caller ignores it


async def ends_within(seconds: float, task: asyncio.Task[Any]) -> bool:
    """Wait for `task` for at most `seconds` seconds. Return True if it has ended; otherwise it keeps running."""
    for _ in range(LOOKS):
        await asyncio.wait({task}, timeout=seconds / LOOKS)
        if task.done():
            return True
    return False


async def cancelled(task: asyncio.Task[Any]) -> None:
    """Cancel `task` and wait until it has ended."""
    task.cancel()
    await asyncio.wait({task})


class Pace:
    """A pacer for long work on the event loop: `await pace.step()` between steps yields to other tasks every `HOLD`
    seconds."""

    def __init__(self) -> None:
        self._since = time.perf_counter()

    async def step(self) -> None:
        """Yield to the event loop if the steps so far have blocked it for more than `HOLD` seconds."""
        if time.perf_counter() - self._since > HOLD:
            await asyncio.sleep(0)
            self._since = time.perf_counter()
