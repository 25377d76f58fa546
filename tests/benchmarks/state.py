"""What `--state-dir` costs a session's turn: time, CPU, bytes written, and the memory of an idle session.

    python -m tests.benchmarks.state [--turns 40] [--episodes 3] [--idle 1000] [--directory DIR] [--markdown]

Routers in processes of their own, in front of an engine that answers at once: without state, and with it in both modes.
They take turns, episode by episode. Agents ask one after the other, so that a time is that of one turn. Bytes are those
that the router's process had written to disks (`write_bytes` of /proc/PID/io), by token given or sampled.
"""

from __future__ import annotations

import argparse
import contextlib
import random
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import orjson

from tests.benchmarks.report import environment, number, table
from tests.benchmarks.session_turns import Subject, running, serving
from tests.benchmarks.sessions import APIS, SAMPLED_SHARE, TARGET_TOKENS, WORDS, Engine

MODES = ("none", "process", "machine")


@dataclass
class Cost:
    """What the turns of one router have taken."""

    seconds: list[float] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)
    written: int = 0
    tokens: int = 0


def written_bytes(pid: int) -> int:
    lines = Path(f"/proc/{pid}/io").read_text().splitlines()
    return int(dict(line.split(": ") for line in lines)["write_bytes"])


def memory(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * 4096


def episode(subject: Subject, cost: Cost, turns: int, seed: int) -> None:
    """One agent's, which grows to some 32,000 tokens."""
    path, request, text_of = APIS["chat"]
    source = random.Random(seed)
    made, _ = subject.one("/sessions", b"{}")
    session = orjson.loads(made)["session_id"]
    messages: list[dict[str, Any]] = [{"role": "system", "content": "You are an agent."}]
    given = int(TARGET_TOKENS / turns * (1 - SAMPLED_SHARE))
    before = written_bytes(subject.pid)
    for _ in range(turns):
        messages.append({"role": "user", "content": " ".join(source.choice(WORDS) for _ in range(given))})
        begun = time.perf_counter()
        answer, cpu = subject.one(f"/sessions/{session}{path}", orjson.dumps(request(messages)))
        cost.seconds.append(time.perf_counter() - begun - subject.pause)
        cost.cpu.append(cpu)
        messages.append({"role": "assistant", "content": text_of(orjson.loads(answer))})
    listed, _ = subject.one(f"/sessions/{session}?form=compact", b"", "GET")
    cost.written += written_bytes(subject.pid) - before
    cost.tokens += sum(each["given_tokens"] + each["completion_tokens"] for each in orjson.loads(listed)["records"])


def idle_bytes(subject: Subject, count: int) -> float:
    """Memory that each of many sessions with one short turn takes, once as many are there already."""
    path, request, _ = APIS["chat"]
    before = 0
    for each in range(2 * count):
        if each == count:
            before = memory(subject.pid)
        subject.one("/sessions", orjson.dumps({"session_id": f"idle-{each}"}))
        subject.one(f"/sessions/idle-{each}{path}", orjson.dumps(request([{"role": "user", "content": f"Hi {each}"}])))
    return (memory(subject.pid) - before) / count


def shown(costs: dict[str, Cost], idle: dict[str, float], *, markdown: bool) -> str:
    def at(values: Sequence[float], share: float) -> float:
        return sorted(values)[min(len(values) - 1, int(len(values) * share))]

    rows = []
    for mode, cost in costs.items():
        base = costs["none"]
        times = [number((at(cost.seconds, share) - at(base.seconds, share)) * 1e3, 2) for share in (0.5, 0.99)]
        cpu = (median(cost.cpu) - median(base.cpu)) * 1e3
        whole = [number(at(cost.seconds, share) * 1e3, 2) for share in (0.5, 0.99)]
        rows.append(
            [mode, *whole, *times, number(cpu, 2), number(cost.written / cost.tokens, 1), number(idle[mode] / 1e3, 1)]
        )
    heading = ["--state-sync", "p50 ms", "p99 ms", "added p50", "added p99", "CPU ms added", "bytes a token", "kB idle"]
    return table(heading, rows, markdown)


def measured(
    turns: int, episodes: int, idle: int, directory: Path | None = None
) -> tuple[dict[str, Cost], dict[str, float]]:
    """What so many episodes cost each mode, and the memory of its idle sessions."""
    engine = Engine(int(TARGET_TOKENS / turns * SAMPLED_SHARE), seed=1)
    costs: dict[str, Cost] = {mode: Cost() for mode in MODES}
    with tempfile.TemporaryDirectory(prefix="state-", dir=directory) as folder, contextlib.ExitStack() as stack:
        port, subjects = stack.enter_context(serving(engine)), {}
        for mode in MODES:
            state = () if mode == "none" else ("--state-dir", f"{folder}/{mode}", "--state-sync", mode)
            subjects[mode] = stack.enter_context(running(port, Path(folder) / f"{mode}.log", *state))
            episode(subjects[mode], Cost(), 5, 0)  # what is loaded and cached first
        for seed in range(episodes):
            for mode, subject in subjects.items():
                episode(subject, costs[mode], turns, seed)
        return costs, {mode: idle_bytes(subject, idle) for mode, subject in subjects.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=40)
    parser.add_argument("--episodes", type=int, default=3)
    parser.add_argument("--idle", type=int, default=1000)
    parser.add_argument("--directory", type=Path, help="on the disk that is measured; default: a temporary one")
    parser.add_argument("--markdown", action="store_true")
    options = parser.parse_args()
    costs, idle = measured(options.turns, options.episodes, options.idle, options.directory)
    print(environment(), shown(costs, idle, markdown=options.markdown), sep="\n\n")


if __name__ == "__main__":
    main()
