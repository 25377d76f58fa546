"""Work beside a test's own steps, ended with the block whatever becomes of the test."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from typing import Any, TypeVar

from miles_router.tasks import cancelled, spawn

Result = TypeVar("Result")


@asynccontextmanager
async def under_way(work: Coroutine[Any, Any, Result]) -> AsyncIterator[asyncio.Task[Result]]:
    """`async with under_way(client.generate("a")) as generating:` ... `await generating`."""
    task = spawn(work, name="under test")
    try:
        yield task
    finally:
        await cancelled(task)
