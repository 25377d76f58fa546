"""The routers that are compared: ours without and with moving, and `sglang-router` with each of its policies.

Timers that decide are shortened as much as the fleet's time is. Ours: how long a generation runs before it may move.
Those of `sglang-router` that can be set, and at most to what it accepts: what it waits before it repeats a request,
checks health, closes a circuit, and asks workers for their load.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.benchmarks.peers import REPO, peers_python
from tests.benchmarks.process import HOST, START_TIMEOUT, PeerError, fetch, free_port, started

OURS, THEIRS = "miles-router", "sglang-router"
OUR_DEFAULT = "least-inflight"
#: Seconds after which a running generation may move; 0: never.
OUR_POLICIES = {"least-inflight": 0.0, "moving": 10.0}
THEIR_DEFAULT = "cache_aware"
#: `manual` ties a routing key to a worker; of its ways to choose one for a new key this is the one that looks at load.
THEIR_POLICIES = {
    "cache_aware": ("cache_aware",),
    "round_robin": ("round_robin",),
    "power_of_two": ("power_of_two",),
    "random": ("random",),
    "manual": ("manual", "--assignment-mode", "min_load"),
}


@dataclass(frozen=True, slots=True)
class Contender:
    """A router with one of its policies; `default` where that is the router's own choice."""

    router: str
    policy: str
    default: bool

    @property
    def name(self) -> str:
        return f"{self.router}:{self.policy}"


def contenders() -> list[Contender]:
    """Return all routers with all their policies."""
    ours = [Contender(OURS, name, name == OUR_DEFAULT) for name in OUR_POLICIES]
    return ours + [Contender(THEIRS, name, name == THEIR_DEFAULT) for name in THEIR_POLICIES]


@dataclass(frozen=True, slots=True)
class RunningRouter:
    """Where it listens, and its process."""

    port: int
    pid: int


@contextlib.contextmanager
def running_router(
    contender: Contender, workers: Sequence[str], time_scale: float, root: Path
) -> Iterator[RunningRouter]:
    """A fresh process that knows all workers; PeerError when it does not get there."""
    port = free_port()
    ours = contender.router == OURS
    command = _ours(contender, port, workers, time_scale) if ours else _theirs(contender, port, workers, time_scale)
    env = {**os.environ, "PYTHONPATH": str(REPO)}
    with started(command, port, "/readiness", root / "router.log", env, REPO) as pid:
        _wait_for_workers(port, len(workers))
        yield RunningRouter(port, pid)


def _ours(contender: Contender, port: int, workers: Sequence[str], time_scale: float) -> list[str]:
    return [
        sys.executable, "-m", "miles_router", "--host", HOST, "--port", str(port), "--worker-urls", *workers,
        "--log-level", "warning", "--move-after", str(OUR_POLICIES[contender.policy] / time_scale),
    ]  # fmt: skip


def _theirs(contender: Contender, port: int, workers: Sequence[str], time_scale: float) -> list[str]:
    def scaled(amount: int) -> str:
        return str(max(1, round(amount / time_scale)))

    return [
        peers_python(), "-m", "sglang_router.launch_router",
        "--host", HOST, "--port", str(port), "--worker-urls", *workers,
        "--policy", *THEIR_POLICIES[contender.policy], "--log-level", "warn",
        "--prometheus-host", HOST, "--prometheus-port", str(free_port()),
        "--worker-startup-check-interval", "1", "--shutdown-grace-period-secs", "1",
        "--retry-initial-backoff-ms", scaled(50), "--retry-max-backoff-ms", scaled(30_000),
        "--health-check-interval-secs", scaled(60),
        "--cb-timeout-duration-secs", scaled(60), "--cb-window-duration-secs", scaled(120),
    ]  # fmt: skip


def _wait_for_workers(port: int, count: int) -> None:
    """Both name their workers at `/workers`; theirs join one by one."""
    deadline = time.monotonic() + START_TIMEOUT
    while time.monotonic() < deadline:
        status, body = fetch(port, "GET", "/workers")
        listed = json.loads(body).get("workers", []) if status == 200 else []
        if sum(_is_ready(each) for each in listed) == count:
            return
        time.sleep(0.05)
    raise PeerError(f"not all {count} workers joined")


def _is_ready(worker: dict[str, object]) -> bool:
    return worker.get("is_healthy") is True or worker.get("state") == "ready"
