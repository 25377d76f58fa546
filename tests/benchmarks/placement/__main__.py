"""How long one rollout step takes behind each router and policy, on one simulated fleet.

    python -m tests.benchmarks.placement [--workload NAME|FILE ...] [--seeds N] [--json]

Without `--workload` the three that are shipped; `--workload adversarial` is the list of hard cases. A file has an
episode a line (tests/benchmarks/placement/workload.py). Routers, fleet and rollout code are processes of their own
that talk over real sockets of 127.0.0.1. Times that are told are the fleet's, which lives `--time-scale` times as fast.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import uvloop

from tests.benchmarks.placement.bounds import lower_bound
from tests.benchmarks.placement.fleet import Fleet, running_fleet
from tests.benchmarks.placement.generators import ADVERSARIAL, SCENARIOS, SHIPPED, Scenario
from tests.benchmarks.placement.results import Row, Run, as_json, plot, render
from tests.benchmarks.placement.rollout import Played, Rollout
from tests.benchmarks.placement.routers import Contender, contenders, running_router
from tests.benchmarks.placement.workload import Episode, read
from tests.benchmarks.process import PeerError
from tests.benchmarks.procstat import cpu_seconds, machine_busy_seconds
from tests.benchmarks.report import environment
from tests.support.simulated.costs.gpu import GPUS, gpu_named

LISTS = {"shipped": list(SHIPPED.values()), "adversarial": list(ADVERSARIAL.values())}
BAR = 24


def arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--workload", nargs="+", default=["shipped"], metavar="NAME|FILE", help=f"{', '.join([*LISTS, *SCENARIOS])}")
    add("--seeds", type=int, default=5, help="runs of each, of which the median is reported (default: %(default)s)")
    add("--only", nargs="+", default=[], metavar="ROUTER[:POLICY]", help="these contenders alone")
    add("--workers", type=int, default=8, help="of the fleet (default: %(default)s)")
    add("--gpu", choices=sorted(GPUS), default="qwen3-8b-h100", help="what each worker has (default: %(default)s)")
    add(
        "--gpu-speed", default="", metavar="F[,F...]", help="how fast the first workers' are against it; 1 for the rest"
    )
    add("--loses-at", type=float, metavar="SECONDS", help="when the last worker is lost; default: never")
    add("--time-scale", type=float, default=10.0, help="the fleet's seconds in one (default: %(default)s)")
    add("--polite", action="store_true", help="do not go before other processes of this machine where that is allowed")
    add("--markdown", action="store_true", help="print the tables as GitHub markdown")
    add("--json", action="store_true", help="print the results as one line of JSON at the end")
    add("--plot", type=Path, metavar="FILE.png", help="draw the makespans")
    options = parser.parse_args(argv)
    try:
        options.speeds = tuple(float(part) for part in options.gpu_speed.split(",") if part)
        options.scenarios = list(_scenarios(options))
        options.contenders = _contenders(options.only)
        if options.seeds < 1 or options.workers < max(1, len(options.speeds)):
            raise ValueError("--seeds and --workers must be at least 1, and no less than there are speeds")
    except (OSError, ValueError) as error:
        parser.error(str(error))
    return options


def _scenarios(options: argparse.Namespace) -> Iterator[Scenario]:
    for name in options.workload:
        if name in LISTS:
            chosen = LISTS[name]
        elif name in SCENARIOS:
            chosen = [SCENARIOS[name]]
        else:
            episodes = read(Path(name))
            chosen = [Scenario(Path(name).stem, lambda seed, episodes=episodes: episodes)]  # type: ignore[misc]
        for each in chosen:
            yield each.with_fleet(options.speeds, options.loses_at)


def _contenders(only: list[str]) -> list[Contender]:
    known = contenders()
    if unknown := [each for each in only if each not in {name for one in known for name in (one.router, one.name)}]:
        raise ValueError(f"no contender {unknown[0]!r}: {', '.join(one.name for one in known)}")
    return [each for each in known if not only or each.router in only or each.name in only]


class Progress:
    """A bar on stderr: runs that are done, and how far the current one is."""

    def __init__(self, total: int) -> None:
        self._total = total
        self._done = 0
        self._shown = 0.0

    def begin(self, name: str, episodes: int) -> None:
        self._name, self._episodes = name, episodes
        self._show(0)

    def ended(self, episodes: int) -> None:
        """How many episodes of the current run have."""
        if time.monotonic() - self._shown > 0.2:
            self._show(episodes)

    def end(self, outcome: str) -> None:
        self._done += 1
        self._line(f"{self._name}: {outcome}", "\n")

    def _show(self, episodes: int) -> None:
        self._shown = time.monotonic()
        if sys.stderr.isatty():
            self._line(f"{self._name} {episodes}/{self._episodes}", "\r", episodes / self._episodes)

    def _line(self, text: str, end: str, part: float = 0.0) -> None:
        filled = round(BAR * (self._done + part) / self._total)
        bar = "#" * filled + "." * (BAR - filled)
        print(f"\x1b[K[{bar}] {self._done}/{self._total} {text}", end=end, file=sys.stderr, flush=True)


def run_once(
    options: argparse.Namespace, scenario: Scenario, contender: Contender, seed: int, progress: Progress, root: Path
) -> Run:
    """One workload through one router in front of a fresh fleet."""
    episodes = scenario.episodes(seed)
    gpu = gpu_named(options.gpu)
    _check_size(episodes, gpu.kv_tokens)
    speeds = (scenario.speeds + (1.0,) * options.workers)[: options.workers]
    fleet = Fleet(options.gpu, speeds, options.time_scale, scenario.loses_at)
    progress.begin(f"{scenario.name} {contender.name} seed {seed}", len(episodes))
    with (
        running_fleet(fleet, root) as workers,
        running_router(contender, workers.urls, options.time_scale, root) as router,
    ):
        began, processes = time.monotonic(), (router.pid, workers.pid)
        before = [time.process_time(), *map(cpu_seconds, processes), machine_busy_seconds()]
        played: Played = uvloop.run(Rollout(episodes, router.port, options.time_scale, seed).play(progress.ended))
        after = [time.process_time(), *map(cpu_seconds, processes), machine_busy_seconds()]
        seconds = time.monotonic() - began
    client, routing, simulating, all_of_it = ((b - a) / seconds for a, b in zip(before, after, strict=True))
    others = max(0.0, all_of_it - client - routing - simulating)
    return Run(played, lower_bound(episodes, gpu, speeds), routing, simulating, client, others)


def _check_size(episodes: list[Episode], memory: int) -> None:
    largest = max(episode.tokens for episode in episodes)
    if largest >= memory:
        raise ValueError(f"an episode has {largest} tokens, and a worker room for {memory}")


def run(options: argparse.Namespace) -> list[Row]:
    """Every contender on every workload once per seed, each seed beginning with another one: drift hits all."""
    rows = {
        (scenario.name, contender): Row(scenario.name, contender)
        for scenario in options.scenarios
        for contender in options.contenders
    }
    progress = Progress(len(rows) * options.seeds)
    with tempfile.TemporaryDirectory(prefix="placement-") as folder:
        for seed in range(options.seeds):
            first = seed % len(options.contenders)
            for scenario in options.scenarios:
                for contender in options.contenders[first:] + options.contenders[:first]:
                    made = run_once(options, scenario, contender, seed, progress, Path(folder))
                    rows[scenario.name, contender].runs.append(made)
                    failed = f", {made.played.failed} FAILED" if made.played.failed else ""
                    progress.end(f"{made.played.makespan_s:,.1f} s{failed}")
    return list(rows.values())


def go_first() -> None:
    """Run before other processes, children included: on a shared machine a turn else waits for strangers, which the
    fleet's time multiplies. Linux lets root do that."""
    try:
        os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(1))
    except (AttributeError, PermissionError):
        print("no priority over other processes: keep the machine free of them", file=sys.stderr)


def main() -> int:
    options = arguments()
    if not options.polite:
        go_first()
    about = {
        **environment(),
        "fleet": f"{options.workers} workers of {options.gpu}",
        "time_scale": f"{options.time_scale:g}",
        "seeds": str(options.seeds),
    }
    try:
        rows = run(options)
    except (PeerError, ValueError, OSError, asyncio.TimeoutError) as error:
        print(f"\n{type(error).__name__}: {error}", file=sys.stderr)
        return 2
    print(render(rows, about, options.markdown))
    if options.plot:
        plot(options.plot, rows, about)
    if options.json:
        print(as_json(rows, about))
    return 1 if any(run.played.failed for row in rows for run in row.runs) else 0


if __name__ == "__main__":
    sys.exit(main())
