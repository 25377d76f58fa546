"""Turns of an agent that are cut anywhere, as often as one likes, are the turns that an uncut one would be."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from miles_router.testing import SimulatedWorker
from miles_router.testing.worker.door import GenerationRecord
from tests.support.brake import Brake
from tests.support.chat_turns import plain, read_stream
from tests.support.session_trial import ADD, ASK_ADD, SessionTrial, message_of, qwen3, session_trial, user
from tests.support.stage import Stage
from tests.support.waiting import soon

HI = [user("What is 17 + 25?")]
TWO = f"I add twice.\n{ASK_ADD}\n{ASK_ADD}"
ANSWERS = {
    "text": "It is 42, naïve 世界 😀, is it not?",
    "reasoning": "<think>\nI add < both </ of them.\n</think>\n\nIt is 42.",
    "one call": f"I add.\n{ASK_ADD}",
    "two calls": TWO,
    "all": f"<think>\nI need a tool.\n</think>\n\n{TWO}",
}


@dataclass
class Scene:
    trial: SessionTrial
    brake: Brake
    version: int = 0

    @property
    def running(self) -> list[Any]:
        return list(self.trial.worker.engine.running.values())


@asynccontextmanager
async def scene_of(stage: Stage, options: Any = None, **worker: Any) -> AsyncIterator[Scene]:
    kind: dict[str, Any] = {"tokenizer": qwen3(), "weight_version": "0", "token_latency_s": 0.0002}
    kind |= {"reasoning_parser": "qwen3", **worker}
    async with SimulatedWorker(**kind) as started:
        trial = await session_trial(stage, started, options=options, partial_rollout="resume")
        yield Scene(trial, Brake(started.engine))


async def cut(scene: Scene, tokens: int, asked: asyncio.Future[Any]) -> bool:
    """Cut the only generation where it has so many tokens, or one more, and give it new weights."""
    scene.brake.on = True
    while not asked.done() and not (scene.running and len(scene.running[0].output_ids) >= tokens):
        if scene.running and scene.trial.worker.engine.paused is None:
            scene.brake.on = len(scene.running[0].output_ids) >= tokens
        await asyncio.sleep(0)
    if asked.done():
        scene.brake.on = False
        return False
    scene.brake.on = True
    scene.version += 1
    for path, body in (
        ("/pause_generation", {"mode": "abort"}),
        ("/update_weight_version", {"new_version": str(scene.version), "abort_all_requests": False}),
        ("/continue_generation", {}),
    ):
        answer = await scene.trial.ask("POST", path, body)
        assert answer.status == 200, answer.body
    return True


@dataclass
class Turned:
    """A turn that is over: its answer, its only sample, and the generations that it took."""

    answer: Any
    sample: Any
    legs: list[GenerationRecord]


async def turn(scene: Scene, text: str, cuts: Sequence[int], **fields: Any) -> Turned:
    """A turn that says this, cut where its generations have so many tokens."""
    scene.trial.worker.say(text)
    session, before = await scene.trial.create(), len(scene.trial.door)
    asking = scene.trial.stream if fields.pop("stream", False) else scene.trial.chat
    asked = asyncio.ensure_future(asking(session, HI, max_tokens=500, tools=[ADD], **fields))
    done = 0
    for tokens in cuts:
        done += await cut(scene, tokens, asked)
    scene.brake.on = False
    answer = await soon(asked)
    legs = [each for exchange in scene.trial.door[before:] for each in exchange.generations]
    assert len(legs) == done + 1
    (sample,) = await scene.trial.samples(session)
    return Turned(answer, sample, legs)


def check(turned: Turned, uncut: Turned) -> None:
    """Each token once, as it was sampled, under the weights that sampled it."""
    sampled = [token for leg in turned.legs for token in leg.output_ids]
    assert sampled == uncut.legs[0].output_ids
    prompt = turned.legs[0].input_ids
    assert turned.sample["tokens"] == [*prompt, *sampled]
    assert turned.sample["loss_mask"] == [0] * len(prompt) + [1] * len(sampled)
    logprobs = [logprob for leg in turned.legs for logprob in leg.logprobs]
    assert np.array_equal(
        np.array(turned.sample["logprobs"][len(prompt) :], np.float32), np.array(logprobs, np.float32)
    )
    spans, at = [], len(prompt)
    for leg in turned.legs:
        (version,) = {span.version for span in leg.weight_versions}
        spans.append({"version": version, "start": at, "end": at + len(leg.output_ids)})
        at += len(leg.output_ids)
    assert turned.sample["weight_versions"] == spans


@pytest.mark.parametrize("name", ANSWERS)
async def test_a_whole_answer_cut_at_any_token_is_the_uncut_one(stage: Stage, name: str) -> None:
    async with scene_of(stage) as scene:
        text = ANSWERS[name]
        uncut = await turn(scene, text, ())
        for tokens in range(0, len(qwen3().encode(text)), 3):
            cut_once = await turn(scene, text, (tokens,))
            check(cut_once, uncut)
            assert plain(message_of(cut_once.answer)) == plain(message_of(uncut.answer)), tokens
            for field in ("finish_reason", "matched_stop"):
                assert cut_once.answer["choices"][0][field] == uncut.answer["choices"][0][field]
            assert cut_once.answer["usage"] == uncut.answer["usage"]


@pytest.mark.parametrize("incremental", [False, True])
@pytest.mark.parametrize("name", ANSWERS)
async def test_a_stream_cut_at_any_token_is_the_uncut_one(stage: Stage, name: str, incremental: bool) -> None:
    async with scene_of(stage, incremental_streaming_output=incremental) as scene:
        text, asked = ANSWERS[name], {"stream": True, "stream_options": {"include_usage": True}}
        uncut = await turn(scene, text, (), **asked)
        for tokens in range(0, len(qwen3().encode(text)), 3):
            cut_once = await turn(scene, text, (tokens,), **asked)
            check(cut_once, uncut)
            assert read_stream(cut_once.answer) == read_stream(uncut.answer), tokens
