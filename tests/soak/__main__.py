"""`python -m tests.soak`: a table at the end, and a status that says whether all was well."""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from tests.soak.rounds import Outcome, soak
from tests.soak.verdict import MIB, Look, judged


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.soak", description=__doc__)
    add = parser.add_argument
    add("--minutes", type=float, default=30.0, help="for how long (default: %(default)g)")
    add("--round", type=float, default=8.0, help="seconds of load before each look (default: %(default)g)")
    add("--seed", type=int, help="default: another one each time")
    add("--out", type=Path, help="directory for looks.jsonl and looks.png (default: a new one)")
    arguments = parser.parse_args(argv)
    seed = random.SystemRandom().randrange(1 << 30) if arguments.seed is None else arguments.seed
    print(f"seed {seed}", flush=True)
    outcome = asyncio.run(
        soak(60 * arguments.minutes, arguments.round, seed=seed, say=lambda line: print(line, flush=True))
    )
    out = arguments.out or Path(tempfile.mkdtemp(prefix="soak-"))
    out.mkdir(parents=True, exist_ok=True)
    (out / "looks.jsonl").write_text("".join(json.dumps(asdict(look)) + "\n" for look in outcome.looks))
    plot(outcome.looks, out / "looks.png")
    print(table(outcome), f"written to {out}", sep="\n")
    return 1 if outcome.broken else 0


def table(outcome: Outcome) -> str:
    lines = [f"{count:10}  {name}" for name, count in sorted(outcome.counts.items())]
    late = judged(outcome.looks)
    if late:
        for name in ("rss", "descriptors", "tasks", "sessions", "in_flight", "texts", "tokens", "row_bytes"):
            values = [getattr(look, name) for look in late]
            unit, shown = (" MiB", MIB) if name == "rss" else ("", 1)
            ends = [round(value / shown, 1) for value in (values[0], values[-1], min(values), max(values))]
            lines.append(
                "{:>10}  {:g}{unit} at first, {:g} at last, between {:g} and {:g}".format(name, *ends, unit=unit)
            )
    return "\n".join([*lines, *(f"BROKEN: {each}" for each in outcome.broken), "" if outcome.broken else "all is well"])


def plot(looks: Sequence[Look], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (memory, descriptors) = pyplot.subplots(2, 1, sharex=True, figsize=(8, 5))
    minutes = [look.seconds / 60 for look in looks]
    memory.plot(minutes, [look.rss / MIB for look in looks])
    memory.set_ylabel("resident MiB")
    memory.set_ylim(bottom=0)
    descriptors.plot(minutes, [look.descriptors for look in looks], label="descriptors")
    descriptors.plot(minutes, [look.tasks for look in looks], label="tasks")
    descriptors.set_ylim(bottom=0)
    descriptors.set_xlabel("minutes")
    descriptors.legend()
    figure.savefig(path, dpi=100)
    pyplot.close(figure)


if __name__ == "__main__":
    sys.exit(main())
