"""The training loop. It runs in SGLang's environment, which has torch, and says each step as a line of JSON.

    python -m tests.training.trainer --router URL --model DIRECTORY --scratch DIRECTORY

Of the router it imports only the client. Each step samples groups of answers, trains on them, and updates the weights
while the next step's answers are being sampled: these begin under the old weights and go on under the new ones.
"""

from __future__ import annotations

import argparse
import asyncio
import shutil
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import torch
from transformers import AutoTokenizer

from miles_router.client import RouterClient, group
from miles_router.tasks import spawn
from miles_router.trajectory.sample import write_safetensors
from tests.training import measures
from tests.training.learner import Learner
from tests.training.tasks import TASKS, Question, Rollout, draw, held_out

#: Steps of the optimizer that one step of sampling is for.
MINIBATCHES = 2
#: Held-out questions whose greedy answers are shown.
SHOWN = 4
#: Of the newest step, what a page shows.
SAMPLES_FILE = "samples.safetensors"


def say(event: str, **fields: Any) -> None:
    """Print one event as a line of JSON."""
    print(orjson.dumps({"event": event, **fields}, option=orjson.OPT_SERIALIZE_NUMPY).decode(), flush=True)


class Trainer:
    """One run of the loop against a router."""

    def __init__(self, client: RouterClient, options: argparse.Namespace) -> None:
        self._client = client
        self._options = options
        self._task = TASKS[options.task]()
        self._tokenizer = AutoTokenizer.from_pretrained(options.model)
        self._learner = Learner(options.model, layers=options.layers, learning_rate=options.learning_rate)
        self._version = ""

    async def run(self) -> None:
        """Train, and say what comes of it."""
        await self._update(self._save(0))
        await self._examine("before")
        sampling = spawn(self._sample(0), name="rollouts")
        for number in range(self._options.steps):
            began = time.monotonic()
            groups = await sampling
            sampled = time.monotonic()
            step = self._train(number, groups)
            weights = self._save(number + 1)
            trained = time.monotonic()
            if number + 1 < self._options.steps:
                sampling = spawn(self._sample(number + 1), name="rollouts")
                await self._under_way(sampling)
            step.update_s = await self._update(weights)
            step.sampling_s, step.training_s = sampled - began, trained - sampled
            say("step", **asdict(step))
        newest = [each.sample for made in groups for each in made]
        (self._options.scratch / SAMPLES_FILE).write_bytes(write_safetensors(newest, {}))
        await self._examine("after")

    async def _sample(self, number: int) -> list[list[Rollout]]:
        """Sample a step's groups, all at once."""
        questions = draw(1000 * self._options.seed + number, self._options.prompts)

        async def one(question: Question) -> list[Rollout]:
            return await group(lambda: self._task.rollout(self._client, question, 1.0), self._options.group)

        return list(await asyncio.gather(*map(one, questions)))

    async def _under_way(self, sampling: asyncio.Task[Any]) -> None:
        """Wait until rollouts are being sampled, or have failed."""
        waiting = spawn(self._task.under_way(self._client), name="under way")
        await asyncio.wait({sampling, waiting}, return_when=asyncio.FIRST_COMPLETED)
        waiting.cancel()

    def _save(self, number: int) -> Path:
        """Write the trained layers as they are; return the directory, whose name is their version."""
        weights: Path = self._options.scratch / str(number)
        self._learner.save(weights)
        return weights

    async def _update(self, weights: Path) -> float:
        """Give every engine the trained layers, and name them; return for how many seconds the fleet was paused."""
        began = time.monotonic()
        async with self._client.paused(self._options.update):
            if self._options.engine == "vllm":
                await self._update_vllm(weights)
            else:
                flush = self._options.update != "in_place"  # the engine holds requests, with their keys and values
                await self._client.update_weights_from_disk(
                    str(weights), weight_version=weights.name, flush_cache=flush
                )
        shutil.rmtree(weights)
        self._version = weights.name
        return time.monotonic() - began

    async def _update_vllm(self, weights: Path) -> None:
        loaded = {"weights_path": str(weights)}
        await self._client.control("/collective_rpc", method="reload_weights", kwargs=loaded)
        await self._client.control("/update_weight_version", new_version=weights.name)

    def _train(self, number: int, groups: Sequence[Sequence[Rollout]]) -> measures.Step:
        """Measure a step's samples and train on them."""
        rollouts = [rollout for made in groups for rollout in made]
        samples = [rollout.sample for rollout in rollouts]
        gains = np.concatenate([measures.advantages([each.reward for each in made]) for made in groups])
        tokens, masks = [each.tokens for each in samples], [each.loss_mask for each in samples]
        old = [each.logprobs[each.loss_mask.astype(bool)] for each in samples]
        stamps = [measures.versions_of(each) for each in samples]
        ours, theirs, versions = self._learner.logprobs(tokens, masks), np.concatenate(old), np.concatenate(stamps)
        current = versions == self._version
        step = measures.Step(
            number=number,
            reward=float(np.mean([each.reward for each in rollouts])),
            samples=self._options.prompts * self._options.group,
            whole=sum(map(measures.is_whole, samples)),
            spanning=sum(len(set(each)) > 1 for each in stamps),
            tokens=len(ours),
            current=measures.distance(ours[current], theirs[current]),
            older=measures.distance(ours[~current], theirs[~current]),
            changed=float(np.mean([measures.changes(self._tokenizer, each) for each in samples])),
            taught=bool(gains.any()),
        )
        known: list[Any] | None = old
        if self._options.tokens == "text":
            tokens, masks = map(list, zip(*map(self._from_text, rollouts), strict=True))
            known = None
        order = np.random.default_rng(number).permutation(len(samples))
        clipped = []
        for part in np.array_split(order, MINIBATCHES):
            rows = [place for place in part if masks[place].any()]
            chosen = [[each[place] for place in rows] for each in (tokens, masks, gains)]
            was = None if known is None else [known[place] for place in rows]
            clipped.append(self._learner.train(chosen[0], chosen[1], was, chosen[2]))
        step.clipped = float(np.mean(clipped))
        return step

    def _from_text(self, rollout: Rollout) -> tuple[Any, Any]:
        """Return ids and mask as a client gets them that has the text alone."""
        given = self._tokenizer.encode(rollout.prompt)
        ids = self._tokenizer.encode(rollout.prompt + rollout.sample.response)
        mask = np.zeros(len(ids), dtype=np.uint8)
        mask[len(given) :] = 1
        return np.array(ids, dtype=np.int32), mask

    async def _examine(self, when: str) -> None:
        """Say the mean reward on questions that are never trained on, and some greedy answers."""
        ask = self._task.rollout
        sampled = await asyncio.gather(*(ask(self._client, each, 1.0) for each in held_out(self._options.examined)))
        shown = await asyncio.gather(*(ask(self._client, each, 0.0) for each in held_out(SHOWN)))
        answers = [[question[0], each.answer] for question, each in zip(held_out(SHOWN), shown, strict=True)]
        say("examined", when=when, reward=float(np.mean([each.reward for each in sampled])), answers=answers)


def parser() -> argparse.ArgumentParser:
    """Return the command line. `make train` gives all of it."""
    made = argparse.ArgumentParser(description="Train through a router.")
    made.add_argument("--router", required=True)
    made.add_argument("--model", type=Path, required=True)
    made.add_argument("--scratch", type=Path, required=True)
    made.add_argument("--engine", choices=("sglang", "vllm"), default="sglang")
    made.add_argument("--task", choices=TASKS, default="capitals")
    made.add_argument("--tokens", choices=("exact", "text"), default="exact")
    made.add_argument("--update", choices=("abort", "retract", "in_place"), default="abort")
    for name, kind, default in (
        ("steps", int, 16),
        ("prompts", int, 8),
        ("group", int, 8),
        ("examined", int, 32),
        ("seed", int, 0),
        ("layers", int, 6),
        ("learning-rate", float, 1e-4),
        ("threads", int, 2),
    ):
        made.add_argument(f"--{name}", type=kind, default=default)
    return made


async def main() -> None:
    """Run the command line."""
    options = parser().parse_args()
    torch.manual_seed(options.seed)
    torch.set_num_threads(options.threads)
    async with RouterClient(options.router) as client:
        await Trainer(client, options).run()


if __name__ == "__main__":
    asyncio.run(main())
