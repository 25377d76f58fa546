"""Answers without the rows they need: an error that names the worker, or a sample that says so."""

from __future__ import annotations

import gzip
import itertools
import json
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from miles_router.testing import SimulatedWorker
from tests.faults.routed_experts.scenes import (
    ABORT,
    FIELD,
    FLAG,
    GOOD,
    HI,
    IDS,
    chat,
    nothing_is_held,
    the_next_works,
)
from tests.support.cache_trial import CACHE, checkpoint, events
from tests.support.experts_trial import (
    ASKED,
    MOE,
    SHAPE,
    SHORT,
    ExpertsTrial,
    compact,
    event_of,
    experts_trial,
    generated,
    in_one,
    tokens_of,
    told,
    truth,
)
from tests.support.http import RawReply
from tests.support.metrics import metric
from tests.support.scripted_chat import DONE, EVENT_STREAM, JSON, PROMPT, chat_events, chat_reply, meta_of, streamed
from tests.support.scripted_worker import LAST_CHUNK, ScriptedWorker, chunk, chunked_head, reply, script
from tests.support.session_apis import case
from tests.support.session_trial import SESSIONS, message_of, user
from tests.support.stage import Stage


@pytest.mark.parametrize("required", [True, False])
@pytest.mark.parametrize("around", [(), (CACHE,)], ids=["alone", "behind the cache"])
async def test_a_worker_without_the_flag_is_named(stage: Stage, around: Sequence[str], required: bool) -> None:
    options = {"moe_shape": SHAPE, "required": required}
    vocabulary = checkpoint()
    async with SimulatedWorker(tokenizer=vocabulary) as bad, SimulatedWorker(moe=MOE, tokenizer=vocabulary) as good:
        trial = await experts_trial(stage, bad, around=around, options=options)
        ways = list(itertools.product((False, True), (False, True)))
        for count, (asks, stream) in enumerate(ways, 1):
            with case(asks, stream):
                answer = await trial.post("/generate", asking("bad", count, asks=asks, stream=stream))
                if required:
                    error = failure(answer, stream=stream)
                    assert error["type"] == "upstream_error"
                    assert bad.url in error["message"]
                    assert FLAG in error["message"]
                else:
                    assert answer.status == 200
                    last = events(answer.body)[-1] if stream else answer.json()
                    assert last["meta_info"]["completion_tokens"] == 6
                assert trial.held["missing"] == {"worker": count}
                await nothing_is_held(trial)
        assert await trial.missing() == {"worker": len(ways)}
        await another_worker_takes_over(trial, bad.url, good.url)
        for count, (asks, stream) in enumerate(ways, 1):
            with case("good", asks, stream):
                asked = asking("good", count, asks=asks, stream=stream)
                answer = await trial.post("/generate", asked)
                assert (answer.status, FIELD in answer.body) == (200, asks)
                rid = asked["rid"]
                assert np.array_equal(await trial.rows(rid=rid), truth(tokens_of(good.log.generation(rid))))


def asking(whom: str, number: int, *, asks: bool, stream: bool) -> dict[str, Any]:
    fields = {"text": f"Hi {number}", "sampling_params": SHORT, "rid": f"{whom} {number}"}
    return {**fields, "stream": stream, "return_routed_experts": asks}


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


async def no_turn(trial: ExpertsTrial, session: str, *, stream: bool) -> None:
    """What the agent has not had is no turn; where it had the beginning of a stream, the session says so."""
    answer = await trial.ask("POST", f"/sessions/{session}/samples", {})
    if stream:
        assert (answer.status, answer.error_type) == (422, "invalid_sample")
    else:
        assert (answer.status, answer.json()["samples"]) == (200, [])


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
            assert error["type"] == "upstream_error"
            assert bad.url in error["message"]
            await no_turn(trial, session, stream=stream)
        else:
            (sample,) = await trial.samples(session)
            assert "routed_experts" not in sample
            assert FLAG in sample["metadata"]["routed_experts_missing"]
            assert bad.url in sample["metadata"]["routed_experts_missing"]
            (record,) = await trial.records(session)
            assert (record["routed_experts"]["rows"], FLAG in record["routed_experts"]["reason"]) == (0, True)
            status, error_type, message = await trial.refused(session_id=session)
            assert (status, error_type, FLAG in message) == (404, "not_found", True)
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


async def test_what_is_told_in_another_form_is_not_told(worker: ScriptedWorker, trial: ExpertsTrial) -> None:
    forms: tuple[Any, ...] = (None, 7, "", [], {})
    for odd, stream in itertools.product(forms, (False, True)):
        with case(odd, stream):
            before = Counter(trial.held["missing"])
            answer = {**generated(IDS, None), "meta_info": {**generated(IDS, None)["meta_info"], "routed_experts": odd}}
            worker.next(streamed(event_of(answer), DONE) if stream else script(in_one(answer)))
            got = await trial.post("/generate", {**ASKED, "stream": stream})
            if odd == "":  # a string, and too short
                assert got.status == 200
                assert Counter(trial.held["missing"]) - before == {"experts_without_gap": 1}
            else:
                assert failure(got, stream=stream)["type"] == "upstream_error"
            await nothing_is_held(trial)
    assert (await trial.missing())["experts_without_gap"] == 2
    await the_next_works(trial, worker)


@pytest.mark.parametrize("stream", [False, True])
async def test_one_of_several_without_is_an_error_for_them_all(
    worker: ScriptedWorker, trial: ExpertsTrial, stream: bool
) -> None:
    answers = [{**generated(IDS, each, id=rid), "index": place} for place, (rid, each) in enumerate(PAIR)]
    worker.next(streamed(*map(event_of, answers), DONE) if stream else script(in_one(answers)))
    got = await trial.post("/generate", {"input_ids": [PROMPT, PROMPT], "stream": stream})
    assert got.body.count(b'"type":"upstream_error"') == 1
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
    assert json.loads(error.removeprefix(b"data: "))["error"]["type"] == "upstream_error"


# Replies that cannot be read


def zipped(*, stream: bool) -> tuple[bytes, bytes]:
    """A reply with rows that its worker has compressed, and its body."""
    answer = generated(IDS, GOOD)
    body = gzip.compress(event_of(answer) + DONE if stream else compact(answer), mtime=0)
    return reply(body, headers=[*(EVENT_STREAM if stream else JSON), ("Content-Encoding", "gzip")]), body


async def test_a_compressed_reply_is_refused_where_rows_are_required(
    worker: ScriptedWorker, trial: ExpertsTrial
) -> None:
    for asks, stream in itertools.product((False, True), (False, True)):
        with case(asks, stream):
            worker.next(script(zipped(stream=stream)[0]))
            asked = {**ASKED, "stream": stream, "return_routed_experts": asks}
            got = await trial.post("/generate", asked, [("Accept-Encoding", "gzip")])
            assert worker.requests[-1].values("accept-encoding") == [], "what cannot be read here is not asked for"
            assert (got.status, got.error_type) == (502, "upstream_error")
            assert worker.url in got.json()["error"]["message"]
            assert "gzip" in got.json()["error"]["message"]
            await nothing_is_held(trial)
    assert await trial.missing() == {"unread": 4}
    await the_next_works(trial, worker)


@pytest.mark.parametrize("asks", [False, True])
@pytest.mark.parametrize("stream", [False, True])
async def test_compressed_reply_passes_where_rows_are_optional_counted_and_logged(
    stage: Stage, worker: ScriptedWorker, caplog: pytest.LogCaptureFixture, stream: bool, asks: bool
) -> None:
    trial = await experts_trial(stage, worker, options={"moe_shape": SHAPE, "required": False})
    whole, body = zipped(stream=stream)
    worker.next(script(whole))
    got = await trial.post("/generate", {**ASKED, "stream": stream, "return_routed_experts": asks})
    assert (got.status, got.value("content-encoding"), got.body) == (200, b"gzip", body)
    assert await trial.missing() == {"unread": 1}
    (line,) = [each for each in caplog.records if each.message == "reply_unread"]
    assert line.__dict__["fields"] == {"layer": "routed_experts", "reason": "content_encoding"}
    labels = {"layer": "routed_experts", "reason": "content_encoding"}
    assert await metric(trial.router, "miles_router_unread_replies_total", **labels) == 1
    await the_next_works(trial, worker)


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
    assert (got.status, b"answered without" in got.body) == (200, False)
    assert await sessions.missing() == {"aborted": 1}
    await no_turn(sessions, session, stream=stream)
