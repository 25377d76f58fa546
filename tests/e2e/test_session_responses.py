"""Agents that speak OpenAI's Responses API, with the official client: their turns are those of every session, exact and
in one segment, whole and as real streams."""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import AsyncIterator, Sequence
from typing import Any

import openai
import pytest

from tests.support.session_apis import BOTH, RESPONSES, Api, case
from tests.support.session_trial import SessionTrial, exactly, simulated_sessions
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
GRAMMAR: Any = {"type": "grammar", "syntax": "lark", "definition": "start: /.+/s"}
PATCH: Any = {"type": "custom", "name": "patch", "description": "Takes a patch.", "format": GRAMMAR}
CRM: Any = {"type": "namespace", "name": "crm", "description": "Customers.", "tools": [{**ADD, "name": "find"}]}
TOOLS = [ADD, PATCH, CRM, {"type": "local_shell"}, {"type": "web_search"}]
TEXT = 'Two "lines":\n\ta \\ b, \U0001f600 and é\n'
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


async def test_an_episode_is_one_exact_segment(stage: Stage) -> None:
    async with scripted(stage) as trial:
        session = await trial.create()
        async with agent(trial, session) as client:
            answers = await episode(client, (True, False, True, False))
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
        exactly(sample, *(exchange.generation for exchange in trial.log))
        records = await trial.records(session)
        assert [record["response_id"] for record in records] == [answer.id for answer in answers]
        assert {(record["path"], record["reason"], *record["tools_left_out"]) for record in records} == {
            ("/v1/responses", None, "web_search")
        }


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


# Errors

#: What is not there, the parameter that a refusal names, and its words.
NOT_THERE: Sequence[tuple[dict[str, Any], str, str]] = [
    ({"tools": [{"type": "file_search"}]}, "tools[0].type", "'file_search' is not available"),
    ({"tools": [{"type": "shell", "environment": {"type": "container_auto"}}]}, "tools[0].environment", "own"),
    ({"tools": [{"type": "web_search"}], "tool_choice": {"type": "web_search"}}, "tool_choice", "not found"),
    ({"background": True}, "background", "not available in a traced session"),
    ({"conversation": "conv_1"}, "conversation", "not available in a traced session"),
    ({"prompt": {"id": "p"}}, "prompt", "not available in a traced session"),
    ({"include": ["message.output_text.logprobs"]}, "include", "not available in a traced session"),
    ({"input": [{"type": "computer_call_output", "call_id": "1", "output": {}}]}, "input[0].type", "not available"),
    ({"input": [{"type": "item_reference", "id": "msg_1"}]}, "input[0]", "Item with id 'msg_1' not found"),
    ({"input": 3}, "input", "Invalid type for 'input'"),
    ({"max_output_tokens": 0}, "max_output_tokens", "Invalid 'max_output_tokens'"),
    ({"verbosity": "low"}, "verbosity", "Unknown parameter: 'verbosity'"),
]


async def test_what_is_not_there_is_refused_by_name_before_anything_is_generated(stage: Stage) -> None:
    async with scripted(stage) as trial:
        session = await trial.create()
        for (given, param, message), live in itertools.product(NOT_THERE, BOTH):
            with case(given, live):
                error = await Api(RESPONSES).refused(trial, session, "Hi", stream=live, **given)
                assert (error["param"], error["type"]) == (param, "invalid_request_error")
                assert message in error["message"]


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
        sent, plainly = ({**exchange.json()} for exchange in trial.log)
        assert [tool["function"]["name"] for tool in sent["tools"]] == ["patch"]
        wanted = {"temperature": 0.5, "top_p": 0.9, "max_tokens": 7, "min_p": 0.1, "reasoning_effort": "low"}
        assert {name: sent[name] for name in wanted} == wanted
        assert (sent["parallel_tool_calls"], sent["tool_choice"]) == (False, "auto")
        json_schema = {"name": "it", "schema": schema, "strict": True}
        assert sent["response_format"] == {"type": "json_schema", "json_schema": json_schema}
        assert not plainly.keys() & {"temperature", "top_p", "max_tokens", "tools", "tool_choice", "reasoning_effort"}
        assert (answer.temperature, answer.truncation, bare.temperature) == (0.5, "disabled", None)
