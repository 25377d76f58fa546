"""Agents that speak Anthropic's Messages API, with the official client: their turns are those of every session, exact
and in one segment, whole and as real streams."""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
from collections.abc import AsyncIterator, Sequence
from typing import Any

from anthropic import AsyncAnthropic
from anthropic.types import Message

from tests.support.scripted_chat import able, answering
from tests.support.session_apis import BOTH, MESSAGES, Api, case
from tests.support.session_trial import SessionTrial, session_trial, simulated_sessions, user
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


scripted = functools.partial(simulated_sessions, script=SCRIPT, reasoning_parser="qwen3")


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


# Counting


async def test_tokens_are_counted_as_the_engine_is_given_them(stage: Stage) -> None:
    async with scripted(stage) as trial:
        session = await trial.create()
        counts = []
        async with agent(trial, session) as client:
            history: list[Any] = [{"role": "user", "content": "What is 17 plus 25, plus 1?"}]
            for turn in range(3):
                fields: Any = {"model": "m", "tools": [ADD], "system": "Be brief."}
                choice: Any = {"tool_choice": {"type": "none"}} if turn == 2 else {}
                counts.append((await client.messages.count_tokens(messages=history, **fields, **choice)).input_tokens)
                answer = await asked(client, history, live=bool(turn), system="Be brief.", **choice)
                usage = answer.usage
                assert usage.input_tokens + (usage.cache_read_input_tokens or 0) == counts[-1]
                assert (usage.cache_read_input_tokens or 0) > counts[-2] if turn else True, "the turn before"
                history += [{"role": "assistant", "content": answer.content}]
                history += [{"role": "user", "content": results(answer) or "Go on"}]
            begun: Any = [{"role": "user", "content": "Say it."}, {"role": "assistant", "content": "It is ("}]
            counts.append((await client.messages.count_tokens(model="m", messages=begun)).input_tokens)
            await client.messages.create(model="m", max_tokens=4, messages=begun)
        assert counts == [len(exchange.generation.input_ids) for exchange in trial.log]
        assert len(await trial.records(session)) == 4, "counting is no turn"


# Beside turns


async def test_models_are_listed_in_both_spellings(stage: Stage) -> None:
    async with scripted(stage) as trial:
        session = await trial.create()
        async with agent(trial, session) as client:
            listed = await client.models.list()
            (model,) = [each async for each in listed]
            assert (model.id, model.type) == ("simulated-model", "model")
        plain = (await trial.ask("GET", f"/sessions/{session}/v1/models")).json()
        assert (plain["object"], plain["data"][0]["object"]) == ("list", "model")
        version = [("anthropic-version", "2023-06-01")]
        one = await trial.ask("GET", f"/sessions/{session}/v1/models/simulated-model", headers=version)
        assert (one.status, one.json()["type"]) == (200, "model")


async def test_a_call_that_nests_deep_is_one_that_its_client_reads_and_sends_back(stage: Stage) -> None:
    api, worker = Api(MESSAGES), able(await stage.worker())
    trial = await session_trial(stage, worker)
    for levels, live in itertools.product((150, 199, 200, 5000), BOTH):
        with case(levels, live):
            arguments = f'{{"a": {"[" * levels}{"]" * levels}}}'
            made = {"id": "c1", "index": 0, "type": "function", "function": {"name": "add", "arguments": arguments}}
            worker.always(answering([7], calls=[made]))
            session, question = await trial.create(), user("Add.")
            reply = await api.post(trial, session, api.body([question], 8, stream=live))
            if live:
                assert json.dumps(arguments[-40:-1])[1:-1].encode() in reply.body
            else:
                (block,) = reply.json()["content"]
                assert block["input"] == (json.loads(arguments) if levels < 200 else {"INVALID_JSON": arguments})
                back = api.body([question, {"role": "assistant", "content": [block]}, user("Go on.")], 8)
                again = await trial.ask("POST", f"/sessions/{session}{MESSAGES}/count_tokens", back)
                assert again.status == (400 if levels == 199 else 200), "a request has more levels around it"
            held = (await trial.records(session))[0]["response"]["tool_calls"][0]["function"]["arguments"]
            assert held == arguments
