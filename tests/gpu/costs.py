"""Seconds of prefills and decode steps, for the cost model of the simulated worker."""

from __future__ import annotations

import random
import secrets
import sys
import time
from statistics import median
from typing import Any

from tests.gpu.engine import Engine

PREFILLS = (16, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768)
CACHED = ((4096, 64), (4096, 512), (4096, 2048), (16384, 64), (16384, 512), (16384, 2048), (32256, 512))
TOGETHER = ((4, 256), (16, 256), (4, 1024), (8, 1024), (16, 1024))  # requests at once, tokens of each
BATCHES = (1, 2, 4, 8, 16, 32, 64, 128)
CONTEXTS = (128, 512, 1024, 4096, 16384, 32768)
STEPS = 64
REPEATS = 3
FIRST_IDS = 150_000


def prompt(dice: random.Random, tokens: int) -> list[int]:
    return [dice.randrange(FIRST_IDS) for _ in range(tokens)]


async def timed(made: Engine, prompts: list[list[int]], tokens: int, key: str) -> tuple[float, int]:
    """Seconds of one request with all these prompts, and how many of their tokens were cached."""
    body = {
        "input_ids": prompts,
        "sampling_params": {"max_new_tokens": tokens, "ignore_eos": True},
        "extra_key": [key] * len(prompts),
    }
    start = time.perf_counter()
    answers = await made.generate(body)
    seconds = time.perf_counter() - start
    return seconds, sum(answer["meta_info"]["cached_tokens"] for answer in answers)


async def costs(made: Engine, dice: random.Random, largest: int) -> dict[str, Any]:
    capacity = int((await made.facts())["max_total_num_tokens"])
    report: dict[str, Any] = {"kv_capacity_tokens": capacity, "prefill": [], "decode": []}
    await timed(made, [prompt(dice, 512)], 8, "warm")
    for tokens in PREFILLS:
        if tokens <= largest:
            report["prefill"].append(await _prefill(made, dice, 1, tokens, 0))
    for cached, tokens in CACHED:
        if cached + tokens <= largest:
            report["prefill"].append(await _prefill(made, dice, 1, tokens, cached))
    for requests, tokens in TOGETHER:
        report["prefill"].append(await _prefill(made, dice, requests, tokens, 0))
    for context in CONTEXTS:
        for batch in BATCHES:
            if context <= largest and batch * (context + STEPS) < 0.95 * capacity:
                report["decode"].append(await _decode(made, dice, batch, context))
                print(report["decode"][-1], file=sys.stderr, flush=True)
    return report


async def _prefill(made: Engine, dice: random.Random, requests: int, tokens: int, cached: int) -> dict[str, Any]:
    """One token is sampled. The first go is left out: kernels are compiled for what they see for the first time."""
    runs = []
    for _ in range(REPEATS + 1):
        key, begins = secrets.token_hex(8), prompt(dice, cached)
        if cached:
            await timed(made, [begins], 1, key)
        seconds, reused = await timed(made, [begins + prompt(dice, tokens) for _ in range(requests)], 1, key)
        assert cached - 1 <= reused <= cached + 1, (cached, reused)
        runs.append(seconds)
    return {
        "requests": requests,
        "tokens": tokens,
        "cached": cached,
        "seconds": round(median(runs[1:]), 5),
        "runs": [round(each, 5) for each in runs[1:]],
    }


async def _decode(made: Engine, dice: random.Random, batch: int, context: int) -> dict[str, Any]:
    """What `STEPS` more tokens take, by a step, with every prompt in the cache."""
    key = secrets.token_hex(8)
    prompts = [prompt(dice, context) for _ in range(batch)]
    for each in prompts:
        await timed(made, [each], 1, key)
    runs = []
    for _ in range(REPEATS + 1):
        one, _reused = await timed(made, prompts, 1, key)
        many, _reused = await timed(made, prompts, 1 + STEPS, key)
        runs.append((many - one) / STEPS)
    return {
        "batch": batch,
        "context": context + STEPS // 2,
        "step_seconds": round(median(runs[1:]), 6),
        "runs": [round(each, 6) for each in runs[1:]],
    }
