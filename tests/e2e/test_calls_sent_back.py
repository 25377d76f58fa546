"""Calls and results as agents' languages and libraries write them anew: other ids or none, other spellings of the
arguments, repaired JSON. The episode stays one segment, the engine reads what the agent says, an edit is an edit."""

from __future__ import annotations

import itertools
import json
import shutil
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import orjson
import pytest

from miles_router.testing import SimulatedWorker
from miles_router.testing.worker.model.hf_vocabulary import DirectoryTokenizer
from tests.support.bare_calls import BARE, DATED, NAMES, NULL, UNKNOWN, a_trial, grown, lossy, named
from tests.support.cache_trial import simulated_trial
from tests.support.scripted_chat import able, answering, chat_reply, failed_stream
from tests.support.scripted_worker import ScriptedWorker, reply, script
from tests.support.session_apis import BOTH, MESSAGES, PLAIN, RESPONSES, TALKS, Api, Said, case
from tests.support.session_trial import (
    CHAT,
    IM_END,
    SessionTrial,
    message_of,
    prompt_of,
    qwen3,
    session_trial,
    simulated_sessions,
    user,
)
from tests.support.stage import Stage
from tests.support.tokenizers import tokenizer_directory

WHEN = user("When?")
TIME: tuple[str, Any] = ("get_time", {"zone": "UTC"})
DATE: tuple[str, Any] = ("get_date", {})
ONE_CALL: Any = {"calls": [{"name": "get_time", "arguments": {"zone": "UTC"}}]}


def made(arguments: str, call_id: str = "c0") -> Any:
    """A call of an engine's answer."""
    return {"id": call_id, "index": 0, "type": "function", "function": {"name": "get_date", "arguments": arguments}}


def history(api: Api, arguments: Any, call_id: str = "c0") -> list[Any]:
    """The question, a call with these arguments as they are, and its result."""
    return [WHEN, *api.called((call_id, "get_date", arguments)), *api.results((call_id, "now"))]


async def parents(trial: SessionTrial, session: str) -> list[int | None]:
    return [record["parent"] for record in await trial.records(session)]


@pytest.fixture
async def worker(stage: Stage) -> ScriptedWorker:
    return able(await stage.worker()).always(answering([9]))


# Arguments

#: Arguments as they were sampled, and as an agent's language or library writes them.
SPELLED = [
    ('{"a": {"b": [9007199254740993]}}', '{"a":{"b":[9007199254740992]}}'),
    ('{"a": 123456789012345678901234567890}', '{"a":1.2345678901234568e+29}'),
    ('{"a": 1000000000000000000000, "b": -0, "c": 1.0}', '{"a":1e+21,"b":0,"c":1}'),
    ('{"b": 1, "10": 2, "9": 0.1000000000000000055, "b": 3}', '{"9":0.1,"10":2,"b":3}'),
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
    *(("{}", spelled) for spelled in ("[]", "0", "false", '""', "null")),
    *((sampled, "[]") for sampled in ("", "null", " {} ")),
    ("[]", "{}"),
]
NOTHING: list[Any] = [[], 0, False, "", None]
#: What comes back of `{"a": 1}`, as it is in place of the arguments, by API. `...`: nothing does.
PARSED: dict[str, list[Any]] = {
    CHAT: [None, {"a": 1}, ...],
    RESPONSES: [{"a": 1}],
    MESSAGES: ['{"a": 1}', None, "", ...],
}


async def test_arguments_in_another_spelling_are_the_held_call(worker: ScriptedWorker, trial: SessionTrial) -> None:
    for api in TALKS:
        spelled = [(text, api.arguments(back)) for text, back in SPELLED if api.path != MESSAGES or "'" not in back]
        for sampled, back in [*spelled, *(('{"a": 1}', back) for back in PARSED[api.path])]:
            with case(api, sampled, back):
                worker.next(answering([7], calls=[made(sampled)]))
                session = await trial.create()
                for items in ([WHEN], history(api, back)):
                    await api.turn(trial, session, items)
                assert await parents(trial, session) == [None, 0]


async def test_nothing_in_any_form_stands_for_no_arguments_alone(worker: ScriptedWorker, trial: SessionTrial) -> None:
    """What libraries write for no arguments, as JSON of any type."""
    for api, nothing in itertools.product(TALKS, [*NOTHING, {}, "[]", "0", "false", "null"]):
        with case(api, repr(nothing)):
            worker.next(answering([7], calls=[made("{}")]), answering([8], calls=[made("", "c1")]))
            session, items = await trial.create(), [WHEN]
            for turn in range(3):
                await api.turn(trial, session, items)
                items = [*items, *history(api, nothing, f"c{turn}")[1:]]
            assert await parents(trial, session) == [None, 0, 1]
        if nothing in ([], 0, "[]"):
            with case(api, nothing, "in place of arguments"):
                worker.next(answering([7], calls=[made('{"a": 1}')]))
                session = await trial.create()
                for items in ([WHEN], history(api, nothing)):
                    await api.turn(trial, session, items)
                assert await parents(trial, session) == [None, None]


async def test_an_input_that_no_answer_had_is_wrapped(worker: ScriptedWorker, trial: SessionTrial) -> None:
    wrapped = [([1], "[1]"), ("ls {", "ls {"), (7, "7")]
    for given, read in [
        *((given, {"INVALID_JSON": text}) for given, text in wrapped),
        ('{"b": 2}', {"b": 2}),
        ("", {}),
        (None, {}),
    ]:
        await Api(MESSAGES).turn(trial, await trial.create(), history(Api(MESSAGES), given))
        asked = json.loads(worker.requests[-1].body)["messages"][1]["tool_calls"][0]["function"]["arguments"]
        assert json.loads(asked) == read, given


async def test_a_segment_may_begin_with_malformed_arguments(stage: Stage) -> None:
    """Real SGLang refuses such a history for ever; the engine is given an object around the text. A simulated worker
    refuses numbers and lists as SGLang does."""
    async with simulated_sessions(stage) as trial:
        for api, arguments, stream in itertools.product(
            (Api(CHAT), Api(RESPONSES)), ('{"a": tru', "[1]", "ls {", '"a"'), BOTH
        ):
            with case(api, arguments, stream):
                session, items = await trial.create(), history(api, arguments)
                for _ in range(2):
                    await api.turn(trial, session, items, 4, stream=stream)
                    items = [*items, {"role": "assistant", "content": "edited"}, WHEN]
                records = await trial.records(session)
                assert [record["wrapped_arguments"] for record in records] == [["messages[1].tool_calls[0]"]] * 2
                held = records[0]["messages"][1]["tool_calls"][0]["function"]["arguments"]
                asked = trial.log[-2].json()["messages"][1]["tool_calls"][0]["function"]["arguments"]
                assert (held, json.loads(asked)) == (arguments, {"INVALID_JSON": arguments})
        for api, nothing in itertools.product(TALKS, NOTHING):
            with case(api, nothing):
                await api.turn(trial, await trial.create(), history(api, nothing), 4)


# Repaired JSON

OPEN = '{"zone": "UTC", "days": [1, 2'
CALL = f'<tool_call>\n{{"name": "get_date", "arguments": {OPEN}\n</tool_call>'


def repaired(api: Api, arguments: Any) -> Any:
    if api.path == MESSAGES:
        return {"INVALID_JSON": arguments} if isinstance(arguments, str) else arguments
    return arguments if isinstance(arguments, str) else json.dumps(arguments)


async def open_call(stage: Stage) -> Callable[..., Any]:
    """Gives the records of a turn with an open call, and of two that follow with the call as the agent has it."""
    worker = able(await stage.worker()).always(answering([9], "Now."))
    trial = await a_trial(stage, worker)
    whole = chat_reply(
        [*qwen3().encode(CALL), IM_END],
        message={"role": "assistant", "content": "", "tool_calls": [made(OPEN)]},
        finish_reason="tool_calls",
    )

    async def turns(api: Api, arguments: Any, *, live: bool = True) -> list[Any]:
        worker.next(lossy(CALL, named("get_date"), grown(OPEN)) if live else script(whole))
        session, tools = await trial.create(), api.tools(*NAMES)
        await api.turn(trial, session, [WHEN], stream=live, tools=tools)
        (record,) = await trial.records(session)
        (call,) = record["response"]["tool_calls"]
        assert call["function"]["arguments"] == OPEN
        items = history(api, repaired(api, arguments), call["id"])
        said = await api.turn(trial, session, items, stream=True, tools=tools)
        await api.turn(trial, session, [*items, *said.items, user("And then?")], stream=True, tools=tools)
        return list(await trial.records(session))

    return turns


async def test_a_repaired_call_is_the_held_one(stage: Stage) -> None:
    turns = await open_call(stage)
    closed: list[Any] = [{"zone": "UTC", "days": [1, 2]}, {"zone": "UTC", "days": [1]}, {"zone": "UTC"}, {}, OPEN]
    for api, arguments, live in itertools.product(TALKS, closed, BOTH):
        with case(api, arguments, live):
            records = await turns(api, arguments, live=live)
            assert [(each["parent"], each["edit"]) for each in records] == [(None, None), (0, None), (1, None)]
    assert "a call was shown that the whole text does not have" in records[0]["shown_otherwise"]


async def test_a_broken_call_that_comes_back_changed_is_an_edit(stage: Stage) -> None:
    turns = await open_call(stage)
    for api in TALKS:
        _, edited, _ = await turns(api, {"zone": "CET", "days": [1, 2]})
        assert (edited["parent"], edited["edit"]["field"]) == (None, "tool_calls[0].function.arguments"), api


# Ids

#: What stands in place of the id of a turn's call: in the call, and in its result.
IDS: dict[str, Callable[[int], tuple[Any, Any]]] = {
    "integers": lambda turn: (turn, turn),
    "an integer and its text": lambda turn: (turn, str(turn)),
    "the same integer": lambda turn: (0, 0),
    "large": lambda turn: (2**63 + turn, 2**63 + turn),
    "missing": lambda turn: (..., ...),
    "null": lambda turn: (None, None),
    "empty": lambda turn: ("", ""),
    "missing in the result": lambda turn: (turn, ...),
    "missing in the call": lambda turn: (..., None),
}


def called(api: Api, *calls: tuple[Any, tuple[str, Any]]) -> list[Any]:
    """Calls under these ids."""
    return api.called(*((each, name, api.arguments(json.dumps(arguments))) for each, (name, arguments) in calls))


async def episode(trial: SessionTrial, api: Api, ids: Callable[[int], tuple[Any, Any]], *, stream: bool) -> str:
    """Three turns of an agent that gives calls such ids."""
    session, items = await trial.create(), [WHEN]
    for turn in range(3):
        await api.turn(trial, session, items, stream=stream, tools=api.tools(*NAMES))
        call_id, result_id = ids(turn)
        items += [*called(api, (call_id, TIME)), *api.results((result_id, f"result {turn}"))]
    return session


async def test_an_episode_with_odd_ids_is_one_segment(stage: Stage) -> None:
    async with simulated_sessions(stage, script=[ONE_CALL, ONE_CALL, "Done."]) as trial:
        for api, (kind, ids), stream in itertools.product(TALKS, IDS.items(), BOTH):
            with case(api, kind, stream):
                session = await episode(trial, api, ids, stream=stream)
                records = await trial.records(session)
                assert [record["parent"] for record in records] == [None, 0, 1]
                sampled = [call["id"] for record in records[:2] for call in record["response"]["tool_calls"]]
                assert [record["messages"][0]["tool_call_id"] for record in records[1:]] == sampled
                prompt = await prompt_of(trial, session)
                assert [prompt.count(f"result {turn}") for turn in range(3)] == [1, 1, 0]


async def test_a_history_that_no_turn_holds_is_read(stage: Stage) -> None:
    async with simulated_sessions(stage) as trial:
        for api, (kind, ids) in itertools.product(TALKS, IDS.items()):
            with case(api, kind):
                call_id, result_id = ids(7)
                session = await trial.create()
                items = [WHEN, *called(api, (call_id, TIME)), *api.results((result_id, "noon"))]
                said = await api.turn(trial, session, items, 8)
                await api.turn(trial, session, [*items, *said.items, user("And now?")], 8)
                assert await trial.reasons(session) == [None, None]
                assert "<tool_response>\nnoon\n</tool_response>" in await prompt_of(trial, session)


async def test_an_id_that_is_none_is_refused_by_its_place(stage: Stage) -> None:
    async with simulated_sessions(stage) as trial:
        session = await trial.create()
        for api, bad, place in itertools.product(TALKS, (True, 1.5, ["a"], {"id": "a"}), (1, 2)):
            ids = (bad, "a") if place == 1 else ("a", bad)
            with case(api, bad, place):
                items = [WHEN, *called(api, (ids[0], TIME)), *api.results((ids[1], "noon"))]
                error = await api.refused(trial, session, items)
                assert any(f"{name}{place}" in str(error) for name in ("messages[", "messages.", "input["))
                assert "integer" in error["message"]


async def test_results_find_the_call_that_they_are_of(stage: Stage) -> None:
    """In Messages results are put into the order of their calls; the others go as they came."""
    chat = Api(CHAT)
    unnamed = chat.results((..., "first"), (..., "second"))
    by_name = [{**each, "name": name} for each, name in zip(reversed(unnamed), ("get_date", "get_time"), strict=True)]
    cases = [
        *((api, (1, 2), api.results((2, "second"), (1, "first"))) for api in TALKS),
        *((api, ("a", ...), api.results(("a", "first"), (..., "second"))) for api in TALKS),
        (chat, ("a", "b"), unnamed),
        (chat, ("a", "b"), by_name),
    ]
    two: Any = {"calls": [{"name": name, "arguments": arguments} for name, arguments in (TIME, DATE)]}
    async with simulated_sessions(stage, script=[two, "Done."]) as trial:
        for api, ids, results in cases:
            with case(api, ids, results):
                session = await trial.create()
                await api.turn(trial, session, [WHEN, *called(api, *zip(ids, (TIME, DATE), strict=True)), *results])
                (record,) = await trial.records(session)
                calls = [call["id"] for each in record["messages"] for call in each.get("tool_calls") or ()]
                found = {each["tool_call_id"]: each["content"] for each in record["messages"] if each["role"] == "tool"}
                assert found == dict(zip(calls, ("first", "second"), strict=True))
        for api in TALKS:
            with case(api, "of one of two calls"):
                calls = called(api, (1, TIME), (2, DATE))
                await api.refused(trial, await trial.create(), [WHEN, *calls, *api.results((..., "noon"))])
        # Qwen3's template writes no ids: behind held calls the prompt is the same whatever they are.
        session = await trial.create()
        said = await chat.turn(trial, session, [WHEN], tools=chat.tools(*NAMES))
        await chat.turn(trial, session, [WHEN, *said.items, *chat.results((..., "noon"))], tools=chat.tools(*NAMES))
        assert await trial.reasons(session) == [None, None]


def renamed(messages: list[Any], name: Callable[[int, str], str]) -> list[Any]:
    """A chat history with other ids; `name`: the number of a message, and an id."""
    sent, last = [], 0
    for place, message in enumerate(messages):
        if message.get("tool_calls"):
            last = place
            calls = [{**call, "id": name(place, call["id"])} for call in message["tool_calls"]]
            message = {**message, "tool_calls": calls}
        elif message["role"] == "tool":
            message = {**message, "tool_call_id": name(last, message["tool_call_id"])}
        sent.append(message)
    return sent


TWICE: Any = [{"calls": ONE_CALL["calls"] * 2}, ONE_CALL, "Done."]
RENAMED: dict[str, Callable[[int, str], str]] = {
    "as litellm does": lambda place, call_id: f"toolu_{call_id}",
    "as opencode does for Mistral": lambda place, call_id: call_id.replace("_", "")[:9],
    "by their place": lambda place, call_id: f"{place}-{call_id[-4:]}",
}


async def renaming(trial: SessionTrial, name: Callable[[int, str], str]) -> list[Any]:
    """The records of three turns of an agent that renames ids."""
    session, tools, messages = await trial.create(), Api(CHAT).tools(*NAMES), [WHEN]
    for _ in TWICE:
        answer = message_of(await trial.chat(session, renamed(messages, name), tools=tools, max_tokens=200))
        results = [(call["id"], f"result {place}") for place, call in enumerate(answer.get("tool_calls") or ())]
        messages += [answer, *Api(CHAT).results(*results)]
    return list(await trial.records(session))


async def test_ids_renamed_for_calls_and_results_alike_are_the_same_history(stage: Stage) -> None:
    async with simulated_sessions(stage, script=TWICE) as trial:
        for kind, name in RENAMED.items():
            with case(kind):
                records = await renaming(trial, name)
                assert [record["parent"] for record in records] == [None, 0, 1]
                ids = [call["id"] for call in records[0]["response"]["tool_calls"]]
                assert [message["tool_call_id"] for message in records[1]["messages"]] == ids
        session, tools = await trial.create(), Api(CHAT).tools(*NAMES)
        answer = message_of(await trial.chat(session, [WHEN], tools=tools, max_tokens=200))
        one, other = answer["tool_calls"]
        results = Api(CHAT).results(*((each["id"], each["id"]) for each in (one, other)))
        swapped = [{**one, "id": other["id"]}, {**other, "id": one["id"]}]
        for calls in (swapped, [{**each, "id": "x"} for each in (one, other)]):
            await trial.chat(session, [WHEN, {**answer, "tool_calls": calls}, *results], tools=tools)
        assert (await parents(trial, session))[2] is None, "of calls alone it is an edit"


#: That of Mistral-7B-Instruct-v0.3 and its like, as far as roles, calls and results go.
MISTRAL = """{%- set ns = namespace(index=0) -%}
{%- for message in messages -%}
{%- if not (message.role == "tool" or (message.tool_calls is defined and message.tool_calls is not none)) -%}
{%- if (message["role"] == "user") != (ns.index % 2 == 0) -%}
{{- raise_exception("After the optional system message, conversation roles must alternate user/assistant") -}}
{%- endif -%}{%- set ns.index = ns.index + 1 -%}{%- endif -%}{%- endfor -%}
{%- for message in messages -%}
{%- if message["role"] == "user" -%}{{- "[INST] " + message["content"] + "[/INST]" -}}
{%- elif message.tool_calls is defined and message.tool_calls is not none -%}
{{- "[TOOL_CALLS] [" -}}
{%- for tool_call in message.tool_calls -%}
{%- set out = tool_call.function|tojson -%}{{- out[:-1] -}}
{%- if not tool_call.id is defined or tool_call.id|length != 9 -%}
{{- raise_exception("Tool call IDs should be alphanumeric strings with length 9!") -}}
{%- endif -%}
{{- ', "id": "' + tool_call.id + '"}' -}}
{%- if not loop.last -%}{{- ", " -}}{%- else -%}{{- "]<|im_end|>" -}}{%- endif -%}
{%- endfor -%}
{%- elif message["role"] == "assistant" -%}{{- " " + message["content"]|trim + "<|im_end|>" -}}
{%- elif message["role"] == "tool" -%}
{{- '[TOOL_RESULTS] {"content": ' + message.content|string + ", " -}}
{%- if not message.tool_call_id is defined or message.tool_call_id|length != 9 -%}
{{- raise_exception("Tool call IDs should be alphanumeric strings with length 9!") -}}
{%- endif -%}
{{- '"call_id": "' + message.tool_call_id + '"}[/TOOL_RESULTS]' -}}
{%- endif -%}{%- endfor -%}"""


async def test_templates_that_take_ids_of_nine_characters_run_tool_loops(stage: Stage, tmp_path: Path) -> None:
    """Ids as they are, as opencode cuts them for Mistral, as numbers, and none."""
    checkpoint = shutil.copytree(tokenizer_directory("qwen3"), tmp_path / "mistral")
    config = checkpoint / "tokenizer_config.json"
    config.write_bytes(orjson.dumps({**orjson.loads(config.read_bytes()), "chat_template": MISTRAL}))
    tokenizer = DirectoryTokenizer(str(checkpoint))
    async with SimulatedWorker(tokenizer=tokenizer, script=TWICE, weight_version="1") as worker:
        trial = await session_trial(stage, worker, hf_checkpoint=str(checkpoint))
        for name in (lambda place, call_id: call_id, RENAMED["as opencode does for Mistral"]):
            records = await renaming(trial, name)
            assert [record["parent"] for record in records] == [None, 0, 1]
        messages = [message for record in records for message in (*record["messages"], record["response"])]
        other = await trial.create()
        await trial.chat(other, [*renamed(messages, name)[:-1], user("And now?")][:4], tools=Api(CHAT).tools(*NAMES))
        assert len(await trial.records(other)) == 1
    async with SimulatedWorker(tokenizer=tokenizer, script=[ONE_CALL, ONE_CALL, "Done."], weight_version="1") as worker:
        trial = await session_trial(stage, worker, hf_checkpoint=str(checkpoint))
        for api, kind in itertools.product(TALKS, ("integers", "missing", "null")):
            with case(api, kind):
                session = await episode(trial, api, IDS[kind], stream=False)
                assert kind == "integers" or await parents(trial, session) == [None, 0, 1]


# Calls without arguments: SGLang's stream loses them and what is behind them

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


# Halves of surrogate pairs, which JavaScript makes of cut texts: each is read as U+FFFD, the same in every turn

HALF = rb"\ud83d"
#: What a body has in a text, and what is read of it.
SPELLINGS = {
    HALF: "\ufffd",
    rb"\uDE00 b": "\ufffd b",
    rb"\ud83d\ud83d\ude00": "\ufffd\U0001f600",
    rb"\ude00\ud83d": "\ufffd\ufffd",
    rb"\ud83d\\ude00": "\ufffd\\ude00",
    rb"\\ud83d\\\ud83d": "\\ud83d\\\ufffd",
    b"\xed\xa0\xbd": "\ufffd",
    b"a\xffb": "a\ufffdb",
    b"\xf0\x9f\x98": "\ufffd",
}
MARK = "@@"
ASKED_WHEN = [user(f"When? {MARK}")]
SPOILED = DATED.replace("UTC", r"\ud83d")
SPOILED_IDS = [*qwen3().encode(SPOILED), IM_END]
FAILED = script(reply(b"Internal Server Error", status=500, headers=[("Content-Type", "text/plain; charset=utf-8")]))


def with_raw(body: Any, raw: bytes) -> bytes:
    """A body with these bytes in place of each mark."""
    return json.dumps(body).encode().replace(MARK.encode(), raw)


async def turn(trial: SessionTrial, session: str, api: Api, items: list[Any], raw: bytes = HALF, **more: Any) -> Said:
    body = api.body(items, **{"tools": api.tools(*NAMES), **more})
    stream = bool(body["stream"])
    return api.read(await api.post(trial, session, with_raw(body, raw)), stream=stream)


def behind(api: Api, said: Said) -> list[Any]:
    """The question, an answer with a call, and its result; a mark stands in both of the client's texts."""
    return [*ASKED_WHEN, *said.items, *api.results((said.calls[0][0], f"now {MARK}"))]


async def test_a_lone_surrogate_is_read_as_a_replacement(stage: Stage) -> None:
    async with simulated_sessions(stage) as trial:
        for api in PLAIN:
            for raw, read in SPELLINGS.items():
                with case(api, raw):
                    session, text = await trial.create(), f"So: {MARK}."
                    fields: Any = {"metadata": {MARK: MARK}, "tools": []} if api in TALKS else {}
                    body = api.body([user(text)] if api in TALKS else text, 4, **fields)
                    assert (await api.post(trial, session, with_raw(body, raw))).status == 200
                    assert f"So: {read}." in await prompt_of(trial, session)


async def test_turns_with_lone_surrogates_are_one_segment(stage: Stage) -> None:
    steps = [{"calls": [{"name": "get_date", "arguments": {"zone": "UTC"}}]}, "Fine."]
    async with simulated_sessions(stage, script=steps) as trial:
        for api in TALKS:
            session = await trial.create()
            await turn(trial, session, api, behind(api, await turn(trial, session, api, ASKED_WHEN)))
            assert await trial.reasons(session) == [None, None], api
            prompt = await prompt_of(trial, session)
            assert "When? \ufffd" in prompt
            assert "now \ufffd" in prompt
            # In the arguments of a call that no session holds
            session = await trial.create()
            call = api.called(("c1", "get_date", api.arguments(f'{{"zone": "{MARK}"}}')))
            raw = HALF if api.path == MESSAGES else HALF.replace(b"\\", b"\\\\")
            await turn(trial, session, api, [user("When?"), *call, *api.results(("c1", "now"))], raw)
            assert '{"zone": "\ufffd"}' in await prompt_of(trial, session), api


async def test_a_sampled_escape_comes_back_as_the_held_call(stage: Stage) -> None:
    """From an engine whose parser shows arguments as they were sampled; and from SGLang, which answers 500 where its
    parser makes half of a surrogate pair of an escape."""
    function = {"name": "get_date", "arguments": r'{"zone": "\ud83d"}'}
    call = {"id": "c", "type": "function", "function": function}
    message = {"role": "assistant", "content": "", "tool_calls": [call]}
    worker = able(await stage.worker()).always(answering([9], "Now."))
    trial = await a_trial(stage, worker)
    raw = script(chat_reply(SPOILED_IDS, SPOILED, finish_reason="stop"))
    for api in TALKS:
        for fails in (False, True):
            with case(api, fails):
                shown = script(chat_reply(SPOILED_IDS, message=message, finish_reason="tool_calls"))
                worker.next(*((FAILED, script(chat_reply([1], "x")), raw) if fails else (shown,)))
                session, before = await trial.create(), len(worker.requests)
                said = await turn(trial, session, api, ASKED_WHEN)
                assert [name for _, name, _ in said.calls] == ["get_date"]
                (sample,) = await trial.samples(session)
                assert sample["tokens"] == [1, 2, 3, *SPOILED_IDS]
                if fails:
                    assert "\ufffd" in json.dumps(said.items, ensure_ascii=False)
                    again = json.loads(worker.requests[before + 2].body)
                    assert (again["tool_choice"], again["input_ids"]) == ("none", [1, 2, 3])
                await turn(trial, session, api, behind(api, said), stream=True)
                assert await trial.reasons(session) == [None, None]


async def test_a_stream_that_failed_at_an_escape_may_be_repeated(stage: Stage) -> None:
    worker = able(await stage.worker())
    trial = await a_trial(stage, worker)
    for api in TALKS:
        session = await trial.create()
        worker.next(failed_stream("surrogates not allowed"))
        body = api.body(ASKED_WHEN, stream=True, tools=api.tools(*NAMES))
        await api.post(trial, session, body)
        assert await trial.records(session) == []
        worker.next(
            FAILED, script(chat_reply([1], "x")), script(chat_reply(SPOILED_IDS, SPOILED, finish_reason="stop"))
        )
        said = api.read(await api.post(trial, session, body), stream=True)
        assert said.calls[0][1] == "get_date", api
        (sample,) = await trial.samples(session)
        assert sample["tokens"] == [1, 2, 3, *SPOILED_IDS]
    worker.always(FAILED)
    answer = await Api(CHAT).post(trial, await trial.create(), Api(CHAT).body(ASKED_WHEN))
    assert (answer.status, answer.body) == (500, b"Internal Server Error"), "it fails for another reason"


async def test_texts_with_lone_surrogates_are_recorded_and_found(stage: Stage) -> None:
    async with simulated_trial(stage) as trial:
        for raw in SPELLINGS:
            with case(raw):
                asked = {"text": f"one {MARK}", "sampling_params": {"max_new_tokens": 4, "ignore_eos": True}}
                first = await trial.post("/generate", with_raw(asked, raw))
                again = {**asked, "text": asked["text"] + first.json()["text"]}
                assert (await trial.post("/generate", with_raw(again, raw))).status == 200
                (one,), (two,) = [each.generations for each in trial.log[-2:]]
                assert two.input_ids == [*one.input_ids, *one.output_ids]
                found = await trial.post("/retrieve_from_text", with_raw({"text": again["text"]}, raw))
                assert found.json()["tokens"] == two.input_ids
