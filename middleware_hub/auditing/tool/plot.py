"""Draw a verdict with matplotlib, for `miles-router audit --plot`."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from middleware_hub.auditing.tool.verdict import Verdict
from miles_router.errors import ConfigError

#: Points drawn at most, and the smallest distance drawn: the axes are logarithmic.
MOST_POINTS, LEAST = 50_000, 1e-5
SIZE, RESOLUTION = (11.0, 4.5), 120


def require(file: Path) -> None:
    """Check that a plot can be written to this file, before the slow audit begins.

    Raises:
        ConfigError: matplotlib is not installed, it does not support the file's suffix, or the folder does not exist.
    """
    try:
        from matplotlib.backend_bases import FigureCanvasBase
    except ImportError:
        raise ConfigError("audit --plot needs matplotlib: pip install 'miles-router[plot]'") from None
    known = FigureCanvasBase.get_supported_filetypes()
    if file.suffix[1:].lower() not in known:
        raise ConfigError(f"audit --plot: {file.name!r} must end with one of {', '.join(f'.{each}' for each in known)}")
    if not file.parent.is_dir():
        raise ConfigError(f"audit --plot: there is no folder {str(file.parent)!r}")


def draw(verdict: Verdict, file: Path) -> None:
    """Plot the distances by position, and their cumulative distribution for each worker that sampled. The suffix of
    `file` selects the image format.

    Raises:
        ConfigError: the file cannot be written.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=SIZE, dpi=RESOLUTION, layout="constrained")
    by_position, by_worker = figure.subplots(1, 2)
    limits, spans = verdict.limits, verdict.found.spans
    workers = list(dict.fromkeys(span.worker for span in spans))
    for worker in workers:
        own = [span for span in spans if span.worker == worker]
        distances = np.maximum(np.concatenate([span.distances for span in own]), LEAST)
        positions = np.concatenate([span.positions for span in own])
        step = -(-len(distances) * len(workers) // MOST_POINTS)
        by_position.scatter(positions[::step], distances[::step], s=4, alpha=0.4, linewidths=0)
        within = np.sort(distances)
        by_worker.plot(within, np.arange(1, len(within) + 1) / len(within), label=worker)
    by_position.axhline(limits.threshold, color="black", linestyle="--", linewidth=1)
    by_position.set(yscale="log", xlabel="position in the sample", ylabel="|recorded - recomputed| (nats)")
    by_worker.axvline(limits.threshold, color="black", linestyle="--", linewidth=1)
    by_worker.axhline(limits.quantile, color="black", linestyle="--", linewidth=1)
    by_worker.set(xscale="log", xlabel="|recorded - recomputed| (nats)", ylabel="share of tokens within")
    if workers:
        by_worker.legend(title="sampled by", fontsize="small")
    try:
        figure.savefig(file)
    except (OSError, ValueError) as error:
        raise ConfigError(f"audit --plot: {error}") from None
