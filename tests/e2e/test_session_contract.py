"""An episode's contract: what it leaves for each turn to the token, what its agent cannot change, and how it ends."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from tests.support.http import RawReply
from tests.support.session_trial import SessionTrial, message_of, simulated_sessions, user
from tests.support.stage import Stage
from tests.support.under_way import under_way
from tests.support.waiting import until

HI = [user("Hi")]
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
LONG: Any = {"ignore_eos": True, "max_tokens": 1000}


@pytest.fixture
async def trial(stage: Stage) -> AsyncIterator[SessionTrial]:
    async with simulated_sessions(stage) as started:
        yield started


def overflow_of(answer: RawReply) -> dict[str, Any]:
    """The error of an agent whose contract leaves nothing."""
    assert answer.status == 400, answer.body
    error: dict[str, Any] = answer.json()["error"]
    assert (error["code"], error["type"]) == ("context_length_exceeded", "invalid_request_error")
    assert error["message"].startswith("This model's maximum context length is")
    return error


async def end_reason(trial: SessionTrial, session: str) -> str | None:
    reason: str | None = (await trial.read(session))["metadata"].get("end_reason")
    return reason


async def ask_again(trial: SessionTrial, session: str, answer: Any, **fields: Any) -> RawReply:
    """The next turn behind the first."""
    return await trial.turn(session, [*HI, message_of(answer), user("More")], **fields)


# What may stand in one


async def test_a_contract_is_read_when_the_session_is_made_and_shown_with_it(trial: SessionTrial) -> None:
    contract = {"budget": {"max_turns": 2}, "sampling": {"temperature": 0.5}}
    session = await trial.create(contract=contract)
    assert (await trial.read(session))["metadata"]["contract"] == contract
    await trial.chat(session, HI)
    (sample,) = await trial.samples(session)
    assert sample["metadata"]["contract"] == contract
    assert "end_reason" not in sample["metadata"]


# The budget


async def test_turns_at_the_same_time_share_a_budget_to_the_token(trial: SessionTrial) -> None:
    session = await trial.create(contract={"budget": {"max_tokens": 50}})
    turns = [trial.turn(session, [user(f"Hi {number}")], ignore_eos=True, max_tokens=20) for number in range(4)]
    answers = await asyncio.gather(*turns)
    assert sorted(answer.status for answer in answers) == [200, 200, 200, 400]
    assert sorted(record["completion_tokens"] for record in await trial.records(session)) == [10, 20, 20]


async def test_a_turn_waits_for_what_others_may_leave_of_the_budget(trial: SessionTrial) -> None:
    session = await trial.create(contract={"budget": {"max_tokens": 40}})
    trial.worker.say("Short.")
    trial.worker.say("Short.")
    trial.worker.stop_scheduler()
    async with under_way(trial.turn(session, HI, max_tokens=None)) as first:
        await until(lambda: trial.worker.running == 1, "the first runs, and may take all")
        async with under_way(trial.turn(session, [user("And I?")], max_tokens=None)) as second:
            while not second.done() and (await trial.read(session))["metadata"]["in_flight"] < 2:
                pass
            trial.worker.continue_scheduler()
            assert [(await first).status, (await second).status] == [200, 200]
    assert len(trial.log) == 2


async def test_a_turn_under_a_budget_is_cut_to_what_the_engine_s_window_holds(stage: Stage) -> None:
    async with simulated_sessions(stage, context_len=100) as trial:
        free = await trial.create()
        assert (await trial.turn(free, HI, **LONG)).status == 400, "the engine refuses it"
        session = await trial.create(contract={"budget": {"max_tokens": 5000}})
        answer = await trial.chat(session, HI, **LONG)
        assert answer["choices"][0]["finish_reason"] == "length"
        refused = await ask_again(trial, session, answer)
        assert overflow_of(refused)["reason"] == "context"


# What the agent cannot change


@pytest.mark.parametrize("enabled", [True, False])
async def test_an_adapter_that_is_not_there_is_never_the_base_model(stage: Stage, enabled: bool) -> None:
    async with simulated_sessions(stage, enable_lora=enabled) as trial:
        session = await trial.create(contract={"model": {"lora": "mine"}})
        answer = await trial.turn(session, HI)
        assert (answer.status, b"mine" in answer.body) == (400, True)
        assert await trial.records(session) == []


async def test_no_name_of_a_model_gets_around_the_adapter_of_the_run(stage: Stage) -> None:
    async with simulated_sessions(stage, options={"lora_path": "mine"}, enable_lora=True) as trial:
        await trial.ask("POST", "/load_lora_adapter", {"lora_name": "mine", "lora_path": "/mine"})
        session = await trial.create()
        await trial.chat(session, HI, model="base:other")
        assert (trial.log[0].json()["model"], trial.log[0].json()["lora_path"]) == ("base", "mine")
        await trial.ask("POST", "/load_lora_adapter", {"lora_name": "other", "lora_path": "/other"})
        for path, fields in ((CHAT, {"messages": HI}), (COMPLETIONS, {"prompt": "Hi"})):
            answer = await trial.ask("POST", f"/sessions/{session}{path}", {**fields, "model": "base:other"})
            assert answer.status == 200, answer.body
        assert {each.lora_path for each in trial.worker.log.generations} == {"mine"}


async def test_what_is_not_traced_has_the_adapter_of_the_run_too(stage: Stage) -> None:
    async with simulated_sessions(stage, options={"lora_path": "mine"}, enable_lora=True) as trial:
        for name in ("mine", "other"):
            await trial.ask("POST", "/load_lora_adapter", {"lora_name": name, "lora_path": "/x"})
        session = await trial.create()
        for path, fields in (("/generate", {"text": "Hi"}), (COMPLETIONS, {"prompt": "Hi", "echo": True})):
            for own in ({}, {"model": "other"}, {"lora_path": "other"}):
                answer = await trial.ask("POST", f"/sessions/{session}{path}", {**fields, **own})
                assert answer.status == 200, answer.body
        assert [each.lora_path for each in trial.worker.log.generations] == ["mine"] * 6
        await trial.ask("POST", f"/sessions/{session}/v1/embeddings", {"input": "Hi", "lora_path": "other"})
        assert trial.worker.log.at("/v1/embeddings")[0].json()["lora_path"] == "mine"


# How old the weights may be


async def new_weights(trial: SessionTrial, version: str) -> None:
    """The fleet has weights of this version."""
    fields = {"model_path": "/new", "weight_version": version, "flush_cache": True}
    answer = await trial.ask("POST", "/update_weights_from_disk", fields)
    assert answer.status == 200, answer.body


async def test_a_turn_in_which_stale_weights_would_take_part_is_refused_by_name(trial: SessionTrial) -> None:
    old = await trial.create(contract={"freshness": {"oldest_version": 2}})
    early = await trial.turn(old, HI)
    assert (early.status, early.error_type) == (400, "invalid_request")
    assert (trial.log, await end_reason(trial, old)) == ([], "stale")
    session = await trial.create(contract={"freshness": {"oldest_version": 1}})
    answer = await trial.chat(session, HI)
    assert (await trial.samples(session))[0]["metadata"]["stale"] is False
    await new_weights(trial, "2")
    assert (await ask_again(trial, session, answer)).status == 200, "old enough"
    assert (await trial.turn(old, HI)).status == 200, "the fleet has come so far"


async def test_a_history_of_stale_weights_is_not_continued(trial: SessionTrial) -> None:
    free = await trial.create(contract={"freshness": {"oldest_version": 2, "otherwise": "mark"}})
    answer = await trial.chat(free, HI)
    await new_weights(trial, "2")
    assert (await ask_again(trial, free, answer)).status == 200, "it is marked, not refused"
    assert (await trial.turn(free, [user("Anew")])).status == 200
    marked = [sample["metadata"]["stale"] for sample in await trial.samples(free)]
    assert marked == [True, False]


async def test_what_cannot_be_counted_or_recorded_is_refused_under_a_budget(trial: SessionTrial) -> None:
    session = await trial.create(contract={"budget": {"max_tokens": 20}})
    wrong: Any = ({"max_tokens": "9"}, {"max_tokens": 0}, {"n": "2"})
    for fields in wrong:  # an engine might read it otherwise
        answer = await trial.turn(session, HI, **fields)
        assert (answer.status, answer.error_type) == (400, "invalid_request"), fields
    for path, body in (("/generate", {"text": "Once"}), (COMPLETIONS, {"prompt": "Once", "echo": True})):
        answer = await trial.ask("POST", f"/sessions/{session}{path}", body)
        assert (answer.status, answer.error_type) == (400, "invalid_request"), path
        assert trial.worker.log.at(path) == []
    session = await trial.create(contract={"budget": {"max_context": 60}})
    answer = await trial.turn(session, HI, chat_template_kwargs=7)  # no template is rendered with that
    assert (answer.status, answer.error_type) == (400, "invalid_request")
    assert trial.log == []
    # Completions give 16 tokens where nobody says how many; a field of chat's does not get around the budget.
    session, asked = await trial.create(contract={"budget": {"max_tokens": 20}}), {"max_completion_tokens": 1}
    for tokens in (16, 4):
        body = {"model": "m", "prompt": "Once", "ignore_eos": True, **asked}
        answer = await trial.ask("POST", f"/sessions/{session}{COMPLETIONS}", body)
        assert answer.json()["usage"]["completion_tokens"] == tokens
