"""A client that leaves in the middle of a turn pays for it: what was sampled counts against the session's budget."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import pytest

from tests.support.http import Client, request
from tests.support.session_apis import CHATS, FIELDS, Api
from tests.support.session_trial import CHAT, JSON, SessionTrial, exactly, simulated_sessions, user
from tests.support.stage import Stage
from tests.support.waiting import until

COMPLETIONS = Api("/v1/completions")
PLAIN = [*(api for api in CHATS if not api.named), COMPLETIONS]
apis = pytest.mark.parametrize("api", PLAIN, ids=str)
both = pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
SAME = [("X-Turn-Id", "t1")]


@pytest.fixture
async def trial(stage: Stage) -> AsyncIterator[SessionTrial]:
    async with simulated_sessions(stage, token_latency_s=0.005) as started:
        yield started


def body_of(api: Api, most: int, *, stream: bool, **fields: Any) -> bytes:
    said, length = FIELDS[api.path]
    text = [user("Hi")] if said == "messages" else "Hi"
    body = {"model": "m", said: text, length: most, "stream": stream, "ignore_eos": True, **fields}
    return json.dumps(body).encode()


async def begin(
    stage: Stage,
    trial: SessionTrial,
    session: str,
    api: Api,
    most: int,
    *,
    stream: bool,
    same: bool = False,
    **more: Any,
) -> Client:
    """A turn that a client has asked for, once its engine has sampled some of it."""
    client = await stage.client(trial.router)
    headers = [*JSON, *(SAME if same else ())]
    asked = body_of(api, most, stream=stream, **more)
    await client.send(request("POST", f"/sessions/{session}{api.path}", headers, asked))
    await until(
        lambda: any(len(running.output_ids) > 2 for running in trial.worker.engine.running.values()), "it samples"
    )
    return client


async def leave(stage: Stage, client: Client) -> None:
    client.abort()
    await stage.nothing_under_way()


@pytest.mark.alone("the process that has the session learns a moment later that the client has left")
@both
@apis
async def test_a_turn_that_is_left_is_recorded_as_aborted(
    stage: Stage, trial: SessionTrial, api: Api, stream: bool
) -> None:
    session = await trial.create(contract={"budget": {"max_tokens": 5000, "max_turns": 9}})
    await leave(stage, await begin(stage, trial, session, api, 3000, stream=stream))
    await until(lambda: not trial.worker.running, "the engine is free")
    (record,) = await trial.records(session)
    assert record["finish_reason"] == "abort"
    assert 0 < record["completion_tokens"] < 3000
    (sample,) = await trial.samples(session)
    assert sample["status"] == "aborted"
    (generation,) = trial.worker.log.at(api.path if api is COMPLETIONS else CHAT)[0].generations
    exactly(sample, generation)
    assert record["completion_tokens"] == len(generation.output_ids)
    left = 5000 - record["completion_tokens"]
    await api.ask(trial, session, 4000, stream=False)
    sent = trial.worker.log.at(api.path if api is COMPLETIONS else CHAT)[-1].json()
    assert min(4000, left) == (sent.get("max_tokens") or sent.get("max_completion_tokens"))


@apis
async def test_leaving_again_and_again_uses_up_the_tokens(stage: Stage, trial: SessionTrial, api: Api) -> None:
    session = await trial.create(contract={"budget": {"max_tokens": 40}})
    begun = 0
    while begun < 60:
        client = await stage.client(trial.router)
        await client.send(request("POST", f"/sessions/{session}{api.path}", JSON, body_of(api, 6, stream=True)))
        status, part = (await client.read_head("POST")).status, await client.read_part()
        if status == 400 or b"context_length_exceeded" in part:
            break
        begun += 1
        await leave(stage, client)
    records = await trial.records(session)
    assert len(records) <= begun < 60
    assert sum(each["completion_tokens"] for each in records) == 40
    assert (await trial.read(session))["metadata"]["end_reason"] == "budget_tokens"


@pytest.mark.alone("the process that has the session learns a moment later that the client has left")
@both
@apis
async def test_leaving_before_the_first_byte_uses_up_the_turns(stage: Stage, api: Api, stream: bool) -> None:
    async with simulated_sessions(stage, token_latency_s=0.1) as trial:
        session = await trial.create(contract={"budget": {"max_turns": 2}})
        for _ in range(2):
            client = await stage.client(trial.router)
            asked = body_of(api, 6, stream=stream)
            await client.send(request("POST", f"/sessions/{session}{api.path}", JSON, asked))
            await until(lambda: trial.worker.running, "it is at the engine")
            await leave(stage, client)
        refused = await api.ask(trial, session, 6)
        assert refused.status == 400
        assert len(trial.log if api is not COMPLETIONS else trial.worker.log.at(api.path)) == 2


@both
async def test_several_choices_that_are_left_count(stage: Stage, trial: SessionTrial, stream: bool) -> None:
    session = await trial.create(contract={"budget": {"max_tokens": 5000, "max_turns": 1}})
    await leave(stage, await begin(stage, trial, session, Api(CHAT), 2000, stream=stream, n=2))
    refused = await trial.turn(session, [user("Hi")])
    assert refused.status == 400


@both
@apis
async def test_a_turn_that_was_left_is_repeated_under_its_id(
    stage: Stage, trial: SessionTrial, api: Api, stream: bool
) -> None:
    session = await trial.create(contract={"budget": {"max_turns": 1}})
    asked = body_of(api, 200, stream=stream)
    client = await begin(stage, trial, session, api, 200, stream=stream, same=True)
    client.abort()
    answers = [await trial.ask("POST", f"/sessions/{session}{api.path}", asked, SAME) for _ in range(2)]
    assert answers[0].status == 200, answers[0].body
    assert answers[0].body == answers[1].body, "the answer of the repetition, not the one that was cut"
    assert [each["finish_reason"] for each in await trial.records(session)] == ["abort", "length"]
    assert (await api.ask(trial, session, 6)).status == 400, "both were one turn, and there is no other"


async def test_repeating_a_turn_that_is_left_each_time_is_bounded(stage: Stage, trial: SessionTrial) -> None:
    session = await trial.create(contract={"budget": {"max_turns": 1}})
    begun = 0
    while begun < 10:
        client = await stage.client(trial.router)
        asked = body_of(Api(CHAT), 3000, stream=True)
        await client.send(request("POST", f"/sessions/{session}{CHAT}", [*JSON, *SAME], asked))
        if (await client.read_head("POST")).status != 200:
            break
        begun += 1
        await client.read_part()
        await leave(stage, client)
    assert begun == 3


async def test_without_a_budget_a_turn_that_is_left_is_none(stage: Stage, trial: SessionTrial) -> None:
    session = await trial.create(contract={"sampling": {"temperature": 1.0}})
    await leave(stage, await begin(stage, trial, session, Api(CHAT), 3000, stream=True))
    assert await trial.records(session) == []
