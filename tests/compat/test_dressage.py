"""Dressage's calls, in the order of its code (`rollout/generate`, `training/train_async_with_rollout_pause.py`, and the
proxy in its sandboxes): what its reader makes of the answers is what the workers were given and sampled."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from typing import Any

import aiohttp
import numpy as np
import pytest

from miles_router.testing.worker.exchange_log import GenerationRecord
from tests.compat.dressage_client import DressageClient, DressageSample, context_overflow_of, read_segments
from tests.support.experts_trial import MOE, simulated_experts, truth
from tests.support.http import ask
from tests.support.scripted_chat import able, chat_reply
from tests.support.scripted_worker import script
from tests.support.session_trial import (
    CHAT,
    SESSIONS,
    Message,
    SessionTrial,
    chunks_of,
    message_of,
    said,
    session_trial,
    simulated_sessions,
    text_of,
    user,
)
from tests.support.stage import Stage
from tests.support.under_way import under_way
from tests.support.waiting import until

GROUP, AGENTS, TURNS = "task-7", 8, 3


@pytest.fixture
async def http() -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession() as session:
        yield session


def body(history: Sequence[Message], **fields: Any) -> dict[str, Any]:
    return {"model": "m", "messages": list(history), "max_tokens": 6, **fields}


def exactly(sample: DressageSample, turns: Sequence[GenerationRecord]) -> None:
    """A sample is what the worker was given and has sampled in these generations, one behind the other."""
    tokens: list[int] = []
    sampled: list[tuple[int, float]] = []
    for turn in turns:
        assert turn.input_ids[: len(tokens)] == tokens
        sampled += [(0, 0.0)] * (len(turn.input_ids) - len(tokens)) if tokens else []
        tokens = [*turn.input_ids, *turn.output_ids]
        sampled += [(1, logprob) for logprob in turn.logprobs]
    assert sample.tokens == tokens
    assert sample.loss_mask == [own for own, _ in sampled]
    assert np.array_equal(
        np.array(sample.rollout_log_probs, np.float32), [np.float32(logprob) for _, logprob in sampled]
    )
    assert sample.response_length == len(sampled)


async def test_white_box_agents_leave_samples_that_its_reader_takes(stage: Stage, http: aiohttp.ClientSession) -> None:
    async with simulated_experts(stage, around=(SESSIONS,)) as trial:
        client = DressageClient(http, trial.router.url)

        async def episode(number: int) -> None:
            name, history = f"wb-{number}", [user(f"I am {number}.")]
            for _ in range(TURNS):
                answer = await client.chat(body(history), session_id=name, instance_id=GROUP)
                history += [message_of(answer), user("Go on")]
            told = await client.finalize(name, instance_id=GROUP, label={"answer": number})
            assert (told["num_steps"], told["num_segments"], told["instance_id"]) == (TURNS, 1, GROUP)
            payload = await client.read(name, instance_id=GROUP)
            (sample,) = read_segments(payload, layers=MOE.layers, top_k=MOE.top_k)
            asked = [each for each in trial.log if dict(each.headers)[b"x-session-id"] == name.encode()]
            exactly(sample, [each.generation for each in asked])
            assert np.array_equal(sample.experts, truth(sample.tokens))
            assert sample.response == history[-2]["content"]
            assert sample.versions == ["1"] * sum(sample.loss_mask)
            assert (sample.truncated, sample.label) == (True, {"answer": number})
            (segment,) = payload["data"]
            assert "routed_experts" not in segment, "rows cross the network once"
            assert segment["messages"] == history[:-1]
            with pytest.raises(aiohttp.ClientResponseError, match="404"):
                await client.read(name, instance_id=GROUP)

        await asyncio.gather(*(episode(number) for number in range(AGENTS)))
        assert trial.held["bytes"] == 0, "what was drained is forgotten"


async def test_all_requests_within_a_turn_of_an_agent_in_a_sandbox_are_steps_of_it(
    stage: Stage, http: aiohttp.ClientSession
) -> None:
    async with simulated_sessions(stage) as trial:
        client = DressageClient(http, trial.router.url)
        history = [user("Hi")]
        for step in range(6):
            given = body(history, stream=step % 2 == 1)
            answer = await client.chat_in_sandbox(given, session_id="s", instance_id=GROUP, turn_id=f"t{step // 3}")
            history += [said(text_of(chunks_of(answer)) if given["stream"] else _content(answer)), user("Go on")]
        assert len(trial.log) == 6
        told = await client.finalize("s", instance_id=GROUP)
        assert (told["num_turns"], told["num_steps"], told["num_segments"]) == (2, 6, 1)
        payload = await client.read("s", instance_id=GROUP)
        exactly(read_segments(payload)[0], [each.generation for each in trial.log])
        assert payload["data"][0]["extra_info"]["turn_ids"] == ["t0", "t1"]


@pytest.mark.parametrize("stream", [False, True])
async def test_turn_gets_what_is_left_of_its_context_window(stage: Stage, stream: bool) -> None:
    async with simulated_sessions(stage, options={"context_window": 60}) as trial:
        named = [("X-Session-Id", "s"), ("X-Instance-Id", GROUP), ("X-Turn-Id", "t0")]
        for most in ({}, {"max_tokens": 4000}):
            asked = {"model": "m", "messages": [user("Hi")], "ignore_eos": True, "stream": stream, **most}
            assert (await trial.ask("POST", CHAT, asked, named)).status == 200
        assert [record["span"][1] for record in await trial.records("s")] == [60, 60]
        long = {**asked, "messages": [user("word " * 100)]}
        refused = await trial.ask("POST", CHAT, long, named)
        found = context_overflow_of(refused.status, refused.body)
        assert found is not None
        assert (found["context_window"], found["input_tokens"] > 100) == (60, True)
        assert refused.json()["error"]["code"] == "context_length_exceeded", "for what else reads it"
        assert len(trial.log) == 2, "before it is generated"
        messages = {"model": "m", "max_tokens": 4, "messages": [user("word " * 100)]}
        other = await trial.ask("POST", "/v1/messages", messages, named[:1])
        assert (other.status, "prompt is too long" in other.json()["error"]["message"]) == (400, True)
        assert (await post(trial, {"session_id": "s"}))["num_steps"] == 2
        (segment, *_) = (await trial.ask("POST", "/trajectory/read", {"session_id": "s"})).json()["data"]
        assert segment["metadata"]["end_reason"] == "context"


async def post(trial: SessionTrial, body: Any) -> Any:
    return (await trial.ask("POST", "/session/finalize", body)).json()


def _content(answer: bytes) -> str:
    return str(message_of(json.loads(answer))["content"])


async def test_branches_are_segments_of_which_each_token_is_trained_in_one(
    stage: Stage, http: aiohttp.ClientSession
) -> None:
    async with simulated_sessions(stage) as trial:
        client = DressageClient(http, trial.router.url)
        first = message_of(await client.chat(body([user("Hi")]), session_id="s", instance_id=GROUP))
        for words in ("This way", "That way"):
            await client.chat(body([user("Hi"), first, user(words)]), session_id="s", instance_id=GROUP)
        await client.finalize("s", instance_id=GROUP)
        one, other = read_segments(await client.read("s", instance_id=GROUP))
        root, left, right = (each.generation for each in trial.log)
        exactly(one, [root, left])
        assert other.tokens == [*right.input_ids, *right.output_ids]
        assert other.response_length == len(right.output_ids), "the shared turn is trained in the first"


async def test_its_trainer_updates_the_engines_between_pause_and_resume(
    stage: Stage, http: aiohttp.ClientSession
) -> None:
    """It updates them behind the router, one after the other, and names no version to it."""
    async with simulated_sessions(stage, token_latency_s=0.02, settings={"health_check_interval": 600}) as trial:
        client = DressageClient(http, trial.router.url)
        asking = client.chat(body([user("Hi")], max_tokens=60, ignore_eos=True), session_id="s", instance_id=GROUP)
        async with under_way(asking) as turn:
            await until(lambda: any(each.output_ids for each in trial.worker.engine.running.values()), "it samples")
            assert (await client.pause())["paused"]
            trial.worker.engine.token_latency_s = 0
            updated = await ask(
                trial.worker.url,
                "POST",
                "/update_weight_version",
                [("Content-Type", "application/json")],
                b'{"new_version": "2", "abort_all_requests": false}',
            )
            assert updated.status == 200
            assert not (await client.resume())["paused"]
            await turn
        await client.finalize("s", instance_id=GROUP)
        (sample,) = read_segments(await client.read("s", instance_id=GROUP))
        assert len(sample.versions) == 60
        assert sorted(set(sample.versions)) == ["1", "2"]
        assert sample.versions == sorted(sample.versions)


async def test_a_rollout_that_was_rejected_is_discarded_whatever_it_is(
    stage: Stage, http: aiohttp.ClientSession
) -> None:
    worker = able(await stage.worker()).always(script(chat_reply([7, 8])))
    trial = await session_trial(stage, worker)
    client = DressageClient(http, trial.router.url)
    for name in ("open", "finalized"):
        await client.chat(body([user("Hi")]), session_id=name, instance_id=GROUP)
    await client.finalize("finalized", instance_id=GROUP)
    told = [await client.discard(name) for name in ("open", "finalized", "finalized", "unknown")]
    assert [(each["success"], each["session_removed"], each["segments_removed"]) for each in told] == [
        (True, True, 0),
        (True, True, 1),
        (True, False, 0),
        (True, False, 0),
    ]
    assert trial.statistics()["bytes"] == 0
