"""Agents that speak Anthropic's Messages API, with the official client: their turns are those of every session, exact
and in one segment, whole and as real streams."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Sequence
from typing import Any

import pytest
from anthropic import AsyncAnthropic
from anthropic.types import Message

from tests.support.session_trial import SessionTrial, exactly, simulated_sessions
from tests.support.stage import Stage

ADD: Any = {
    "name": "add",
    "description": "Adds two numbers.",
    "input_schema": {
        "type": "object",
        "properties": {
            "a": {"type": "integer"},
            "b": {"type": "integer"},
            "exact": {"type": "boolean", "default": True},
        },
        "required": ["a", "b"],
    },
}
SCRIPT: Sequence[Any] = [
    {
        "reasoning": "Two sums at once.",
        "text": "Let me add.",
        "calls": [
            {"name": "add", "arguments": {"a": 17, "b": 25}},
            {"name": "add", "arguments": {"a": 1.0, "b": {"c": "}"}}},
        ],
    },
    {"calls": [{"name": "add", "arguments": {"b": 1, "a": 42}}]},
    {"reasoning": "That is all.", "text": "It is 43."},
]


@contextlib.asynccontextmanager
async def scripted(stage: Stage, script: Sequence[Any] = SCRIPT, **worker: Any) -> AsyncIterator[SessionTrial]:
    async with simulated_sessions(stage, script=script, reasoning_parser="qwen3", **worker) as trial:
        yield trial


@contextlib.asynccontextmanager
async def agent(trial: SessionTrial, session: str, **options: Any) -> AsyncIterator[AsyncAnthropic]:
    """The official client, which knows `anthropic_base_url` and nothing else."""
    url = f"{trial.router.url}/sessions/{session}"
    async with AsyncAnthropic(base_url=url, **{"api_key": "none", "max_retries": 0, **options}) as client:
        yield client


async def asked(client: AsyncAnthropic, messages: Sequence[Any], *, live: bool, **fields: Any) -> Message:
    """One turn, whole or streamed."""
    given: dict[str, Any] = {"model": "m", "max_tokens": 200, "messages": messages, "tools": [ADD], **fields}
    if not live:
        answer: Message = await client.messages.create(**given)
        return answer
    async with client.messages.stream(**given) as stream:
        return await stream.get_final_message()


def results(answer: Message) -> list[Any]:
    """The results of an answer's calls, in the order in which they ended: the last first."""
    calls = [block for block in answer.content if block.type == "tool_use"]
    return [
        {"type": "tool_result", "tool_use_id": call.id, "content": [{"type": "text", "text": f"result {place}"}]}
        for place, call in reversed([*enumerate(calls)])
    ]


async def episode(client: AsyncAnthropic, live: Sequence[bool], **fields: Any) -> tuple[list[Any], list[Message]]:
    """An agent that calls tools until there are none: its history, and the answers."""
    history: list[Any] = [{"role": "user", "content": "What is 17 plus 25, plus 1?"}]
    answers: list[Message] = []
    for each in live:
        answers.append(await asked(client, history, live=each, system="Be brief.", **fields))
        history.append({"role": "assistant", "content": answers[-1].content})
        if answers[-1].stop_reason == "tool_use":
            history.append({"role": "user", "content": results(answers[-1])})
    return history, answers


# Exact


@pytest.mark.parametrize("live", [(True, True, True), (False, False, False), (False, True, False)])
async def test_a_tool_agent_leaves_one_exact_segment(stage: Stage, live: Sequence[bool]) -> None:
    async with scripted(stage) as trial:
        session = await trial.create()
        async with agent(trial, session) as client:
            _, answers = await episode(client, live)
        assert [answer.stop_reason for answer in answers] == ["tool_use", "tool_use", "end_turn"]
        assert [[block.type for block in answer.content] for answer in answers] == [
            ["thinking", "text", "tool_use", "tool_use"],
            ["tool_use"],
            ["thinking", "text"],
        ]
        first, second = answers[0].content[2:]
        assert (first.type, second.type) == ("tool_use", "tool_use")
        assert (first.input, second.input) == ({"a": 17, "b": 25}, {"a": 1.0, "b": {"c": "}"}})
        assert await trial.reasons(session) == [None] * 3
        (sample,) = await trial.samples(session)
        exactly(sample, *(exchange.generation for exchange in trial.door))
        assert ["input_ids" in exchange.json() for exchange in trial.door] == [False, True, True]
        assert [record["path"] for record in await trial.records(session)] == ["/v1/messages"] * 3
