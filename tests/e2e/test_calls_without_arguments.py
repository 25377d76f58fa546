"""Tool calls without arguments: SGLang's stream loses them and what is behind them; its agent sees all of them."""

from __future__ import annotations

import itertools
import json
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from tests.support.bare_calls import BARE, DATED, NAMES, NULL, UNKNOWN, a_trial, grown, lossy, named
from tests.support.scripted_chat import able, answering, chat_reply
from tests.support.scripted_worker import script
from tests.support.session_apis import BOTH, MESSAGES, RESPONSES, TALKS, Api, Said, case
from tests.support.session_trial import CHAT, IM_END, qwen3, user
from tests.support.stage import Stage

ENDS = {CHAT: "tool_calls", MESSAGES: "tool_use", RESPONSES: "completed"}
CUT_OFF = '<tool_call>\n{"name": "get_date", "arguments": {"zo'
SHOWN = [named("get_date"), grown('{"zone": "UTC"}')]
AGAIN = BARE.replace("}", ', "arguments": {}}')
Ask = Callable[..., Awaitable[tuple[Said, Any]]]


@pytest.fixture
async def ask(stage: Stage) -> Ask:
    """Ask for one turn, of which an engine samples and shows this. Gives what its agent sees, and the record."""
    worker = able(await stage.worker())
    trial = await a_trial(stage, worker)

    async def asked(api: Api, text: str, *shown: bytes, finish: str = "tool_calls") -> tuple[Said, Any]:
        worker.next(lossy(text, *shown, finish=finish))
        session = await trial.create()
        said = await api.turn(trial, session, [user("When?")], stream=True, tools=api.tools(*NAMES))
        (record,) = await trial.records(session)
        return said, record

    return asked


async def test_every_sampled_call_is_shown_before_the_end(ask: Ask) -> None:
    """SGLang numbers calls from 0 again behind a function that it does not know."""
    cases = [
        (f"{BARE}\n{DATED}", [named("get_time")], 2),
        (f"{NULL}\n{DATED}", [named("get_time")], 2),
        (f"{BARE}\n{BARE}\n{DATED}", [named("get_time")], 3),
        (BARE, [named("get_time")], 1),
        (f"{DATED}\n{BARE}", [*SHOWN, named("get_time", index=1)], 2),
        (f"{DATED}\n{DATED}", [named("get_date"), grown('{"zone": '), grown('"UTC"}')], 2),
        (
            f"{DATED}\n{UNKNOWN}\n{AGAIN}",
            [*SHOWN, named("get_time"), grown("{}")],
            2,
        ),
    ]
    for api, (text, shown, count) in itertools.product(TALKS, cases):
        with case(api, text):
            said, record = await ask(api, text, *shown)
            assert len(said.calls) == len({call_id for call_id, _, _ in said.calls}) == count
            assert said.end == ENDS[api.path]
            assert [json.loads(arguments or "{}") for _, _, arguments in said.calls] == [
                {"zone": "UTC"} if name == "get_date" else {} for _, name, _ in said.calls
            ]
            assert "shown_otherwise" not in record
            assert [call["id"] for call in record["response"]["tool_calls"]] == [each for each, _, _ in said.calls]


async def test_calls_that_were_lost_or_made_up_are_told(ask: Ask) -> None:
    for api in TALKS:
        said, record = await ask(api, f"So.\n{BARE}", finish="stop")
        assert ([name for _, name, _ in said.calls], said.end) == (["get_time"], ENDS[api.path])
        assert record["finish_reason"] == "tool_calls", "a lost call alone turns a stop into calls"
    _, record = await ask(Api(CHAT), "No call.", named("get_time", "{}"))
    assert "a call was shown that the whole text does not have" in record["shown_otherwise"]


async def test_whole_calls_of_a_cut_answer_are_shown(ask: Ask) -> None:
    cases = [
        (f"{BARE}\n{DATED}", [named("get_time")], 2),
        (f"{BARE}\n{DATED}\n{CUT_OFF}", [named("get_time")], 2),
        (f"{BARE}\n{BARE}\n{DATED}", [], 3),
        (f"{DATED}\n{CUT_OFF}", [*SHOWN, named("get_date", '{"zo', 1)], 2),
        (f"{DATED}\n{DATED}", SHOWN, 2),
    ]
    for (text, shown, count), finish in itertools.product(cases, ("length", "abort")):
        with case(text, finish):
            said, record = await ask(Api(CHAT), text, *shown, finish=finish)
            assert (len(said.calls), said.end) == (count, finish)
            assert "shown_otherwise" not in record
            assert [call["function"]["name"] for call in record["response"]["tool_calls"]] == [
                name for _, name, _ in said.calls
            ]
            assert all(json.loads(arguments) is not None for _, _, arguments in said.calls if arguments[-2:] != "zo")


async def test_a_call_that_comes_back_without_arguments_is_the_held_one(stage: Stage) -> None:
    text = f"{BARE}\n{DATED}"
    calls = [
        {"id": f"call_{name}", "index": place, "type": "function", "function": {"name": name, "arguments": arguments}}
        for place, (name, arguments) in enumerate(zip(NAMES, ("{}", '{"zone": "UTC"}'), strict=True))
    ]
    message = {"role": "assistant", "content": "", "tool_calls": calls}
    whole = script(chat_reply([*qwen3().encode(text), IM_END], message=message, finish_reason="tool_calls"))
    worker = able(await stage.worker()).always(answering([9], "Now."))
    trial = await a_trial(stage, worker)
    nothing: list[Any] = ["", None, "null", " ", "{ }", {}, ...]
    for api, arguments, live in itertools.product(TALKS, nothing, BOTH):
        if api.path == RESPONSES and isinstance(arguments, dict):
            continue  # arguments of this API are a text
        with case(api, repr(arguments), live):
            worker.next(lossy(text, named("get_time")) if live else whole)
            session, tools = await trial.create(), api.tools(*NAMES)
            await api.turn(trial, session, [user("When?")], stream=live, tools=tools)
            (record,) = await trial.records(session)
            (bare, _, _), (dated, name, other) = [
                (call["id"], *call["function"].values()) for call in record["response"]["tool_calls"]
            ]
            back = api.called((bare, NAMES[0], arguments), (dated, name, api.arguments(other)))
            items = [user("When?"), *back, *api.results((bare, "now"), (dated, "now"))]
            await api.turn(trial, session, items, stream=True, tools=tools)
            assert [(each["parent"], each["edit"]) for each in await trial.records(session)] == [
                (None, None),
                (0, None),
            ]
