"""One turn of a session, whole and streamed: agents see what OpenAI's own client expects, and what they asked for."""

from __future__ import annotations

import itertools
import json
from collections.abc import AsyncIterator
from typing import Any

import openai
import pytest
from openai.types.chat import ChatCompletion
from pydantic import BaseModel

from miles_router.testing import SimulatedWorker
from tests.support.http import RawReply, ask
from tests.support.scripted_worker import reply, script
from tests.support.session_trial import (
    ADD,
    ASK_ADD,
    CHAT,
    JSON,
    SessionTrial,
    chunks_of,
    qwen3,
    session_trial,
    simulated_sessions,
    user,
)
from tests.support.stage import Stage, staged

HI: list[Any] = [user("Hi")]
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}, "n": {"type": "integer"}}}
FORMAT = {"type": "json_schema", "json_schema": {"name": "place", "schema": SCHEMA}}
NAMED = {"type": "function", "function": {"name": "add"}}
UNKNOWN = {"type": "function", "function": {"name": "nobody"}}
#: What agents ask for.
ASKED: dict[str, dict[str, Any]] = {
    "nothing": {},
    "max_completion_tokens": {"max_tokens": None, "max_completion_tokens": 5},
    "logprobs": {"logprobs": True},
    "top_logprobs": {"logprobs": True, "top_logprobs": 3},
    "top_logprobs without logprobs": {"logprobs": False, "top_logprobs": 3},
    "n": {"n": 3},
    "n, logprobs": {"n": 2, "logprobs": True},
    "tools": {"tools": [ADD]},
    "no tool": {"tools": [ADD], "tool_choice": "none"},
    "some tool": {"tools": [ADD], "tool_choice": "required", "max_tokens": 200},
    "one tool": {"tools": [ADD], "tool_choice": NAMED, "max_tokens": 200, "logprobs": True},
    "response_format": {"response_format": FORMAT, "max_tokens": 200},
    "stop": {"stop": ["e", "a"], "max_tokens": 200},
    "unknown": {"priority": 7, "bogus": {"a": [1.5, None, "é"]}},
    "parameters": {"temperature": 0.5, "top_p": 0.9, "seed": 3, "presence_penalty": 0.1, "user": "me"},
    "ids": {"return_input_ids_in_sglext": True, "return_output_ids_in_sglext": True},
    "cached tokens": {"return_cached_tokens_details": True},
}
OF_WHOLE: dict[str, dict[str, Any]] = {
    "prompt ids": {"return_prompt_token_ids": True},
    "meta": {"return_meta_info": True},
    "meta, logprobs": {"return_meta_info": True, "logprobs": True, "top_logprobs": 1},
    "token ids": {"return_token_ids": True},
}
OF_STREAM: dict[str, dict[str, Any]] = {
    "usage": {"stream_options": {"include_usage": True}},
    "usage, n": {"stream_options": {"include_usage": True}, "n": 2},
    "usage all along": {"stream_options": {"include_usage": True, "continuous_usage_stats": True}},
    "usage, ids": {"stream_options": {"include_usage": True}, **ASKED["ids"]},
    "prompt ids refused": {"return_prompt_token_ids": True},
}


@pytest.fixture(scope="module")
async def shared() -> AsyncIterator[SessionTrial]:
    """One router and worker for all tests that leave them as they were: each has sessions of its own."""
    async with staged() as stage, simulated_sessions(stage) as made:
        yield made


@pytest.fixture
def trial(shared: SessionTrial) -> SessionTrial:
    shared.worker.door.clear()
    return shared


Pair = tuple[SessionTrial, SimulatedWorker]


@pytest.fixture(scope="module")
async def pair() -> AsyncIterator[Pair]:
    """A router with sessions and, beside it, a worker with the same weights that is asked for the same."""
    async with (
        staged() as stage,
        simulated_sessions(stage) as made,
        SimulatedWorker(tokenizer=qwen3(), weight_version="1") as other,
    ):
        yield made, other


#: What ends one request, when its client has left, must not end the next.
rids = (f"r-{number}" for number in itertools.count())


async def both(pair: Pair, session: str, body: dict[str, Any]) -> tuple[RawReply, RawReply]:
    """The router's reply and the other worker's."""
    through = await pair[0].ask("POST", f"/sessions/{session}{CHAT}", body)
    direct = await ask(pair[1].url, "POST", CHAT, JSON, json.dumps(body).encode())
    return through, direct


def steady(answer: Any) -> Any:
    """Without times and ids that are made up."""
    if isinstance(answer, list):
        return [steady(each) for each in answer]
    if not isinstance(answer, dict):
        return answer
    passing = ("created", "id", "e2e_latency", "response_sent_to_client_ts")
    return {name: None if name in passing else steady(value) for name, value in answer.items()}


@pytest.mark.parametrize("asked", [*ASKED.values(), *OF_WHOLE.values()], ids=[*ASKED, *OF_WHOLE])
async def test_an_agent_is_given_the_worker_s_answer_and_nothing_it_did_not_ask_for(
    pair: Pair, asked: dict[str, Any]
) -> None:
    body = {"model": "m", "messages": HI, "temperature": 0, "rid": next(rids), "max_tokens": 8, **asked}
    through, direct = await both(pair, await pair[0].create(), body)
    assert (through.status, direct.status) == (200, 200)
    assert through.value("content-type") == direct.value("content-type")
    told = direct.json()["metadata"]
    told["weight_versions"] = json.dumps(told["weight_versions"], separators=(",", ":"))  # a text, as the API has it
    assert steady(through.json()) == steady({**direct.json(), "metadata": told})
    ChatCompletion.model_validate(through.json(), strict=True)


@pytest.mark.parametrize("asked", [*ASKED.values(), *OF_STREAM.values()], ids=[*ASKED, *OF_STREAM])
async def test_an_agent_is_given_the_worker_s_stream_and_nothing_it_did_not_ask_for(
    pair: Pair, asked: dict[str, Any]
) -> None:
    body = {"model": "m", "messages": HI, "temperature": 0, "rid": next(rids), "max_tokens": 8, "stream": True, **asked}
    through, direct = await both(pair, await pair[0].create(), body)
    assert through.status == direct.status
    assert through.value("content-type") == direct.value("content-type")
    if direct.status != 200:
        assert through.body == direct.body
    else:
        seen, expected = chunks_of(through.body), chunks_of(direct.body)
        assert in_order(seen) == in_order(expected)


def in_order(chunks: list[Any]) -> list[Any]:
    """By choice, and what tells logprobs apart: choices of one request interleave as they come, and a piece of a call
    waits until it is known that the answer does not end there."""
    return [steady(chunk) for chunk in sorted(chunks, key=_place)]


def _place(chunk: Any) -> tuple[int, bool]:
    if not chunk["choices"]:
        return 99, False
    choice = chunk["choices"][0]
    return choice["index"], choice.get("logprobs") is not None


async def test_what_an_agent_asks_for_reaches_the_worker_as_it_is(trial: SessionTrial) -> None:
    session = await trial.create()
    asked = {**ASKED["unknown"], **ASKED["parameters"], "stop": ["#"], "max_completion_tokens": 5, "tools": [ADD]}
    for stream in (False, True):
        await trial.turn(session, HI, stream=stream, **asked)
        sent = trial.door[-1].json()
        assert {name: sent[name] for name in asked} == asked
        assert (sent["messages"], sent["model"], sent.get("stream", False)) == (HI, "m", stream)


# Through the official client


async def test_the_official_client_reads_a_whole_answer(trial: SessionTrial) -> None:
    trial.worker.say("Hello there!")
    async with trial.agent(await trial.create()) as client:
        answer = await client.chat.completions.create(model="m", messages=HI, n=1)
    (choice,) = answer.choices
    assert (choice.message.content, choice.finish_reason, choice.logprobs) == ("Hello there!", "stop", None)
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == len(trial.door[0].generation.input_ids)
    assert answer.usage.completion_tokens == len(trial.door[0].generation.output_ids)


async def test_the_official_client_reads_a_stream(trial: SessionTrial) -> None:
    trial.worker.say("Hello there!")
    async with trial.agent(await trial.create()) as client:
        stream = await client.chat.completions.create(
            model="m",
            messages=HI,
            stream=True,
            stream_options={"include_usage": True},
        )
        chunks = [chunk async for chunk in stream]
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == "Hello there!"
    assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices][-1] == "stop"
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == len(trial.door[0].generation.output_ids)
    assert all("sglext" not in (chunk.model_extra or {}) for chunk in chunks)


@pytest.mark.parametrize("streamed", [False, True])
async def test_the_official_client_gets_the_tool_calls(trial: SessionTrial, streamed: bool) -> None:
    trial.worker.say(f"I add them.\n{ASK_ADD}")
    asked: dict[str, Any] = {"model": "m", "messages": HI, "tools": [ADD], "tool_choice": "auto"}
    async with trial.agent(await trial.create()) as client:
        if streamed:
            async with client.chat.completions.stream(**asked) as stream:
                answer: Any = await stream.get_final_completion()
        else:
            answer = await client.chat.completions.create(**asked)
    (choice,) = answer.choices
    (call,) = choice.message.tool_calls or []
    assert (choice.message.content.strip(), choice.finish_reason) == ("I add them.", "tool_calls")
    assert (call.function.name, json.loads(call.function.arguments)) == ("add", {"a": 17, "b": 25})
    assert call.id.startswith("call_")


async def test_the_official_client_gets_several_choices(trial: SessionTrial) -> None:
    session = await trial.create()
    asked: dict[str, Any] = {"model": "m", "messages": HI, "n": 3, "max_tokens": 6}
    async with trial.agent(session) as client:
        answer = await client.chat.completions.create(**asked)
        stream = await client.chat.completions.create(**asked, stream=True)
        choices = [choice async for chunk in stream for choice in chunk.choices]
    whole = [choice.message.content for choice in answer.choices]
    streamed = ["".join(each.delta.content or "" for each in choices if each.index == index) for index in range(3)]
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    assert len({*whole, *streamed}) == 6
    records = await trial.records(session)
    assert [each["response"]["content"] for each in records] == [*whole, *streamed]
    assert [each["choice"] for each in records] == [0, 1, 2, 0, 1, 2]


class Place(BaseModel):
    city: str
    n: int


async def test_the_official_client_parses_what_it_asked_to_be_formatted(trial: SessionTrial) -> None:
    async with trial.agent(await trial.create()) as client:
        answer = await client.chat.completions.parse(model="m", messages=HI, response_format=Place)
    assert isinstance(answer.choices[0].message.parsed, Place)


@pytest.mark.parametrize("streamed", [False, True])
async def test_reasoning_comes_apart_where_the_worker_separates_it(stage: Stage, streamed: bool) -> None:
    async with simulated_sessions(stage, reasoning_parser="qwen3") as trial:
        trial.worker.say("<think>\nWhy?\n</think>\n\nBecause.")
        session = await trial.create()
        if streamed:
            deltas = [chunk["choices"][0]["delta"] for chunk in await trial.stream(session, HI, max_tokens=99)]
            message = {
                name: "".join(delta.get(name) or "" for delta in deltas) for name in ("content", "reasoning_content")
            }
        else:
            async with trial.agent(session) as client:
                answer = await client.chat.completions.create(model="m", messages=HI)
                message = answer.choices[0].message.model_dump()
        assert (message["reasoning_content"], message["content"]) == ("\nWhy?\n", "\n\nBecause.")
        (record,) = await trial.records(session)
        assert record["response"]["reasoning_content"] == "\nWhy?\n"


async def test_a_stop_string_ends_the_answer_and_its_tokens_are_kept(trial: SessionTrial) -> None:
    trial.worker.say("one two#three")
    session = await trial.create()
    async with trial.agent(session) as client:
        answer = await client.chat.completions.create(model="m", messages=HI, stop=["#"])
    assert (answer.choices[0].message.content, answer.choices[0].finish_reason) == ("one two", "stop")
    (sample,) = await trial.samples(session)
    sampled = trial.door[0].generation.output_ids
    assert sample["tokens"][-len(sampled) :] == sampled
    assert "#" in sample["response"]


@pytest.mark.parametrize("streamed", [False, True])
async def test_the_logprobs_that_an_agent_asks_for_are_those_of_the_sample(trial: SessionTrial, streamed: bool) -> None:
    session = await trial.create()
    asked: dict[str, Any] = {"model": "m", "messages": HI, "max_tokens": 6, "logprobs": True, "top_logprobs": 2}
    async with trial.agent(session) as client:
        if streamed:
            stream = await client.chat.completions.create(**asked, stream=True)
            found = [chunk.choices[0].logprobs async for chunk in stream]
        else:
            found = [(await client.chat.completions.create(**asked)).choices[0].logprobs]
    tokens = [token for each in found if each for token in each.content or ()]
    assert [token.logprob for token in tokens] == trial.door[0].generation.logprobs
    assert all(len(token.top_logprobs) == 2 for token in tokens)


async def test_completion_tokens_are_bounded_as_the_agent_says(trial: SessionTrial) -> None:
    async with trial.agent(await trial.create()) as client:
        for name in ("max_tokens", "max_completion_tokens"):
            asked: dict[str, Any] = {"model": "m", "messages": HI, name: 5}
            answer = await client.chat.completions.create(**asked)
            assert answer.usage is not None
            assert (answer.usage.completion_tokens, answer.choices[0].finish_reason) == (5, "length")


# Errors


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    "bad", [{"temperature": -1}, {"tool_choice": "required"}, {"tools": [ADD], "tool_choice": UNKNOWN}], ids=str
)
async def test_what_the_engine_refuses_comes_in_its_words_and_is_not_recorded(
    pair: Pair, bad: dict[str, Any], stream: bool
) -> None:
    trial = pair[0]
    session = await trial.create()
    body = {"model": "m", "messages": HI, "stream": stream, **bad}
    through, direct = await both(pair, session, body)
    assert (through.status, through.body) == (400, direct.body)
    async with trial.agent(session) as client:
        with pytest.raises(openai.BadRequestError):
            await client.chat.completions.create(**body)
    found = await trial.read(session)
    assert (found["records"], found["metadata"]["untraced"]) == ([], [])


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("status", [400, 404, 429, 500, 503])
async def test_errors_of_workers_pass_byte_for_byte(stage: Stage, status: int, stream: bool) -> None:
    worker = await stage.worker()
    odd = b'{ "object":"error",   "message": "\\u00e9", "code": 1.50}'
    headers = [("Content-Type", "application/json"), ("X-Odd", "a"), ("X-Odd", "b"), ("Retry-After", "3")]
    worker.always(script(reply(odd, status, headers)))
    worker.standing["/openapi.json"] = script(reply(b"{}", 404))
    trial = await session_trial(stage, worker)
    session = await trial.create()
    answer = await trial.turn(session, HI, stream=stream)
    assert (answer.status, answer.body) == (status, odd)
    assert (answer.values("x-odd"), answer.value("retry-after")) == ([b"a", b"b"], b"3")
    assert await trial.records(session) == []


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b'"text"',
        {},
        {"messages": None},
        {"messages": []},
        {"messages": "Hi"},
        {"messages": ["Hi"]},
        {"messages": [{"content": "Hi"}]},
        {"messages": [{"role": 7, "content": "Hi"}]},
    ],
    ids=repr,
)
async def test_what_is_no_chat_request_is_refused(stage: Stage, body: Any) -> None:
    worker = await stage.worker()
    trial = await session_trial(stage, worker)
    session = await trial.create()
    answer = await trial.ask("POST", f"/sessions/{session}{CHAT}", body)
    assert (answer.status, answer.error_type) == (400, "invalid_request")
    assert worker.requests == []
    assert (await trial.read(session))["metadata"]["in_flight"] == 0
