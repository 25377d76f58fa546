"""Routed experts of agents' turns, and of what is cut: every sample has the rows of its tokens, each asked for once."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import numpy as np
import pytest
from aiohttp import web

from miles_router.settings.config import MiddlewareSpec
from miles_router.testing import SimulatedWorker
from tests.support.brake import Brake
from tests.support.cache_trial import CACHE, checkpoint
from tests.support.cuts import cut, lose
from tests.support.experts_trial import (
    EXPERTS,
    HI,
    MOE,
    SHAPE,
    WIDTH,
    ExpertsTrial,
    episode,
    experts_of,
    experts_trial,
    simulated_experts,
    tokens_of,
    told,
)
from tests.support.generations import Generating
from tests.support.recording_proxy import Exchange, RecordingProxy
from tests.support.scripted_chat import DONE, able, chat_reply, meta_of
from tests.support.scripted_worker import script
from tests.support.session_trial import CHAT, SESSIONS, message_of, user
from tests.support.stage import Stage, staged
from tests.support.under_way import under_way
from tests.support.waiting import until

FIELD = b"routed_experts"
COMPLETIONS = "/v1/completions"


@pytest.fixture(scope="module")
async def shared() -> AsyncIterator[ExpertsTrial]:
    async with staged() as stage, simulated_experts(stage, around=(SESSIONS, CACHE)) as made:
        yield made


@pytest.fixture
def trial(shared: ExpertsTrial) -> ExpertsTrial:
    """Sessions and the cache with a keeper of experts behind them; of no test alone, but for its proxy."""
    shared.worker.log.clear()
    return shared


# Sessions


@pytest.mark.parametrize("incremental", [False, True])
async def test_each_row_of_an_episode_comes_once(stage: Stage, incremental: bool) -> None:
    async with simulated_experts(stage, around=(SESSIONS,), incremental_streaming_output=incremental) as trial:
        session = await trial.create()
        await episode(trial, session, 8)
        (sample,) = await trial.exact(session)
        ends = [len(tokens_of(each)) - 1 for each in trial.generations(CHAT)]
        assert trial.starts(CHAT) == [0, *ends[:-1]]
        assert len(sample["tokens"]) - 1 == ends[-1]
        assert trial.held["transferred_rows"] == ends[-1]
        assert trial.held["bytes"] == ends[-1] * WIDTH
        assert [each["routed_experts"] for each in await trial.records(session)] == [{"rows": end} for end in ends]
        found = await trial.rows(session_id=session)
        assert np.array_equal(found, experts_of(sample))


async def test_completions_in_a_session_have_their_rows(trial: ExpertsTrial) -> None:
    session = await trial.create()
    path = f"/sessions/{session}{COMPLETIONS}"
    assert (await trial.post(path, {"model": "m", "prompt": "Once upon", "max_tokens": 5})).status == 200
    tokens = tokens_of(trial.generations(COMPLETIONS)[-1])
    asked = {"model": "m", "prompt": [*tokens, 40, 41], "max_tokens": 5, "stream": True}
    answer = await trial.post(path, asked)
    assert answer.body.endswith(DONE)
    assert FIELD not in answer.body
    assert trial.starts(COMPLETIONS) == [0, len(tokens) - 1]
    (sample,) = await trial.exact(session)
    assert sample["tokens"] == tokens_of(trial.generations(COMPLETIONS)[-1])


@pytest.mark.parametrize("fields", [{"prompt": ["Once upon", "a time"]}, {"prompt": "Once upon", "n": 2}])
async def test_of_several_streamed_completions_the_engine_does_not_say_whose_rows_it_tells(
    trial: ExpertsTrial, fields: dict[str, Any]
) -> None:
    session = await trial.create()
    body = {"model": "m", "max_tokens": 5, "stream": True, **fields}
    assert (await trial.post(f"/sessions/{session}{COMPLETIONS}", body)).status == 200
    samples = await trial.samples(session)
    assert len(samples) == 2
    for sample in samples:
        assert "routed_experts" not in sample
        assert "of several completions" in sample["metadata"]["routed_experts_missing"]
    (asked,) = [exchange.json() for exchange in trial.worker.log.at(COMPLETIONS)]
    assert "return_routed_experts" not in asked


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("path", "fields"), [(CHAT, {}), (CHAT, {"n": 2}), (COMPLETIONS, {})], ids=["chat", "choices", "completion"]
)
async def test_an_agent_that_asks_for_rows_gets_none_and_leaves_no_gap(
    trial: ExpertsTrial, path: str, stream: bool, fields: dict[str, Any]
) -> None:
    session = await trial.create()
    body = {"model": "m", "messages": HI, "prompt": "Hi", "max_tokens": 6, "stream": stream, **fields}
    asks = {"return_routed_experts": True, "routed_experts_start_len": 3, "return_meta_info": not stream}
    answer = await trial.post(f"/sessions/{session}{path}", {**body, **asks})
    assert answer.status == 200
    assert FIELD not in answer.body
    assert await trial.exact(session)


async def test_a_stream_that_is_made_of_a_whole_answer_has_its_rows(stage: Stage) -> None:
    worker = able(await stage.worker(), "messages")  # an engine that cannot stream ids
    trial = await experts_trial(stage, worker, around=(SESSIONS,))
    worker.next(script(chat_reply([7, 8], meta_info=meta_of([7, 8], routed_experts=told([7, 8])))))
    session = await trial.create()
    assert await trial.stream(session, HI)
    assert not json.loads(worker.requests[-1].body).get("stream")
    assert len(await trial.exact(session)) == 1


async def test_a_sample_that_is_cut_has_the_rows_of_what_is_left(trial: ExpertsTrial) -> None:
    session = await trial.create()
    await episode(trial, session, 3)
    (whole,) = await trial.exact(session)
    first, second, third = whole["metadata"]["turns"]
    for length in (first["start"] + 1, first["end"], second["start"] + 3, second["end"], third["end"] - 1):
        (sample,) = await trial.exact(session, max_seq_len=length)
        assert len(sample["tokens"]) == length
        assert len(experts_of(sample)) == length - 1


# Aborts and pauses


@pytest.mark.parametrize("stream", [False, True])
async def test_a_turn_asks_for_the_rows_behind_each_cut_alone(stage: Stage, stream: bool) -> None:
    settings = {"partial_rollout": "resume"}
    async with simulated_experts(stage, around=(SESSIONS,), settings=settings, token_latency_s=0.0002) as trial:
        session, brake = await trial.create(), Brake(trial.worker.engine)
        async with under_way(trial.turn(session, HI, max_tokens=40, ignore_eos=True, stream=stream)) as turn:
            for version, tokens in (("2", 5), ("3", 8)):
                await cut(trial, brake, tokens, version)
            assert (await turn).status == 200
        (sample,) = await trial.exact(session)
        first, second, third = trial.generations(CHAT)
        assert sample["tokens"] == tokens_of(third)
        assert trial.starts(CHAT) == [0, len(tokens_of(first)) - 1, len(tokens_of(second)) - 1]


@pytest.mark.alone("its worker comes back within a step of the test's loop")
@pytest.mark.parametrize("tokens", [0, 1, 9])
async def test_a_stream_whose_worker_was_lost_has_all_its_rows(stage: Stage, tokens: int) -> None:
    settings = {"resume_on_worker_loss": True, "max_retries": 3}
    async with simulated_experts(stage, around=(SESSIONS,), settings=settings, token_latency_s=0.0002) as trial:
        session, brake = await trial.create(), Brake(trial.worker.engine)
        history = [*HI, message_of(await trial.chat(session, HI)), user("Go on")]
        brake.when = lambda generation: len(generation.output_ids) >= tokens
        async with under_way(trial.stream(session, history, max_tokens=12, ignore_eos=True)) as turn:
            await until(lambda: brake.on, "it has sampled so many")
            await lose(trial, brake)
            await turn
        (sample,) = await trial.exact(session)
        assert sample["loss_mask"][-12:] == [1] * 12


class EndsEarly(RecordingProxy):
    """Breaks chat streams off before they say that they end."""

    async def _answer(
        self, request: web.BaseRequest, exchange: Exchange, reply: aiohttp.ClientResponse, generating: Generating
    ) -> web.StreamResponse:
        if exchange.path != CHAT:
            return await super()._answer(request, exchange, reply, generating)
        answer = web.StreamResponse(headers={"Content-Type": reply.content_type})
        await answer.prepare(request)
        async for line in reply.content:
            if b'"finish_reason":"' in line:
                assert request.transport is not None
                request.transport.abort()
                break
            await answer.write(line)
        return answer


async def test_a_stream_that_was_lost_at_its_end_asks_for_its_rows_alone(stage: Stage) -> None:
    layers = (MiddlewareSpec(SESSIONS), MiddlewareSpec(EXPERTS, {"moe_shape": SHAPE}))
    async with (
        SimulatedWorker(moe=MOE, tokenizer=checkpoint(), weight_version="1") as worker,
        EndsEarly(worker.url) as proxy,
    ):
        settings: dict[str, Any] = {"hf_checkpoint": checkpoint(), "resume_on_worker_loss": True}
        trial = ExpertsTrial(await stage.router(proxy.url, middlewares=layers, **settings), [worker])
        session = await trial.create()
        await trial.stream(session, HI, max_tokens=12, ignore_eos=True)
        (sample,) = await trial.exact(session)
        assert sample["loss_mask"][-12:] == [1] * 12
        chat, rows = [each for each in worker.log if each.generations][-2:]
        assert (chat.path, rows.path) == (CHAT, "/generate")
        asked = rows.json()
        assert asked["sampling_params"]["max_new_tokens"] == 0
        assert asked["input_ids"] == sample["tokens"]
