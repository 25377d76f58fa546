"""RoutedExpertsMiddleware and what goes wrong: an answer without the rows it needs is an error that names the worker,
rows that do not fit are said to be missing, and nothing half is ever held."""

from __future__ import annotations

import asyncio
import gzip
import json
import re
from collections.abc import Awaitable, Sequence
from typing import Any

import numpy as np
import pytest

from miles_router.testing import SimulatedWorker
from miles_router.testing.worker.moe import MoeShape, encode_routes
from tests.faults.test_sessions import GARBAGE
from tests.support.cache_trial import CACHE, checkpoint, events
from tests.support.experts_trial import (
    ASKED,
    MOE,
    SHAPE,
    SHORT,
    WIDTH,
    ExpertsTrial,
    compact,
    event_of,
    experts_of,
    experts_trial,
    generated,
    in_one,
    tokens_of,
    told,
    truth,
)
from tests.support.http import CutReply, RawReply, request
from tests.support.scripted_chat import (
    DONE,
    EVENT_STREAM,
    JSON,
    PROMPT,
    able,
    chat_answer,
    chat_events,
    chat_reply,
    meta_of,
    streamed,
)
from tests.support.scripted_worker import (
    CLOSE,
    HANG,
    LAST_CHUNK,
    RESET,
    Behaviour,
    ScriptedWorker,
    chunk,
    chunked_head,
    head,
    reply,
    script,
)
from tests.support.session_trial import CHAT, SESSIONS, message_of, user
from tests.support.stage import Stage
from tests.support.waiting import until

FIELD = b"routed_experts"
FLAG = "--enable-return-routed-experts"
HI = [user("Hi")]
IDS = [7, 8]
TOKENS = [*PROMPT, *IDS]
GOOD = told(IDS)
RUNNING = {**generated([7], None), "meta_info": {**generated([7], None)["meta_info"], "finish_reason": None}}
ABORT = {"type": "abort", "message": "Abort in waiting queue"}


@pytest.fixture
async def worker(stage: Stage) -> ScriptedWorker:
    return able(await stage.worker())


@pytest.fixture(params=[(), (CACHE,)], ids=["alone", "behind the cache"])
async def trial(stage: Stage, worker: ScriptedWorker, request: pytest.FixtureRequest) -> ExpertsTrial:
    return await experts_trial(stage, worker, around=request.param)


@pytest.fixture
async def alone(stage: Stage, worker: ScriptedWorker) -> ExpertsTrial:
    return await experts_trial(stage, worker)


@pytest.fixture
async def sessions(stage: Stage, worker: ScriptedWorker) -> ExpertsTrial:
    return await experts_trial(stage, worker, around=(SESSIONS,))


def native(experts: str | None, *, stream: bool, **meta: Any) -> Behaviour:
    """An answer of `/generate` with what is told of its experts."""
    answer = generated(IDS, experts, **meta)
    if not stream:
        return script(in_one(answer))
    return streamed(event_of(RUNNING), event_of(answer), DONE)


def chat(experts: str | None, *, stream: bool) -> Behaviour:
    """The same of a chat request."""
    if stream:
        return streamed(*chat_events(IDS, ["o", "k"], routed_experts=experts))
    extra = {} if experts is None else {"routed_experts": experts}
    return script(chat_reply(IDS, meta_info=meta_of(IDS, **extra)))


async def nothing_is_held(trial: ExpertsTrial) -> None:
    assert (trial.held["bytes"], trial.held["generations"]) == (0, 0)
    assert await trial.metric("bytes") == 0


async def the_next_works(trial: ExpertsTrial, worker: ScriptedWorker) -> None:
    """On the same worker, and its rows are held."""
    worker.next(native(GOOD, stream=False, id="next"))
    assert (await trial.post("/generate", ASKED)).status == 200
    assert np.array_equal(await trial.rows(rid="next"), truth(TOKENS))


async def the_next_turn_works(trial: ExpertsTrial, worker: ScriptedWorker) -> None:
    for stream in (False, True):
        session = await trial.create()
        worker.next(chat(GOOD, stream=stream))
        assert (await trial.turn(session, HI, stream=stream)).status == 200
        (sample,) = await trial.exact(session)
        assert sample["tokens"] == TOKENS


# Workers that tell none


@pytest.mark.parametrize("required", [True, False])
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("asks", [False, True])
@pytest.mark.parametrize("around", [(), (CACHE,)], ids=["alone", "behind the cache"])
async def test_a_worker_without_the_flag_is_named(
    stage: Stage, around: Sequence[str], asks: bool, stream: bool, required: bool
) -> None:
    options = {"moe_shape": SHAPE, "required": required}
    vocabulary = checkpoint()
    async with SimulatedWorker(tokenizer=vocabulary) as bad, SimulatedWorker(moe=MOE, tokenizer=vocabulary) as good:
        trial = await experts_trial(stage, bad, around=around, options=options)
        body = {"text": "Hi", "sampling_params": SHORT, "stream": stream, "return_routed_experts": asks}
        answer = await trial.post("/generate", {**body, "rid": "bad"})
        if required:
            error = failure(answer, stream=stream)
            assert error["type"] == "routed_experts_missing"
            assert bad.url in error["message"]
            assert FLAG in error["message"]
        else:
            assert answer.status == 200
            assert (events(answer.body)[-1] if stream else answer.json())["meta_info"]["completion_tokens"] == 6
        assert await trial.missing() == {"worker": 1}
        await nothing_is_held(trial)
        await another_worker_takes_over(trial, bad.url, good.url)
        answer = await trial.post("/generate", {**body, "rid": "good"})
        assert answer.status == 200
        assert (FIELD in answer.body) == asks
        assert np.array_equal(await trial.rows(rid="good"), truth(tokens_of(good.door.generation("good"))))


async def another_worker_takes_over(trial: ExpertsTrial, gone: str, new: str) -> None:
    for path in (f"/add_worker?url={new}", f"/remove_worker?url={gone}"):
        assert (await trial.ask("POST", path)).status == 200


def failure(answer: RawReply, *, stream: bool) -> Any:
    """The error that the client got, whole or in place of a stream's end."""
    if not stream:
        assert answer.status == 502
        return answer.json()["error"]
    assert answer.status == 200
    *before, last, rest = answer.body.split(b"\n\n")
    assert rest == b""
    assert DONE.strip() not in answer.body, "nothing that looks like an end"
    for event in before:
        parsed = json.loads(event.removeprefix(b"data: "))
        assert "meta_info" not in parsed or parsed["meta_info"]["finish_reason"] is None
        assert "error" not in parsed
    return json.loads(last.removeprefix(b"data: "))["error"]


@pytest.mark.parametrize("required", [True, False])
@pytest.mark.parametrize("stream", [False, True])
async def test_a_worker_without_the_flag_is_named_to_an_agent(stage: Stage, stream: bool, required: bool) -> None:
    options = {"moe_shape": SHAPE, "required": required}
    vocabulary = checkpoint()
    async with SimulatedWorker(tokenizer=vocabulary) as bad, SimulatedWorker(moe=MOE, tokenizer=vocabulary) as good:
        trial = await experts_trial(stage, bad, around=(SESSIONS,), options=options)
        session = await trial.create()
        answer = await trial.turn(session, HI, stream=stream)
        if required:
            error = failure(answer, stream=stream)
            assert error["type"] == "routed_experts_missing"
            assert bad.url in error["message"]
            assert await trial.samples(session) == [], "what the agent has not had is no turn"
        else:
            (sample,) = await trial.samples(session)
            assert "routed_experts" not in sample
            assert FLAG in sample["metadata"]["routed_experts_missing"]
            assert bad.url in sample["metadata"]["routed_experts_missing"]
            (record,) = await trial.records(session)
            assert (record["routed_experts"]["rows"], FLAG in record["routed_experts"]["reason"]) == (0, True)
            status, error_type, message = await trial.refused(session_id=session)
            assert (status, error_type, FLAG in message) == (404, "routed_experts_not_held", True)
        assert await trial.missing() == {"worker": 1}
        await nothing_is_held(trial)
        await another_worker_takes_over(trial, bad.url, good.url)
        session = await trial.create()
        assert (await trial.turn(session, HI, stream=stream)).status == 200
        assert len(await trial.exact(session)) == 1


async def test_what_is_missing_of_one_turn_is_asked_for_with_the_next(stage: Stage, worker: ScriptedWorker) -> None:
    trial = await experts_trial(stage, worker, around=(SESSIONS,), options={"moe_shape": SHAPE, "required": False})
    session = await trial.create()
    worker.next(chat(None, stream=False))
    message = message_of(await trial.chat(session, HI))
    (sample,) = await trial.samples(session)
    assert FLAG in sample["metadata"]["routed_experts_missing"]

    async def second(visit: Any) -> None:
        asked = json.loads(await visit.read_body())
        assert (asked["return_routed_experts"], asked["routed_experts_start_len"]) == (True, 0)
        experts = told([9], prompt=asked["input_ids"])
        choice = {"prompt_token_ids": asked["input_ids"], "meta_info": meta_of([9], routed_experts=experts)}
        await visit.write(chat_reply([9], **choice))

    worker.next(second)
    await trial.chat(session, [*HI, message, user("Go on")])
    assert len(await trial.exact(session)) == 1


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("odd", [None, 7, "", [], {}], ids=str)
async def test_what_is_told_in_another_form_is_not_told(
    worker: ScriptedWorker, trial: ExpertsTrial, odd: Any, stream: bool
) -> None:
    answer = {**generated(IDS, None), "meta_info": {**generated(IDS, None)["meta_info"], "routed_experts": odd}}
    worker.next(streamed(event_of(answer), DONE) if stream else script(in_one(answer)))
    got = await trial.post("/generate", {**ASKED, "stream": stream})
    if odd == "":  # a string, and too short
        assert (got.status, await trial.missing()) == (200, {"experts_without_gap": 1})
    else:
        assert failure(got, stream=stream)["type"] == "routed_experts_missing"
    await nothing_is_held(trial)
    await the_next_works(trial, worker)


@pytest.mark.parametrize("stream", [False, True])
async def test_one_of_several_without_is_an_error_for_them_all(
    worker: ScriptedWorker, trial: ExpertsTrial, stream: bool
) -> None:
    answers = [{**generated(IDS, each, id=rid), "index": place} for place, (rid, each) in enumerate(PAIR)]
    worker.next(streamed(*map(event_of, answers), DONE) if stream else script(in_one(answers)))
    got = await trial.post("/generate", {"input_ids": [PROMPT, PROMPT], "stream": stream})
    assert got.body.count(b'"type":"routed_experts_missing"') == 1
    assert (got.status, DONE in got.body) == (200 if stream else 502, False)
    assert await trial.missing() == {"worker": 1}


PAIR = [("a", GOOD), ("b", None)]


@pytest.mark.parametrize("stream", [False, True])
async def test_what_was_aborted_before_it_began_needs_none(
    worker: ScriptedWorker, trial: ExpertsTrial, stream: bool
) -> None:
    answer = generated([], None, finish_reason=ABORT)
    del answer["meta_info"]["prompt_tokens"]
    whole = event_of(answer) + DONE if stream else compact(answer)
    worker.next(streamed(whole) if stream else script(reply(whole, headers=JSON)))
    got = await trial.post("/generate", {**ASKED, "stream": stream, "return_logprob": True})
    assert (got.status, got.body) == (200, whole)
    assert await trial.missing() == {"aborted": 1}
    await nothing_is_held(trial)


@pytest.mark.parametrize("stream", [False, True])
async def test_a_turn_that_was_aborted_before_it_began_is_none(
    worker: ScriptedWorker, sessions: ExpertsTrial, stream: bool
) -> None:
    if stream:
        compactly = [json.loads(each[6:]) for each in chat_events([], [])[:2]]
        compactly[1]["choices"][0]["finish_reason"] = "abort"
        worker.next(streamed(*map(event_of, compactly), DONE))
    else:
        meta = meta_of([], finish_reason=ABORT)
        worker.next(script(chat_reply([], "", finish_reason="abort", meta_info=meta)))
    session = await sessions.create()
    got = await sessions.turn(session, HI, stream=stream)
    assert (got.status, b"routed_experts_missing" in got.body) == (200, False)
    assert await sessions.missing() == {"aborted": 1}
    assert await sessions.samples(session) == []


async def test_events_that_are_written_with_spaces_are_events(worker: ScriptedWorker, trial: ExpertsTrial) -> None:
    spaced = [b"data: " + json.dumps(each).encode() + b"\n\n" for each in (RUNNING, generated(IDS, GOOD))]
    worker.next(streamed(*spaced, DONE))
    got = await trial.post("/generate", {**ASKED, "stream": True, "return_logprob": True})
    assert (got.status, len(events(got.body)), got.body.startswith(spaced[0])) == (200, 2, True)
    assert np.array_equal(await trial.rows(rid="r1"), truth(TOKENS))
    assert await trial.missing() == {}


async def test_events_before_the_one_without_rows_are_given_on(worker: ScriptedWorker, trial: ExpertsTrial) -> None:
    """Also where all of them come in one piece."""
    worker.next(streamed(event_of(RUNNING) + event_of(generated(IDS, None)) + DONE))
    got = await trial.post("/generate", {**ASKED, "stream": True, "return_logprob": True})
    assert failure(got, stream=True)["type"] == "routed_experts_missing"
    assert got.body.startswith(event_of(RUNNING))


async def test_an_error_never_stands_within_another_event(worker: ScriptedWorker, trial: ExpertsTrial) -> None:
    """Of two generations the first has rows: a client that asked for them gets all of its event, and then the error."""
    first = event_of({**generated(IDS, GOOD, rid="a"), "index": 0})
    second = event_of({**generated(IDS, None, rid="b"), "index": 1})
    worker.next(script(chunked_head(EVENT_STREAM), chunk(first + second[:20]), chunk(second[20:] + DONE), LAST_CHUNK))
    asked = {
        **ASKED,
        "stream": True,
        "return_logprob": True,
        "return_routed_experts": True,
        "sampling_params": {"n": 2},
    }
    got = await trial.post("/generate", asked)
    assert got.body.startswith(first)
    (error,) = [each for each in got.body[len(first) :].split(b"\n\n") if each]
    assert json.loads(error.removeprefix(b"data: "))["error"]["type"] == "routed_experts_missing"


# Rows that do not fit

OTHER = MoeShape(4, 40, 2)
WRONG: dict[str, tuple[str, str, str]] = {
    "garbage": ("!" * len(GOOD), "experts_are_rows", "base64"),
    "one odd character": (GOOD[:40] + "-" + GOOD[41:], "experts_are_rows", "base64"),
    "base64 that ends within itself": (GOOD[:-3], "experts_are_rows", "base64"),
    "base64 that ends within an id": (GOOD[:-4], "experts_are_rows", "id"),
    "base64 that goes on behind its end": (encode_routes(truth(TOKENS[:2])[:, :1, :1]) + GOOD, "experts_are_rows", ""),
    "none": ("", "experts_without_gap", "rows 0 to 3"),
    "one row too few": (encode_routes(truth(TOKENS)[:-1]), "experts_without_gap", "row.* 3"),
    "the prompt's alone": (encode_routes(truth(TOKENS)[:2]), "experts_without_gap", "rows 2 to 3"),
    "one row too many": (told([*IDS, 9]), "experts_without_overlap", "5 rows"),
    "a row and a half": (encode_routes(truth(TOKENS))[:-16], "experts_are_rows", "21 ids"),
    "an id too large": (encode_routes(truth(TOKENS) + 37), "experts_of_the_model", "expert"),
    "an id below zero": (encode_routes(truth(TOKENS) - 39), "experts_of_the_model", "expert"),
    "an id that fits into no two bytes": (encode_routes(truth(TOKENS) + 70_000), "experts_of_the_model", "expert"),
    "another width": (told(IDS, moe=OTHER), "experts_", "rows"),
}
CASES = pytest.mark.parametrize(("experts", "invariant", "says"), WRONG.values(), ids=WRONG)


async def counted(trial: ExpertsTrial, invariant: str) -> None:
    ((reason, count),) = (await trial.missing()).items()
    assert (reason.startswith(invariant), count, trial.held["answers"]) == (True, 1, 0)


@CASES
@pytest.mark.parametrize("stream", [False, True])
async def test_rows_that_do_not_fit_are_not_held_and_the_answer_is_given(
    worker: ScriptedWorker, trial: ExpertsTrial, experts: str, invariant: str, says: str, stream: bool
) -> None:
    worker.next(native(experts, stream=stream))
    got = await trial.post("/generate", {**ASKED, "stream": stream, "return_logprob": True})
    bare = generated(IDS, None)
    want = event_of(RUNNING) + event_of(bare) + DONE if stream else compact(bare)
    assert (got.status, got.body) == (200, want)
    await counted(trial, invariant)
    await nothing_is_held(trial)
    assert (await trial.refused(rid="r1"))[0] == 404
    await the_next_works(trial, worker)


@CASES
@pytest.mark.parametrize("stream", [False, True])
async def test_a_sample_says_why_its_rows_did_not_fit(
    worker: ScriptedWorker, sessions: ExpertsTrial, experts: str, invariant: str, says: str, stream: bool
) -> None:
    worker.next(chat(experts, stream=stream))
    session = await sessions.create()
    got = await sessions.turn(session, HI, stream=stream)
    assert (got.status, FIELD in got.body) == (200, False)
    (sample,) = await sessions.samples(session)
    assert sample["tokens"] == TOKENS
    assert "routed_experts" not in sample
    why = sample["metadata"]["routed_experts_missing"]
    assert invariant in why
    assert re.search(says, why), why
    (record,) = await sessions.records(session)
    assert record["routed_experts"] == {"rows": 0, "reason": why.removeprefix("experts_held: ")}
    status, error, message = await sessions.refused(session_id=session)
    assert (status, error) == (404, "routed_experts_not_held")
    assert re.search(says, message), message
    await counted(sessions, invariant)
    await nothing_is_held(sessions)
    await the_next_turn_works(sessions, worker)


async def test_only_the_answer_whose_rows_do_not_fit_is_without(worker: ScriptedWorker, trial: ExpertsTrial) -> None:
    rids = {"a": GOOD, "b": GOOD[:-3], "c": GOOD}
    worker.next(script(in_one([generated(IDS, experts, id=rid) for rid, experts in rids.items()])))
    assert (await trial.post("/generate", {"input_ids": [PROMPT] * 3})).status == 200
    for rid in "ac":
        assert np.array_equal(await trial.rows(rid=rid), truth(TOKENS))
    assert (await trial.refused(rid="b"))[0] == 404
    assert await trial.missing() == {"experts_are_rows": 1}


async def test_a_worker_of_another_model_among_the_fleet_spoils_its_own_answers_alone(stage: Stage) -> None:
    vocabulary = checkpoint()
    async with (
        SimulatedWorker(moe=MOE, tokenizer=vocabulary) as one,
        SimulatedWorker(moe=OTHER, tokenizer=vocabulary) as other,
    ):
        trial = await experts_trial(stage, one, other)
        for number in range(8):
            await trial.generate(input_ids=[40, 41, number], rid=f"{number}")
        theirs = {worker: [each.rid for each in worker.door.generations] for worker in (one, other)}
        assert all(theirs.values()), "each has answered some"
        for rid in theirs[one]:
            assert np.array_equal(await trial.rows(rid=rid), truth(tokens_of(one.door.generation(rid))))
        for rid in theirs[other]:
            assert (await trial.refused(rid=rid))[0] == 404
        assert sum((await trial.missing()).values()) == len(theirs[other])


async def test_what_was_held_before_stays_whatever_comes_behind_it(
    worker: ScriptedWorker, sessions: ExpertsTrial
) -> None:
    worker.next(chat(GOOD, stream=False))
    session = await sessions.create()
    message = message_of(await sessions.chat(session, HI))
    held = sessions.held["bytes"]

    async def second(visit: Any) -> None:
        asked = json.loads(await visit.read_body())
        assert asked["routed_experts_start_len"] == 4
        meta = meta_of([9], routed_experts=told([9], 5, prompt=asked["input_ids"]))
        await visit.write(chat_reply([9], prompt_token_ids=asked["input_ids"], meta_info=meta))

    worker.next(second)
    await sessions.chat(session, [*HI, message, user("Go on")])
    (sample,) = await sessions.samples(session)
    assert "experts_without_gap" in sample["metadata"]["routed_experts_missing"]
    assert np.array_equal(await sessions.rows(session_id=session, leaf=0), truth(TOKENS))
    (sample,) = await sessions.samples(session, max_seq_len=len(TOKENS))
    assert np.array_equal(experts_of(sample), truth(TOKENS)), "of what is left of it all rows are there"
    assert sessions.held["bytes"] == held


async def test_what_an_answer_will_continue_is_not_evicted_for_others(stage: Stage, worker: ScriptedWorker) -> None:
    trial = await experts_trial(
        stage, worker, around=(SESSIONS,), options={"moe_shape": SHAPE, "max_bytes": 60 * WIDTH}
    )
    worker.next(chat(GOOD, stream=False))
    session = await trial.create()
    message = message_of(await trial.chat(session, HI))
    gate, asked = asyncio.Event(), asyncio.Event()

    async def second(visit: Any) -> None:
        wanted = json.loads(await visit.read_body())
        asked.set()
        await gate.wait()
        experts = told([9], wanted["routed_experts_start_len"], prompt=wanted["input_ids"])
        choice = {"prompt_token_ids": wanted["input_ids"], "meta_info": meta_of([9], routed_experts=experts)}
        await visit.write(chat_reply([9], **choice))

    worker.next(second)
    turn = asyncio.ensure_future(trial.chat(session, [*HI, message, user("Go on")]))
    await asyncio.wait_for(asked.wait(), 5)
    for number in range(3):
        other = [7] * 50
        worker.next(script(chat_reply(other, meta_info=meta_of(other, routed_experts=told(other)))))
        await trial.chat(await trial.create(f"{number}"), HI)
    assert trial.held["evicted"] == 2, "of three that take more room than there is beside the one that goes on"
    gate.set()
    await turn
    assert len(await trial.exact(session)) == 1
    assert trial.held["bytes"] <= 60 * WIDTH


# Replies that are lost

LONG = told([9] * 3000)


async def outcome(asking: Awaitable[RawReply]) -> tuple[RawReply, bool]:
    """What came, and whether it was broken off."""
    try:
        return await asking, False
    except CutReply as cut:
        return cut.reply, True


def half(*, stream: bool) -> list[bytes]:
    """A reply up to the middle of its rows."""
    answer = generated([9] * 3000, LONG, output_token_logprobs=None)
    whole = event_of(RUNNING) + event_of(answer) if stream else compact(answer)
    at = whole.index(LONG.encode()) + len(LONG) // 2
    return [whole[:at][begin : begin + 50_000] for begin in range(0, at, 50_000)]


@pytest.mark.parametrize("asks", [False, True])
@pytest.mark.parametrize("stream", [False, True])
async def test_under_resume_too_a_worker_lost_within_its_rows_is_a_lost_answer(
    stage: Stage, worker: ScriptedWorker, stream: bool, asks: bool
) -> None:
    trial = await experts_trial(stage, worker, partial_rollout="resume")
    worker.next(script(chunked_head(EVENT_STREAM if stream else JSON), *map(chunk, half(stream=stream)), RESET))
    body = {**ASKED, "stream": stream, "return_routed_experts": asks}
    got, cut = await outcome(trial.post("/generate", body))
    assert b"[DONE]" not in got.body
    assert (cut, got.status) in ((True, 200), (False, 502))
    assert cut or not (stream or asks), "what the client has seen something of is broken off"
    await stage.nothing_under_way()
    await nothing_is_held(trial)
    await the_next_works(trial, worker)


@pytest.mark.parametrize("end", [RESET, CLOSE])
@pytest.mark.parametrize("asks", [False, True])
@pytest.mark.parametrize("stream", [False, True])
async def test_a_worker_lost_within_its_rows_is_a_lost_answer(
    stage: Stage, worker: ScriptedWorker, trial: ExpertsTrial, end: Any, asks: bool, stream: bool
) -> None:
    worker.next(script(chunked_head(EVENT_STREAM if stream else JSON), *map(chunk, half(stream=stream)), end))
    body = {**ASKED, "stream": stream, "return_routed_experts": asks}
    got, cut = await outcome(trial.post("/generate", body))
    if cut:
        assert stream or asks, "what the client has seen nothing of is an error"
        assert (got.status, b"[DONE]" in got.body) == (200, False)
        assert asks or FIELD not in got.body
    else:
        assert (stream, got.status, got.error_type) == (False, 502, "upstream_broken")
    await stage.nothing_under_way()
    await nothing_is_held(trial)
    assert trial.held["answers"] == 0
    await the_next_works(trial, worker)


async def test_a_length_that_is_a_lie_takes_no_room(stage: Stage, worker: ScriptedWorker, alone: ExpertsTrial) -> None:
    lie = [*JSON, ("Content-Length", f"{10**15}")]
    worker.next(script(head(200, lie), compact(generated(IDS, GOOD)), RESET))
    got, cut = await outcome(alone.post("/generate", ASKED))
    assert (cut, got.status, got.error_type) == (False, 502, "upstream_broken")
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
        assert (got.status, got.error_type) == (502, "upstream_broken")
    await stage.nothing_under_way()
    assert await sessions.records(session) == []
    await nothing_is_held(sessions)
    await the_next_turn_works(sessions, worker)


@pytest.mark.parametrize("asks", [False, True])
@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_leaves_within_the_rows_leaves_nothing(
    stage: Stage, worker: ScriptedWorker, trial: ExpertsTrial, stream: bool, asks: bool
) -> None:
    sent = asyncio.Event()
    steps = [chunk(each) for each in half(stream=stream)]

    async def behave(visit: Any) -> None:
        await visit.read_body()
        for each in (chunked_head(EVENT_STREAM if stream else JSON), *steps):
            await visit.write(each)
        sent.set()
        await visit.run((HANG,))

    worker.next(behave)
    client = await stage.client(trial.router)
    body = compact({**ASKED, "stream": stream, "return_routed_experts": asks})
    await client.send(request("POST", "/generate", JSON, body))
    await asyncio.wait_for(sent.wait(), 5)
    client.abort()
    await stage.nothing_under_way()
    await nothing_is_held(trial)
    assert await trial.missing() == {}
    await the_next_works(trial, worker)


async def test_an_agent_that_leaves_within_the_rows_leaves_nothing(
    stage: Stage, worker: ScriptedWorker, sessions: ExpertsTrial
) -> None:
    parts = chat_events([9] * 3000, ["o"], routed_experts=LONG)[:-1]
    parts[-1] = parts[-1][: parts[-1].index(LONG.encode()) + 60_000]
    worker.next(script(chunked_head(EVENT_STREAM), *map(chunk, parts), HANG))
    session = await sessions.create()
    client = await stage.client(sessions.router)
    body = compact({"model": "m", "messages": HI, "stream": True})
    await client.send(request("POST", f"/sessions/{session}{CHAT}", JSON, body))
    await client.read_head("POST")
    assert await client.read_part()
    client.abort()
    await stage.nothing_under_way()
    assert await sessions.records(session) == []
    await nothing_is_held(sessions)
    await the_next_turn_works(sessions, worker)


async def test_a_worker_lost_before_it_answers_is_replaced_and_the_rows_come_from_the_other(stage: Stage) -> None:
    lost, other = await stage.worker(), await stage.worker()
    lost.always(script(RESET))
    other.always(native(GOOD, stream=False))
    trial = await experts_trial(stage, lost, other)
    for _ in range(2):
        assert (await trial.post("/generate", ASKED)).status == 200
    assert lost.requests
    assert json.loads(other.requests[-1].body)["return_routed_experts"] is True
    assert np.array_equal(await trial.rows(rid="r1"), truth(TOKENS))


# What is no answer

PLAIN = [("Content-Type", "text/plain")]
ZIPPED = [*JSON, ("Content-Encoding", "gzip")]
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
    "gzip": reply(gzip.compress(compact(generated(IDS, GOOD)), mtime=0), headers=ZIPPED),
}


@pytest.mark.parametrize("asks", [False, True])
@pytest.mark.parametrize("answer", UNTOUCHED.values(), ids=UNTOUCHED)
async def test_what_is_no_answer_passes_untouched(
    worker: ScriptedWorker, alone: ExpertsTrial, answer: bytes, asks: bool
) -> None:
    trial = alone
    worker.next(script(answer))
    headers = [("Accept-Encoding", "gzip")]
    got = await trial.post("/generate", {**ASKED, "return_routed_experts": asks}, headers)
    head, _, body = answer.partition(b"\r\n\r\n")
    assert f"HTTP/1.1 {got.status} ".encode() in head
    assert got.body == body
    for name in ("content-type", "content-encoding", "retry-after"):
        assert (got.value(name) or b"") in head
    assert worker.requests[-1].values("accept-encoding") == [], "what cannot be read here is not asked for"
    await nothing_is_held(trial)
    assert await trial.missing() == {}
    await the_next_works(trial, worker)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("status", [400, 500, 503])
async def test_errors_reach_agents_as_they_are(
    worker: ScriptedWorker, sessions: ExpertsTrial, status: int, stream: bool
) -> None:
    worker.next(script(reply(b'{"message": "no"}', status, JSON)))
    session = await sessions.create()
    got = await sessions.turn(session, HI, stream=stream)
    assert (got.status, got.body) == (status, b'{"message": "no"}')
    assert await sessions.missing() == {}
    await nothing_is_held(sessions)
    await the_next_turn_works(sessions, worker)


@pytest.mark.parametrize("garbage", [*GARBAGE.values()], ids=[*GARBAGE])
async def test_an_answer_that_makes_no_sense_is_the_same_error_as_without_a_keeper(
    worker: ScriptedWorker, sessions: ExpertsTrial, garbage: bytes
) -> None:
    worker.next(script(garbage))
    session = await sessions.create()
    got = await sessions.turn(session, HI)
    assert (got.status, got.error_type in ("unusable_answer", "routed_experts_missing")) == (502, True), got.body
    assert await sessions.records(session) == []
    await nothing_is_held(sessions)
    await the_next_turn_works(sessions, worker)


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


@pytest.mark.parametrize("asks", [False, True])
@pytest.mark.parametrize("behind", [False, True])
@pytest.mark.parametrize("odd", ODD_EVENTS.values(), ids=ODD_EVENTS)
async def test_an_event_that_is_none_of_the_engine_s_passes_in_its_place(
    worker: ScriptedWorker, alone: ExpertsTrial, odd: bytes, behind: bool, asks: bool
) -> None:
    first, last = event_of(RUNNING), event_of(generated(IDS, GOOD))
    parts = [first, last, odd, DONE] if behind else [first, odd, last, DONE]
    worker.next(streamed(*parts))
    got = await alone.post("/generate", {**ASKED, "stream": True, "return_routed_experts": asks})
    shown = [event_of(generated(IDS, None)) if part is last and not asks else part for part in parts]
    assert (got.status, got.body) == (200, b"".join(shown))
    assert np.array_equal(await alone.rows(rid="r1"), truth(TOKENS))
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
    assert (got.status, b"routed_experts_missing" in got.body, b"BadRequestError" in got.body) == (200, False, True)
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
        assert (got.status, got.error_type) == (502, "upstream_invalid_response")
    await stage.nothing_under_way()
    await nothing_is_held(trial)
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
    await asyncio.wait_for(sent.wait(), 5)
    assert trial.held["bytes"] == 0
    gate.set()
    got = await reading if asks else await client.read("POST")
    assert got.status == 200
    assert (len(got.body) > 20 * len(more) - 1000) == asks
    assert await trial.missing() == {"experts_fit": 1}
    await nothing_is_held(trial)
    await the_next_works(trial, worker)


@pytest.mark.parametrize("experts", [GOOD, None], ids=["with rows", "without"])
@pytest.mark.parametrize("asks", [False, True])
async def test_an_event_that_never_ends_holds_nothing_and_is_given_up_with_its_worker(
    stage: Stage, worker: ScriptedWorker, trial: ExpertsTrial, asks: bool, experts: str | None
) -> None:
    unended = event_of(generated(IDS, experts))[:-2]
    worker.next(script(chunked_head(EVENT_STREAM), chunk(event_of(RUNNING)), chunk(unended), RESET))
    with pytest.raises(CutReply) as caught:
        await trial.post("/generate", {**ASKED, "stream": True, "return_routed_experts": asks})
    assert caught.value.reply.status == 200
    assert b"finish_reason" in caught.value.reply.body
    assert b'"type":"length"' not in caught.value.reply.body or asks
    await stage.nothing_under_way()
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


# Clients that ask for what cannot be


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
