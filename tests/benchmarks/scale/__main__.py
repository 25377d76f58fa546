"""How large a router of several processes is: what it costs and gives, measured here and computed beyond.

    python -m tests.benchmarks.scale [--quick] [--repeat 3] [--seconds 1.5] [--markdown]

Six loads on one process and on two, in turns, so that what else the machine does falls on both: ratios are medians of
the ratios of each round. Each load comes once from many clients, which says how much there is in a second, and once
from one client, which says what an answer costs: processes that are all busy take cores and caches from each other, and
their CPU times say that too. Then what `--state-dir` adds, as `tests.benchmarks.state` measures it, and the memory of
held tokens, as `tests.benchmarks.sessions` does. All of it goes into the model (`model.py`), which is arithmetic: its
tables are computed, and say so. Needs nginx and wrk.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import shutil
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median

from tests.benchmarks import sessions, state
from tests.benchmarks.report import environment, number, table
from tests.benchmarks.scale.loads import Load, Round, loads, measured, running, running_worker
from tests.benchmarks.scale.model import BUSY, CORES, MEMORY, NETWORK, Costs, Rollout, bound, needed, wait

Rounds = dict[str, list[Round]]
#: Of a load: its rounds with many clients, and with one.
Both = tuple[Rounds, Rounds]
ONE, TWO = "1 process", "2 processes"
SIZES = (1_000, 10_000, 100_000)
QUICK = 0.5


def measure_load(load: Load, root: Path, options: argparse.Namespace) -> Both:
    root.mkdir()
    with contextlib.ExitStack() as stack:
        worker = stack.enter_context(running_worker(root, load.answers))
        routers = {
            name: stack.enter_context(running(count, worker, root / f"{name}.log", *load.arguments))
            for name, count in ((ONE, 1), (TWO, 2))
        }
        for router in routers.values():
            load.drive(router.port, QUICK, load.clients)  # what is loaded and cached first
        rounds, calm = Rounds(), Rounds()
        for turn in range(options.repeat):
            names = [*routers]
            for name in names[turn % len(names) :] + names[: turn % len(names)]:
                for clients, kept in ((load.clients, rounds), (1, calm)):
                    kept.setdefault(name, []).append(measured(load, routers[name], options.seconds, clients))
    return rounds, calm


def ratio(rounds: Rounds, name: str, of: str, figure: str) -> float:
    """The median of a figure's ratios, round by round."""
    pairs = zip(rounds[name], rounds[of], strict=True)
    return float(median(getattr(one, figure) / getattr(other, figure) for one, other in pairs))


def middle(rounds: Sequence[Round], figure: str) -> float:
    return float(median(getattr(each, figure) for each in rounds))


def shown_load(load: Load, both: Both, *, markdown: bool) -> str:
    rows, (rounds, calm) = [], both
    for name in sorted(rounds, key=[ONE, TWO].index):
        each = rounds[name]
        cost, beside = middle(each, "cost"), middle(each, "beside")
        most = bound(2 if name == TWO else 1, os.cpu_count() or 1, cost, beside)
        costs = [number(value * 1e6, 0 if value > 1e-4 else 1) for value in (middle(calm[name], "cost"), cost, beside)]
        own = [number(ratio(calm, name, ONE, "cost"), 2), number(ratio(rounds, name, ONE, "rate"), 2)]
        rows.append([name, costs[0], own[0], number(middle(each, "rate"), 0), own[1], *costs[1:], number(most, 0)])
    unit = load.unit
    heading = [load.title, f"CPU us/{unit}", "ratio", f"{unit}s/s", "ratio", "busy: CPU us", "beside it", "bound/s"]
    return table(heading, rows, markdown)


def held_token(options: argparse.Namespace) -> float:
    """Bytes of memory for each token of sessions."""
    agents, turns = (4, 5) if options.quick else (16, 20)
    _, memory = asyncio.run(sessions.measured(agents, turns, "chat"))
    return memory["grown"] / memory["tokens"]


def costs_of(
    measurements: Mapping[str, tuple[Load, Both]], kept: dict[str, state.Cost], idle: dict[str, float], held: float
) -> Costs:
    """The constants of the model: of two processes, where all there is to pay is paid; turns of whole episodes."""
    passed, turns, *_, rows = [(load, calm) for load, (_, calm) in measurements.values()]
    return Costs(
        request=middle(passed[1][TWO], "cost"),
        turn=median(kept["none"].cpu) * ratio(turns[1], TWO, ONE, "cost"),
        store=max(0.0, median(kept["process"].cpu) - median(kept["none"].cpu)),
        row_byte=middle(rows[1][TWO], "cost") / len(rows[0].answers["/generate"]),
        disk_token=kept["process"].written / kept["process"].tokens,
        idle=idle["process"],
        held_token=held,
    )


def shown_costs(costs: Costs, *, markdown: bool) -> str:
    """What one core does in a second."""
    rows = [
        ["small requests", number(1 / costs.request, 0)],
        ["traced turns", number(1 / costs.turn, 0)],
        ["traced turns, with --state-dir", number(1 / (costs.turn + costs.store), 0)],
        ["bytes of answers with routed experts", f"{1 / costs.row_byte / 1e6:,.0f} MB"],
    ]
    return table(["a second, of one core", ""], rows, markdown)


def shown_needs(costs: Costs, *, markdown: bool) -> str:
    """Computed: what agents need."""
    rows = []
    for agents in SIZES:
        for name, kind in {
            "sessions": {"rows": False, "state": False},
            "with --state-dir": {"rows": False, "state": True},
            "with R3 and --state-dir": {"rows": True, "state": True},
        }.items():
            need = needed(agents, costs, Rollout(), **kind)
            sizes = [f"{need.memory / 1e9:,.0f} GB", f"{need.network / 1e6:,.0f} MB/s", f"{need.disk / 1e6:,.0f} MB/s"]
            waits = "-" if need.wait == float("inf") else number(need.wait * 1e3, 1)
            numbers = [number(need.turns, 0), number(need.cores, 1), str(need.processes), waits]
            rows.append([f"{agents:,} agents, {name}", *numbers, *sizes, str(need.machines), need.first])
    heading = ["computed", "turns/s", "cores", "processes", "wait ms", "memory", "network", "disk", "machines", "first"]
    return table(heading, rows, markdown)


def shown_queues(costs: Costs, *, markdown: bool) -> str:
    """Computed: what N processes give, and how long turns wait for each other."""
    rows = []
    for processes in (1, 2, 4, 8, 16, 32, 64):
        rate = BUSY * processes / costs.turn
        waits = [number(wait(costs.turn, busy) * 1e3, 1) for busy in (0.3, BUSY, 0.9)]
        rows.append([str(processes), number(rate, 0), number(processes / costs.turn, 0), *waits])
    heading = ["processes (computed)", f"turns/s at {BUSY:.0%}", "at most", "wait ms at 30%", f"{BUSY:.0%}", "90%"]
    return table(heading, rows, markdown)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one round of 0.5 s: a smoke test, not a measurement")
    parser.add_argument("--repeat", type=int, default=3, help="rounds, of which medians are shown")
    parser.add_argument("--seconds", type=float, default=1.5, help="of half a round")
    parser.add_argument("--markdown", action="store_true", help="print the tables as GitHub markdown")
    options = parser.parse_args()
    if options.quick:
        options.repeat, options.seconds = 1, QUICK
    return options


def main() -> int:
    options = arguments()
    if missing := [tool for tool in ("nginx", "wrk") if shutil.which(tool) is None]:
        print(f"not installed: {', '.join(missing)}", file=sys.stderr)
        return 2
    about = environment()
    print(", ".join(f"{name}: {value}" for name, value in about.items()))
    measurements: dict[str, tuple[Load, Both]] = {}
    with tempfile.TemporaryDirectory(prefix="scale-") as folder:
        for at, load in enumerate(loads(Path(folder))):
            both = measure_load(load, Path(folder) / str(at), options)
            measurements[load.title] = load, both
            print(f"\n{shown_load(load, both, markdown=options.markdown)}", flush=True)
    turns, episodes, sessions_idle = (10, 1, 50) if options.quick else (30, 2, 400)
    kept, idle = state.measured(turns, episodes, sessions_idle)
    print(f"\n{state.shown(kept, idle, markdown=options.markdown)}", flush=True)
    costs = costs_of(measurements, kept, idle, held_token(options))
    for text in (shown_costs, shown_queues, shown_needs):
        print(f"\n{text(costs, markdown=options.markdown)}")
    print(f"\nassumed: {Rollout()}; a machine of {CORES} cores, {MEMORY / 1e9:.0f} GB, {NETWORK / 1e9} GB/s")
    print(f"measured: {costs}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
