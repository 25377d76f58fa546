"""Agents that speak Anthropic's Messages API, with the official client: their turns are those of every session, exact
and in one segment, whole and as real streams."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
from collections.abc import AsyncIterator, Sequence
from typing import Any

import anthropic
import pytest
from anthropic import AsyncAnthropic
from anthropic.types import Message

from tests.support.scripted_chat import (
    able,
    chat_events,
    chat_reply,
    cut_answer,
    delta,
    event,
    failed_stream,
    finish_event,
    streamed,
)
from tests.support.scripted_worker import script
from tests.support.session_trial import SessionTrial, exactly, session_trial, simulated_sessions
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
CACHED: Any = {"type": "ephemeral"}
HELLO: Any = {"model": "m", "max_tokens": 2, "messages": [{"role": "user", "content": "Hi"}]}
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
        inputs = [block.to_dict()["input"] for block in answers[0].content[2:]]
        assert inputs == [{"a": 17, "b": 25}, {"a": 1.0, "b": {"c": "}"}}]
        assert await trial.reasons(session) == [None] * 3
        (sample,) = await trial.samples(session)
        exactly(sample, *(exchange.generation for exchange in trial.door))
        assert ["input_ids" in exchange.json() for exchange in trial.door] == [False, True, True]
        assert [record["path"] for record in await trial.records(session)] == ["/v1/messages"] * 3


async def test_it_is_equal_however_its_agent_writes_it_anew(stage: Stage) -> None:
    """Inputs in another order with defaults filled in, texts cut, thinking left out, cache marks that move."""
    async with scripted(stage) as trial:
        session = await trial.create()
        async with agent(trial, session) as client:
            question = {"role": "user", "content": [{"type": "text", "text": "Add."}]}
            first = await asked(client, [question], live=False)
            thinking, text, one, other = (block.to_dict() for block in first.content)
            assert (thinking["type"], text["text"]) == ("thinking", "Let me add.")
            one["input"] = {"exact": True, "b": 25, "a": 17}
            other["input"] = {"b": {"c": "}"}, "a": 1}  # 1.0 as JavaScript writes it
            words = [{"type": "text", "text": "Let me"}, {"type": "text", "text": " add.", "cache_control": CACHED}]
            echo = {"role": "assistant", "content": [*words, one, other]}
            history = [{"role": "user", "content": "Add."}, echo, {"role": "user", "content": results(first)}]
            await asked(client, history, live=True)
            edited = {"role": "assistant", "content": [*words, {**one, "input": {"a": 17, "b": 26}}, other]}
            await asked(client, [history[0], edited, history[2]], live=True)
        assert [record["parent"] for record in await trial.records(session)] == [None, 0, None]


async def test_reasoning_that_its_agent_does_not_see_is_known_by_its_signature(stage: Stage) -> None:
    async with scripted(stage) as trial:
        session = await trial.create()
        async with agent(trial, session) as client:
            thinking: Any = {"type": "adaptive", "display": "omitted"}
            history, (first, *_) = await episode(client, (True, False, True), thinking=thinking)
            assert (first.content[0].type, first.content[0].to_dict()["thinking"]) == ("thinking", "")
            (_, answer, *rest) = history
            foreign = {**first.content[0].to_dict(), "thinking": "Something else."}
            edited = {"role": "assistant", "content": [foreign, *first.content[1:]]}
            await asked(client, [history[0], edited, *rest], live=False, system="Be brief.", thinking=thinking)
            assert answer["content"] == first.content
        assert await trial.reasons(session) == [None, None, None, "edited_history"]


async def test_the_apis_of_a_session_share_its_turns(stage: Stage) -> None:
    async with scripted(stage) as trial:
        session = await trial.create()
        async with agent(trial, session) as client:
            await asked(client, [{"role": "user", "content": "Add."}], live=True)
        (record,) = await trial.records(session)
        assert record["path"] == "/v1/messages"
        function = {"name": "add", "description": ADD["description"], "parameters": ADD["input_schema"]}
        answer = record["response"]
        done = [{"role": "tool", "tool_call_id": call["id"], "content": "3"} for call in answer["tool_calls"]]
        history = [{"role": "user", "content": "Add."}, answer, *done]
        await trial.chat(session, history, tools=[{"type": "function", "function": function}])
        assert [record["parent"] for record in await trial.records(session)] == [None, 0]


async def test_a_turn_that_is_asked_for_again_is_answered_once(stage: Stage) -> None:
    async with scripted(stage) as trial:
        session = await trial.create()
        async with agent(trial, session, default_headers={"X-Turn-Id": "1"}) as client:
            question: Any = [{"role": "user", "content": "Add."}]
            one, other = [await asked(client, question, live=True) for _ in range(2)]
        assert (one, len(trial.door)) == (other, 1)


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
        assert counts == [len(exchange.generation.input_ids) for exchange in trial.door]
        assert len(await trial.records(session)) == 4, "counting is no turn"


# Beside turns, and errors


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


async def test_errors_are_told_in_the_api_s_words(stage: Stage) -> None:
    async with scripted(stage, context_len=600) as trial:
        session = await trial.create()
        question: Any = [{"role": "user", "content": "Add."}]
        async with agent(trial, session) as client:
            image: Any = [
                {"role": "user", "content": [{"type": "image", "source": {"type": "url", "url": "http://x"}}]}
            ]
            for live in (False, True):
                with pytest.raises(anthropic.BadRequestError, match=r"messages\.0\.content\.0: .*'image'") as refused:
                    await asked(client, image, live=live)
                assert (refused.value.type, refused.value.error_code) == ("invalid_request_error", "invalid_request")
                with pytest.raises(anthropic.BadRequestError, match=r"exceed context limit: \d+ \+ 9000 > 600,"):
                    await asked(client, question, live=live, max_tokens=9000)
                long: Any = [{"role": "user", "content": "word " * 900}]
                with pytest.raises(anthropic.BadRequestError, match=r"prompt is too long: \d+ tokens > 600 max"):
                    await asked(client, long, live=live)
            settings = {"chat_template_kwargs": {"tools": 1}}
            with pytest.raises(anthropic.BadRequestError, match="template"):
                await client.messages.count_tokens(model="m", messages=question, extra_body=settings)
        assert (await trial.read(session))["records"] == []
        async with agent(trial, "nobody") as client:
            with pytest.raises(anthropic.NotFoundError) as missing:
                await asked(client, question, live=False)
        assert (missing.value.type, missing.value.error_code) == ("not_found_error", "not_found")


async def test_a_key_may_come_as_this_api_s_clients_send_it(stage: Stage) -> None:
    async with simulated_sessions(stage, script=SCRIPT, settings={"api_key": "secret"}) as trial:
        made = await trial.ask("POST", "/sessions", {}, [("Authorization", "Bearer secret")])
        session = made.json()["session_id"]
        question: Any = [{"role": "user", "content": "Add."}]
        async with agent(trial, session, api_key="secret") as client:
            assert (await asked(client, question, live=True)).stop_reason == "tool_use"
        async with agent(trial, session, api_key="wrong") as client:
            with pytest.raises(anthropic.AuthenticationError):
                await asked(client, question, live=True)


async def test_why_an_answer_ended_is_told(stage: Stage) -> None:
    async with (
        simulated_sessions(stage, script=["one # two # three"]) as trial,
        agent(trial, await trial.create()) as client,
    ):
        question: Any = [{"role": "user", "content": "Count."}]
        for live in (False, True):
            cut = await asked(client, question, live=live, max_tokens=2)
            assert (cut.stop_reason, cut.usage.output_tokens) == ("max_tokens", 2)
            stopped = await asked(client, question, live=live, stop_sequences=["?", "#"])
            assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", "#")
            assert stopped.content[0].to_dict()["text"] == "one "


@pytest.mark.parametrize("live", [False, True])
async def test_a_call_that_was_cut_never_looks_complete(stage: Stage, live: bool) -> None:
    steps = [{"text": "Now.", "calls": [{"name": "add", "arguments": {"a": 17, "b": 25}}]}]
    async with scripted(stage, script=steps) as trial:
        session = await trial.create()
        async with agent(trial, session) as client:
            question: Any = [{"role": "user", "content": "Add."}]
            full = await asked(client, question, live=live)
            assert full.content[-1].to_dict()["input"] == {"a": 17, "b": 25}
            for most in range(1, full.usage.output_tokens - 1):
                request: Any = {"model": "m", "max_tokens": most, "messages": question, "tools": [ADD]}
                if live:
                    async with client.messages.stream(**request) as stream:
                        arguments = "".join([each.partial_json async for each in stream if each.type == "input_json"])
                        cut = await stream.get_final_message()
                    assert not arguments.rstrip().endswith("}")
                else:
                    cut = await client.messages.create(**request)
                    assert "tool_use" not in {block.type for block in cut.content}
                assert cut.stop_reason == "max_tokens"
        assert None not in {record["finish_reason"] for record in await trial.records(session)}


async def test_a_stream_that_fails_says_so_and_has_no_end(stage: Stage) -> None:
    worker = able(await stage.worker()).always(failed_stream("CUDA out of memory"))
    trial = await session_trial(stage, worker)
    session = await trial.create()
    async with agent(trial, session) as client:
        with pytest.raises(anthropic.APIStatusError, match="CUDA out of memory") as failed:
            await asked(client, [{"role": "user", "content": "Hi"}], live=True)
    assert failed.value.type == "api_error"
    assert (await trial.read(session))["records"] == []


@pytest.mark.parametrize("live", [False, True])
async def test_an_answer_that_was_cut_off_is_an_error_and_stays_recorded(stage: Stage, live: bool) -> None:
    worker = able(await stage.worker()).always(cut_answer(stream=live))
    trial = await session_trial(stage, worker)
    session = await trial.create()
    async with agent(trial, session) as client:
        with pytest.raises(anthropic.APIStatusError) as failed:
            await asked(client, [{"role": "user", "content": "Hi"}], live=live)
    assert failed.value.type == "overloaded_error"
    assert [record["finish_reason"] for record in await trial.records(session)] == ["abort"]


@pytest.mark.parametrize("live", [False, True])
@pytest.mark.parametrize("levels", [150, 199, 200, 260, 5000])
async def test_a_call_that_nests_deep_is_one_that_its_client_reads_and_sends_back(
    stage: Stage, levels: int, live: bool
) -> None:
    arguments = f'{{"a": {"[" * levels}{"]" * levels}}}'
    made = {"id": "c1", "index": 0, "type": "function", "function": {"name": "add", "arguments": arguments}}
    message = {"role": "assistant", "content": "", "tool_calls": [made]}
    role, said, finish, ids, done = chat_events([7], [""])
    said = event([{**delta(None), "delta": {"tool_calls": [made]}}])
    whole = chat_reply([7], message=message, finish_reason="tool_calls")
    finish = finish_event("tool_calls")
    worker = able(await stage.worker()).always(streamed(role, said, finish, ids, done) if live else script(whole))
    trial = await session_trial(stage, worker)
    session = await trial.create()
    question = {"role": "user", "content": "Add."}
    fields = {"model": "m", "max_tokens": 8, "stream": live, "messages": [question]}
    reply = await trial.ask("POST", f"/sessions/{session}/v1/messages", fields)
    assert reply.status == 200
    if live:
        assert json.dumps(arguments[-40:-1])[1:-1].encode() in reply.body
    else:
        (block,) = reply.json()["content"]
        assert block["input"] == (json.loads(arguments) if levels < 200 else {"INVALID_JSON": arguments})
        back = [question, {"role": "assistant", "content": [block]}, {"role": "user", "content": "Go on."}]
        again = await trial.ask("POST", f"/sessions/{session}/v1/messages/count_tokens", {**fields, "messages": back})
        assert again.status == (400 if levels == 199 else 200), "a request has more levels around it than an answer"
    assert (await trial.records(session))[0]["response"]["tool_calls"][0]["function"]["arguments"] == arguments


async def test_message_events_stream_at_once_and_the_end_waits_for_the_record(stage: Stage) -> None:
    first, last = asyncio.Event(), asyncio.Event()
    role, one, two, finish, ids, done = chat_events([7, 8], ["Hel", "lo"])
    worker = able(await stage.worker()).always(streamed(role, one, first, two, finish, last, ids, done))
    trial = await session_trial(stage, worker)
    session = await trial.create()
    async with agent(trial, session) as client, client.messages.stream(**HELLO) as stream:
        seen = ""
        async for each in stream:
            if each.type == "text":
                seen += each.text
                assert await trial.records(session) == []
                (first if seen == "Hel" else last).set()
            elif each.type == "message_delta":
                assert len(await trial.records(session)) == 1
    assert seen == "Hello"


async def test_an_engine_that_cannot_stream_ids_serves_it_by_a_buffered_stream(stage: Stage) -> None:
    worker = able(await stage.worker(), "messages").always(script(chat_reply([7, 8], "Hello")))
    trial = await session_trial(stage, worker)
    session = await trial.create()
    async with agent(trial, session) as client:
        answer = await asked(client, HELLO["messages"], live=True, max_tokens=2)
    assert (answer.content[0].to_dict()["text"], answer.stop_reason) == ("Hello", "max_tokens")
    assert len(await trial.records(session)) == 1
