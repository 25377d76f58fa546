"""`python -m tests.fuzz`: look for inputs that break an oracle, and write them into the corpus."""

from __future__ import annotations

import argparse
import multiprocessing
import os
import random
import sys
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from dataclasses import dataclass, field
from pathlib import Path

from tests.fuzz.doors import TARGETS
from tests.fuzz.search import Finding, Search, bounded

#: Seconds for which a process stays with one target.
SLICE = 20.0


@dataclass
class Report:
    """What one process came to with one target."""

    target: str
    runs: int
    kept: list[bytes]
    finding: Finding | None


def explore(name: str, seed: int, kept: Sequence[bytes], runs: int | None, seconds: float | None) -> Report:
    """Search one target. `kept` are inputs that showed something new before."""
    target = TARGETS[name]()
    try:
        search = Search(target, seed, list(kept))
        finding = search.run(runs=runs, seconds=seconds)
        return Report(name, search.runs, search.kept, finding)
    finally:
        target.close()


@dataclass
class Campaign:
    """Many searches, side by side, until the time is up."""

    names: Sequence[str]
    seed: int
    seconds: float
    runs: Counter[str] = field(default_factory=Counter)
    kept: dict[str, list[bytes]] = field(default_factory=dict)
    findings: list[Finding] = field(default_factory=list)

    def run(self, processes: int) -> None:
        end, begun = time.monotonic() + self.seconds, 0
        context = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(processes, mp_context=context) as pool:
            under_way: set[Future[Report]] = set()
            while under_way or time.monotonic() < end:
                while len(under_way) < processes and (left := end - time.monotonic()) > 0:
                    name = self.names[begun % len(self.names)]
                    seconds = min(SLICE, left, self.seconds * processes / len(self.names))
                    seed, kept = self.seed + begun, self.kept.get(name, [])
                    under_way.add(pool.submit(explore, name, seed, kept, None, seconds))
                    begun += 1
                done, under_way = wait(under_way, return_when=FIRST_COMPLETED)
                for future in done:
                    self._take(future.result(), max(0.0, end - time.monotonic()))

    def _take(self, report: Report, left: float) -> None:
        self.runs[report.target] += report.runs
        self.kept[report.target] = report.kept
        new = report.finding is not None and report.finding.problem not in {each.problem for each in self.findings}
        if report.finding is not None and new:
            self.findings.append(report.finding)
            print(f"\nFOUND in {report.target}: {told(report.finding)}", flush=True)
        totals = ", ".join(f"{name} {self.runs[name]}" for name in self.names)
        print(f"{left:6.0f} s left, {len(self.findings)} found; inputs: {totals}", flush=True)


def told(finding: Finding) -> str:
    """Save a finding, and say where."""
    return f"{finding.problem[:2000]}\n  {finding.data[:2000]!r}\n  written to {finding.save()}"


def once(name: str, paths: Sequence[str]) -> int:
    """Check some inputs again; gives the exit status."""
    target, broken = TARGETS[name](), 0
    try:
        for path in paths:
            try:
                with bounded():
                    seen = target.check(Path(path).read_bytes())
                print(f"{path}: {seen}")
            except Exception as error:  # noqa: BLE001 - that is what is looked for
                broken += 1
                print(f"{path}: {type(error).__name__}: {error}")
    finally:
        target.close()
    return 1 if broken else 0


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    add = parser.add_argument
    add("--target", choices=TARGETS, action="append", help="which door; default: all of them")
    add("--seconds", type=float, default=60.0, help="for how long, on all cores (default: %(default)g)")
    add("--seed", type=int, help="default: another one each time")
    add("--runs", type=int, help="so many inputs in place of a time, in one process: always the same ones")
    add("--input", action="append", help="check this file and nothing else")
    arguments = parser.parse_args(argv)
    names = arguments.target or list(TARGETS)
    if arguments.input:
        return once(names[0], arguments.input)
    seed = random.SystemRandom().randrange(1 << 30) if arguments.seed is None else arguments.seed
    print(f"seed {seed}", flush=True)
    if arguments.runs is not None:
        reports = [explore(name, seed, (), arguments.runs, None) for name in names]
        findings = [report.finding for report in reports if report.finding is not None]
        for finding in findings:
            print(f"FOUND in {finding.target}: {told(finding)}")
        return 1 if findings else 0
    campaign = Campaign(names, seed, arguments.seconds)
    campaign.run(max(1, len(os.sched_getaffinity(0))))
    print(f"{sum(campaign.runs.values())} inputs, {len(campaign.findings)} findings")
    return 1 if campaign.findings else 0


if __name__ == "__main__":
    sys.exit(main())
