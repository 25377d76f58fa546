"""Workers and a router for one test, and the look afterwards that nothing of it is left."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import os
import socket
import stat
import traceback
from collections.abc import AsyncIterator, Iterable
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import pytest

from miles_router.settings.config import MiddlewareSpec
from tests.support.http import Client
from tests.support.running_router import RunningRouter, running_router
from tests.support.scripted_worker import ScriptedWorker
from tests.support.waiting import until

#: A reply's two ways: past layers that have not wrapped `send`, and through one that has, message by message.
both_ways = pytest.mark.parametrize(
    "layers", [(), (MiddlewareSpec("tests.support.plugins.working.Tagging"),)], ids=["past", "through"]
)


class Stage:
    """`stage.worker()`, `stage.router(...)`, `stage.client()`; ended and searched for leaks by the fixture."""

    def __init__(self, stack: AsyncExitStack, defects: list[str]) -> None:
        self._defects = defects
        self._stack = stack
        self.workers: list[ScriptedWorker] = []
        self.routers: list[RunningRouter] = []
        self._read: dict[RunningRouter, int] = {}

    @property
    def defects(self) -> list[str]:
        """Errors that routers have logged; a test that provokes one takes it out."""
        for router in self.routers:
            new = router.errors()[self._read.get(router, 0) :]
            self._defects += new
            self._read[router] = self._read.get(router, 0) + len(new)
        return self._defects

    async def provoked(self, words: str) -> None:
        """Wait for an error that says this, and take it out: the test wants it."""
        await until(lambda: any(words in defect for defect in self.defects), f"the log says {words}")
        self._defects.remove(next(defect for defect in self._defects if words in defect))

    async def worker(self) -> ScriptedWorker:
        """A scripted worker that answers everything with 200 and `{}`."""
        worker = await self._stack.enter_async_context(ScriptedWorker())
        self.workers.append(worker)
        return worker

    async def router(self, *workers: str | ScriptedWorker, **settings: Any) -> RunningRouter:
        """A router whose first probes are over, so that nothing but the test's requests is under way."""
        router = await self._stack.enter_async_context(running_router(*workers, **settings))
        self.routers.append(router)
        await until(lambda: not router.leftovers(), "the first probes are over")
        return router

    async def worker_and_router(self, **settings: Any) -> tuple[ScriptedWorker, RunningRouter]:
        worker = await self.worker()
        return worker, await self.router(worker, **settings)

    async def client(self, router: RunningRouter, *, receive_buffer: int | None = None) -> Client:
        client = await Client.connect(router.url, receive_buffer=receive_buffer)
        return await self._stack.enter_async_context(client)

    async def nothing_under_way(self) -> float:
        """Every lease is back, every request's task has ended, no worker is busy. Says how long that took."""
        return await until(lambda: not self._under_way(), lambda: f"nothing under way: {self._under_way()}")

    def _under_way(self) -> list[str]:
        if given_up(self.routers):
            return []
        left = [each for router in self.routers for each in router.leftovers()]
        return left + [f"{worker.url} is busy with {worker.busy}" for worker in self.workers if worker.busy]


@asynccontextmanager
async def staged() -> AsyncIterator[Stage]:
    """A stage; at the end requests must be over, and every task and socket gone."""
    tasks, sockets = _tasks(), _sockets()
    defects = _Defects()
    logging.getLogger().addHandler(defects)
    try:
        async with AsyncExitStack() as stack:
            stage = Stage(stack, defects.seen)
            yield stage
            await stage.nothing_under_way()
    except AssertionError:
        gc.collect()  # a task that failed says so here, and not while pytest parses sources for its report
        raise
    finally:
        logging.getLogger().removeHandler(defects)
    assert given_up(stage.routers) or not stage.defects, stage.defects
    for worker in stage.workers:
        for crash in worker.crashes:
            raise crash
    await until(lambda: _tasks() <= tasks, f"tasks ended: {_tasks() - tasks}")
    await until(lambda: _sockets() <= sockets, f"sockets closed: {_sockets() - sockets}")


def given_up(routers: Iterable[RunningRouter]) -> bool:
    """Whether the test has stopped in its middle: it has looked inside of a router of several processes."""
    return any(router.given_up for router in routers)


class _Defects(logging.Handler):
    """What the router or its server logs as an error. Failures of clients and workers are warnings at most; those of a
    collector are errors to OpenTelemetry's SDK."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.seen: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        if record.name.startswith("opentelemetry."):
            return
        trace = "" if record.exc_info is None else "".join(traceback.format_exception(*record.exc_info))
        self.seen.append(f"{record.name}: {record.getMessage()} {getattr(record, 'fields', '')}\n{trace}")


def _tasks() -> set[asyncio.Task[Any]]:
    current = asyncio.current_task()
    return {task for task in asyncio.all_tasks() if task is not current}


def _sockets() -> set[str]:
    """The TCP sockets of this process, by inode; the event loop keeps others for itself."""
    found = set()
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # the descriptor of this very listing is gone by now
            if stat.S_ISSOCK(os.fstat(int(name)).st_mode):
                with socket.socket(fileno=os.dup(int(name))) as sock:
                    if sock.family in (socket.AF_INET, socket.AF_INET6):
                        found.add(os.readlink(f"/proc/self/fd/{name}"))
    return found
