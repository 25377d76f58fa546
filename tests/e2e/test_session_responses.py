"""Agents that speak OpenAI's Responses API, with the official client: their turns are those of every session, exact and
in one segment, whole and as real streams."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Sequence
from typing import Any

import pytest
from openai import AsyncOpenAI

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


@contextlib.asynccontextmanager
async def scripted(stage: Stage, steps: Sequence[Any] = SCRIPT, **worker: Any) -> AsyncIterator[SessionTrial]:
    async with simulated_sessions(stage, script=steps, reasoning_parser="qwen3", **worker) as trial:
        yield trial


async def asked(client: AsyncOpenAI, given: Any, *, live: bool, **fields: Any) -> Any:
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


async def episode(client: AsyncOpenAI, live: Sequence[bool], **fields: Any) -> list[Any]:
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
        async with trial.agent(session) as client:
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
