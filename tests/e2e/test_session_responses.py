"""Agents that speak OpenAI's Responses API, with the official client: their turns are those of every session, exact and
in one segment, whole and as real streams."""

from __future__ import annotations

import asyncio
import contextlib
import functools
from collections.abc import AsyncIterator, Sequence
from typing import Any

import openai
import pytest

from tests.support.scripted_chat import (
    able,
    chat_events,
    chat_reply,
    cut_answer,
    failed_stream,
    streamed,
)
from tests.support.scripted_worker import script
from tests.support.session_trial import SessionTrial, exactly, session_trial, simulated_sessions
from tests.support.stage import Stage

ADD: Any = {
    "type": "function",
    "name": "add",
    "description": "Adds two numbers.",
    "strict": False,
    "parameters": {
        "type": "object",
        "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
        "required": ["a", "b"],
    },
}
FULL = "context_length_exceeded"
GRAMMAR: Any = {"type": "grammar", "syntax": "lark", "definition": "start: /.+/s"}
PATCH: Any = {"type": "custom", "name": "patch", "description": "Takes a patch.", "format": GRAMMAR}
CRM: Any = {"type": "namespace", "name": "crm", "description": "Customers.", "tools": [{**ADD, "name": "find"}]}
TOOLS = [ADD, PATCH, CRM, {"type": "local_shell"}, {"type": "web_search"}]
TEXT = 'Two "lines":\n\ta \\ b, \U0001f600 and é\n'
HELLO: Any = {"model": "m", "max_output_tokens": 2, "input": "Hi"}
SCRIPT: Sequence[Any] = [
    {
        "reasoning": "Two things at once.",
        "text": "Let me see.",
        "calls": [
            {"name": "add", "arguments": {"a": 17, "b": {"c": "}"}}},
            {"name": "patch", "arguments": {"input": TEXT}},
            {"name": "crm__find", "arguments": {"a": 1, "b": 2}},
        ],
    },
    {"calls": [{"name": "local_shell", "arguments": {"command": ["ls", "-l"], "timeout_ms": 10}}]},
    {"calls": [{"name": "patch", "arguments": {"patch": "no input"}}]},
    {"reasoning": "That is all.", "text": "It is 43."},
]
ITEMS = [
    ["reasoning", "message", "function_call", "custom_tool_call", "function_call"],
    ["local_shell_call"],
    ["custom_tool_call"],
    ["reasoning", "message"],
]


scripted = functools.partial(simulated_sessions, script=SCRIPT, reasoning_parser="qwen3")


@contextlib.asynccontextmanager
async def agent(trial: SessionTrial, session: str, **options: Any) -> AsyncIterator[Any]:
    """The official client, whose requests may be anything."""
    async with trial.agent(session, **options) as client:
        yield client


async def asked(client: Any, given: Any, *, live: bool, **fields: Any) -> Any:
    """One response, whole or streamed; a stream is read by the client's own parser, and says what the response says."""
    request: dict[str, Any] = {"model": "m", "input": given, "tools": TOOLS, "max_output_tokens": 400, **fields}
    if not live:
        return await client.responses.create(**request)
    async with client.responses.stream(**request) as stream:
        events = [each async for each in stream]
        answer = await stream.get_final_response()
    assert [each.sequence_number for each in events] == list(range(len(events)))
    done = [plain(each.item.to_dict()) for each in events if each.type == "response.output_item.done"]
    assert done == plain([item.to_dict() for item in answer.output])
    for kind, name in (
        ("output_text", "text"),
        ("reasoning_text", "text"),
        ("function_call_arguments", "arguments"),
        ("custom_tool_call_input", "input"),
    ):
        for each in (each for each in events if each.type == f"response.{kind}.done"):
            deltas = [
                one.delta for one in events if one.type == f"response.{kind}.delta" and one.item_id == each.item_id
            ]
            assert "".join(deltas) == getattr(each, name)
    return answer


def outputs(answer: Any) -> list[Any]:
    """What its tools give back."""
    results = []
    for item in answer.output:
        if item.type == "function_call":
            results.append({"type": "function_call_output", "call_id": item.call_id, "output": "43"})
        elif item.type == "custom_tool_call":
            parts = [{"type": "input_text", "text": "Done."}]
            results.append({"type": "custom_tool_call_output", "call_id": item.call_id, "output": parts})
        elif item.type == "local_shell_call":
            results.append({"type": "local_shell_call_output", "id": item.call_id, "output": "a.txt"})
    return results


def plain(item: Any) -> Any:
    """An item without what the client's parser adds to it."""
    if isinstance(item, list):
        return [plain(each) for each in item]
    if not isinstance(item, dict):
        return item
    return {name: plain(value) for name, value in item.items() if name not in ("parsed", "parsed_arguments")}


def sent_back(answer: Any) -> list[Any]:
    """Its items as the official client gives them back."""
    return [item.to_dict() for item in answer.output]


async def episode(client: Any, live: Sequence[bool], **fields: Any) -> list[Any]:
    """All turns of the script, the whole history sent along each time."""
    given: list[Any] = [{"role": "user", "content": "What is 17 plus 25, plus 1?"}]
    answers = []
    for each in live:
        answers.append(await asked(client, given, live=each, instructions="Be brief.", **fields))
        given = [*given, *sent_back(answers[-1]), *outputs(answers[-1])]
    return answers


@pytest.mark.parametrize("live", [(False,) * 4, (True,) * 4, (True, False, True, False)])
async def test_an_episode_is_one_exact_segment(stage: Stage, live: Sequence[bool]) -> None:
    async with scripted(stage) as trial:
        session = await trial.create()
        async with agent(trial, session) as client:
            answers = await episode(client, live)
        assert [[item.type for item in answer.output] for answer in answers] == ITEMS
        thought, said, add, patch, find = answers[0].output
        assert (thought.content[0].text.strip(), said.content[0].text.strip()) == ("Two things at once.", "Let me see.")
        assert (add.name, add.arguments) == ("add", '{"a": 17, "b": {"c": "}"}}')
        assert (patch.name, patch.input) == ("patch", TEXT)
        assert (find.name, find.namespace) == ("find", "crm")
        assert answers[1].output[0].action.command == ["ls", "-l"]
        assert answers[2].output[0].input == '{"patch": "no input"}'
        assert answers[3].output_text.strip() == "It is 43."
        assert {answer.status for answer in answers} == {"completed"}
        (sample,) = await trial.samples(session)
        exactly(sample, *(exchange.generation for exchange in trial.door))
        records = await trial.records(session)
        assert [record["response_id"] for record in records] == [answer.id for answer in answers]
        assert {(record["path"], record["reason"], *record["tools_left_out"]) for record in records} == {
            ("/v1/responses", None, "web_search")
        }


async def test_what_an_agent_writes_anew_is_the_answer_it_got(stage: Stage) -> None:
    """Without ids, without reasoning, with only what stands for it, with the results between the calls."""
    steps = [*SCRIPT[:1], "So it is."]
    async with scripted(stage, script=steps) as trial:
        session = await trial.create()
        async with agent(trial, session) as client:
            question: Any = [{"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Add."}]}]
            first = await asked(client, question, live=True, include=["reasoning.encrypted_content"], store=False)
            items, results = plain(sent_back(first)), outputs(first)
            assert items[0]["encrypted_content"].startswith("miles1.")
            bare = [{name: value for name, value in item.items() if name not in ("id", "status")} for item in items]
            sealed = {"type": "reasoning", "summary": [], "encrypted_content": items[0]["encrypted_content"]}
            between = [one for pair in zip(items[2:], results, strict=True) for one in pair]
            for spelling in (
                [*items, *results],
                [*bare[1:], *results],
                [sealed, *bare[1:], *results],
                [*items[:2], *between],
                [{"role": "assistant", "content": bare[1]["content"][0]["text"]}, *bare[2:], *results],
            ):
                await asked(client, [*question, *spelling], live=False)
        records = await trial.records(session)
        assert [record["parent"] for record in records] == [None] + [0] * 5
        assert {len({str(each["messages"]) for each in records[1:]}), len(records[1]["messages"])} == {1, 3}


async def test_a_response_goes_on_from_one_before_without_its_instructions(stage: Stage) -> None:
    async with scripted(stage) as trial:
        session = await trial.create()
        async with agent(trial, session) as client:
            pirate = {"instructions": "Speak like a pirate."}
            first = await asked(client, "Add.", live=False, **pirate)
            second = await asked(client, outputs(first), live=True, previous_response_id=first.id, **pirate)
            third = await asked(client, outputs(second), live=False, previous_response_id=second.id, **pirate)
            assert (second.previous_response_id, third.previous_response_id) == (first.id, second.id)
            assert [record["parent"] for record in await trial.records(session)] == [None, 0, 1]
            again = await asked(client, outputs(first), live=True, previous_response_id=first.id, **pirate)
            plainly = await asked(client, outputs(second), live=False, previous_response_id=again.id)
            anew = await asked(client, "Go on", live=False, previous_response_id=plainly.id, instructions="Be brief.")
        records = await trial.records(session)
        assert [record["parent"] for record in records] == [None, 0, 1, 0, None, None]
        roles = [[message["role"] for message in record["messages"]] for record in records]
        assert roles[4] == ["user", "assistant", "tool", "tool", "tool", "assistant", "tool"], "without instructions"
        assert (roles[5][0], records[5]["messages"][0]["content"]) == ("system", "Be brief.")
        assert anew.instructions == "Be brief."


async def test_a_stored_response_is_its_turn_written_again(stage: Stage) -> None:
    async with scripted(stage) as trial:
        session = await trial.create()
        async with agent(trial, session) as client:
            own: Any = {
                "metadata": {"episode": "7"},
                "instructions": "Be brief.",
                "include": ["reasoning.encrypted_content"],
            }
            question: Any = [{"role": "developer", "content": "Think."}, {"role": "user", "content": "Add."}]
            for live in (False, True):
                first = await asked(client, question, live=live, **own)
                read = await client.responses.retrieve(first.id)
                assert plain(read.to_dict()) == plain(first.to_dict())
                assert (read.metadata, read.usage) == ({"episode": "7"}, first.usage)
                assert [tool.type for tool in read.tools] == ["function", "custom", "namespace", "local_shell"]
            second = await asked(
                client, outputs(first), live=True, previous_response_id=first.id, instructions="Be brief."
            )
            pages = await client.responses.input_items.list(second.id, order="asc", limit=4)
            items = [each.to_dict() async for each in pages]
            assert [item["type"] for item in items] == ["message"] * 2 + ITEMS[0] + [
                "function_call_output",
                "custom_tool_call_output",
                "function_call_output",
            ]
            assert [item["role"] for item in items[:3] if "role" in item] == ["system", "user"]
            newest = await client.responses.input_items.list(second.id, limit=1)
            assert newest.data[0].id == items[-1]["id"]
            referred = [{"type": "item_reference", "id": item["id"]} for item in items]
            third = await asked(client, referred, live=False, instructions="Be brief.")
            assert (await trial.records(session))[-1]["reason"] == "retry"
            await client.responses.delete(first.id)
            for gone in (client.responses.retrieve(first.id), client.responses.delete(first.id)):
                with pytest.raises(openai.NotFoundError, match=f"Response with id '{first.id}' not found"):
                    await gone
            hidden = await asked(client, "Hi", live=False, store=False)
            for response_id in (first.id, hidden.id, "resp_none"):
                with pytest.raises(openai.BadRequestError, match="Previous response with id") as refused:
                    await asked(client, "Hi", live=True, previous_response_id=response_id)
                assert (refused.value.code, refused.value.param) == (
                    "previous_response_not_found",
                    "previous_response_id",
                )
        assert len(await trial.records(session)) == 5, "what is deleted stays a turn"
        assert third.id != second.id


@pytest.mark.parametrize("live", [False, True])
async def test_usage_tells_what_the_prefix_cache_had(stage: Stage, live: bool) -> None:
    async with scripted(stage) as trial:
        session = await trial.create()
        async with agent(trial, session) as client:
            first = await asked(client, "Add.", live=live)
            second = await asked(client, outputs(first), live=live, previous_response_id=first.id)
        told = [(each.usage.input_tokens, each.usage.input_tokens_details.cached_tokens) for each in (first, second)]
        records = await trial.records(session)
        assert told == [(record["prompt_tokens"], record["cached_tokens"] or 0) for record in records]
        assert told[1][1] > 0
        assert second.usage.total_tokens == second.usage.input_tokens + second.usage.output_tokens


async def test_stored_responses_take_little_beside_their_turns(stage: Stage) -> None:
    steps = ["one", "two", "three", "four"]
    async with scripted(stage, script=steps) as trial:
        sessions = [await trial.create() for _ in range(2)]
        tools = [{**ADD, "description": "word " * 5000}]
        sizes = []
        for session, stored in zip(sessions, (True, False), strict=True):
            async with agent(trial, session) as client:
                given: list[Any] = []
                for _ in steps:
                    given.append({"role": "user", "content": "x" * 1000})
                    answer = await asked(client, given, live=True, tools=tools, store=stored)
                    given += sent_back(answer)
            sizes.append((await trial.read(session))["metadata"]["bytes"])
        assert abs(sizes[0] - sizes[1]) < 5000
        assert sizes[0] < 3 * 25_000 + 4 * 12_000, "tools are held once"


# Errors


@pytest.mark.parametrize(
    ("given", "param", "message"),
    [
        ({"tools": [{"type": "file_search"}]}, "tools[0].type", "'file_search' is not available"),
        ({"tools": [{"type": "code_interpreter"}]}, "tools[0].type", "'code_interpreter' is not available"),
        ({"tools": [{"type": "shell", "environment": {"type": "container_auto"}}]}, "tools[0].environment", "own"),
        ({"tools": [{"type": "web_search"}], "tool_choice": {"type": "web_search"}}, "tool_choice", "not found"),
        ({"background": True}, "background", "not available in a traced session"),
        ({"conversation": "conv_1"}, "conversation", "not available in a traced session"),
        ({"prompt": {"id": "p"}}, "prompt", "not available in a traced session"),
        ({"include": ["message.output_text.logprobs"]}, "include", "not available in a traced session"),
        ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "http://x"}]}]},
         "input[0].content[0].type", "'input_image' is not available"),
        ({"input": [{"type": "computer_call_output", "call_id": "1", "output": {}}]}, "input[0].type", "not available"),
        ({"input": [{"type": "item_reference", "id": "msg_1"}]}, "input[0]", "Item with id 'msg_1' not found"),
        ({"input": 3}, "input", "Invalid type for 'input'"),
        ({"max_output_tokens": 0}, "max_output_tokens", "Invalid 'max_output_tokens'"),
        ({"extra_body": {"verbosity": "low"}}, "verbosity", "Unknown parameter: 'verbosity'"),
        ({"metadata": {"a": "x" * (1 << 20)}}, "metadata", "Invalid 'metadata'"),
    ],
)  # fmt: skip
async def test_what_is_not_there_is_refused_by_name_before_anything_is_generated(
    refusing: tuple[SessionTrial, str], given: Any, param: str, message: str
) -> None:
    trial, session = refusing
    async with agent(trial, session) as client:
        for live in (False, True):
            with pytest.raises(openai.BadRequestError, match=message) as refused:
                await client.responses.create(model="m", **{"input": "Hi", "stream": live, **given})
            body: Any = refused.value.body
            assert (refused.value.param, body["type"]) == (param, "invalid_request_error")
    assert trial.door == []


@pytest.fixture
async def refusing(stage: Stage) -> AsyncIterator[tuple[SessionTrial, str]]:
    async with scripted(stage) as trial:
        yield trial, await trial.create()


async def test_errors_are_told_in_the_api_s_words(stage: Stage) -> None:
    async with scripted(stage, context_len=600) as trial:
        session = await trial.create()
        async with agent(trial, session) as client:
            for given, fields in (("Hi", {"max_output_tokens": 9000}), ("word " * 900, {})):
                with pytest.raises(openai.BadRequestError, match="exceeds the context window") as refused:
                    await client.responses.create(model="m", input=given, **fields)
                assert (refused.value.code, refused.value.type) == (FULL, "invalid_request_error")
                stream: Any = await client.responses.create(model="m", input=given, stream=True, **fields)
                events = [event async for event in stream]
                kinds = [event.type for event in events]
                assert kinds == ["response.created", "response.in_progress", "response.failed"]
                assert events[-1].response.error.code == FULL, "where Codex looks for it"
        assert (await trial.read(session))["records"] == []
        async with agent(trial, "nobody") as client:
            for ask in (client.responses.create(model="m", input="Hi"), client.responses.retrieve("resp_1")):
                with pytest.raises(openai.NotFoundError) as missing:
                    await ask
                assert (missing.value.type, missing.value.code) == ("invalid_request_error", "not_found")


@pytest.mark.parametrize("live", [False, True])
async def test_a_call_that_was_cut_never_looks_complete(stage: Stage, live: bool) -> None:
    steps = [
        {"text": "Now.", "calls": [{"name": "add", "arguments": {"a": 17, "b": 25}}], "when": "Add"},
        {"calls": [{"name": "patch", "arguments": {"input": "a b c d e f"}}], "when": "Patch"},
    ]
    async with scripted(stage, script=steps) as trial:
        session = await trial.create()
        async with agent(trial, session) as client:
            for word in ("Add", "Patch"):
                full = await asked(client, word, live=live)
                assert full.status == "completed"
                for most in range(1, full.usage.output_tokens - 1):
                    request: Any = {"model": "m", "input": word, "tools": TOOLS, "max_output_tokens": most}
                    if live:
                        events = [each async for each in await client.responses.create(**request, stream=True)]
                        kinds = {each.type for each in events}
                        assert not kinds & {
                            "response.function_call_arguments.done",
                            "response.custom_tool_call_input.done",
                        }
                        done = [each.item.type for each in events if each.type == "response.output_item.done"]
                        cut = events[-1].response
                        assert events[-1].type == "response.incomplete"
                    else:
                        cut = await client.responses.create(**request)
                        done = [item.type for item in cut.output]
                    assert (cut.status, cut.incomplete_details.reason) == ("incomplete", "max_output_tokens")
                    assert set(done) <= {"reasoning", "message"}
                    open_calls = [item for item in cut.output if item.type not in ("reasoning", "message")]
                    assert all(item.type == "function_call" and item.status == "incomplete" for item in open_calls)
                    assert not any(item.arguments.endswith("}") for item in open_calls)
                    assert plain((await client.responses.retrieve(cut.id)).to_dict()) == plain(cut.to_dict())


async def test_a_stream_that_fails_says_so_and_is_no_turn(stage: Stage) -> None:
    worker = able(await stage.worker()).always(failed_stream("CUDA out of memory"))
    trial = await session_trial(stage, worker)
    session = await trial.create()
    async with agent(trial, session) as client:
        *_, last = [each async for each in await client.responses.create(**HELLO, stream=True)]
    assert (last.type, last.response.status, last.response.error.code) == ("response.failed", "failed", "server_error")
    assert "CUDA out of memory" in last.response.error.message
    assert (await trial.read(session))["records"] == []


@pytest.mark.parametrize("live", [False, True])
async def test_an_answer_that_was_cut_off_has_failed_and_stays_recorded(stage: Stage, live: bool) -> None:
    worker = able(await stage.worker()).always(cut_answer(stream=live))
    trial = await session_trial(stage, worker)
    session = await trial.create()
    async with agent(trial, session) as client:
        if live:
            *_, last = [each async for each in await client.responses.create(**HELLO, stream=True)]
            assert (last.type, last.response.error.code) == ("response.failed", "server_error")
            assert last.response.output[0].status == "incomplete"
        else:
            with pytest.raises(openai.InternalServerError) as failed:
                await client.responses.create(**HELLO)
            assert (failed.value.code, failed.value.type) == ("unavailable", "server_error")
        (record,) = await trial.records(session)
        assert (record["finish_reason"], (await client.responses.retrieve(record["response_id"])).status) == (
            "abort",
            "failed",
        )


# Streams


async def test_response_events_stream_at_once_and_the_end_waits_for_the_record(stage: Stage) -> None:
    first, last = asyncio.Event(), asyncio.Event()
    role, one, two, finish, ids, done = chat_events([7, 8], ["Hel", "lo"])
    worker = able(await stage.worker()).always(streamed(role, one, first, two, finish, last, ids, done))
    trial = await session_trial(stage, worker)
    session = await trial.create()
    kinds, seen = [], ""
    async with agent(trial, session) as client:
        async for each in await client.responses.create(**HELLO, stream=True):
            kinds.append(each.type)
            if each.type == "response.output_text.delta":
                seen += each.delta
                assert await trial.records(session) == []
                (first if seen == "Hel" else last).set()
            elif each.type == "response.output_text.done":
                assert len(await trial.records(session)) == 1
    assert seen == "Hello"
    assert kinds == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
        "response.output_text.delta",
        "response.output_text.delta",
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.incomplete",
    ]


async def test_an_engine_that_cannot_stream_ids_serves_it_by_a_buffered_stream(stage: Stage) -> None:
    worker = able(await stage.worker(), "messages").always(script(chat_reply([7, 8], "Hello")))
    trial = await session_trial(stage, worker)
    session = await trial.create()
    async with agent(trial, session) as client:
        *_, last = [each async for each in await client.responses.create(**HELLO, stream=True)]
    assert (last.response.output_text, last.type) == ("Hello", "response.incomplete")
    assert len(await trial.records(session)) == 1


async def test_a_turn_that_is_asked_for_again_is_answered_once(stage: Stage) -> None:
    async with scripted(stage) as trial:
        session = await trial.create()
        async with agent(trial, session, default_headers={"X-Turn-Id": "1"}) as client:
            one, other = [await asked(client, "Add.", live=True) for _ in range(2)]
        assert (one, len(trial.door)) == (other, 1)


async def test_the_apis_of_a_session_share_its_turns(stage: Stage) -> None:
    async with scripted(stage, script=[SCRIPT[0] | {"calls": SCRIPT[0]["calls"][:1]}, "It is 43.", "Yes."]) as trial:
        session = await trial.create()
        function = {name: ADD[name] for name in ("name", "description", "parameters")}
        async with agent(trial, session) as client:
            first = await asked(client, "Add.", live=True, tools=[ADD], instructions="Be brief.")
            answer = (await trial.records(session))[0]["response"]
            done = [{"role": "tool", "tool_call_id": call["id"], "content": "43"} for call in answer["tool_calls"]]
            history = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Add."}, answer, *done]
            chat = await trial.chat(session, history, tools=[{"type": "function", "function": function}])
            more: Any = [*outputs(first), {"role": "assistant", "content": chat["choices"][0]["message"]["content"]}]
            await asked(
                client,
                [*more, {"role": "user", "content": "Go on"}],
                live=False,
                tools=[ADD],
                previous_response_id=first.id,
                instructions="Be brief.",
            )
        assert [record["parent"] for record in await trial.records(session)] == [None, 0, 1]


# Settings


async def test_settings_reach_the_engine_as_a_chat_request_has_them(stage: Stage) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    async with scripted(stage, script=["Yes."]) as trial:
        session = await trial.create()
        async with agent(trial, session) as client:
            answer = await client.responses.create(
                model="m",
                input="Hi",
                tools=TOOLS,
                tool_choice={"type": "allowed_tools", "mode": "auto", "tools": [{"type": "custom", "name": "patch"}]},
                parallel_tool_calls=False,
                temperature=0.5,
                top_p=0.9,
                max_output_tokens=7,
                reasoning={"effort": "low", "summary": "auto"},
                text={
                    "format": {"type": "json_schema", "name": "it", "schema": schema, "strict": True},
                    "verbosity": "low",
                },
                truncation="auto",
                extra_body={"min_p": 0.1},
            )
            bare = await client.responses.create(model="m", input="Hi")
        sent, plainly = ({**exchange.json()} for exchange in trial.door)
        assert [tool["function"]["name"] for tool in sent["tools"]] == ["patch"]
        wanted = {"temperature": 0.5, "top_p": 0.9, "max_tokens": 7, "min_p": 0.1, "reasoning_effort": "low"}
        assert {name: sent[name] for name in wanted} == wanted
        assert (sent["parallel_tool_calls"], sent["tool_choice"]) == (False, "auto")
        json_schema = {"name": "it", "schema": schema, "strict": True}
        assert sent["response_format"] == {"type": "json_schema", "json_schema": json_schema}
        assert not plainly.keys() & {"temperature", "top_p", "max_tokens", "tools", "tool_choice", "reasoning_effort"}
        assert (answer.temperature, answer.truncation, bare.temperature) == (0.5, "disabled", None)
