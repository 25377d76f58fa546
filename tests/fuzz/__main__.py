"""`python -m tests.fuzz`: look for inputs that break an oracle, and write them into the corpus."""

from __future__ import annotations

import argparse
import os
import random
import sys
from collections.abc import Sequence
from pathlib import Path

from tests.fuzz.campaign import Campaign, explore, told
from tests.fuzz.entrances import TARGETS
from tests.fuzz.search import bounded


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
    add("--target", choices=TARGETS, action="append", help="which entrance; default: all of them")
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
