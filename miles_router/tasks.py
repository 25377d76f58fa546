"""Background tasks that cannot be lost: each has a name, is referenced until it ends, and reports its crash."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine
from typing import Any

logger = logging.getLogger(__name__)

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


async def cancelled(task: asyncio.Task[Any]) -> None:
    """Cancel `task` and wait until it has ended."""
    task.cancel()
    await asyncio.wait({task})
