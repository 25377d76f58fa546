"""Histories that agents' libraries write anew: other call ids, other numbers, calls without item ids. The episode stays
one segment, and the engine reads what the agent says."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import orjson
import pytest

from tests.support.http import RawReply
from tests.support.scripted_chat import able, chat_reply
from tests.support.scripted_worker import ScriptedWorker, script
from tests.support.session_apis import FIELDS, MESSAGES, RESPONSES
from tests.support.session_trial import CHAT, SessionTrial, session_trial, simulated_sessions
from tests.support.stage import Stage

USER = {"role": "user", "content": "Go."}
FUNCTION: Any = {"type": "function", "name": "bash", "parameters": {"type": "object"}}


def call(arguments: str, call_id: str = "bash:0", name: str = "bash") -> Any:
    return {"id": call_id, "index": 0, "type": "function", "function": {"name": name, "arguments": arguments}}


def scripted(worker: ScriptedWorker, *answers: Any) -> ScriptedWorker:
    """A worker with these answers' messages, one for each turn."""
    for place, message in enumerate(answers):
        told: dict[str, Any] = {} if place == 0 else {"prompt_token_ids": None}
        said = {"role": "assistant", "content": None, **message}
        finish = "tool_calls" if message.get("tool_calls") else "stop"
        worker.next(script(chat_reply([7 + place], message=said, finish_reason=finish, **told)))
    return able(worker)


async def responses_turn(trial: SessionTrial, session: str, given: Sequence[Any]) -> list[Any]:
    """The output of a turn, without the ids of its items."""
    body = {"model": "m", "input": given, "tools": [FUNCTION], "max_output_tokens": 8}
    reply = await trial.ask("POST", f"/sessions/{session}{RESPONSES}", body)
    assert reply.status == 200, reply.body
    return [{name: item[name] for name in item if name != "id"} for item in reply.json()["output"]]


def output(text: str) -> Any:
    return {"type": "function_call_output", "call_id": "bash:0", "output": text}


async def parents(trial: SessionTrial, session: str) -> list[int | None]:
    return [record["parent"] for record in await trial.records(session)]


async def test_the_same_call_in_two_turns_stays_two_turns_without_item_ids(stage: Stage) -> None:
    same = {"tool_calls": [call('{"command": "ls"}')]}
    worker = scripted(await stage.worker(), same, {**same, "content": "Once more."}, same, {"content": "Done."})
    trial = await session_trial(stage, worker)
    session, given = await trial.create(), [USER]
    for turn in range(4):
        said = await responses_turn(trial, session, given)
        calls = [item for item in said if item["type"] == "function_call"]
        text = [item for item in said if item["type"] == "message"]
        given += [*calls, *text, *(output(str(turn)) for _ in calls)]
    assert await parents(trial, session) == [None, 0, 1, 2]


async def test_reasoning_that_comes_back_as_a_message_is_reasoning(stage: Stage) -> None:
    calls = [call('{"command": "ls"}', f"call_{turn}") for turn in range(2)]
    answers = [{"reasoning_content": f"Thought {turn}.\n", "tool_calls": [calls[turn]]} for turn in range(2)]
    done = {"reasoning_content": "Enough.", "content": "Done."}
    worker = scripted(await stage.worker(), *answers, done, {"content": "Bye."})
    trial = await session_trial(stage, worker)
    session, given = await trial.create(), [USER]
    for _ in range(4):
        for item in await responses_turn(trial, session, given):
            if item["type"] == "reasoning":
                text = item["content"][0]["text"].strip()
                item = {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": text}]}
            given.append(item)
            if item["type"] == "function_call":
                given.append({**output("ok"), "call_id": item["call_id"]})
        if given[-1].get("role") == "assistant":
            given.append(USER)
    assert await parents(trial, session) == [None, 0, 1, 2]


def sent_back(path: str, arguments: Any, call_id: str = "bash:0") -> list[Any]:
    """A history with one call, as an agent of an API sends it back with the call's result."""
    if path == RESPONSES:
        item = {"type": "function_call", "call_id": call_id, "name": "bash", "arguments": arguments}
        return [USER, item, {**output("ok"), "call_id": call_id}]
    if path == MESSAGES:
        block = {"type": "tool_use", "id": call_id, "name": "bash", "input": orjson.loads(arguments)}
        result = {"type": "tool_result", "tool_use_id": call_id, "content": "ok"}
        return [USER, {"role": "assistant", "content": [block]}, {"role": "user", "content": [result]}]
    message = {"role": "assistant", "content": None, "tool_calls": [call(arguments, call_id)]}
    return [USER, message, {"role": "tool", "tool_call_id": call_id, "content": "ok"}]


async def turn(trial: SessionTrial, session: str, path: str, given: Sequence[Any], **fields: Any) -> RawReply:
    name, most = FIELDS[path]
    body = {"model": "m", name: given, most: 8, **fields}
    return await trial.ask("POST", f"/sessions/{session}{path}", body)


@pytest.mark.parametrize("path", [CHAT, MESSAGES, RESPONSES])
@pytest.mark.parametrize(
    ("sampled", "rounded"),
    [
        ('{"a": {"b": [9007199254740993]}}', '{"a":{"b":[9007199254740992]}}'),
        ('{"a": 1152921504606846977}', '{"a":1152921504606847000}'),
        ('{"a": 123456789012345678901234567890}', '{"a":1.2345678901234568e+29}'),
        ('{"a": 1000000000000000000000, "b": -0, "c": 1.0}', '{"a":1e+21,"b":0,"c":1}'),
        ('{"b": 1, "10": 2, "9": 0.1000000000000000055, "b": 3}', '{"9":0.1,"10":2,"b":3}'),
    ],
)
async def test_numbers_that_javascript_rounds_are_the_same_call(
    stage: Stage, path: str, sampled: str, rounded: str
) -> None:
    trial = await session_trial(stage, scripted(await stage.worker(), {"tool_calls": [call(sampled)]}, {}, {}))
    session = await trial.create()
    for given in ([USER], sent_back(path, rounded)):
        reply = await turn(trial, session, path, given)
        assert reply.status == 200, reply.body
    assert await parents(trial, session) == [None, 0]


#: Arguments as they were sampled, and as an agent's language or library writes them.
SPELLED = [
    ('{"a": 1e400, "b": [-Infinity]}', '{"a":null,"b":[null]}'),
    ('{"a": NaN}', '{"a":null}'),
    ('{"a": "it", "b": [true, null]}', "{'a': 'it', 'b': [True, None]}"),
    ('{"a": 1}', '"{\\"a\\": 1}"'),
    ('"{\\"a\\": 1}"', '{"a":1}'),
    ('```json\n{"a": 1}\n```', '{"a":1}'),
    ('Sure: {"a": 1}', '{"a":1}'),
    ('{"a": tru', '{"a":true}'),
    ('{"a": 1, "b":', '{"a":1,"b":""}'),
    ('{"a": 1}{"b": 2}', '{"a":1}'),
    ("}{", "{}"),
    ("{}", "[]"),
    ("[]", "{}"),
    *((sampled, spelled) for sampled in ("{}", "", "null", " {} ") for spelled in ("[]", "0", "false", '""', "null")),
]
#: What libraries write for no arguments, as JSON of any type.
NOTHING: list[Any] = [[], 0, False, "", None, {}, "[]", "0", "false", "null"]


@pytest.mark.parametrize("path", [CHAT, MESSAGES, RESPONSES])
@pytest.mark.parametrize(("sampled", "spelled"), SPELLED, ids=lambda text: str(text)[:24])
async def test_arguments_in_another_spelling_are_the_held_call(
    stage: Stage, path: str, sampled: str, spelled: str
) -> None:
    if path == MESSAGES and "'" in spelled:
        pytest.skip("inputs of this API are JSON")
    trial = await session_trial(stage, scripted(await stage.worker(), {"tool_calls": [call(sampled)]}, {}))
    session = await trial.create()
    for given in ([USER], sent_back(path, spelled)):
        reply = await turn(trial, session, path, given)
        assert reply.status == 200, reply.body
    assert await parents(trial, session) == [None, 0]


def holding(path: str, value: Any) -> list[Any]:
    """The history with this value as it is in place of the arguments."""
    history = sent_back(path, "{}")
    if path == RESPONSES:
        history[1]["arguments"] = value
    elif path == MESSAGES:
        history[1]["content"][0]["input"] = value
    else:
        history[1]["tool_calls"][0]["function"]["arguments"] = value
    return history


@pytest.mark.parametrize("path", [CHAT, MESSAGES, RESPONSES])
@pytest.mark.parametrize("value", NOTHING, ids=repr)
async def test_nothing_in_any_form_is_the_held_call_without_arguments(stage: Stage, path: str, value: Any) -> None:
    answers: list[Any] = [{"tool_calls": [call(text, f"bash:{n}")]} for n, text in enumerate(("{}", ""))]
    trial = await session_trial(stage, scripted(await stage.worker(), *answers, {}))
    session, given = await trial.create(), [USER]
    for number in range(3):
        reply = await turn(trial, session, path, given)
        assert reply.status == 200, reply.body
        given += renamed_call(path, holding(path, value)[1:], f"bash:{number}")
    assert await parents(trial, session) == [None, 0, 1]


def renamed_call(path: str, history: list[Any], call_id: str) -> list[Any]:
    """The same messages or items with this id of the call."""
    return list(orjson.loads(orjson.dumps(history).replace(b"bash:0", call_id.encode())))


@pytest.mark.parametrize("path", [CHAT, MESSAGES, RESPONSES])
@pytest.mark.parametrize("value", [[], 0, False, "[]", "0"], ids=repr)
async def test_nothing_in_place_of_arguments_is_an_edit(stage: Stage, path: str, value: Any) -> None:
    said = {"role": "assistant", "content": None, "tool_calls": [call('{"a": 1}')]}
    worker = await stage.worker()
    worker.next(*[script(chat_reply([7], message=said, finish_reason="tool_calls"))] * 2)
    trial = await session_trial(stage, able(worker))
    session = await trial.create()
    for given in ([USER], holding(path, value)):
        reply = await turn(trial, session, path, given)
        assert reply.status == 200, reply.body
    assert await parents(trial, session) == [None, None]


@pytest.mark.parametrize(("path", "given"), [(CHAT, None), (CHAT, {"a": 1}), (CHAT, "left out"), (RESPONSES, {"a": 1})])
async def test_arguments_that_come_back_parsed_or_not_at_all_are_held(stage: Stage, path: str, given: Any) -> None:
    trial = await session_trial(stage, scripted(await stage.worker(), {"tool_calls": [call('{"a": 1}')]}, {}))
    session = await trial.create()
    history = sent_back(path, given)
    holder = history[1] if path == RESPONSES else history[1]["tool_calls"][0]["function"]
    if given == "left out":
        del holder["arguments"]
    for sent in ([USER], history):
        reply = await turn(trial, session, path, sent)
        assert reply.status == 200, reply.body
    assert await parents(trial, session) == [None, 0]


@pytest.mark.parametrize("given", ['{"a": 1}', None, "", {"a": 1}, "left out"])
async def test_an_input_in_another_form_is_the_held_call(stage: Stage, given: Any) -> None:
    trial = await session_trial(stage, scripted(await stage.worker(), {"tool_calls": [call('{"a": 1}')]}, {}))
    session = await trial.create()
    history = sent_back(MESSAGES, "{}")
    block = history[1]["content"][0]
    block["input"] = given
    if given == "left out":
        del block["input"]
    for sent in ([USER], history):
        reply = await turn(trial, session, MESSAGES, sent)
        assert reply.status == 200, reply.body
    assert await parents(trial, session) == [None, 0]


@pytest.mark.parametrize(
    ("given", "read"),
    [
        ([1], {"INVALID_JSON": "[1]"}),
        ("ls {", {"INVALID_JSON": "ls {"}),
        (7, {"INVALID_JSON": "7"}),
        ('{"b": 2}', {"b": 2}),
        ("", {}),
        (None, {}),
    ],
)
async def test_an_input_that_no_answer_had_is_wrapped(stage: Stage, given: Any, read: Any) -> None:
    worker = scripted(await stage.worker(), {})
    trial = await session_trial(stage, worker)
    history = sent_back(MESSAGES, "{}")
    history[1]["content"][0]["input"] = given
    assert (await turn(trial, await trial.create(), MESSAGES, history)).status == 200
    asked = orjson.loads(worker.requests[-1].body)["messages"][1]["tool_calls"][0]["function"]["arguments"]
    assert orjson.loads(asked) == read


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", [CHAT, RESPONSES])
@pytest.mark.parametrize("arguments", ['{"a": tru', "[1]", "ls {", '"a"'])
async def test_a_segment_may_begin_with_malformed_arguments(
    stage: Stage, path: str, arguments: str, stream: bool
) -> None:
    """Real SGLang refuses such a history for ever; the engine is given an object around the text."""
    async with simulated_sessions(stage) as trial:
        session, given = await trial.create(), sent_back(path, arguments)
        for _ in range(2):
            reply = await turn(trial, session, path, given, stream=stream)
            assert reply.status == 200, reply.body
            given = [*given, {"role": "assistant", "content": "edited"}, USER]
        records = await trial.records(session)
        assert [record["wrapped_arguments"] for record in records] == [["messages[1].tool_calls[0]"]] * 2
        held = records[0]["messages"][1]["tool_calls"][0]["function"]["arguments"]
        asked = orjson.loads(trial.door[0].body)["messages"][1]["tool_calls"][0]["function"]["arguments"]
        assert (held, orjson.loads(asked)) == (arguments, {"INVALID_JSON": arguments})


@pytest.mark.parametrize("path", [CHAT, MESSAGES, RESPONSES])
@pytest.mark.parametrize("value", [[], 0, False, None, ""], ids=repr)
async def test_the_engine_is_given_no_arguments_that_it_refuses(stage: Stage, path: str, value: Any) -> None:
    """A simulated worker refuses numbers and lists as SGLang does."""
    async with simulated_sessions(stage) as trial:
        session = await trial.create()
        reply = await turn(trial, session, path, holding(path, value))
        assert reply.status == 200, reply.body
