"""Rows that do not fit their answer or the model are refused by name, and nothing half is ever held."""

from __future__ import annotations

import asyncio
import itertools
import json
import re
from collections import Counter
from typing import Any

import numpy as np
import pytest

from miles_router.testing import SimulatedWorker
from miles_router.testing.worker.model.moe import MoeShape, encode_routes
from tests.faults.routed_experts.scenes import (
    FIELD,
    GOOD,
    HI,
    IDS,
    RUNNING,
    TOKENS,
    chat,
    native,
    nothing_is_held,
    the_next_turn_works,
    the_next_works,
)
from tests.support.cache_trial import checkpoint
from tests.support.experts_trial import (
    ASKED,
    MOE,
    SHAPE,
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
from tests.support.scripted_chat import DONE, PROMPT, chat_reply, meta_of, streamed
from tests.support.scripted_worker import ScriptedWorker, script
from tests.support.session_apis import case
from tests.support.session_trial import SESSIONS, message_of, user
from tests.support.stage import Stage
from tests.support.waiting import soon

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
#: Each of them, whole or streamed: all on one router, one behind the other.
CASES = [(kind, *case, bool(place % 2)) for place, (kind, case) in enumerate(WRONG.items())]


def counted(trial: ExpertsTrial, invariant: str, before: Counter[str]) -> None:
    """One answer more is without rows than `before`, for this reason; counts it there."""
    ((reason, count),) = (Counter(trial.held["missing"]) - before).items()
    assert (reason.startswith(invariant), count, trial.held["answers"]) == (True, 1, 0)
    before[reason] += 1


async def test_rows_that_do_not_fit_are_not_held_and_the_answer_is_given(
    worker: ScriptedWorker, trial: ExpertsTrial
) -> None:
    missing = Counter[str]()
    for kind, experts, invariant, _, stream in CASES:
        with case(kind, stream):
            worker.next(native(experts, stream=stream))
            got = await trial.post("/generate", {**ASKED, "stream": stream, "return_logprob": True})
            bare = generated(IDS, None)
            want = event_of(RUNNING) + event_of(bare) + DONE if stream else compact(bare)
            assert (got.status, got.body) == (200, want)
            counted(trial, invariant, missing)
            await nothing_is_held(trial)
            assert (await trial.refused(rid="r1"))[0] == 404
    assert await trial.missing() == missing
    await the_next_works(trial, worker)


async def test_a_sample_says_why_its_rows_did_not_fit(worker: ScriptedWorker, sessions: ExpertsTrial) -> None:
    missing = Counter[str]()
    for kind, experts, invariant, says, stream in CASES:
        with case(kind, stream):
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
            assert (status, error) == (404, "not_found")
            assert re.search(says, message), message
            counted(sessions, invariant, missing)
            await nothing_is_held(sessions)
    assert await sessions.missing() == missing
    await the_next_turn_works(sessions, worker)


async def test_a_worker_of_another_model_among_the_fleet_spoils_its_own_answers_alone(stage: Stage) -> None:
    vocabulary = checkpoint()
    async with (
        SimulatedWorker(moe=MOE, tokenizer=vocabulary) as one,
        SimulatedWorker(moe=OTHER, tokenizer=vocabulary) as other,
    ):
        trial = await experts_trial(stage, one, other)
        for number in range(8):
            await trial.generate(input_ids=[40, 41, number], rid=f"row-{number}")
        theirs = {worker: [each.rid for each in worker.log.generations] for worker in (one, other)}
        assert all(theirs.values()), "each has answered some"
        for rid in theirs[one]:
            assert np.array_equal(await trial.rows(rid=rid), truth(tokens_of(one.log.generation(rid))))
        for rid in theirs[other]:
            assert (await trial.refused(rid=rid))[0] == 404
        assert sum((await trial.missing()).values()) == len(theirs[other])


async def test_without_a_shape_that_is_known_each_worker_is_judged_by_its_own_rows(stage: Stage) -> None:
    vocabulary = checkpoint()
    async with (
        SimulatedWorker(moe=MOE, tokenizer=vocabulary) as one,
        SimulatedWorker(moe=OTHER, tokenizer=vocabulary) as other,
    ):
        trial = await experts_trial(stage, one, other, options={})
        for number in range(8):
            await trial.generate(input_ids=[40, 41, number], rid=f"row-{number}")
        for worker, shape in ((one, MOE), (other, OTHER)):
            assert worker.log.generations, "each has answered some"
            for generation in worker.log.generations:
                expected = truth(tokens_of(generation), moe=shape)
                assert np.array_equal(await trial.rows(rid=generation.rid), expected.reshape(len(expected), -1))
        assert await trial.missing() == {}


@pytest.mark.alone("each process learns by itself what rows look like")
@pytest.mark.parametrize("stream", [False, True])
async def test_a_worker_started_anew_is_judged_by_its_own_rows(
    stage: Stage, worker: ScriptedWorker, stream: bool
) -> None:
    trial = await experts_trial(stage, worker, options={})
    for shape in (MOE, OTHER):
        for rid in (f"{shape.layers} first", f"{shape.layers} second"):
            worker.next(native(told(IDS, moe=shape), stream=stream, id=rid))
            assert (await trial.post("/generate", {**ASKED, "stream": stream})).status == 200
            expected = truth(TOKENS, moe=shape)
            assert np.array_equal(await trial.rows(rid=rid), expected.reshape(len(expected), -1))
        worker.next(native(told([*IDS, 9], moe=shape), stream=stream, id="long"))
        assert (await trial.post("/generate", {**ASKED, "stream": stream})).status == 200
        assert (await trial.refused(rid="long"))[0] == 404
        worker.kill()
        await worker.listen()
    assert await trial.missing() == {"experts_without_overlap": 2}


async def test_what_stands_in_the_place_of_rows_is_not_taken_for_those_of_another_answer(
    stage: Stage, worker: ScriptedWorker
) -> None:
    trial = await experts_trial(stage, worker, options={"moe_shape": SHAPE, "required": False})
    places: tuple[Any, ...] = (0, 1, 0.0, True)
    for count, (odd, stream) in enumerate(itertools.product(places, (False, True)), 1):
        with case(odd, stream):
            rids = [f"{name}{count}" for name in "abc"]
            answers = [
                {**generated(IDS, each, id=rid), "index": place}
                for place, (rid, each) in enumerate(zip(rids, (GOOD, odd, GOOD), strict=True))
            ]
            worker.next(streamed(*map(event_of, answers), DONE) if stream else script(in_one(answers)))
            assert (await trial.post("/generate", {"input_ids": [PROMPT] * 3, "stream": stream})).status == 200
            assert (await trial.refused(rid=rids[1]))[0] == 404
            for rid in (rids[0], rids[2]):
                assert np.array_equal(await trial.rows(rid=rid), truth(TOKENS))
            assert await trial.missing() == {"worker": count}


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


@pytest.mark.alone("rows in memory are bounded in each process")
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
    await soon(asked.wait())
    for number in range(3):
        other = [7] * 50
        worker.next(script(chat_reply(other, meta_info=meta_of(other, routed_experts=told(other)))))
        await trial.chat(await trial.create(f"{number}"), HI)
    assert trial.held["evicted"] == 2, "of three that take more room than there is beside the one that goes on"
    gate.set()
    await turn
    assert len(await trial.exact(session)) == 1
    assert trial.held["bytes"] <= 60 * WIDTH
