"""The processes of a soak: the router as users start it, and workers that die and come back."""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

from tests.support.cache_trial import CACHE, checkpoint
from tests.support.experts_trial import EXPERTS, SHAPE
from tests.support.http import ask
from tests.support.ports import free_ports
from tests.support.running_router import RouterProcess, router_process
from tests.support.session_trial import SESSIONS
from tests.support.waiting import PATIENCE, until

ROOT = Path(__file__).resolve().parents[2]
PROBE = "tests.soak.probe.Probe"
TOKEN_MS = 1
#: Small enough to be full within a minute or two: what is held then stays as it is.
MAX_TOKENS, MAX_ROW_BYTES = 25_000, 200_000


class WorkerProcess:
    """One simulated worker; `kill` is a crash, and `start` brings it back on its port."""

    def __init__(self, port: int) -> None:
        self.url = f"http://127.0.0.1:{port}"
        self._port = port
        self._process: subprocess.Popen[bytes] | None = None

    async def start(self) -> None:
        """Until it answers."""
        command = [sys.executable, "-m", "miles_router.testing.worker.cli", "--port", str(self._port)]
        command += ["--tokenizer", checkpoint(), "--moe", SHAPE, "--token-latency-ms", str(TOKEN_MS)]
        command += ["--weight-version", "0", "--log-level", "error"]
        self._process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)  # noqa: ASYNC220
        for _ in range(int(PATIENCE / 0.05)):
            with contextlib.suppress(OSError):
                await ask(self.url, "GET", "/model_info")
                return
            await asyncio.sleep(0.05)
        raise AssertionError(f"the worker at {self.url} does not answer")

    async def kill(self) -> None:
        """SIGKILL."""
        process = self._process
        if process is not None:
            process.kill()
            await until(lambda: process.poll() is not None, "the worker is dead")


@dataclass
class Fleet:
    """What a soak runs on."""

    router: RouterProcess
    workers: list[WorkerProcess]


@contextlib.asynccontextmanager
async def fleet(workers: int, *, leak_bytes: int = 0) -> AsyncIterator[Fleet]:
    """Start all; `leak_bytes` are lost by the router with each request, to see that this is found."""
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    started = [WorkerProcess(port) for port in free_ports(workers)]
    try:
        await asyncio.gather(*(worker.start() for worker in started))
        async with router_process(*_arguments(started, leak_bytes)) as router:
            yield Fleet(router, started)
    finally:
        await asyncio.gather(*(worker.kill() for worker in started))


def _arguments(workers: list[WorkerProcess], leak_bytes: int) -> list[str]:
    arguments = ["--worker-urls", *(worker.url for worker in workers), "--hf-checkpoint", checkpoint()]
    arguments += ["--middleware-paths", PROBE, SESSIONS, CACHE, EXPERTS]
    arguments += ["--partial-rollout", "resume", "--resume-on-worker-loss", "true", "--max-retries", "9"]
    arguments += ["--health-check-interval", "0.5", "--health-check-failure-threshold", "2", "--log-level", "error"]
    options = {
        "probe.leak_bytes": leak_bytes,
        "radix_tree_middleware.max_tokens": MAX_TOKENS,
        "routed_experts_middleware.max_bytes": MAX_ROW_BYTES,
        "routed_experts_middleware.moe_shape": SHAPE,
    }
    return arguments + [part for name, value in options.items() for part in ("--set", f"{name}={value}")]
