"""What is no answer of the engine's passes as it came, and so does its refusal of what cannot be."""

from __future__ import annotations

import asyncio
import itertools

import numpy as np
import pytest

from miles_router.testing import SimulatedWorker
from tests.faults.routed_experts.scenes import (
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
from tests.support.cache_trial import checkpoint
from tests.support.experts_trial import ASKED, MOE, ExpertsTrial, compact, event_of, experts_trial, generated, truth
from tests.support.scripted_chat import DONE, EVENT_STREAM, JSON, chat_events, streamed
from tests.support.scripted_worker import ScriptedWorker, reply, script
from tests.support.session_apis import case
from tests.support.stage import Stage
from tests.support.waiting import until

PLAIN = [("Content-Type", "text/plain")]
UNTOUCHED: dict[str, bytes] = {
    "bad request": reply(b'{"error": {"message": "too long"}}', 400, JSON),
    "bad request with rows": reply(compact(generated(IDS, GOOD)), 400, JSON),
    "not found": reply(b"", 404),
    "overloaded": reply(b'{"object":"error"}', 503, [*JSON, ("Retry-After", "1")]),
    "a defect": reply(b"Internal Server Error", 500, PLAIN),
    "a stream of status 500": reply(event_of({"error": {"message": "no"}}), 500, EVENT_STREAM),
    "no JSON": reply(b"hello", headers=PLAIN),
    "no JSON under its name": reply(b'{"text": ', headers=JSON),
    "empty": reply(b"", headers=JSON),
    "a number": reply(b"7", headers=JSON),
    "a list of numbers": reply(b"[7]", headers=JSON),
    "no meta": reply(b'{"text": "x", "meta_info": null}', headers=JSON),
    "odd meta": reply(b'{"text": "x", "meta_info": [7]}', headers=JSON),
    "another object": reply(b'{"object": "error", "message": "no"}', headers=JSON),
    "without a type": reply(compact(generated(IDS, GOOD))),
}


async def test_what_is_no_answer_passes_untouched(worker: ScriptedWorker, alone: ExpertsTrial) -> None:
    for (kind, answer), asks in itertools.product(UNTOUCHED.items(), (False, True)):
        with case(kind, asks):
            worker.next(script(answer))
            headers = [("Accept-Encoding", "gzip")]
            got = await alone.post("/generate", {**ASKED, "return_routed_experts": asks}, headers)
            head, _, body = answer.partition(b"\r\n\r\n")
            assert f"HTTP/1.1 {got.status} ".encode() in head
            assert got.body == body
            for name in ("content-type", "content-encoding", "retry-after"):
                assert (got.value(name) or b"") in head
            assert worker.requests[-1].values("accept-encoding") == [], "what cannot be read here is not asked for"
            await nothing_is_held(alone)
            assert alone.held["missing"] == {}
    assert await alone.missing() == {}
    await the_next_works(alone, worker)


ODD_EVENTS: dict[str, bytes] = {
    "a number": b"data: 7\n\n",
    "a list": b"data: [7]\n\n",
    "no JSON": b"data: {\n\n",
    "a comment": b": ping\n\n",
    "an empty one": b"\n\n",
    "a name": b"event: ping\ndata: {}\n\n",
    "an object": b'data: {"odd": "\\"routed_experts\\": 7"}\n\n',
    "odd meta": b'data: {"meta_info": 7}\n\n',
    "no meta": b'data: {"meta_info": null}\n\n',
}


async def test_an_event_that_is_none_of_the_engine_s_passes_in_its_place(
    worker: ScriptedWorker, alone: ExpertsTrial
) -> None:
    cases = itertools.product(ODD_EVENTS.items(), (False, True), (False, True))
    for number, ((kind, odd), behind, asks) in enumerate(cases):
        with case(kind, behind, asks):
            rid = f"r{number}"
            first, last = event_of(RUNNING), event_of(generated(IDS, GOOD, id=rid))
            parts = [first, last, odd, DONE] if behind else [first, odd, last, DONE]
            worker.next(streamed(*parts))
            got = await alone.post("/generate", {**ASKED, "stream": True, "return_routed_experts": asks})
            bare = event_of(generated(IDS, None, id=rid))
            shown = [bare if part is last and not asks else part for part in parts]
            assert (got.status, got.body) == (200, b"".join(shown))
            assert np.array_equal(await alone.rows(rid=rid), truth(TOKENS))
    assert await alone.missing() == {}


ERROR = {"error": {"message": "no", "type": "BadRequestError", "code": 400}}


@pytest.mark.parametrize("asks", [False, True])
async def test_an_error_inside_a_stream_passes_as_it_is(
    worker: ScriptedWorker, trial: ExpertsTrial, asks: bool
) -> None:
    whole = event_of(RUNNING) + event_of(ERROR) + DONE
    worker.next(streamed(whole))
    asked = {**ASKED, "stream": True, "return_logprob": True, "return_routed_experts": asks}
    got = await trial.post("/generate", asked)
    assert (got.status, got.body) == (200, whole)
    assert await trial.missing() == {}
    await nothing_is_held(trial)


async def test_an_error_inside_an_agent_s_stream_passes_as_it_is(
    worker: ScriptedWorker, sessions: ExpertsTrial
) -> None:
    worker.next(streamed(event_of(ERROR), DONE))
    session = await sessions.create()
    got = await sessions.turn(session, HI, stream=True)
    assert (got.status, b"answered without" in got.body, b"BadRequestError" in got.body) == (200, False, True)
    assert await sessions.missing() == {}
    await the_next_turn_works(sessions, worker)


@pytest.mark.parametrize("stream", [False, True])
async def test_rows_in_what_is_none_of_the_engine_s_answers_are_not_held(
    stage: Stage, worker: ScriptedWorker, trial: ExpertsTrial, stream: bool
) -> None:
    broken = compact(generated(IDS, GOOD))[:-1]
    worker.next(streamed(b"data: " + broken + b"\n\n", DONE) if stream else script(reply(broken, headers=JSON)))
    got, cut = await outcome(trial.post("/generate", {**ASKED, "stream": stream}))
    if cut:
        assert (stream, b"[DONE]" in got.body) == (True, False)
    else:
        assert (got.status, got.error_type) == (502, "upstream_error")
    await stage.nothing_under_way()
    await nothing_is_held(trial)
    await the_next_works(trial, worker)


@pytest.mark.parametrize("start", [-1, 10_000], ids=str)
async def test_a_first_row_that_the_engine_refuses_is_refused_in_its_words(stage: Stage, start: int) -> None:
    async with SimulatedWorker(moe=MOE, tokenizer=checkpoint()) as worker:
        trial = await experts_trial(stage, worker)
        body = {"text": "Hi", "return_routed_experts": True, "routed_experts_start_len": start}
        got = await trial.post("/generate", body)
        assert (got.status, b"routed_experts_start_len" in got.body) == (400, True)
        await nothing_is_held(trial)


async def test_sessions_that_are_deleted_while_their_rows_come_hold_none(
    stage: Stage, worker: ScriptedWorker, sessions: ExpertsTrial
) -> None:
    gate = asyncio.Event()
    parts = chat_events(IDS, ["o", "k"], routed_experts=GOOD)
    worker.next(streamed(*parts[:-2], gate, *parts[-2:]))
    session = await sessions.create()
    turn = asyncio.ensure_future(sessions.turn(session, HI, stream=True))
    await until(lambda: worker.requests, "the turn is at the worker")
    assert (await sessions.ask("DELETE", f"/sessions/{session}")).status == 204
    gate.set()
    assert (await turn).status == 200
    await stage.nothing_under_way()
    await until(lambda: not sessions.held["bytes"], "its rows are gone with it")
    await nothing_is_held(sessions)


async def test_errors_reach_agents_as_they_are(worker: ScriptedWorker, sessions: ExpertsTrial) -> None:
    for status, stream in itertools.product((400, 500, 503), (False, True)):
        with case(status, stream):
            worker.next(script(reply(b'{"message": "no"}', status, JSON)))
            session = await sessions.create()
            got = await sessions.turn(session, HI, stream=stream)
            assert (got.status, got.body) == (status, b'{"message": "no"}')
            await nothing_is_held(sessions)
    assert await sessions.missing() == {}
    await the_next_turn_works(sessions, worker)
