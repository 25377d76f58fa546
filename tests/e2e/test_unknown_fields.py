"""Fields that an API does not have: null and false mean that they are not given; any other value is refused by a name
and the setting, or recorded."""

from __future__ import annotations

import itertools
from typing import Any

from tests.support.http import RawReply
from tests.support.session_apis import BOTH, MESSAGES, RESPONSES, TALKS, Api, case
from tests.support.session_trial import CHAT, SessionTrial, qwen3, simulated_sessions, user
from tests.support.stage import Stage

APIS = (Api(MESSAGES), Api(RESPONSES))
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


async def ask(trial: SessionTrial, session: str, api: Api, fields: dict[str, Any]) -> RawReply:
    return await api.post(trial, session, {**api.body([user("Hi")], 4), **fields})


async def test_fields_without_a_value_are_not_given(stage: Stage) -> None:
    async with simulated_sessions(stage) as trial:
        for api in TALKS:
            for fields in NOTHING[api.path]:
                with case(api, fields):
                    session = await trial.create()
                    reply = await ask(trial, session, api, fields)
                    assert reply.status == 200, reply.body
                    (record,) = await trial.records(session)
                    assert "unknown_fields" not in record
        contract = {"budget": {"max_turns": 1, "max_tokens": None}, "key": None, "media": None, "model": {"name": None}}
        assert (await ask(trial, await trial.create(contract=contract), Api(CHAT), {})).status == 200


async def test_a_field_with_a_value_is_refused_by_name_or_recorded(stage: Stage) -> None:
    async with simulated_sessions(stage) as trial:
        session = await trial.create()
        for api in APIS:
            for fields, name in SOMETHING[api.path]:
                with case(api, fields):
                    error = await api.refused(trial, session, [user("Hi")], **fields)
                    assert name.removeprefix("include.") in error["message"]
                    assert "unknown_fields" in error["message"]
    async with simulated_sessions(stage, options={"unknown_fields": "record"}) as trial:
        for api in APIS:
            session = await trial.create()
            for fields, _ in SOMETHING[api.path]:
                reply = await ask(trial, session, api, fields)
                assert reply.status == 200, (api, fields, reply.body)
            many = {f"x_{number:04}" + "y" * 200: 1 for number in range(500)}
            assert (await ask(trial, session, api, many)).status == 200
            *names, bounded = [record["unknown_fields"] for record in await trial.records(session)]
            assert names == [[name] for _, name in SOMETHING[api.path]], api
            assert (len(bounded), max(map(len, bounded))) == (32, 64)


async def test_metadata_of_responses_is_said_again_and_bounded(stage: Stage) -> None:
    api, key = Api(RESPONSES), "k" * 300
    values = [("v" * 100_000, "v" * 100_000), (7, "7"), (True, "true"), ({"a": [1]}, '{"a":[1]}'), ("", "")]
    async with simulated_sessions(stage) as trial:
        session = await trial.create()
        for (value, text), stream in itertools.product(values, BOTH):
            with case(text[:10], stream):
                reply = await ask(trial, session, api, {"metadata": {key: value, "b": None}, "stream": stream})
                answer = api.answers(reply, stream=stream)[-1]
                answer = answer.get("response", answer)
                stored = await trial.ask("GET", f"/sessions/{session}/v1/responses/{answer['id']}")
                assert answer["metadata"] == stored.json()["metadata"] == {key: text}
        long = "v" * (1 << 20)
        for metadata in ({"a": long}, {long: "a"}, {"a": [long]}):
            assert (await api.refused(trial, session, [user("Hi")], metadata=metadata))["param"] == "metadata"


async def prompts(trial: SessionTrial, session: str) -> str:
    return "".join(qwen3().decode(sample["tokens"]) for sample in await trial.samples(session))


async def test_tools_of_one_name_are_one_tool_or_refused_in_a_first_turn(stage: Stage) -> None:
    async with simulated_sessions(stage) as trial:
        for api in APIS:
            (one,), (other,) = (api.tools("add", description=text) for text in ("Adds.", "Adds more."))
            session = await trial.create()
            assert (await ask(trial, session, api, {"tools": [one, one]})).status == 200
            assert (await prompts(trial, session)).count('"Adds."') == 1, api
            session = await trial.create()
            assert "'add'" in (await api.refused(trial, session, [user("Hi")], tools=[one, other]))["message"]
            for tools in ([one], [one, other]):
                assert (await ask(trial, session, api, {"tools": tools})).status == 200
            left_out = [record.get("tools_left_out") for record in await trial.records(session)]
            assert left_out == [None, ["add"]], api
            assert "Adds more." not in await prompts(trial, session)
