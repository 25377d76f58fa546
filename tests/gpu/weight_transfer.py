"""Weights transferred to a real engine behind the router while it generates: nothing is lost, nothing is stamped wrong.

    python -m tests.gpu.model DIRECTORY --tokenizer TOKENIZER
    python -m tests.gpu.weight_transfer --model DIRECTORY [--python SGLANG_PYTHON] [--report FILE]

In each mode of a pause, generations run through the router; it is told to pause, a process of its own sends other
weights, and it is told to continue, all on the router's port. Then every answer is held against what passed at the
worker's proxy, and every logprob against one prefill of the same ids under the weights that its token is stamped with.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from collections.abc import Awaitable, Iterable, Sequence
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass, field
from typing import Any

import aiohttp

from miles_router.settings.config import MiddlewareSpec
from tests.gpu.engine import Engine, Sender, add_options, device_name, engine, sender, write_report
from tests.gpu.generations import all_under_way, audit, checked, rollouts, run
from tests.gpu.model import Shape, read_shape
from tests.support.recording_proxy import RecordingProxy
from tests.support.running_router import running_router
from tests.support.under_way import under_way

MODES = ("abort", "retract", "in_place")
EXPERTS = "middleware_hub.routed_experts_middleware.RoutedExpertsMiddleware"
OLD, NEW = 1, 2  # seeds of two policies that have nothing in common
#: Median differences of logprobs, in nats: under the weights that sampled a token at most, under the others at least.
SAME, OTHER = 0.5, 5.0


@dataclass
class Trainer:
    """The side that owns the weights. It speaks to the router alone."""

    url: str
    sender: Sender
    versions: list[str] = field(default_factory=list)
    paused: float = 0.0  # seconds of the last pause

    async def update(self, seed: int, mode: str) -> dict[str, Any]:
        """Pause, transfer, name the new version, flush where the mode lets it, continue."""
        version = str(len(self.versions) + 1)
        async with aiohttp.ClientSession(self.url, timeout=aiohttp.ClientTimeout(total=None)) as http:
            start = time.monotonic()
            await _post(http, "/pause_generation", {"mode": mode})
            try:
                sent = await self.sender.send(seed)
                await _post(http, "/update_weight_version", {"new_version": version, "abort_all_requests": False})
                if mode != "in_place":
                    await _post(http, "/flush_cache", {})
            finally:
                await _post(http, "/continue_generation", {})
            self.paused = time.monotonic() - start
        self.versions.append(version)
        return sent


async def _post(http: aiohttp.ClientSession, path: str, body: dict[str, Any]) -> None:
    async with http.post(path, json=body) as reply:
        assert reply.status == 200, f"{path}: {await reply.text()}"


@dataclass
class Trial:
    """Everything that a trial is made of."""

    engine: Engine
    proxy: RecordingProxy
    trainer: Trainer
    shape: Shape
    count: int
    tokens: int

    async def update(self, mode: str) -> dict[str, Any]:
        """Generations of the old policy go on with the new one; what that came to."""
        old = self.trainer.versions[-1]
        of = rollouts(self.count, f"{mode}-{old}")
        url = self.trainer.url
        async with under_way(_all(run(url, rollout, self.tokens) for rollout in of)) as generating:
            await all_under_way(self.engine, self.proxy, self.count)
            sent = await self.trainer.update(NEW, mode)
            paused, new = self.trainer.paused, self.trainer.versions[-1]
            await generating
        found = await checked(url, self.proxy, self.shape, of, self.tokens, old, new)
        assert found.crossed == self.count, "the update fell into every generation"
        assert found.carried_on == (self.count if mode == "abort" else 0)
        under_new = await audit(self.engine, of)
        await self.trainer.update(OLD, "abort")
        under_old = await audit(self.engine, of)
        _judge(mode, old, new, under_old, under_new)
        return {
            "mode": mode,
            **asdict(found),
            "paused_seconds": round(paused, 3),
            "transfer": {name: round(value, 3) for name, value in sent.items()},
            "logprobs_apart": {
                "tokens of the old weights": {"recomputed under the old": under_old[old], "the new": under_new[old]},
                "tokens of the new weights": {"recomputed under the new": under_new[new], "the old": under_old[new]},
            },
        }


async def _all(works: Iterable[Awaitable[None]]) -> None:
    await asyncio.gather(*works)


def _judge(mode: str, old: str, new: str, under_old: dict[str, Any], under_new: dict[str, Any]) -> None:
    """Each token's logprob is that of the weights it is stamped with, and not of the others. In place, what follows the
    update was computed on a cache of the old weights, which no prefill has."""
    assert _median(under_old[old]) < SAME, under_old
    assert _median(under_new[old]) > OTHER, under_new
    assert _median(under_old[new]) > OTHER, under_old
    if mode != "in_place":
        assert _median(under_new[new]) < SAME, under_new


def _median(told: dict[str, Any]) -> float:
    return float(told["absolute"]["0.5"])


async def transfer(arguments: argparse.Namespace) -> dict[str, Any]:
    """All trials; the report."""
    shape = read_shape(arguments.model)
    layer = MiddlewareSpec(EXPERTS, {"moe_shape": shape.moe_shape})
    async with AsyncExitStack() as stack:
        made = await stack.enter_async_context(engine(arguments))
        proxy = await stack.enter_async_context(RecordingProxy(made.url))
        settings: dict[str, Any] = {"partial_rollout": "resume", "middlewares": (layer,)}
        router = await stack.enter_async_context(running_router(proxy.url, **settings))
        sends = await stack.enter_async_context(sender(arguments, router.url))
        trainer = Trainer(router.url, sends)
        await trainer.update(OLD, "abort")
        trial = Trial(made, proxy, trainer, shape, arguments.generations, arguments.tokens)
        report: dict[str, Any] = {
            "device": device_name(),
            **await made.facts(),
            "model": {"shape": shape.moe_shape, "bytes": shape.bytes},
            "tokens_each": arguments.tokens,
            "trials": [],
        }
        for mode in arguments.mode or MODES:
            report["trials"].append(await trial.update(mode))
            print(f"{mode}: {report['trials'][-1]}", file=sys.stderr, flush=True)
        return report


def options(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.gpu.weight_transfer", description=__doc__)
    add_options(parser)
    parser.add_argument("--generations", type=int, default=48, help="at a time (default: %(default)s)")
    parser.add_argument("--tokens", type=int, default=400, help="of each (default: %(default)s)")
    parser.add_argument("--mode", action="append", choices=MODES, help="default: all, one after another")
    return parser.parse_args(argv)


def main() -> None:
    arguments = options()
    write_report(arguments, asyncio.run(transfer(arguments)))


if __name__ == "__main__":
    main()
