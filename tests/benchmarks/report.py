"""What a run is reported as: a heading, one table per load, JSON, and a plot."""

from __future__ import annotations

import json
import os
import platform
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from datetime import datetime, timezone
from importlib import metadata
from pathlib import Path
from statistics import median

from tests.benchmarks.load import LOADS, Load, Sample
from tests.benchmarks.peers import NOOP_LAYERS, PEERS, REPO, peer_version

REFERENCES = ("nginx", "sglang-router", "smg", "vllm-router")

Results = Mapping[str, Mapping[str, Sequence[Sample]]]  # load -> peer -> one sample per repetition


def _first_line(*command: str) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True, cwd=REPO)
    except (OSError, subprocess.SubprocessError):
        return ""
    return (done.stdout or done.stderr).strip().partition("\n")[0]


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "absent"


def _cpu_model() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def environment() -> dict[str, str]:
    """What a number means nothing without."""
    commit = _first_line("git", "rev-parse", "--short", "HEAD") or "none"
    changed = "" if commit == "none" or not _first_line("git", "status", "--porcelain") else " with local changes"
    return {
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
        "commit": commit + changed,
        "cpu": f"{_cpu_model()}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f} at the start",
        "python": platform.python_version(),
        "peers": ", ".join(
            [
                f"miles-router {_version('miles-router')}",
                *(f"{name} {peer_version(name) or 'absent'}" for name, peer in PEERS.items() if peer.package),
                _first_line("nginx", "-v").removeprefix("nginx version: "),
            ]
        ),
    }


def middle(samples: Sequence[Sample]) -> Sample:
    """The median of each figure; one failed repetition fails the row."""
    failed = next((sample for sample in samples if sample.failure), None)
    if failed is not None:
        return failed
    figures = {
        name: median(values)
        for name in ("rate", "mb_per_s", "p50_ms", "p99_ms", "cpu_us", "cores", "rss_mb", "others")
        if None not in (values := [getattr(sample, name) for sample in samples])
    }
    return replace(samples[0], **figures)


def _ratio(samples: Sequence[Sample], references: Sequence[Sample], figure: str) -> str:
    """Median over the rounds of a peer's figure by the reference's in the same round, minutes apart at most."""
    pairs = [(getattr(a, figure), getattr(b, figure)) for a, b in zip(samples, references, strict=False)]
    return f"{median(a / b for a, b in pairs):.2f}" if pairs and all(a and b for a, b in pairs) else "-"


def number(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:,.{digits}f}"


def _references(by_peer: Mapping[str, Sequence[Sample]]) -> list[str]:
    return [name for name in REFERENCES if name in by_peer]


def _header(load: Load, by_peer: Mapping[str, Sequence[Sample]]) -> list[str]:
    unit = load.unit.rstrip("s")
    latency = "gap" if load.unit == "events" else "latency"
    return [
        "peer", f"{load.unit}/s", "MB/s", f"{latency} p50 ms", "p99 ms", f"CPU us/{unit}", "cores", "RSS MB",
        *[f"{what}/{name.partition('-')[0]}" for name in _references(by_peer) for what in ("rate", "CPU")], "others",
    ]  # fmt: skip


def _row(name: str, by_peer: Mapping[str, Sequence[Sample]]) -> list[str]:
    sample = middle(by_peer[name])
    if sample.failure:
        return [name, f"failed: {sample.failure}"[:100]]
    ratios = [
        _ratio(by_peer[name], by_peer[other], figure) for other in _references(by_peer) for figure in ("rate", "cpu_us")
    ]
    cpu_digits = 0 if (sample.cpu_us or 0) >= 1000 else 1
    return [
        name, number(sample.rate, 0 if sample.rate >= 1000 else 1), number(sample.mb_per_s, 1),
        number(sample.p50_ms, 2), number(sample.p99_ms, 2), number(sample.cpu_us, cpu_digits),
        number(sample.cores, 2), number(sample.rss_mb, 0), *ratios, number(sample.others, 2),
    ]  # fmt: skip


def table(header: list[str], rows: list[list[str]], markdown: bool) -> str:
    if markdown:
        padded = [row + [""] * (len(header) - len(row)) for row in rows]
        lines = [header, ["---"] + ["---:"] * (len(header) - 1), *padded]
        return "\n".join(f"| {' | '.join(line)} |" for line in lines)
    full = [row for row in [header, *rows] if len(row) == len(header)]  # a failed row has its reason alone
    widths = [max(len(row[i]) for row in full) for i in range(len(header))]
    widths[0] = max(len(row[0]) for row in [header, *rows])
    return "\n".join(_plain_line(row, widths) for row in [header, *rows])


def _plain_line(row: list[str], widths: list[int]) -> str:
    first = row[0].ljust(widths[0])
    if len(row) < len(widths):
        return "  ".join([first, *row[1:]])
    return "  ".join([first, *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True))])


def render(results: Results, about: Mapping[str, str], markdown: bool) -> str:
    mark = "### " if markdown else ""
    lines = [
        f"{mark}Passthrough: {about['date']}, commit {about['commit']}",
        "",
        f"{about['cpu']}; Python {about['python']}; {about['peers']}.",
        "",
        f"Medians of {about['repeats']} x {about['seconds']} s, peers interleaved, a fresh process each. CPU and cores "
        "are the peer's own user+system time, RSS its peak; rate/X and CPU/X are ratios to X, taken round by round "
        "before the median, since the machine drifts; others is the cores that strangers took meanwhile.",
        f"miles-router+{NOOP_LAYERS} has {NOOP_LAYERS} no-op middlewares.",
    ]
    for load_name, by_peer in results.items():
        rows = [_row(name, by_peer) for name in by_peer]
        load = LOADS[load_name]
        lines += ["", f"{mark and '#### '}{load.title}", "", table(_header(load, by_peer), rows, markdown)]
    return "\n".join(lines)


def write_json(path: Path, results: Results, about: Mapping[str, str]) -> None:
    loads = {
        load: {
            peer: {"median": asdict(middle(samples)), "samples": [asdict(sample) for sample in samples]}
            for peer, samples in by_peer.items()
        }
        for load, by_peer in results.items()
    }
    path.write_text(json.dumps({"environment": dict(about), "loads": loads}, indent=1) + "\n")
