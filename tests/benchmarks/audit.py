"""How far recorded logprobs lie from recomputed ones on a real SGLang, in nats: what the threshold of an audit has to
let pass, and what it has to find.

    python -m tests.benchmarks.audit

Models with random weights on the CPU. Episodes of three turns, sampled as each row says, are audited by the command;
damaged ones have the logprobs of the next position, or other ids.
"""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

from miles_router.trajectory import Piece
from tests.sglang.environment import ensure, trained_model
from tests.sglang_worker import RealWorker
from tests.support.audits import audited, damaged, episode, foreign, shifted
from tests.support.real_sessions import real_sessions
from tests.support.session_trial import SessionTrial

QUANTILES = ("0.5", "0.95", "0.99")
EPISODES = 6


class Case(NamedTuple):
    """Settings to sample with, and what is done to the samples."""

    name: str
    settings: dict[str, Any]
    change: Callable[[Piece], Piece] | None = None


CASES = (
    Case("right", {}),
    Case("`top_p` 0.9", {"top_p": 0.9}),
    Case("`top_k` 50", {"top_k": 50}),
    Case("greedy", {"temperature": 0}),
    Case("`temperature` 0.6, token by token", {"temperature": 0.6}),
    Case("shifted by one position", {}, shifted),
    Case("foreign ids", {}, foreign),
)
MODELS: Mapping[str, tuple[tuple[str, ...], Callable[[], Path], tuple[Case, ...]]] = {
    "tiny Qwen3, CPU, bfloat16": ((), lambda: ensure().dense_model, CASES),
    "the same, float32": (("--dtype", "float32"), lambda: ensure().dense_model, CASES[:1]),
    "tiny Qwen3-MoE, CPU, bfloat16": ((), lambda: ensure().moe_model, CASES[:1]),
    "SmolLM2-135M-Instruct, CPU, bfloat16": (("--dtype", "bfloat16"), trained_model, (CASES[0], *CASES[-2:])),
}


async def quantiles(trial: SessionTrial, case: Case) -> list[float]:
    """Of the distances of a case's tokens."""
    names = [await trial.create() for _ in range(EPISODES)]
    await asyncio.gather(*(episode(trial, name, **case.settings) for name in names))
    with ExitStack() as stack:
        if case.change is not None:
            for name in names:
                stack.enter_context(damaged(trial, name, case.change))
        said = await audited(trial, *(flag for name in names for flag in ("--session", name)))
    for name in names:
        await trial.ask("DELETE", f"/sessions/{name}")
    return [said.report["total"]["quantiles"][quantile] for quantile in QUANTILES]


async def rows(flags: tuple[str, ...], cases: tuple[Case, ...], model: Path) -> list[tuple[str, list[float]]]:
    """Return each case's quantiles on a worker of its own."""
    with await asyncio.to_thread(RealWorker.start, *flags, model=model) as worker:
        async with real_sessions(worker, hf_checkpoint=str(model)) as (trial, _):
            return [(case.name, await quantiles(trial, case)) for case in cases]


def table() -> Iterator[str]:
    yield f"| model | what | {' | '.join(QUANTILES)} |"
    yield f"| --- | --- |{' ---: |' * len(QUANTILES)}"
    for name_of_model, (flags, model, cases) in MODELS.items():
        for number, (name, values) in enumerate(asyncio.run(rows(flags, cases, model()))):
            yield f"| {'' if number else name_of_model} | {name} | {' | '.join(f'{value:.4f}' for value in values)} |"


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    for line in table():
        print(line, flush=True)


if __name__ == "__main__":
    main()
