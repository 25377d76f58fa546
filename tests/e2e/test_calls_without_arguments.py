"""Tool calls without arguments: SGLang's stream loses them and what is behind them; its agent sees all of them."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.support.bare_calls import (
    BARE,
    DATED,
    ENDS,
    MESSAGES,
    NULL,
    RESPONSES,
    UNKNOWN,
    a_trial,
    ask,
    end_of,
    grown,
    history,
    lossy,
    named,
    request,
    seen_calls,
)
from tests.support.scripted_chat import able, chat_reply
from tests.support.scripted_worker import script
from tests.support.session_trial import CHAT, IM_END, qwen3
from tests.support.stage import Stage

apis = pytest.mark.parametrize("path", [CHAT, MESSAGES, RESPONSES])


@apis
@pytest.mark.parametrize(
    ("text", "shown", "count"),
    [
        (f"{BARE}\n{DATED}", [named("get_time")], 2),
        (f"{NULL}\n{DATED}", [named("get_time")], 2),
        (f"{BARE}\n{BARE}\n{DATED}", [named("get_time")], 3),
        (BARE, [named("get_time")], 1),
        (f"{DATED}\n{BARE}", [named("get_date"), grown('{"zone": "UTC"}'), named("get_time", index=1)], 2),
        (f"{DATED}\n{DATED}", [named("get_date"), grown('{"zone": '), grown('"UTC"}')], 2),
    ],
    ids=["bare", "null", "twice", "alone", "last", "second lost"],
)
async def test_every_sampled_call_is_shown_before_the_end(
    stage: Stage, path: str, text: str, shown: list[bytes], count: int
) -> None:
    worker = able(await stage.worker()).always(lossy(text, *shown))
    trial = await a_trial(stage, worker)
    session = await trial.create()
    reply = await ask(trial, session, path, [{"role": "user", "content": "When?"}])
    calls = seen_calls(path, reply)
    assert len(calls) == len({call_id for call_id, _, _ in calls}) == count
    assert end_of(path, reply) == ENDS[path]
    assert [json.loads(arguments or "{}") for _, _, arguments in calls] == [
        {"zone": "UTC"} if name == "get_date" else {} for _, name, _ in calls
    ]
    (record,) = await trial.records(session)
    assert "shown_otherwise" not in record
    assert [call["id"] for call in record["response"]["tool_calls"]] == [call_id for call_id, _, _ in calls]


@apis
async def test_a_lost_call_alone_turns_a_stop_into_calls(stage: Stage, path: str) -> None:
    worker = able(await stage.worker()).always(lossy(f"So.\n{BARE}", finish="stop"))
    trial = await a_trial(stage, worker)
    session = await trial.create()
    reply = await ask(trial, session, path, [{"role": "user", "content": "When?"}])
    assert [name for _, name, _ in seen_calls(path, reply)] == ["get_time"]
    assert end_of(path, reply) == ENDS[path]
    assert [record["finish_reason"] for record in await trial.records(session)] == ["tool_calls"]


@apis
async def test_calls_around_an_unknown_function_stay_apart(stage: Stage, path: str) -> None:
    """SGLang numbers them from 0 again behind a function that it does not know."""
    shown = [named("get_date"), grown('{"zone": "UTC"}'), named("get_time"), grown("{}")]
    text = f"{DATED}\n{UNKNOWN}\n{BARE.replace('}', ', ' + chr(34) + 'arguments' + chr(34) + ': {}}')}"
    worker = able(await stage.worker()).always(lossy(text, *shown))
    trial = await a_trial(stage, worker)
    session = await trial.create()
    reply = await ask(trial, session, path, [{"role": "user", "content": "When?"}])
    assert [(name, json.loads(said)) for _, name, said in seen_calls(path, reply)] == [
        ("get_date", {"zone": "UTC"}),
        ("get_time", {}),
    ]
    (record,) = await trial.records(session)
    assert len(record["response"]["tool_calls"]) == 2
    assert "shown_otherwise" not in record


async def test_a_turn_that_showed_other_calls_than_were_sampled_says_so(stage: Stage) -> None:
    worker = able(await stage.worker()).always(lossy("No call.", named("get_time", "{}")))
    trial = await a_trial(stage, worker)
    session = await trial.create()
    await ask(trial, session, CHAT, [{"role": "user", "content": "When?"}])
    (record,) = await trial.records(session)
    assert "a call was shown that the whole text does not have" in record["shown_otherwise"]


@pytest.mark.parametrize("live", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("arguments", ["", None, "null", " ", "{}", "{ }", {}, ...], ids=repr)
@apis
async def test_a_call_that_comes_back_without_arguments_is_the_held_one(
    stage: Stage, path: str, arguments: Any, live: bool
) -> None:
    if path == RESPONSES and isinstance(arguments, dict):
        pytest.skip("arguments of this API are a text")
    text = f"{BARE}\n{DATED}"
    message = {
        "role": "assistant",
        "content": "",
        "tool_calls": [
            {"id": "call_a", "index": 0, "type": "function", "function": {"name": "get_time", "arguments": "{}"}},
            {
                "id": "call_b",
                "index": 1,
                "type": "function",
                "function": {"name": "get_date", "arguments": '{"zone": "UTC"}'},
            },
        ],
    }
    worker = able(await stage.worker())
    whole = script(chat_reply([*qwen3().encode(text), IM_END], message=message, finish_reason="tool_calls"))
    worker.next(lossy(text, named("get_time")) if live else whole).always(lossy("Now.", root=False))
    trial = await a_trial(stage, worker)
    session = await trial.create()
    question = request(path, [{"role": "user", "content": "When?"}], stream=live)
    await trial.ask("POST", f"/sessions/{session}{path}", question)
    (record,) = await trial.records(session)
    calls = [(call["id"], call["function"]["name"]) for call in record["response"]["tool_calls"]]
    reply = await ask(trial, session, path, history(path, calls, arguments))
    assert reply.status == 200, reply.body
    assert [each["edit"] for each in await trial.records(session)] == [None, None]
    assert [each["parent"] for each in await trial.records(session)] == [None, 0]


CUT_OFF = '<tool_call>\n{"name": "get_date", "arguments": {"zo'


@pytest.mark.parametrize("finish", ["length", "abort"])
@pytest.mark.parametrize(
    ("text", "shown", "count"),
    [
        (f"{BARE}\n{DATED}", [named("get_time")], 2),
        (f"{BARE}\n{DATED}\n{CUT_OFF}", [named("get_time")], 2),
        (f"{BARE}\n{BARE}\n{DATED}", [], 3),
        (f"{DATED}\n{CUT_OFF}", [named("get_date"), grown('{"zone": "UTC"}'), named("get_date", '{"zo', 1)], 2),
        (f"{DATED}\n{DATED}", [named("get_date"), grown('{"zone": "UTC"}')], 2),
    ],
    ids=["lost", "lost and open", "none shown", "open", "second lost"],
)
async def test_whole_calls_of_a_cut_answer_are_shown(
    stage: Stage, text: str, shown: list[bytes], count: int, finish: str
) -> None:
    worker = able(await stage.worker()).always(lossy(text, *shown, finish=finish))
    trial = await a_trial(stage, worker)
    session = await trial.create()
    reply = await ask(trial, session, CHAT, [{"role": "user", "content": "When?"}])
    calls = seen_calls(CHAT, reply)
    assert (len(calls), end_of(CHAT, reply)) == (count, finish)
    (record,) = await trial.records(session)
    assert "shown_otherwise" not in record
    assert [call["function"]["name"] for call in record["response"]["tool_calls"]] == [name for _, name, _ in calls]
    assert all(json.loads(arguments) is not None for _, _, arguments in calls if not arguments.endswith("zo"))
