"""Replies and clients that are lost within their rows, and answers without an end: nothing of them is held."""

from __future__ import annotations

import asyncio
import itertools
import json
from typing import Any

import numpy as np
import pytest

from miles_router.testing.worker.model.moe import encode_routes
from tests.faults.routed_experts.scenes import (
    FIELD,
    GOOD,
    HI,
    IDS,
    RUNNING,
    TOKENS,
    nothing_is_held,
    outcome,
    the_next_turn_works,
    the_next_works,
)
from tests.support.experts_trial import (
    ASKED,
    SHAPE,
    ExpertsTrial,
    compact,
    event_of,
    experts_trial,
    generated,
    told,
    truth,
)
from tests.support.http import request
from tests.support.scripted_chat import DONE, EVENT_STREAM, JSON, chat_answer, chat_events, meta_of, streamed
from tests.support.scripted_worker import (
    CLOSE,
    HANG,
    LAST_CHUNK,
    RESET,
    ScriptedWorker,
    chunk,
    chunked_head,
    head,
    script,
)
from tests.support.session_apis import case
from tests.support.stage import Stage
from tests.support.waiting import soon

LONG = told([9] * 3000)


def half(*, stream: bool) -> list[bytes]:
    """A reply up to the middle of its rows."""
    answer = generated([9] * 3000, LONG, output_token_logprobs=None)
    whole = event_of(RUNNING) + event_of(answer) if stream else compact(answer)
    at = whole.index(LONG.encode()) + len(LONG) // 2
    return [whole[:at][begin : begin + 50_000] for begin in range(0, at, 50_000)]


async def test_a_worker_lost_within_its_rows_is_a_lost_answer(
    stage: Stage, worker: ScriptedWorker, trial: ExpertsTrial
) -> None:
    for end, asks, stream in itertools.product((RESET, CLOSE), (False, True), (False, True)):
        with case(end, asks, stream):
            worker.next(script(chunked_head(EVENT_STREAM if stream else JSON), *map(chunk, half(stream=stream)), end))
            body = {**ASKED, "stream": stream, "return_routed_experts": asks}
            got, cut = await outcome(trial.post("/generate", body))
            if cut:
                assert stream or asks, "what the client has seen nothing of is an error"
                assert (got.status, b"[DONE]" in got.body) == (200, False)
                assert asks or FIELD not in got.body
            else:
                assert (stream, got.status, got.error_type) == (False, 502, "upstream_error")
            await stage.nothing_under_way()
            await nothing_is_held(trial)
            assert trial.held["answers"] == 0
    await the_next_works(trial, worker)


async def test_a_length_that_is_a_lie_takes_no_room(stage: Stage, worker: ScriptedWorker, alone: ExpertsTrial) -> None:
    lie = [*JSON, ("Content-Length", f"{10**15}")]
    worker.next(script(head(200, lie), compact(generated(IDS, GOOD)), RESET))
    got, cut = await outcome(alone.post("/generate", ASKED))
    assert (cut, got.status, got.error_type) == (False, 502, "upstream_error")
    await stage.nothing_under_way()
    await nothing_is_held(alone)
    await the_next_works(alone, worker)


@pytest.mark.parametrize("stream", [False, True])
async def test_a_turn_lost_within_its_rows_is_no_turn(
    stage: Stage, worker: ScriptedWorker, sessions: ExpertsTrial, stream: bool
) -> None:
    if stream:
        parts = chat_events([9] * 3000, ["o"], routed_experts=LONG)[:-1]
        parts[-1] = parts[-1][: parts[-1].index(LONG.encode()) + 60_000]
        worker.next(script(chunked_head(EVENT_STREAM), *map(chunk, parts), RESET))
    else:
        whole = json.dumps(chat_answer([9] * 3000, meta_info=meta_of([9] * 3000, routed_experts=LONG))).encode()
        at = whole.index(LONG.encode()) + 60_000
        worker.next(script(chunked_head(JSON), chunk(whole[:at]), RESET))
    session = await sessions.create()
    got, cut = await outcome(sessions.turn(session, HI, stream=stream))
    assert cut == stream
    if cut:
        assert not any(end in got.body for end in (b"[DONE]", b'"finish_reason":"length"'))
    else:
        assert (got.status, got.error_type) == (502, "upstream_error")
    await stage.nothing_under_way()
    assert await sessions.records(session) == []
    await nothing_is_held(sessions)
    await the_next_turn_works(sessions, worker)


async def test_a_client_that_leaves_within_the_rows_leaves_nothing(
    stage: Stage, worker: ScriptedWorker, trial: ExpertsTrial
) -> None:
    for asks, stream in itertools.product((False, True), (False, True)):
        with case(asks, stream):
            sent = asyncio.Event()
            parts = script(chunked_head(EVENT_STREAM if stream else JSON), *map(chunk, half(stream=stream)))

            async def behave(visit: Any, parts: Any = parts, sent: asyncio.Event = sent) -> None:
                await parts(visit)
                sent.set()
                await visit.run((HANG,))

            worker.next(behave)
            client = await stage.client(trial.router)
            body = compact({**ASKED, "stream": stream, "return_routed_experts": asks})
            await client.send(request("POST", "/generate", JSON, body))
            await soon(sent.wait())
            client.abort()
            await stage.nothing_under_way()
            await nothing_is_held(trial)
    assert await trial.missing() == {}
    await the_next_works(trial, worker)


# Answers without an end


@pytest.mark.parametrize("asks", [False, True])
@pytest.mark.parametrize("stream", [False, True])
async def test_rows_without_an_end_take_no_more_room_than_there_is(
    stage: Stage, worker: ScriptedWorker, asks: bool, stream: bool
) -> None:
    room = 10_000
    trial = await experts_trial(stage, worker, options={"moe_shape": SHAPE, "max_bytes": room})
    whole = event_of(generated(IDS, "")) if stream else compact(generated(IDS, ""))
    before, behind = whole.split(b'"routed_experts":"')
    more = chunk(encode_routes(truth([9] * 3001)).encode())
    sent = asyncio.Event()
    gate = asyncio.Event()

    async def behave(visit: Any) -> None:
        await visit.read_body()
        await visit.write(chunked_head(EVENT_STREAM if stream else JSON) + chunk(before + b'"routed_experts":"'))
        for _ in range(20):
            await visit.write(more)
        sent.set()
        await visit.run((gate, chunk(behind), *((chunk(DONE),) if stream else ()), LAST_CHUNK))

    worker.next(behave)
    client = await stage.client(trial.router)
    body = compact({**ASKED, "stream": stream, "return_routed_experts": asks})
    await client.send(request("POST", "/generate", JSON, body))
    if asks:
        await client.read_head("POST")
        reading = asyncio.ensure_future(client.read_body())
    await soon(sent.wait())
    assert trial.held["bytes"] == 0
    gate.set()
    got = await reading if asks else await client.read("POST")
    assert got.status == 200
    assert (len(got.body) > 20 * len(more) - 1000) == asks
    assert await trial.missing() == {"experts_fit": 1}
    await nothing_is_held(trial)
    await the_next_works(trial, worker)


@pytest.mark.parametrize("asks", [False, True])
async def test_what_stands_behind_the_last_event_is_given_on(
    worker: ScriptedWorker, trial: ExpertsTrial, asks: bool
) -> None:
    """A stream that ends in order, but within an event: as it would pass without a keeper, and nothing is held."""
    unended = b"data: " + compact({"odd": "rest"})
    whole = event_of(RUNNING) + event_of(generated(IDS, GOOD)) + unended
    worker.next(streamed(whole))
    asked = {**ASKED, "stream": True, "return_logprob": True, "return_routed_experts": asks}
    got = await trial.post("/generate", asked)
    bare = event_of(RUNNING) + event_of(generated(IDS, None)) + unended
    assert (got.status, got.body) == (200, whole if asks else bare)
    assert np.array_equal(await trial.rows(rid="r1"), truth(TOKENS))
