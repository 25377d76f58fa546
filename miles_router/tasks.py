"""Helpers for asyncio: background tasks that log their crash, time limits, and long work that yields to the loop."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Coroutine, Sequence
from typing import Any, TypeVar

logger = logging.getLogger(__name__)

#: Seconds that work in steps may block the event loop before `Pace.step` yields.
HOLD = 0.002
#: The number of intervals that a time limit is divided into. While this process itself is stopped, at most one interval
#: passes, so that work does not time out because the router did not run.
LOOKS = 10

Result = TypeVar("Result")

_running: set[asyncio.Task[Any]] = set()


def spawn(work: Coroutine[Any, Any, Any], *, name: str) -> asyncio.Task[Any]:
    """Start `work` in the background, and log `task_crashed` if it fails.

    The task is referenced until it ends: the event loop holds only weak references (CPython docs, `create_task`).
    """
    task = asyncio.get_running_loop().create_task(work, name=name)
    _running.add(task)
    task.add_done_callback(_finished)
    return task


def _finished(task: asyncio.Task[Any]) -> None:
    _running.discard(task)
    if not task.cancelled() and (error := task.exception()) is not None:
        logger.error("task_crashed", exc_info=error, extra={"fields": {"task": task.get_name()}})


async def together(works: Sequence[Coroutine[Any, Any, None]], *, name: str) -> None:
    """Run all of `works` concurrently. The first failure, or the caller's cancellation, cancels the others.

    Returns or raises only after all of them have ended.

    Raises:
        Exception: the first failure, unchanged.
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
    """Return the result of `work`, or cancel it after this number of seconds.

    Before Python 3.12, `asyncio.wait_for` may swallow a cancellation that arrives together with the result. This
    function never does.

    Raises:
        TimeoutError: `work` took longer; it was cancelled and has ended.
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
            task.exception()  # mark a failure as retrieved, else asyncio logs it when the task is deleted


async def ends_within(seconds: float, task: asyncio.Task[Any]) -> bool:
    """Wait for `task` for at most this number of seconds, and return whether it has ended. A slow task continues."""
    for _ in range(LOOKS):
        await asyncio.wait({task}, timeout=seconds / LOOKS)
        if task.done():
            return True
    return False


async def cancelled(task: asyncio.Task[Any]) -> None:
    """Cancel `task` and wait until it has ended. Its result or failure is ignored."""
    task.cancel()
    await asyncio.wait({task})


class Pace:
    """A timer for long work on the event loop. Await `step` between pieces of work, so that other tasks can run."""

    def __init__(self) -> None:
        self._since = time.perf_counter()

    async def step(self) -> None:
        """Yield to the event loop if the work has blocked it for more than `HOLD` seconds since the last yield."""
        if time.perf_counter() - self._since > HOLD:
            await asyncio.sleep(0)
            self._since = time.perf_counter()
