"""Turns that go on from held ones: the engine is given what it was given and what it sampled, never an encoding of its
own words, whatever agents and templates make of the history on the way."""

from __future__ import annotations

import itertools
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest

from miles_router.testing.worker.exchange_log import GenerationRecord
from tests.support.scripted_chat import able, chat_reply
from tests.support.scripted_worker import reply, script
from tests.support.session_apis import BOTH, Api, case
from tests.support.session_trial import (
    ADD,
    ASK_ADD,
    CHAT,
    IM_END,
    Message,
    SessionTrial,
    exactly,
    message_of,
    qwen3,
    said,
    session_trial,
    simulated_sessions,
    text_of,
    tool_result,
    user,
)
from tests.support.stage import Stage, staged

HI: list[Any] = [user("Hi")]


@pytest.fixture(scope="module")
async def shared() -> AsyncIterator[SessionTrial]:
    async with staged() as stage, simulated_sessions(stage) as made:
        yield made


@pytest.fixture
def trial(shared: SessionTrial) -> SessionTrial:
    shared.worker.log.clear()
    return shared


def generations(trial: SessionTrial) -> list[GenerationRecord]:
    return [generation for exchange in trial.log for generation in exchange.generations]


def held(generation: GenerationRecord) -> list[int]:
    return generation.input_ids + generation.output_ids


def given_behind(generation: GenerationRecord, before: GenerationRecord, *, dropped: int = 0) -> str:
    """The text that a turn was given behind what was held, which it must begin with."""
    kept = held(before)[: len(held(before)) - dropped]
    assert generation.input_ids[: len(kept)] == kept
    return qwen3().decode(generation.input_ids[len(kept) :])


def spelled(text: str) -> list[int]:
    """A text in single characters and the end of the message: nobody encodes it so."""
    return [*(qwen3().encode(character)[0] for character in text), IM_END]


async def test_a_tool_agent_s_episode_is_what_the_engine_saw(trial: SessionTrial) -> None:
    session = await trial.create()
    history: list[Message] = [{"role": "system", "content": "Add."}, user("17 + 25?")]
    for turn in range(6):
        trial.worker.say(spelled(ASK_ADD if turn % 2 == 0 else f"It is {turn}, naïve 世界."))
        if turn % 3 == 2:
            text = text_of(await trial.stream(session, history, tools=[ADD], max_tokens=99))
            message = (await trial.records(session))[-1]["response"]
            assert (message["content"] or "") == text
        else:
            message = message_of(await trial.chat(session, history, tools=[ADD], max_tokens=99))
        calls = message.get("tool_calls") or []
        history += [message, *([tool_result(call, "42") for call in calls] or [user("Again")])]
    (sample,) = await trial.samples(session)
    exactly(sample, *generations(trial))
    assert sum(sample["loss_mask"]) == sum(len(each.output_ids) for each in generations(trial))
    for each in generations(trial):
        assert qwen3().encode(qwen3().decode(each.output_ids)) != each.output_ids, "encoding it again would drift"
    assert (await trial.reasons(session)) == [None] * 6


SPACED = '{"a":17,   "b":25}'


@pytest.mark.parametrize(
    ("equality", "continues"), [("strict", False), (None, True), ("tests.support.session_trial.equal_roles", True)]
)
async def test_arguments_that_were_written_anew_are_the_same_unless_the_operator_says_no(
    stage: Stage, equality: str | None, continues: bool
) -> None:
    options = {"message_equality": equality} if equality else {}
    async with simulated_sessions(stage, options=options) as trial:
        session = await trial.create()
        trial.worker.say(ASK_ADD)
        message = message_of(await trial.chat(session, HI, tools=[ADD], max_tokens=99))
        call = json.loads(json.dumps(message["tool_calls"][0]))
        call["function"]["arguments"] = SPACED
        assert json.loads(SPACED) == json.loads(message["tool_calls"][0]["function"]["arguments"])
        await trial.chat(session, [*HI, {**message, "tool_calls": [call]}, tool_result(call, "42")], tools=[ADD])
        assert await trial.reasons(session) == [None, None if continues else "edited_history"]
        assert ("input_ids" in trial.log[-1].json()) is continues
        edits = [record["edit"] for record in await trial.records(session)]
        written = call["function"]["arguments"], message["tool_calls"][0]["function"]["arguments"]
        field = "tool_calls[0].function.arguments"
        edit = {"message": 1, "field": field, "held": written[1], "sent": written[0]}
        assert edits == [None, None if continues else edit]
        for sample in await trial.samples(session):
            assert [turn["edit"] for turn in sample["metadata"]["turns"]] in ([None], [None, None], [edit])
            last = generations(trial)[-1]
            assert sample["tokens"] in (held(last), held(generations(trial)[0]))


async def test_completions_go_on_from_ids_that_are_held(trial: SessionTrial) -> None:
    session = await trial.create()
    path = f"/sessions/{session}/v1/completions"
    first = (await trial.ask("POST", path, {"model": "m", "prompt": "Once upon", "max_tokens": 5})).json()
    assert set(first["choices"][0]) == {"index", "text", "logprobs", "finish_reason", "matched_stop"}
    assert first["choices"][0]["logprobs"] is None
    one = trial.worker.log.at("/v1/completions")[-1].generation
    prompt = [*held(one), 40, 41]
    asked = {"model": "m", "prompt": prompt, "max_tokens": 5, "stream": True, "logprobs": 1}
    body = (await trial.ask("POST", path, asked)).body
    assert b"token_ids" not in body
    two = trial.worker.log.at("/v1/completions")[-1].generation
    assert two.input_ids == prompt
    (sample,) = await trial.samples(session)
    exactly(sample, one, two)
    assert [each["path"] for each in await trial.records(session)] == ["/v1/completions"] * 2
    async with trial.agent(session) as client:
        answer = await client.completions.create(model="m", prompt=["a", "b"], max_tokens=3, logprobs=0)
    assert [len(choice.logprobs.token_logprobs or ()) for choice in answer.choices if choice.logprobs] == [3, 3]
    assert len(await trial.samples(session)) == 3


async def test_reasoning_stays_held_whether_or_not_the_agent_sends_it_back(stage: Stage) -> None:
    """Qwen3's template leaves the reasoning of earlier answers out: that would be another history."""
    async with simulated_sessions(stage, reasoning_parser="qwen3") as trial:
        for returned, stream in itertools.product(BOTH, BOTH):
            with case(returned, stream):
                trial.worker.log.clear()
                session, history = await trial.create(), [*HI]
                for turn in range(3):
                    trial.worker.say(f"<think>\nThought {turn}.\n</think>\n\nAnswer {turn}.")
                    told = await Api(CHAT).turn(trial, session, history, 99, stream=stream)
                    assert (told.reasoning, told.text) == (f"\nThought {turn}.\n", f"\n\nAnswer {turn}.")
                    history += [*(told.items if returned else [said(told.text)]), user("Go on")]
                (sample,) = await trial.samples(session)
                exactly(sample, *generations(trial))
                assert sample["response"].count("Thought") == 3


async def test_what_the_prompt_is_not_made_of_may_change_from_turn_to_turn(trial: SessionTrial) -> None:
    tools: dict[str, Any] = {"tools": [ADD]}
    changes: list[tuple[dict[str, Any], dict[str, Any]]] = [
        (tools, {**tools, "tool_choice": "none"}),
        (tools, {**tools, "tool_choice": "auto", "temperature": 0.3, "max_tokens": 4}),
        ({}, {"response_format": {"type": "json_object"}}),
        ({}, {"stream": True, "n": 2}),
    ]
    for first, second in changes:
        with case(second):
            trial.worker.log.clear()
            session = await trial.create()
            message = message_of(await trial.chat(session, HI, **first))
            assert (await trial.turn(session, [*HI, message, user("Go on")], **second)).status == 200
            assert {each["parent"] for each in (await trial.records(session))[1:]} == {0}
            given_behind(generations(trial)[1], generations(trial)[0])


async def test_what_cannot_be_continued_exactly_is_a_new_segment_by_name(trial: SessionTrial) -> None:
    part = {"role": "user", "content": [{"type": "tool_reference", "name": "f"}]}
    cases: list[tuple[dict[str, Any], Message, str]] = [
        ({"input_ids": [1, 2, 3]}, user("Go on"), "own_input_ids"),
        ({"continue_final_message": True}, user("Go on"), "continue_final_message"),
        ({}, part, "not_text"),
    ]
    for fields, appended, reason in cases:
        with case(reason):
            trial.worker.log.clear()
            session = await trial.create()
            message = message_of(await trial.chat(session, HI))
            await trial.chat(session, [*HI, message, appended], **fields)
            assert await trial.reasons(session) == [None, reason]
            one, two = await trial.samples(session)
            exactly(one, generations(trial)[0])
            exactly(two, generations(trial)[1])
            assert (one["metadata"]["reason"], two["metadata"]["reason"]) == (None, reason)


async def test_messages_that_are_none_are_the_engine_s_to_refuse(stage: Stage) -> None:
    worker = able(await stage.worker()).next(script(chat_reply([7, 8])))
    worker.always(script(reply(b'{"message": "no"}', 400)))
    trial = await session_trial(stage, worker)
    session = await trial.create()
    message = message_of(await trial.chat(session, HI))
    call = {"function": {"name": "add", "arguments": "[1]"}}
    contents: list[Any] = [[{"type": "text"}], [{"type": "text", "text": 7}], [7], 7]
    odd: list[Message] = [
        *({"role": "user", "content": content} for content in contents),
        *({"role": "assistant", "content": "", "tool_calls": [each]} for each in (7, call)),
        {"role": "nobody", "content": "Hi"},
    ]
    for each, stream in itertools.product(odd, BOTH):
        answer = await trial.turn(session, [*HI, message, each, user("Go on")], stream=stream)
        assert (answer.status, answer.body) == (400, b'{"message": "no"}'), each
    assert len(await trial.records(session)) == 1


async def test_an_equality_that_is_none_stops_the_start(stage: Stage) -> None:
    for equality in ("loose", "no.such.module.function", "json.decoder"):
        with pytest.raises(ValueError, match="message_equality"):
            await session_trial(stage, options={"message_equality": equality})
