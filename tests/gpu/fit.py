"""The cost model's prices for what was measured: `python -m tests.gpu.fit [REPORT]`.

Least squares in relative error. Fitted is what a rollout asks of a worker that is busy; the errors of all else are told
beside it. A report is what `tests.gpu.measure cost` writes; `data/cost.json` made `QWEN3_30B_A3B_H100`.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import sqrt
from pathlib import Path
from typing import Any

import numpy

from tests.support.simulated.costs.gpu import Gpu

Row = tuple[str, ...]

REPORT = Path(__file__).parent / "data" / "cost.json"
LEAST_COMPUTED = 256
LONGEST = 16_384 + 2048
LEAST_BATCH = 8

PREFILL = ("prefill_s", "prefill_token_s", "prefill_pair_s")
DECODE = ("decode_s", "decode_sequence_s", "decode_context_s")
DIGITS = 4
FREE = Gpu(0.0, 0.0, 0.0, 0.0, 0.0, 0.0, kv_tokens=0)

#: What is fitted, then what is left out, in the order in which they are told.
USUAL, SMALL, LONG = (
    "prefill of 256 to 16,384 tokens, behind at most 16,384 in the cache",
    "prefill of fewer tokens",
    "prefill in a sequence of 32,768",
)
BUSY, IDLE = "decode step of 8 to 128 sequences", "decode step of fewer sequences"
FITTED = {USUAL: PREFILL, BUSY: DECODE}
ERRORS = ("what", "fitted", "points", "errors", "root mean square")
GROUPS = (USUAL, SMALL, LONG, BUSY, IDLE)


@dataclass(frozen=True, slots=True)
class Point:
    """What took `seconds`, and what a GPU's prices make of it."""

    group: str
    seconds: float
    cost: Callable[[Gpu], float]

    def error(self, gpu: Gpu) -> float:
        """By how much of what it took the model is above it."""
        return self.cost(gpu) / self.seconds - 1


def points(report: Mapping[str, Any]) -> list[Point]:
    """All that was measured, but prefills without graphs."""
    return [
        *(_prefill(each, report["chunked_prefill_size"]) for each in report["prefill"]),
        *(_step(each["batch"], each["context"], each["step_seconds"]) for each in report["decode"]),
    ]


def _prefill(measured: Mapping[str, Any], chunk: int) -> Point:
    requests, tokens, cached = (measured[name] for name in ("requests", "tokens", "cached"))
    cut = list(chunks(requests, tokens, cached, chunk))
    group = SMALL if tokens < LEAST_COMPUTED else LONG if cached + tokens > LONGEST else USUAL
    return Point(group, measured["seconds"], lambda gpu: sum(map(gpu.prefill_seconds, cut)))


def _step(batch: int, context: int, seconds: float) -> Point:
    group = BUSY if batch >= LEAST_BATCH else IDLE
    return Point(group, seconds, lambda gpu: gpu.decode_seconds(1, batch, batch * context))


def chunks(requests: int, tokens: int, cached: int, chunk: int) -> Iterator[list[tuple[int, int]]]:
    """The prefills of requests that come together, as the engine cuts them; each is a list of parts."""
    parts: list[tuple[int, int]] = []
    room = chunk
    for _ in range(requests):
        done = 0
        while done < tokens:
            part = min(room, tokens - done)
            parts.append((part, cached + done))
            done, room = done + part, room - part
            if not room:
                yield parts
                parts, room = [], chunk
    if parts:
        yield parts


def fit(report: Mapping[str, Any]) -> Gpu:
    measured = points(report)
    prices: dict[str, float] = {}
    for group, names in FITTED.items():
        prices |= _least_squares([each for each in measured if each.group == group], names)
    return replace(
        FREE,
        **prices,  # type: ignore[arg-type]
        kv_tokens=report["kv_capacity_tokens"],
        chunk_tokens=report["chunked_prefill_size"],
    )


def _least_squares(measured: Sequence[Point], names: Sequence[str]) -> dict[str, float]:
    """The model is linear in its prices: at one second each by itself it says what each is multiplied with."""
    units = [replace(FREE, **{name: 1.0}) for name in names]  # type: ignore[arg-type]
    rows = numpy.array([[each.cost(unit) / each.seconds for unit in units] for each in measured])
    scale = rows.max(axis=0)
    found = numpy.linalg.lstsq(rows / scale, numpy.ones(len(rows)), rcond=None)[0] / scale
    return {name: float(f"{price:.{DIGITS}g}") for name, price in zip(names, found, strict=True)}


def errors(report: Mapping[str, Any], gpu: Gpu) -> list[Row]:
    """For each group whether it is fitted, how many points, least and largest error, root mean square."""
    rows: list[Row] = []
    for group in GROUPS:
        off = [each.error(gpu) for each in points(report) if each.group == group]
        mean = sqrt(sum(each * each for each in off) / len(off))
        fitted = "yes" if group in FITTED else "no"
        rows.append((group, fitted, str(len(off)), f"{min(off):+.0%} to {max(off):+.0%}", f"{mean:.1%}"))
    return rows


def step_errors(report: Mapping[str, Any], gpu: Gpu) -> list[Row]:
    """A heading with contexts, then the errors of each batch."""
    off = {}
    for each in report["decode"]:
        batch, context = each["batch"], each["context"]
        off[batch, context] = f"{_step(batch, context, each['step_seconds']).error(gpu):+.0%}"
    batches, contexts = (sorted(set(sizes)) for sizes in zip(*off, strict=True))
    heading = ("sequences", *(f"{context:,}" for context in contexts))
    return [heading, *((str(batch), *(off.get((batch, each), "") for each in contexts)) for batch in batches)]


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.gpu.fit", description=__doc__)
    parser.add_argument("report", type=Path, nargs="?", default=REPORT)
    report = json.loads(parser.parse_args(argv).report.read_text())
    gpu = fit(report)
    for name in (*PREFILL, *DECODE, "kv_tokens"):
        print(f"{name}={getattr(gpu, name)!r},")
    print()
    for row in [ERRORS, *errors(report, gpu)]:
        print("{:70}{:>7}{:>7}{:>16}{:>18}".format(*row))
    print("\nerrors of a decode step, by sequences and tokens in the context of each")
    for row in step_errors(report, gpu):
        print(("{:>10}" * len(row)).format(*row))


if __name__ == "__main__":
    main()
