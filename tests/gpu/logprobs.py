"""How far recorded and recomputed logprobs lie apart: by batch, by routing, and where something is wrong."""

from __future__ import annotations

import asyncio
import base64
import random
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from tests.gpu.costs import prompt
from tests.gpu.engine import Engine, Sender
from tests.gpu.generations import AT_ONCE
from tests.gpu.model import Shape
from tests.gpu.spread import Differences, differences, spread

BATCHES = ((1, 8), (8, 2), (32, 2), (64, 2))  # at a time, and how often
TOKENS = 256
STEPS = (0.003, 0.03)  # of the weights, by how much others differ from them
OTHERS = 64  # sequences that are recomputed under other weights


@dataclass
class Sampled:
    """A prompt with what was sampled after it."""

    begin: int
    ids: list[int]
    recorded: list[float]
    experts: str


async def apart(made: Engine, sends: Sender, dice: random.Random, seed: int, shape: Shape) -> dict[str, Any]:
    """All comparisons, under the weights of `seed`, which the worker has."""
    batches, every = [], list[Sampled]()
    for batch, times in BATCHES:
        of = [each for _ in range(times) for each in await _generate(made, dice, batch)]
        every += of
        batches.append({"batch": batch, **await _recomputed(made, of, shape)})
        print(batches[-1], file=sys.stderr, flush=True)
    of = every[-OTHERS:]
    first, second = await _logprobs(made, of, AT_ONCE), await _logprobs(made, of, 1)
    wrong = {"shifted by one position": spread([_shifted(each, said) for each, said in zip(of, second, strict=True)])}
    for step in STEPS:
        await sends.send(seed, step)
        wrong[f"weights {step} apart"] = spread(_differences(of, await _logprobs(made, of, AT_ONCE)))
    await sends.send(seed + 1)
    wrong["other weights"] = spread(_differences(of, await _logprobs(made, of, AT_ONCE)))
    await sends.send(seed)
    entropy = -float(np.mean([value for each in every for value in each.recorded]))
    return {
        "mean_surprise": round(entropy, 4),
        "batches": batches,
        "prefill_beside_prefill": spread([differences(*pair) for pair in zip(first, second, strict=True)]),
        "wrong": wrong,
        "weights_sent_again": spread(_differences(of, await _logprobs(made, of, 1))),
    }


async def _generate(made: Engine, dice: random.Random, batch: int) -> list[Sampled]:
    """So many at once."""
    prompts = [prompt(dice, dice.randint(64, 512)) for _ in range(batch)]
    body = {
        "input_ids": prompts,
        "sampling_params": {"max_new_tokens": TOKENS, "ignore_eos": True},
        "return_logprob": True,
        "return_routed_experts": True,
    }
    return [
        Sampled(
            begin=len(given),
            ids=[*given, *answer["output_ids"]],
            recorded=[entry[0] for entry in answer["meta_info"]["output_token_logprobs"]],
            experts=answer["meta_info"]["routed_experts"],
        )
        for given, answer in zip(prompts, await made.generate(body), strict=True)
    ]


async def _said(made: Engine, of: Sequence[Sampled], at_once: int) -> list[dict[str, Any]]:
    turns = asyncio.Semaphore(at_once)

    async def one(each: Sampled) -> dict[str, Any]:
        async with turns:
            return await made.recompute(each.ids)

    return list(await asyncio.gather(*(one(each) for each in of)))


async def _logprobs(made: Engine, of: Sequence[Sampled], at_once: int) -> list[list[float]]:
    """Of the sampled tokens, by one prefill; so many sequences at once."""
    said = await _said(made, of, at_once)
    return [answer["logprobs"][each.begin - 1 :] for each, answer in zip(of, said, strict=True)]


def _differences(of: Sequence[Sampled], recomputed: Sequence[Sequence[float]]) -> list[Differences]:
    return [differences(each.recorded, said) for each, said in zip(of, recomputed, strict=True)]


def _shifted(each: Sampled, recomputed: Sequence[float]) -> Differences:
    return differences(each.recorded[1:], recomputed[:-1])


async def _recomputed(made: Engine, of: Sequence[Sampled], shape: Shape) -> dict[str, Any]:
    """All tokens; and those at whose position each layer chose the same experts while decoding, beside the others."""
    said = await _said(made, of, AT_ONCE)
    alike, unlike, every = list[Differences](), list[Differences](), list[Differences]()
    choices, changed = 0, 0
    for each, answer in zip(of, said, strict=True):
        apart = differences(each.recorded, answer["logprobs"][each.begin - 1 :])
        rows, others = (_rows(encoded, shape)[each.begin - 1 :] for encoded in (each.experts, answer["experts"]))
        moved = (np.sort(rows, axis=2) != np.sort(others, axis=2)).any(axis=2)  # [tokens, layers]
        choices, changed = choices + moved.size, changed + int(moved.sum())
        every.append(apart)
        alike.append(apart[~moved.any(axis=1)])
        unlike.append(apart[moved.any(axis=1)])
    return {
        **spread(every),
        "layers_with_other_experts": round(changed / choices, 6),
        "where_all_experts_are_the_same": spread(alike),
        "where_some_are_not": spread(unlike),
    }


def _rows(encoded: str, shape: Shape) -> npt.NDArray[np.int32]:
    flat = np.frombuffer(base64.b64decode(encoded, validate=True), "<i4")
    return flat.reshape(-1, shape.num_hidden_layers, shape.num_experts_per_tok)
