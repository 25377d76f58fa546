"""Turns of agents that a pause cuts, that end too early, or that cannot be carried on."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.support.chat_turns import read_stream
from tests.support.session_trial import ADD, ASK_ADD, message_of, qwen3, simulated_sessions, user
from tests.support.stage import Stage

HI: list[Any] = [user("What is 17 + 25?")]
CALL = qwen3().encode(ASK_ADD)


def tokens_up_to(part: str) -> int:
    """How many tokens of a call are in front of this."""
    return len(qwen3().encode(ASK_ADD[: ASK_ADD.index(part)]))


@pytest.mark.parametrize("parsers", ["hybrid", "engine"])
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("part", ['"b"', " 25", "}}"])
async def test_a_call_that_ended_by_length_is_never_shown_as_complete(
    stage: Stage, stream: bool, part: str, parsers: str
) -> None:
    async with simulated_sessions(stage, options={"parsers": parsers}) as trial:
        trial.worker.say(ASK_ADD)
        session = await trial.create()
        budget = tokens_up_to(part)
        fields: dict[str, Any] = {"tools": [ADD], "max_tokens": budget}
        if stream:
            message, finish, _ = read_stream(await trial.stream(session, HI, **fields))
        else:
            answer = await trial.chat(session, HI, **fields)
            message, finish = message_of(answer), answer["choices"][0]["finish_reason"]
        assert finish == "length"
        calls = message.get("tool_calls") or []
        assert len(calls) == (stream or parsers == "hybrid"), "a family that is not known is left out by the engine"
        for call in calls:
            assert call["function"]["name"] == "add"
            with pytest.raises(json.JSONDecodeError):
                json.loads(call["function"]["arguments"])
        (record,) = await trial.records(session)
        assert [call["function"]["arguments"] for call in record["response"].get("tool_calls", ())] == [
            call["function"]["arguments"] for call in calls
        ]
        (sample,) = await trial.samples(session)
        assert sample["tokens"][-budget:] == CALL[:budget]


@pytest.mark.parametrize("stream", [False, True])
async def test_a_call_that_was_sampled_to_its_end_is_complete_whatever_ends_the_answer(
    stage: Stage, stream: bool
) -> None:
    async with simulated_sessions(stage) as trial:
        trial.worker.say(ASK_ADD)
        session = await trial.create()
        fields: dict[str, Any] = {"tools": [ADD], "max_tokens": len(CALL)}
        if stream:
            message, finish, _ = read_stream(await trial.stream(session, HI, **fields))
        else:
            answer = await trial.chat(session, HI, **fields)
            message, finish = message_of(answer), answer["choices"][0]["finish_reason"]
        (call,) = message["tool_calls"]
        assert json.loads(call["function"]["arguments"]) == {"a": 17, "b": 25}
        assert finish == "length"
