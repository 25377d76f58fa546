"""What runs come to: medians over seeds, a table, JSON, a plot."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

from tests.benchmarks.placement.rollout import Played
from tests.benchmarks.placement.routers import OURS, Contender
from tests.benchmarks.report import number, table


@dataclass(frozen=True, slots=True)
class Run:
    """One contender on one workload with one seed; CPU in cores."""

    played: Played
    bound_s: float
    router_cores: float
    fleet_cores: float
    client_cores: float
    others_cores: float

    @property
    def hit_rate(self) -> float:
        return self.played.cached_tokens / max(1, self.played.prompt_tokens)


@dataclass(slots=True)
class Row:
    """All runs of one contender on one workload."""

    workload: str
    contender: Contender
    runs: list[Run] = field(default_factory=list)

    @property
    def makespans(self) -> list[float]:
        return [run.played.makespan_s for run in self.runs]

    @property
    def makespan(self) -> float:
        return median(self.makespans)

    @property
    def bound(self) -> float:
        return median(run.bound_s for run in self.runs)

    def turn(self, share: float) -> float:
        """A percentile of turns' latency: the median over seeds of each seed's."""
        return median(_percentile(run.played.turns_s, share) for run in self.runs)

    def as_json(self) -> dict[str, object]:
        return {
            "router": self.contender.router,
            "policy": self.contender.policy,
            "default": self.contender.default,
            "makespan_s": round(self.makespan, 2),
            "turn_p50_s": round(self.turn(0.5), 3),
            "turn_p99_s": round(self.turn(0.99), 3),
            "prefix_hit_rate": round(median(run.hit_rate for run in self.runs), 4),
            "workload": self.workload,
            "makespans_s": [round(each, 2) for each in self.makespans],
            "lower_bound_s": round(self.bound, 2),
            "repeats": sum(run.played.repeats for run in self.runs),
            "retractions": sum(run.played.retractions for run in self.runs),
            "failed": sum(run.played.failed for run in self.runs),
        }

    def cells(self) -> list[str]:
        mark = " (default)" if self.contender.default else ""
        low, high = min(self.makespans), max(self.makespans)
        return [
            f"{self.contender.router} {self.contender.policy}{mark}",
            number(self.makespan, 1),
            f"{low:,.1f} to {high:,.1f}",
            f"{median(run.played.makespan_s / run.bound_s for run in self.runs):.2f}",
            number(self.turn(0.5), 2),
            number(self.turn(0.99), 2),
            f"{median(run.hit_rate for run in self.runs):.1%}",
            number(1000 * median(_percentile(run.played.overheads_s, 0.5) for run in self.runs), 1),
            *[
                number(median(getattr(run, f"{whose}_cores") for run in self.runs), 2)
                for whose in ("router", "fleet", "client", "others")
            ],
            str(sum(run.played.repeats for run in self.runs)),
            str(sum(run.played.retractions for run in self.runs)),
            str(sum(run.played.failed for run in self.runs)),
        ]


_HEADER = [
    "router and policy", "makespan s", "spread", "x bound", "turn p50 s", "p99 s", "prefix hits",
    "overhead ms", "router cores", "fleet", "client", "others", "repeats", "retractions", "failed",
]  # fmt: skip


def _percentile(values: Sequence[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(len(ordered) * share))] if ordered else 0.0


def render(rows: Sequence[Row], about: Mapping[str, str], markdown: bool) -> str:
    mark = "### " if markdown else ""
    out = [
        f"{mark}Placement: {about['date']}, commit {about['commit']}",
        "",
        f"{about['cpu']}; {about['peers']}; {about['fleet']}.",
        "",
        f"Seconds are the fleet's, {about['time_scale']} of which pass in one. Medians of {about['seeds']} seeds, the "
        "smallest and the largest makespan. Bound: the longest episode alone, or all work over all workers. Overhead: "
        "what a turn takes beside the engine, in real time. Others: the cores that strangers took.",
    ]
    for workload in dict.fromkeys(row.workload for row in rows):
        mine = [row for row in rows if row.workload == workload]
        bound = median(row.bound for row in mine)
        out += ["", f"{mark and '#### '}{workload} (bound {bound:,.1f} s)", ""]
        out.append(table(_HEADER, [row.cells() for row in mine], markdown))
    return "\n".join(out)


def as_json(rows: Sequence[Row], about: Mapping[str, str]) -> str:
    return json.dumps({"results": [row.as_json() for row in rows], "about": dict(about)})


def plot(path: Path, rows: Sequence[Row], about: Mapping[str, str]) -> None:
    """Makespans of every contender, a panel for each workload; the bound is a line."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    workloads = list(dict.fromkeys(row.workload for row in rows))
    columns = min(3, len(workloads))
    height = -(-len(workloads) // columns)
    figure, axes = pyplot.subplots(height, columns, figsize=(5.4 * columns, 3.0 * height + 0.5), squeeze=False)
    for axis in axes.flat[len(workloads) :]:
        axis.set_visible(False)
    for axis, workload in zip(axes.flat, workloads, strict=False):
        mine = [row for row in rows if row.workload == workload]
        names = [f"{row.contender.router} {row.contender.policy}" for row in mine]
        colours = ["#2a6f97" if row.contender.router == OURS else "#adb5bd" for row in mine]
        values = [row.makespan for row in mine]
        spread = [
            [row.makespan - min(row.makespans) for row in mine],
            [max(row.makespans) - row.makespan for row in mine],
        ]
        bars = axis.barh(names, values, color=colours, xerr=spread, error_kw={"elinewidth": 1, "ecolor": "#495057"})
        axis.bar_label(bars, [f"{value:,.0f} s" for value in values], label_type="center", color="white", fontsize=8)
        axis.axvline(median(row.bound for row in mine), color="#d62828", linewidth=1)
        axis.set_title(f"{workload}: makespan, and its bound", fontsize=9)
        axis.invert_yaxis()
        axis.spines[["top", "right"]].set_visible(False)
    figure.suptitle(f"One rollout step, less is better ({about['fleet']}, {about['seeds']} seeds)", fontsize=10)
    figure.tight_layout()
    figure.savefig(path, dpi=130)
    pyplot.close(figure)
