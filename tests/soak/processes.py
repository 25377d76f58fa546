"""The processes of a soak: the router as users start it, and workers that die and come back."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

from tests.support.cache_trial import CACHE, checkpoint
from tests.support.experts_trial import EXPERTS, SHAPE
from tests.support.ports import free_ports
from tests.support.running_router import RouterProcess, router_process
from tests.support.session_trial import SESSIONS
from tests.support.worker_process import WorkerProcess

ROOT = Path(__file__).resolve().parents[2]
PROBE = "tests.soak.probe.Probe"
TOKEN_MS = 1
WORKER = (
    *("--tokenizer", checkpoint(), "--moe", SHAPE),
    *("--token-latency-ms", str(TOKEN_MS), "--weight-version", "0"),
)
#: Small enough to be full within a minute or two: what is held then stays as it is.
MAX_TOKENS, MAX_ROW_BYTES = 25_000, 200_000


@dataclass
class Fleet:
    """What a soak runs on."""

    router: RouterProcess
    workers: list[WorkerProcess]


@contextlib.asynccontextmanager
async def fleet(workers: int, *, leak_bytes: int = 0) -> AsyncIterator[Fleet]:
    """Start all; `leak_bytes` are lost by the router with each request, to see that this is found."""
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    started = [WorkerProcess(port, *WORKER) for port in free_ports(workers)]
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
