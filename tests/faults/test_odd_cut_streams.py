"""Streams of turns that may be carried on, from engines that say odd things: nothing looks complete that is not."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

import orjson
import pytest

from tests.support.http import CutReply, RawReply
from tests.support.scripted_chat import (
    DONE,
    EVENT_STREAM,
    JSON,
    PROMPT,
    able,
    chat_answer,
    chat_events,
    chat_reply,
    delta,
    event,
    finish_event,
    meta_of,
    streamed,
)
from tests.support.scripted_worker import RESET, ScriptedWorker, chunked_head, reply, script
from tests.support.session_trial import SessionTrial, session_trial, user
from tests.support.stage import Stage
from tests.support.under_way import under_way
from tests.support.waiting import until

Answer = TypeVar("Answer")
HI: list[Any] = [user("What is 17 + 25?")]
ROLE = event([{**delta("", 0), "delta": {"role": "assistant", "content": ""}}])
HEL = event([delta("Hel")])
ABORT = finish_event("abort")
ENTRY = {"token": "", "bytes": [], "logprob": -0.5, "top_logprobs": []}
REFUSALS = {
    "json": script(reply(b'{"error": {"message": "no"}}', 400, JSON)),
    "text": script(reply(b"gone", 400, [("Content-Type", "text/plain")])),
}


def told(**extension: Any) -> bytes:
    return event([], sglext={"input_ids": PROMPT, **extension})


async def trial_of(stage: Stage, **settings: Any) -> tuple[ScriptedWorker, SessionTrial]:
    worker = able(await stage.worker())
    return worker, await session_trial(stage, worker, **settings)


async def asked(trial: SessionTrial, session: str) -> tuple[RawReply, bool]:
    """The answer to a streamed turn, and whether it was broken off."""
    try:
        return await trial.turn(session, HI, stream=True, max_tokens=8), False
    except CutReply as error:
        return error.reply, True


@pytest.mark.parametrize("how", REFUSALS)
async def test_a_refusal_behind_a_lost_stream_is_no_answer(stage: Stage, how: str) -> None:
    worker, trial = await trial_of(stage, resume_on_worker_loss=True, max_retries=3)
    worker.next(script(chunked_head(EVENT_STREAM), RESET), REFUSALS[how])
    session = await trial.create()
    answer, broken = await asked(trial, session)
    assert broken
    assert b"the next one answered 400" in answer.body
    assert await trial.records(session) == []


async def cut_turn(trial: SessionTrial, worker: ScriptedWorker, session: str, *events: bytes) -> tuple[RawReply, bool]:
    """A turn that a pause cuts with these events, and that the worker would carry on."""
    gate = asyncio.Event()
    worker.next(streamed(gate, *events))
    worker.always(streamed(*chat_events([8], ["lo"])))
    return await cut_by_a_pause(trial, worker, asked(trial, session), gate)


async def cut_by_a_pause(
    trial: SessionTrial, worker: ScriptedWorker, asking: Coroutine[Any, Any, Answer], gate: asyncio.Event
) -> Answer:
    """What is answered to a turn that a pause cuts before the gate opens."""
    for path in ("/pause_generation", "/continue_generation"):
        worker.standing[path] = script(reply(b"{}", headers=JSON))
    async with under_way(asking) as turn:
        await until(lambda: bool(worker.requests), "it was asked")
        assert (await trial.ask("POST", "/pause_generation", {"mode": "abort"})).status == 200
        gate.set()
        await until(lambda: trial.router.app.router.gate.held or turn.done(), "it was cut")
        await trial.ask("POST", "/continue_generation", {})
        return await turn


async def test_a_stream_that_says_nothing_but_its_abort_goes_on(stage: Stage) -> None:
    worker, trial = await trial_of(stage, partial_rollout="resume")
    session = await trial.create()
    answer, broken = await cut_turn(trial, worker, session, ABORT, told(output_ids=[[]]), DONE)
    assert not broken
    assert answer.body.endswith(DONE)
    (record,) = await trial.records(session)
    assert (record["finish_reason"], record["response"]["content"]) == ("length", "lo")


@pytest.mark.parametrize("prompt", [5, "abc", ["a"]])
async def test_a_cut_stream_whose_prompt_is_none_is_refused(stage: Stage, prompt: object) -> None:
    worker, trial = await trial_of(stage, partial_rollout="resume")
    session = await trial.create()
    end = event([], sglext={"input_ids": prompt, "output_ids": [[7]]})
    answer, broken = await cut_turn(trial, worker, session, ROLE, HEL, ABORT, end, DONE)
    assert broken
    assert b"upstream_error" in answer.body
    assert await trial.records(session) == []


BAD_ABORT = {**delta(None, 0), "delta": {}, "finish_reason": "abort"}
#: Events, and whether the agent is told of an error; else it keeps what it has, and the turn is not recorded.
ODD: dict[str, tuple[list[bytes], bool]] = {
    "logprobs of an abort": ([ROLE, HEL, event([{**BAD_ABORT, "logprobs": {"content": "x"}}])], True),
    "an extension of an abort": ([ROLE, HEL, event([BAD_ABORT], sglext="x")], False),
    "logprobs that are a text": ([ROLE, event([{**delta("Hel"), "logprobs": {"content": "x"}}])], True),
    "a logprob that is null": ([ROLE, event([{**delta("Hel"), "logprobs": {"content": [None]}}])], True),
    "logprobs that are a list": ([ROLE, event([{**delta("Hel"), "logprobs": [1]}])], True),
}


@pytest.mark.parametrize("case", ODD)
async def test_what_is_odd_is_told_as_where_nothing_is_carried_on(stage: Stage, case: str) -> None:
    events, is_error = ODD[case]
    end = [] if "abort" in case else [finish_event("length")]
    worker, trial = await trial_of(stage, partial_rollout="resume")
    worker.next(streamed(*events, *end, told(output_ids=[[7]]), DONE))
    session = await trial.create()
    answer, broken = await asked(trial, session)
    assert broken == is_error
    assert (b"upstream_error" in answer.body) == is_error
    assert b'"logprob"' not in answer.body
    assert await trial.records(session) == []


async def test_a_text_that_waited_is_shown_before_a_stream_that_ends_early_fails(stage: Stage) -> None:
    worker, trial = await trial_of(stage, partial_rollout="resume")
    worker.next(streamed(ROLE, event([delta("a>")])))
    session = await trial.create()
    answer, broken = await asked(trial, session)
    assert broken
    assert answer.body.index(b'"a>"') < answer.body.index(b"upstream_error")


@pytest.mark.parametrize("odd", ["fewer choices than were asked for", "a choice without a place"])
async def test_a_cut_whole_answer_that_lacks_something_is_refused(stage: Stage, odd: str) -> None:
    worker, trial = await trial_of(stage, partial_rollout="resume")
    session, gate, fewer = await trial.create(), asyncio.Event(), odd.startswith("fewer")
    meta = meta_of([7], finish_reason={"type": "abort", "message": "x"}, prompt_tokens=3)
    cut = chat_answer([7], "Hel", finish_reason="abort", meta_info=meta, logprobs={"content": [ENTRY]})
    if not fewer:
        del cut["choices"][0]["index"]
    worker.next(script(gate, reply(orjson.dumps(cut), headers=JSON)))
    rest = meta_of([8], prompt_tokens=4)
    worker.always(script(chat_reply([8], "lo", meta_info=rest, logprobs={"content": [ENTRY]})))
    asking = trial.turn(session, HI, max_tokens=2, n=2 if fewer else 1)
    answer = await cut_by_a_pause(trial, worker, asking, gate)
    assert (answer.status, answer.error_type) == (502, "upstream_error")
    assert await trial.records(session) == []
