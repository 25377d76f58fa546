"""Fields that an API does not have: null and false mean that they are not given; any other value is refused by a name
and the setting, or recorded."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.bare_calls import MESSAGES, RESPONSES, events, request
from tests.support.session_trial import CHAT, SessionTrial, qwen3, simulated_sessions, user
from tests.support.stage import Stage

apis = pytest.mark.parametrize("path", [MESSAGES, RESPONSES])
#: Fields that say nothing, at any depth.
NOTHING: dict[str, list[dict[str, Any]]] = {
    CHAT: [
        {"x_new": None},
        {"x_new": False},
        {"metadata": {str(number): "v" for number in range(40)}},
        {"response_format": None, "stop": None, "tools": None, "tool_choice": None, "reasoning": None},
    ],
    MESSAGES: [
        {"x_new": None},
        {"x_new": False},
        {"output_config": {"effort": None, "format": None, "x_new": None}},
        {"tools": [{"name": "a", "input_schema": {}, "x_new": False, "strict": None, "defer_loading": None}]},
        {"metadata": {str(number): "v" for number in range(40)}},
        {"thinking": None, "tool_choice": None, "system": None, "stop_sequences": None, "container": None},
    ],
    RESPONSES: [
        {"x_new": None},
        {"x_new": False},
        {"text": {"format": None, "verbosity": None}},
        {"text": None, "reasoning": {"effort": None}, "include": None, "conversation": None, "tool_choice": None},
        {"metadata": {str(number): "v" for number in range(40)}},
        {"metadata": {"a": None}},
        {"tools": [{"type": "function", "name": "a", "parameters": None, "strict": None, "x_new": 1}]},
    ],
}
#: Fields that say something, and what they are called.
SOMETHING: dict[str, list[tuple[dict[str, Any], str]]] = {
    MESSAGES: [
        ({"x_new": 1}, "x_new"),
        ({"x_new": {}}, "x_new"),
        ({"output_config": {"x_new": "a"}}, "output_config.x_new"),
        ({"tools": [{"name": "a", "input_schema": {}, "x_new": True}]}, "tools.0.x_new"),
    ],
    RESPONSES: [
        ({"x_new": 1}, "x_new"),
        ({"x_new": []}, "x_new"),
        ({"include": ["x_call.results"]}, "include.x_call.results"),
        ({"include": ["reasoning.encrypted_content", "x_call.results"]}, "include.x_call.results"),
    ],
}


async def ask(trial: SessionTrial, session: str, path: str, fields: dict[str, Any]) -> Any:
    body = {**request(path, [user("Hi")], stream=False), **fields}
    return await trial.ask("POST", f"/sessions/{session}{path}", body)


@pytest.mark.parametrize(
    ("path", "fields"),
    [(path, fields) for path, each in NOTHING.items() for fields in each],
    ids=lambda value: str(value)[:60],
)
async def test_fields_without_a_value_are_not_given(stage: Stage, path: str, fields: dict[str, Any]) -> None:
    async with simulated_sessions(stage) as trial:
        session = await trial.create()
        reply = await ask(trial, session, path, fields)
        assert reply.status == 200, reply.body
        (record,) = await trial.records(session)
        assert "unknown_fields" not in record


@apis
async def test_a_field_with_a_value_is_refused_and_the_setting_named(stage: Stage, path: str) -> None:
    async with simulated_sessions(stage) as trial:
        session = await trial.create()
        for fields, name in SOMETHING[path]:
            reply = await ask(trial, session, path, fields)
            assert reply.status == 400
            assert name.removeprefix("include.") in reply.json()["error"]["message"]
            assert "unknown_fields" in reply.json()["error"]["message"]
        assert await trial.records(session) == []


@apis
async def test_a_field_with_a_value_may_be_recorded_instead(stage: Stage, path: str) -> None:
    async with simulated_sessions(stage, options={"unknown_fields": "record"}) as trial:
        session = await trial.create()
        for fields, _ in SOMETHING[path]:
            reply = await ask(trial, session, path, fields)
            assert reply.status == 200, reply.body
        names = [record["unknown_fields"] for record in await trial.records(session)]
        assert names == [[name] for _, name in SOMETHING[path]]


@apis
async def test_many_unknown_fields_are_recorded_within_bounds(stage: Stage, path: str) -> None:
    async with simulated_sessions(stage, options={"unknown_fields": "record"}) as trial:
        session = await trial.create()
        fields = {f"x_{number:04}" + "y" * 200: 1 for number in range(500)}
        assert (await ask(trial, session, path, fields)).status == 200
        (record,) = await trial.records(session)
        assert len(record["unknown_fields"]) == 32
        assert max(map(len, record["unknown_fields"])) == 64


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize(
    ("value", "text"),
    [("v" * 100_000, "v" * 100_000), (7, "7"), (True, "true"), ({"a": [1]}, '{"a":[1]}'), ("", "")],
    ids=["long", "a number", "true", "an object", "empty"],
)
async def test_metadata_of_any_length_and_type_is_said_again(
    stage: Stage, value: Any, text: str, *, stream: bool
) -> None:
    async with simulated_sessions(stage) as trial:
        session, key = await trial.create(), "k" * 300
        reply = await ask(trial, session, RESPONSES, {"metadata": {key: value, "b": None}, "stream": stream})
        assert reply.status == 200, reply.body
        answer = events(reply)[-1]["response"] if stream else reply.json()
        assert answer["metadata"] == {key: text}
        stored = await trial.ask("GET", f"/sessions/{session}/v1/responses/{answer['id']}")
        assert stored.json()["metadata"] == {key: text}


@pytest.mark.parametrize("metadata", [{"a": "v" * (1 << 20)}, {"v" * (1 << 20): "a"}, {"a": ["v" * (1 << 20)]}])
async def test_metadata_beyond_its_bound_is_refused(stage: Stage, metadata: Any) -> None:
    async with simulated_sessions(stage) as trial:
        session = await trial.create()
        reply = await ask(trial, session, RESPONSES, {"metadata": metadata})
        assert reply.status == 400
        assert reply.json()["error"]["param"] == "metadata"
        assert await trial.records(session) == []


def tool(path: str, description: str) -> dict[str, Any]:
    """The tool `add`, as an API has it."""
    told = {"name": "add", "description": description}
    if path == MESSAGES:
        return {**told, "input_schema": {"type": "object"}}
    return {"type": "function", **told, "parameters": {"type": "object"}}


async def prompts(trial: SessionTrial, session: str) -> str:
    return "".join(qwen3().decode(sample["tokens"]) for sample in await trial.samples(session))


@apis
async def test_equal_tools_of_one_name_are_one_tool(stage: Stage, path: str) -> None:
    async with simulated_sessions(stage) as trial:
        session = await trial.create()
        reply = await ask(trial, session, path, {"tools": [tool(path, "Adds."), tool(path, "Adds.")]})
        assert reply.status == 200, reply.body
        assert (await prompts(trial, session)).count('"Adds."') == 1
        (record,) = await trial.records(session)
        assert "tools_left_out" not in record


@apis
async def test_different_tools_of_one_name_are_refused_in_a_first_turn(stage: Stage, path: str) -> None:
    tools = [tool(path, "Adds."), tool(path, "Adds more.")]
    async with simulated_sessions(stage) as trial:
        session = await trial.create()
        reply = await ask(trial, session, path, {"tools": tools})
        assert (reply.status, "'add'" in reply.json()["error"]["message"]) == (400, True)
        assert not trial.door
        assert (await ask(trial, session, path, {"tools": tools[:1]})).status == 200
        assert (await ask(trial, session, path, {"tools": tools})).status == 200
        left_out = [record.get("tools_left_out") for record in await trial.records(session)]
        assert left_out == [None, ["add"]]
        assert "Adds more." not in await prompts(trial, session)


async def test_null_in_a_contract_is_not_given(stage: Stage) -> None:
    async with simulated_sessions(stage) as trial:
        contract = {"budget": {"max_turns": 1, "max_tokens": None}, "key": None, "media": None, "model": {"name": None}}
        session = await trial.create(contract=contract)
        assert (await ask(trial, session, CHAT, {})).status == 200
