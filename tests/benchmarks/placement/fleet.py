"""The fleet: simulated workers that take the time of a GPU, in one process, and one of which may be lost.

python -m tests.benchmarks.placement.fleet --ports 30001,30002 --speeds 1,0.5 --time-scale 10 --loses-at 40
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import signal
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import uvloop

from tests.benchmarks.process import HOST, free_port, started
from tests.support.simulated.costs.gpu import gpu_named
from tests.support.simulated.costs.paced_worker import PacedWorker


@dataclass(frozen=True, slots=True)
class Fleet:
    """What a fleet is made of; times are its own."""

    gpu: str
    speeds: tuple[float, ...]
    time_scale: float
    loses_at: float | None = None


@dataclass(frozen=True, slots=True)
class RunningFleet:
    """Its workers' URLs and its process."""

    urls: list[str]
    pid: int


@contextlib.contextmanager
def running_fleet(fleet: Fleet, root: Path) -> Iterator[RunningFleet]:
    """A fleet with empty caches, until the block ends."""
    ports = [free_port() for _ in fleet.speeds]
    command = [
        sys.executable, "-m", "tests.benchmarks.placement.fleet", "--gpu", fleet.gpu,
        "--ports", ",".join(map(str, ports)), "--speeds", ",".join(map(str, fleet.speeds)),
        "--time-scale", str(fleet.time_scale),
    ]  # fmt: skip
    if fleet.loses_at is not None:
        command += ["--loses-at", str(fleet.loses_at)]
    with started(command, ports[-1], "/model_info", root / "fleet.log") as pid:
        yield RunningFleet([f"http://{HOST}:{port}" for port in ports], pid)


async def _serve(options: argparse.Namespace) -> None:
    stopped = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stopped.set)
    gpu = gpu_named(options.gpu)
    made = zip(options.ports.split(","), options.speeds.split(","), strict=True)
    async with contextlib.AsyncExitStack() as stack:
        workers = [
            PacedWorker(
                gpu.scaled(float(speed)), time_scale=options.time_scale, host=HOST, port=int(port), replica=number,
                context_len=2 * gpu.kv_tokens, log_limit=4,
            )
            for number, (port, speed) in enumerate(made)
        ]  # fmt: skip
        for worker in workers:
            await stack.enter_async_context(worker)
        if options.loses_at is not None:
            losing = asyncio.ensure_future(_lose(workers, options.loses_at / options.time_scale))
            stack.callback(losing.cancel)
        await stopped.wait()


async def _lose(workers: list[PacedWorker], seconds: float) -> None:
    """Lose the last worker so long after the first generation came anywhere."""
    waits = [asyncio.ensure_future(each.log.wait_for(lambda log: log.at("/generate"), 1e9)) for each in workers]
    await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
    for wait in waits:
        wait.cancel()
    await asyncio.sleep(seconds)
    await workers[-1].kill()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpu", required=True)
    parser.add_argument("--ports", required=True, help="of the workers")
    parser.add_argument("--speeds", required=True, help="of the workers, against the GPU's")
    parser.add_argument("--time-scale", type=float, required=True, help="seconds of the GPU in one")
    parser.add_argument("--loses-at", type=float, help="when the last worker is lost, in the GPU's seconds")
    uvloop.run(_serve(parser.parse_args()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
