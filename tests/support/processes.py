"""A router on several processes: which they are, and what all of them show."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any
from urllib.parse import urlsplit

import orjson
import psutil

from tests.support.forks import fork_router
from tests.support.http import RawReply, ask
from tests.support.metrics import metric
from tests.support.running_router import RouterProcess, Start, router_process
from tests.support.scripted_worker import ScriptedWorker
from tests.support.waiting import STEP, until

JSON = [("Content-Type", "application/json")]
HI = {"text": "Hi", "sampling_params": {"max_new_tokens": 2}}


def is_alive(process: psutil.Process) -> bool:
    """Whether it runs, and not only waits for its parent to hear that it has ended."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return bool(process.status() != psutil.STATUS_ZOMBIE)
    return False


class Processes:
    """One router of `count` processes that take requests."""

    def __init__(self, router: RouterProcess, count: int) -> None:
        self.url = router.url
        self.router = router
        self.count = count

    @property
    def children(self) -> dict[int, psutil.Process]:
        """The living processes that the supervisor has started, by their process ids."""
        found = psutil.Process(self.router.process.pid).children()
        return {each.pid: each for each in found if is_alive(each)}

    async def data(self) -> list[int]:
        found: list[int] = (await self.info())["processes"]
        return found

    def own_url(self, process: int) -> str:
        """Where one of those alone listens."""
        listening = [each for each in psutil.Process(process).net_connections("tcp") if each.status == "LISTEN"]
        (port,) = {each.laddr.port for each in listening} - {urlsplit(self.url).port}
        return f"http://127.0.0.1:{port}"

    async def control(self) -> int:
        (found,) = self.children.keys() - set(await self.data())
        return found

    async def whole(self) -> None:
        """Wait until all processes are there and take requests."""
        await self.shows(lambda info: len(info["processes"]) == self.count and len(self.children) == self.count + 1)

    async def kill(self, process: int, sent: signal.Signals = signal.SIGKILL) -> None:
        os.kill(process, sent)
        await until(lambda: process not in self.children, f"{process} has ended")

    async def ask(self, method: str, target: str, **fields: Any) -> RawReply:
        body = orjson.dumps(fields) if fields or method == "POST" else None
        return await ask(self.url, method, target, JSON if body else (), body)

    async def post(self, target: str, **fields: Any) -> RawReply:
        return await self.ask("POST", target, **fields)

    def generating(self, count: int) -> list[asyncio.Task[RawReply]]:
        """So many generations, each on a connection of its own."""
        return [asyncio.ensure_future(self.post("/generate", **HI)) for _ in range(count)]

    async def info(self) -> dict[str, Any]:
        found: dict[str, Any] = (await self.ask("GET", "/router/info")).json()
        return found

    async def in_flight(self) -> dict[str, int]:
        return {each["url"]: each["in_flight"] for each in (await self.info())["workers"]}

    async def shows(self, condition: Callable[[dict[str, Any]], object]) -> dict[str, Any]:
        """Wait until `GET /router/info` shows something; and what it shows then."""
        while not condition(found := await self.info()):  # noqa: ASYNC110  # each look is a request
            await asyncio.sleep(STEP)
        return found

    async def becomes_idle(self) -> None:
        """Wait until no process has a lease."""
        await self.shows(lambda info: info["in_flight"] == 0)

    async def held(self, count: int) -> None:
        """Wait until so many requests wait at the gates of all processes."""
        await self.shows(lambda info: info["gate"]["held"] == count)

    async def metric(self, name: str, **labels: str) -> float:
        """The sum of all samples of a metric with these labels."""
        return await metric(self, name, **labels)


@contextlib.asynccontextmanager
async def processes(
    workers: Sequence[ScriptedWorker | str],
    *arguments: str,
    count: int = 2,
    expect_status: int = 0,
    start: Start = fork_router,
) -> AsyncIterator[Processes]:
    """A router of several processes, all of which take requests; SIGTERM must end it with `expect_status`."""
    urls = [each if isinstance(each, str) else each.url for each in workers]
    given = (*(("--worker-urls", *urls) if urls else ()), "--processes", str(count), *arguments)
    async with router_process(*given, expect_status=expect_status, start=start) as router:
        running = Processes(router, count)
        await running.whole()
        yield running
