"""Background tasks that cannot be lost: each has a name, is referenced until it ends, and reports its crash. And work
that is long for the event loop, which lets others go on in between."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Coroutine, Sequence
from typing import Any, TypeVar

logger = logging.getLogger(__name__)

#: Seconds that the event loop is held at a time by work that can be done in steps.
HOLD = 0.002
#: As often somebody looks whether a time limit has been reached. A stop of this process itself, however long, takes one
#: look: nobody is blamed for what the router did not let him do.
LOOKS = 10

Result = TypeVar("Result")

_running: set[asyncio.Task[Any]] = set()


def spawn(work: Coroutine[Any, Any, Any], *, name: str) -> asyncio.Task[Any]:
    """Run `work` beside the caller. The event loop holds tasks only weakly (CPython docs, `create_task`); we do not."""
    task = asyncio.get_running_loop().create_task(work, name=name)
    _running.add(task)
    task.add_done_callback(_finished)
    return task


def _finished(task: asyncio.Task[Any]) -> None:
    _running.discard(task)
    if not task.cancelled() and (error := task.exception()) is not None:
        logger.error("task_crashed", exc_info=error, extra={"fields": {"task": task.get_name()}})


async def together(works: Sequence[Coroutine[Any, Any, None]], *, name: str) -> None:
    """Run all of `works` at once; the first that fails, or the caller's cancellation, ends them all.

    Raises:
        Whatever the first failure was.
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
    """What `work` gives within so many seconds. Before Python 3.12 `asyncio.wait_for` may swallow a cancellation that
    arrives together with the result; this never does.

    Raises:
        TimeoutError: it took longer; it has been cancelled, and has ended.
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
            task.exception()  # nobody else looks at the failure of what nobody waits for any more


async def ends_within(seconds: float, task: asyncio.Task[Any]) -> bool:
    """Wait until `task` has ended, for so many seconds at most; whether it has. It goes on if not."""
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
    """Long work in steps on the event loop: `await pace.step()` between them lets everybody else go on, where this has
    held the loop for `HOLD` seconds."""

    def __init__(self) -> None:
        self._since = time.perf_counter()

    async def step(self) -> None:
        """One is done."""
        if time.perf_counter() - self._since > HOLD:
            await asyncio.sleep(0)
            self._since = time.perf_counter()
