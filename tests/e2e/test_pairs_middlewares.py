"""Sessions, the text cache and routed experts above prefill/decode pairs: they notice nothing, and all is exact."""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from miles_router.tasks import spawn
from miles_router.testing.worker.exchange_log import GenerationRecord
from tests.support.cache_trial import CACHE, checkpoint
from tests.support.experts_trial import HI, MOE, ExpertsTrial, episode, experts_trial
from tests.support.pairs import Halves, halves
from tests.support.session_trial import CHAT, SESSIONS, exactly, message_of, qwen3, session_trial, user
from tests.support.stage import Stage
from tests.support.tokenizers import tokenizer_directory
from tests.support.under_way import under_way

TURN: dict[str, Any] = {"max_tokens": 8}


@asynccontextmanager
async def above(stage: Stage, **settings: Any) -> AsyncIterator[tuple[ExpertsTrial, Halves]]:
    """Sessions, the cache and a keeper of experts before two pairs that sample alike."""
    trial = await experts_trial(stage, around=(SESSIONS, CACHE), **settings)
    worker = {"moe": MOE, "tokenizer": checkpoint(), "weight_version": "1"}
    async with halves(stage, 2, 2, router=trial.router, worker=worker) as pair:
        yield trial, pair


def turns_of(pair: Halves, path: str) -> list[GenerationRecord]:
    """What the decode halves sampled, in the order of its prompts' lengths."""
    told = [record for worker in pair.decodes for exchange in worker.log.at(path) for record in exchange.generations]
    return sorted(told, key=lambda record: len(record.input_ids))


async def test_an_episode_is_exact_with_the_rows_of_every_position(stage: Stage) -> None:
    async with above(stage) as (trial, pair):
        session = await trial.create()
        await episode(trial, session, 5, **TURN)
        (sample,) = await trial.exact(session)
        told = turns_of(pair, CHAT)
        assert len(told) == 5
        exactly(sample, *told)
        busy = [worker for worker in pair.workers if worker.log.at(CHAT)]
        assert len(busy) == 2, "a session keeps its halves"


@pytest.mark.parametrize("mode", ["abort", "retract", "in_place"])
@pytest.mark.parametrize("phase", ["prompt", "output"])
async def test_a_turn_outlives_an_update(stage: Stage, mode: str, phase: str) -> None:
    async with above(stage, partial_rollout="resume") as (trial, pair):
        session = await trial.create()
        history = [*HI, message_of(await trial.chat(session, HI, **TURN)), user("Go on")]
        pair.hold(pair.prefills if phase == "prompt" else pair.decodes)
        turn = spawn(trial.chat(session, history, **TURN), name="an agent")
        await (pair.prefilling() if phase == "prompt" else pair.decoding())
        await pair.post("/pause_generation", mode=mode)
        pair.release()
        await pair.post("/update_weight_version", new_version="2", abort_all_requests=False)
        await pair.post("/continue_generation")
        await turn
        (sample,) = await trial.exact(session)
        sampled = Counter[str]()
        for each in sample["weight_versions"]:
            sampled[each["version"]] += each["end"] - each["start"]
        assert sampled["1"] + sampled["2"] == 16
        assert sampled["2"] == 8 if phase == "prompt" else 0 < sampled["2"] < 8


@pytest.mark.parametrize("lost", ["prefill", "decode"])
async def test_a_streamed_turn_outlives_the_loss_of_a_half(stage: Stage, lost: str) -> None:
    trial = await session_trial(stage, resume_on_worker_loss=True, hf_checkpoint=tokenizer_directory("qwen3"))
    worker = {"tokenizer": qwen3(), "weight_version": "1"}
    async with halves(stage, 2, 2, router=trial.router, worker=worker) as pair:
        session = await trial.create()
        those = pair.prefills if lost == "prefill" else pair.decodes
        pair.hold(those)
        async with under_way(trial.stream(session, HI, max_tokens=20, ignore_eos=True)) as turn:
            await (pair.prefilling() if lost == "prefill" else pair.decoding())
            await next(each for each in those if each.running).kill()
            pair.release()
            await turn
        (sample,) = await trial.samples(session)
        last = turns_of(pair, CHAT)[-1]
        assert sample["tokens"] == [*last.input_ids, *last.output_ids]
        assert sum(sample["loss_mask"]) == 20
