"""The text cache beside a character trie and a linear scan: time of its operations, memory, and how both grow.

    python -m tests.benchmarks.radix_tree [--quick] [--json FILE] [--plot FILE.png]

Made-up rollouts, no tokenizer: GRPO groups of 8 over a prompt, three turns each, and a few long ones. Times are of one
operation in this process. Memory is what a fresh process grows by (resident bytes), without the text.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tests.benchmarks.radix_tree_curves import Curve, measured_curves, plot
from tests.benchmarks.radix_tree_peers import PEERS, Memory, Peer, Times, memory_of, play
from tests.benchmarks.report import environment, number, table

TARGET_MATCH_MS, TARGET_BYTES = 1.0, 16.0


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a twentieth of the rollouts: a smoke test")
    parser.add_argument("--rollouts", type=int, default=10_000, help="trajectories held (default: %(default)s)")
    parser.add_argument("--repeat", type=int, default=300, help="operations timed of each kind (default: %(default)s)")
    parser.add_argument("--markdown", action="store_true", help="print the tables as GitHub markdown")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write everything measured")
    parser.add_argument("--plot", type=Path, metavar="FILE.png", help="draw the curves")
    options = parser.parse_args()
    if options.quick:
        options.rollouts, options.repeat = 500, 50
    return options


def progress(step: str) -> None:
    print(f"[{time.strftime('%H:%M:%S')}] {step}", file=sys.stderr, flush=True)


def times_table(times: Mapping[str, Mapping[str, Times]], *, markdown: bool) -> str:
    header = ["held by", "rollouts", "generations", "look-up", "median ms", "p99 ms", "record ms", "retrieve ms"]
    rows = [
        [
            name, number(each.rollouts, 0), number(each.entries, 0), kind, *map(_ms, (each.match, each.match_p99)),
            *map(_ms, (each.record, each.retrieve)),
        ]
        for name, by_kind in times.items() for kind, each in by_kind.items()
    ]  # fmt: skip
    return table(header, rows, markdown)


def _ms(seconds: float | None) -> str:
    return "-" if seconds is None else number(seconds * 1e3, 3)


def memory_table(memory: Mapping[str, Memory], *, markdown: bool) -> str:
    header = ["held by", "rollouts", "tokens", "text MB", "grown MB", "bytes/token", "beside the text"]
    rows = [
        [
            name, number(each.rollouts, 0), number(each.tokens, 0), number(each.text / 1e6, 1),
            number(each.grown / 1e6, 1), number(each.grown / each.tokens, 1), number(each.beside_text, 1),
        ]
        for name, each in memory.items()
    ]  # fmt: skip
    return table(header, rows, markdown)


def curve_table(curve: Curve, *, markdown: bool) -> str:
    names = list(curve.seconds)
    header = [curve.of, *(f"{name} CPU ms" for name in names)]
    rows = [[number(size, 0), *(_ms(curve.seconds[name][at]) for name in names)] for at, size in enumerate(curve.sizes)]
    growth = ["grows as size ^", *(number(curve.exponent(name), 2) for name in names)]
    return table(header, [*rows, growth], markdown)


def run(options: argparse.Namespace) -> dict[str, Any]:
    times: dict[str, dict[str, Times]] = {}
    memory: dict[str, Memory] = {}
    for name, peer in PEERS.items():
        held = _scaled(peer, options.rollouts)
        progress(f"{name}: memory of {held:,} rollouts")
        memory[name] = memory_of(name, held)
        progress(f"{name}: {memory[name].beside_text:.1f} bytes/token beside the text; times")
        times[name] = play(peer, held, options.repeat, progress)
    curves = measured_curves(progress, quick=options.quick)
    return {"times": times, "memory": memory, "curves": curves}


def _scaled(peer: Peer, rollouts: int) -> int:
    return rollouts if peer.most is None else min(rollouts, peer.most)


def render(results: Mapping[str, Any], about: Mapping[str, str], *, markdown: bool) -> str:
    mark = "### " if markdown else ""
    blocks = [
        f"{mark}Text cache: {about['date']}, commit {about['commit']}",
        f"{about['cpu']}; Python {about['python']}.",
        "Look-up of a text that extends a held one of 100,000 characters, which came about in so many turns, by 200.",
        times_table(results["times"], markdown=markdown),
        *(f"{name}: {peer.remark}" for name, peer in PEERS.items() if peer.remark),
        "Memory of the rollouts without the long ones. Tokens are counted once where rollouts share a prompt.",
        memory_table(results["memory"], markdown=markdown),
        *(curve_table(curve, markdown=markdown) for curve in results["curves"]),
        _judged(results),
    ]
    return "\n\n".join(blocks)


def _judged(results: Mapping[str, Any]) -> str:
    ours = next(iter(PEERS))
    slowest = max(each.match for each in results["times"][ours].values()) * 1e3
    size = results["memory"][ours].beside_text
    steepest = max(curve.exponent(name) for curve in results["curves"] for name in curve.seconds)
    return (
        f"Targets: look-up {slowest:.3f} ms at most (target {TARGET_MATCH_MS:g}), {size:.1f} bytes per cached token "
        f"(target {TARGET_BYTES:g}), steepest growth size ^ {steepest:.2f} (quadratic would be 2)."
    )


def write_json(path: Path, results: Mapping[str, Any], about: Mapping[str, str]) -> None:
    plain: dict[str, Any] = {
        "times": {name: {kind: asdict(one) for kind, one in by.items()} for name, by in results["times"].items()},
        "memory": {name: asdict(each) for name, each in results["memory"].items()},
        "curves": [asdict(curve) for curve in results["curves"]],
    }
    path.write_text(json.dumps({"environment": dict(about), **plain}, indent=1) + "\n")


def main() -> int:
    options = arguments()
    about = environment()
    results = run(options)
    print(render(results, about, markdown=options.markdown))
    if options.json:
        write_json(options.json, results, about)
    if options.plot:
        plot(options.plot, results["curves"], about)
    return 0


if __name__ == "__main__":
    sys.exit(main())
