"""How the text cache's operations grow: with the text's length, with what else is held, with an episode's turns.

In CPU time, which strangers on the machine disturb least.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tests.benchmarks.radix_tree_peers import LONG_CHARS, Radix, timed
from tests.benchmarks.rollout_data import Rollouts, new_cache

CHARS = (1_000, 3_000, 10_000, 30_000, 100_000, 300_000, 1_000_000)
ROLLOUTS = (104, 304, 1_000, 3_000, 10_000)
TURNS = (1, 2, 5, 10, 20, 50, 100, 200)
CHARS_PER_TURN = 500
LONG_TURNS = 10
REPEAT = 40


@dataclass
class Curve:
    """Median CPU seconds of each operation at each size."""

    of: str
    sizes: Sequence[int]
    seconds: dict[str, list[float]] = field(default_factory=lambda: {"look-up": [], "record": [], "retrieve": []})

    def take(self, radix: Radix, made: Rollouts, text: str) -> None:
        """Measure at the next size."""
        times = timed(radix, radix.cache, made, text, REPEAT, clock=time.thread_time)
        for name, value in zip(self.seconds, (times.match, times.record, times.retrieve), strict=True):
            self.seconds[name].append(value)

    def exponent(self, name: str) -> float:
        """The steepest growth between two sizes a factor of 5 or more apart, as the power of the size."""
        points = list(zip(self.sizes, self.seconds[name], strict=False))
        return max(
            math.log(later / sooner) / math.log(larger / smaller)
            for smaller, sooner in points
            for larger, later in points
            if larger >= 5 * smaller
        )


def by_length(sizes: Sequence[int]) -> Curve:
    curve = Curve("characters of the text", sizes)
    for chars in sizes:
        radix, made = Radix(new_cache()), Rollouts()
        curve.take(radix, made, made.long(radix.cache, chars, 2))
    return curve


def by_rollouts(sizes: Sequence[int]) -> Curve:
    curve = Curve("rollouts held", sizes)
    radix, made, held = Radix(new_cache()), Rollouts(), 0
    for rollouts in sizes:
        made.groups(radix.cache, rollouts - held)
        held = rollouts
        curve.take(radix, made, made.long(radix.cache, LONG_CHARS, LONG_TURNS))
    return curve


def by_turns(sizes: Sequence[int]) -> Curve:
    curve = Curve(f"turns of {CHARS_PER_TURN} characters", sizes)
    for turns in sizes:
        radix, made = Radix(new_cache()), Rollouts()
        curve.take(radix, made, made.long(radix.cache, turns * CHARS_PER_TURN, turns))
    return curve


CURVES: Mapping[Callable[[Sequence[int]], Curve], Sequence[int]] = {
    by_length: CHARS,
    by_rollouts: ROLLOUTS,
    by_turns: TURNS,
}


def measured_curves(progress: Callable[[str], None], *, quick: bool) -> list[Curve]:
    """All of them; `quick` leaves out the many rollouts."""
    curves = []
    for measure, sizes in CURVES.items():
        kept = [size for size in sizes if not quick or measure is not by_rollouts or size <= 1_000]
        curves.append(measure(kept))
        progress(f"curve: {curves[-1].of}")
    return curves


def plot(path: Path, curves: Sequence[Curve], about: Mapping[str, str]) -> None:
    """A panel for each curve, both axes logarithmic; the dotted line is growth in proportion to the size."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, len(curves), figsize=(4.4 * len(curves), 3.6), sharey=True)
    for axis, curve in zip(axes, curves, strict=True):
        for name, seconds in curve.seconds.items():
            axis.loglog(curve.sizes, [value * 1e3 for value in seconds], marker="o", markersize=3, label=name)
        start = curve.seconds["look-up"][0] * 1e3
        linear = [start * size / curve.sizes[0] for size in curve.sizes]
        axis.loglog(curve.sizes, linear, ":", color="#adb5bd", label="linear")
        axis.set_xlabel(curve.of)
        axis.spines[["top", "right"]].set_visible(False)
    axes[0].set_ylabel("CPU ms, median")
    axes[0].legend(frameon=False, fontsize=8)
    axes[0].set_ylim(1e-3, 1e2)
    figure.suptitle(f"CPU time of one operation of the text cache ({about['date']}, {about['cpu']})", fontsize=9)
    figure.tight_layout()
    figure.savefig(path, dpi=130)
