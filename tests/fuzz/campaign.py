"""Searches over many targets, side by side, for a given time."""

from __future__ import annotations

import multiprocessing
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from dataclasses import dataclass, field

from tests.fuzz.entrances import TARGETS
from tests.fuzz.search import Finding, Search

#: Seconds for which a process stays with one target.
SLICE = 20.0
#: Findings of one target whose problems begin alike are taken for one.
KIND = 32


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
        known = {(each.target, each.problem[:KIND]) for each in self.findings}
        if report.finding is not None and (report.target, report.finding.problem[:KIND]) not in known:
            self.findings.append(report.finding)
            print(f"\nFOUND in {report.target}: {told(report.finding)}", flush=True)
        totals = ", ".join(f"{name} {self.runs[name]}" for name in self.names)
        print(f"{left:6.0f} s left, {len(self.findings)} found; inputs: {totals}", flush=True)


def told(finding: Finding) -> str:
    """Save a finding, and say where."""
    return f"{finding.problem[:2000]}\n  {finding.data[:2000]!r}\n  written to {finding.save()}"
