"""A simulated worker in a process of its own."""

from __future__ import annotations

import asyncio
import contextlib
import subprocess
import sys
from collections.abc import AsyncIterator

from tests.support.http import ask
from tests.support.ports import free_ports
from tests.support.waiting import PATIENCE, until


class WorkerProcess:
    """One simulated worker; `kill` is a crash, and `start` brings it back on its port."""

    def __init__(self, port: int, *arguments: str) -> None:
        self.url = f"http://127.0.0.1:{port}"
        self._command = [sys.executable, "-m", "miles_router.testing.worker.cli", "--port", str(port), *arguments]
        self._process: subprocess.Popen[bytes] | None = None

    async def start(self) -> None:
        command = [*self._command, "--log-level", "error"]
        self._process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)  # noqa: ASYNC220
        for _ in range(int(PATIENCE / 0.05)):
            with contextlib.suppress(OSError):
                await ask(self.url, "GET", "/model_info")
                return
            await asyncio.sleep(0.05)
        raise AssertionError(f"the worker at {self.url} does not answer")

    async def kill(self) -> None:
        process = self._process
        if process is not None:
            process.kill()
            await until(lambda: process.poll() is not None, "the worker is dead")


@contextlib.asynccontextmanager
async def worker_process(*arguments: str) -> AsyncIterator[WorkerProcess]:
    worker = WorkerProcess(free_ports(1)[0], *arguments)
    await worker.start()
    try:
        yield worker
    finally:
        await worker.kill()
