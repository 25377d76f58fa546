"""Parsers of model families: what is certain of a growing text is never taken back, and costs no more than it says."""

from __future__ import annotations

import json
from contextlib import suppress
from typing import Any, cast

import pytest

from middleware_hub.openai_session.sessions.repaired import is_repair
from miles_router.engines.answers import UnreadableAnswer
from miles_router.engines.facts import Facts
from miles_router.engines.openai.chat import tools_by_name
from miles_router.engines.openai.chat_stream import GrowingMessage
from miles_router.engines.openai.rest import missing_arguments, missing_deltas
from miles_router.engines.parsers import FAMILIES as KNOWN
from miles_router.engines.parsers import Parsers, Unparsable
from miles_router.engines.parsers.growing import GrowingText
from miles_router.generation.generation import CannotResume
from miles_router.generation.message import MessageReader
from miles_router.generation.questions import EngineQuestions
from tests.support.written_turns import FAMILIES, TOOLS

BY_NAME = tools_by_name(TOOLS)
TURNS = [(name, text) for name, family in FAMILIES.items() for text in family.turns]


def reader_of(name: str, text: str) -> GrowingText:
    family, names = KNOWN[name], dict[int, str]()
    return GrowingText(
        family.thinking, opened(text), family.calls, BY_NAME, lambda _, place: names.setdefault(place, f"call_{place}")
    )


def opened(text: str) -> bool:
    """Whether the prompt has begun the reasoning in it."""
    return "</think>" in text and "<think>" not in text


@pytest.mark.parametrize(("name", "text"), TURNS)
def test_a_growing_text_takes_nothing_back_and_becomes_the_whole(name: str, text: str) -> None:
    reader, shown = reader_of(name, text), GrowingMessage()
    for end in range(len(text) + 1):
        for delta in missing_deltas(shown.message(), *reader.message(text[:end])):
            shown.add(delta)
    family = KNOWN[name]
    split = family.thinking.split(text, thinking=opened(text))
    content, calls = family.calls.read(split.rest or "", BY_NAME)
    made = shown.message()
    assert (made.get("reasoning_content") or "") == split.reasoning
    found = [(each["function"]["name"], each["function"]["arguments"]) for each in made.get("tool_calls", ())]
    assert found == [tuple(call) for call in calls]
    assert content.strip().startswith(made["content"].strip()), "what is behind a call comes at the end"


@pytest.mark.parametrize(("name", "text"), [turn for turn in TURNS if turn[0] != "deepseekv4"])
def test_a_call_that_is_not_complete_is_no_json(name: str, text: str) -> None:
    calls = KNOWN[name].calls
    begun = 0
    for end in range(len(text)):
        call = calls.unfinished(text[:end], BY_NAME)
        if call is None:
            continue
        begun += 1
        if call.arguments not in text[:end] or not call.arguments:  # its end alone is not there
            with pytest.raises(json.JSONDecodeError):
                json.loads(call.arguments)
    complete = [call for call in calls.read(text, BY_NAME).calls if call.arguments != "{}"]
    assert begun or not complete, "each complete call was one that is not"


@pytest.mark.parametrize("text", FAMILIES["deepseekv4"].turns)
def test_a_call_that_the_engine_shows_as_far_as_it_goes_is_no_json_before_its_end(text: str) -> None:
    calls, mark = KNOWN["deepseekv4"].calls, "｜DSML｜parameter"
    for end in range(len(text)):
        if text.rfind("<" + mark, 0, end) > text.rfind("</" + mark, 0, end):
            arguments = calls.read(text[:end], BY_NAME).calls[-1].arguments
            with pytest.raises(json.JSONDecodeError):
                json.loads(arguments)
    assert all(json.loads(call.arguments) is not None for call in calls.read(text, BY_NAME).calls)


def test_a_schema_that_engines_read_by_rules_of_their_own_is_refused() -> None:
    tools = {"add": {"properties": {"a": {"anyOf": [{"type": "integer"}, {"type": "string"}]}}}}
    text = "<tool_call>\n<function=add>\n<parameter=a>\n1\n</parameter>\n</function>\n</tool_call>"
    with pytest.raises(Unparsable, match="no single type"):
        KNOWN["qwen3.5"].calls.read(text, tools)


@pytest.mark.parametrize(
    ("mode", "facts", "known"),
    [
        ("engine", Facts(tool_call_parser="qwen25", reasoning_parser="qwen3"), (False, False)),
        ("hybrid", Facts(tool_call_parser="qwen25", reasoning_parser="qwen3"), (True, True)),
        ("hybrid", Facts(tool_call_parser="hunyuan", reasoning_parser="hunyuan"), (False, False)),
        ("local", Facts(tool_call_parser="hunyuan"), (True, True)),
    ],
)
def test_the_engine_s_names_come_before_the_family(mode: str, facts: Facts, known: tuple[bool, bool]) -> None:
    parsers = Parsers.from_settings(mode, "kimi" if mode == "local" else None)
    assert (parsers.call_format(facts) is not None, parsers.reasoning_format(facts) is not None) == known


@pytest.mark.parametrize(
    ("shown", "whole", "rest"),
    [
        ('{"a": 1', '{"a": 17, "b": 2}', '7, "b": 2}'),
        ('{"a":1,"b":', '{"a": 1, "b": 2}', " 2}"),
        ('{"a": "x y', '{"a": "x yz"}', 'z"}'),
        ('{"a": "x\\" ', '{"a": "x\\" y"}', 'y"}'),
        ("", "{}", "{}"),
    ],
)
def test_the_rest_of_arguments_is_found_whatever_their_spaces(shown: str, whole: str, rest: str) -> None:
    assert missing_arguments(shown, whole) == rest


@pytest.mark.parametrize(("shown", "whole"), [('{"a": 2', '{"a": 1}'), ('{"a": "x ', '{"a": "xy"}')])
def test_other_arguments_are_refused(shown: str, whole: str) -> None:
    with pytest.raises(UnreadableAnswer, match="streamed arguments differ"):
        missing_arguments(shown, whole)


#: What a model writes that samples the same again and again, by the family: a call's beginning, and what is repeated.
REPEATED = [
    ("glm47", "<tool_call>f", "<arg_key></arg_key><arg_value>"),
    ("deepseek", '<｜DSML｜invoke name="f">', '<｜DSML｜parameter name="a" string="false">'),
    ("qwen35", "<tool_call><function=f>", "<parameter=a>"),
    ("minimax", '<minimax:tool_call><invoke name="f">', '<parameter name="a">'),
]


@pytest.mark.parametrize(("name", "begin", "again"), REPEATED)
def test_endless_repeated_call_is_parsed_in_linear_time(name: str, begin: str, again: str) -> None:
    """Quadratic, it would take minutes, and more than cubic for ever."""
    calls, text = KNOWN[name].calls, begin + again * 40_000
    assert calls.unfinished(text, {"f": {}}) == ("f", "")
    assert not calls.read(calls.begin * 40_000, {"f": {}}).calls
    if calls.end == "</tool_call>":
        calls.read(text + calls.end, {"f": {}})


@pytest.mark.parametrize(
    ("name", "again"),
    [
        *(
            ("gpt-oss", each)
            for each in ("<|", "<|start|>", "<|x <|channel|>", "<|start|>assistant<|channel|>commentary")
        ),
        ("gpt-oss", "<|channel|>analysis<|message|>x<|end|>"),
        ("deepseekv4", '<｜DSML｜parameter name="a" string="true">x</｜DSML｜parameter>'),
    ],
)
def test_marks_that_repeat_themselves_are_read_in_time_that_grows_with_them_alone(name: str, again: str) -> None:
    family, begin = KNOWN[name], '<｜DSML｜tool_calls><｜DSML｜invoke name="f">' * (name == "deepseekv4")
    text = begin + again * 20_000
    for rest in (family.thinking.split(text, thinking=False).rest, text):
        family.calls.read(rest or "", {"f": {}})
    family.thinking.split_certain(text, thinking=False)
    family.calls.unfinished(text, {"f": {}})


@pytest.mark.parametrize(
    ("name", "again"),
    [
        ("deepseekv3", "<｜tool▁sep｜>f\n```json\n"),
        ("deepseekv3", "<｜tool▁call▁begin｜>"),
        ("deepseekv31", "<｜tool▁call▁begin｜>"),
    ],
)
def test_a_call_that_says_its_marks_again_and_again_is_none(name: str, again: str) -> None:
    """Cubic, it would be read for ever."""
    text = f"<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>{again * 20_000}<｜tool▁call▁end｜>"
    assert KNOWN[name].calls.read(text, {"f": {}}) == (text, [])


BEYOND = [f'{{"a": {"[" * 100_000}', f'{{"a": {"1" * 5000}', "{1, 2}", "{[]: 1}"]
WRITTEN = {
    "qwen3": '<tool_call>\n{"name": "f", "arguments": %s}\n</tool_call>',
    "qwen35": "<tool_call><function=f><parameter=a>%s</parameter></function></tool_call>",
    "glm47": "<tool_call>f<arg_key>a</arg_key><arg_value>%s</arg_value></tool_call>",
    "minimax": '<minimax:tool_call><invoke name="f"><parameter name="a">%s</parameter></invoke></minimax:tool_call>',
    "deepseekv31": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>%s<｜tool▁call▁end｜>",
    "gpt-oss": "<|start|>assistant<|channel|>commentary to=f <|constrain|>json<|message|>%s<|call|>",
}


@pytest.mark.parametrize("arguments", BEYOND, ids=["deep", "digits", "a set", "an unhashable key"])
@pytest.mark.parametrize("name", WRITTEN)
async def test_a_call_beyond_what_can_be_read_ends_no_answer_with_another_error(name: str, arguments: str) -> None:
    function = {"name": "f", "parameters": {"properties": {"a": {"type": "array"}}}}
    fields = {"messages": [], "tools": [{"type": "function", "function": function}]}
    reader, facts = MessageReader(Parsers("local", name), fields), Facts(tool_call_parser="any")
    text, nobody = WRITTEN[name] % arguments, cast(EngineQuestions, None)
    for each in (text, text[: -len(KNOWN[name].calls.end)]):
        answer = {"text": each, "meta_info": {"finish_reason": {"type": "length"}}}
        with suppress(CannotResume):
            await reader.read(answer, {"role": "assistant"}, facts, nobody, stream=True)


REPAIRED: list[tuple[str, Any]] = [
    ('{"a": 17, "b": 25', {"a": 17, "b": 25}),
    ('{"a": 17, "b": 2', {"a": 17}),
    ('{"a": 17, "b":', {"a": 17, "b": None}),
    ('{"a": 17, "b": 25}}', {"a": 17, "b": 25}),
    ('{"a": [1, {"b": "x"', {"a": [1, {"b": "x"}]}),
    ('{"path": "/tmp/a", "text": "one\\ntw', {"path": "/tmp/a", "text": "one\ntw"}),
    ('{"text": "one\ntwo"}', {"text": "one\ntwo"}),
    ('{"text": "a\\', {"text": "a"}),
    ("{'a': True, 'b': None}", {"a": True, "b": None}),
    ('{"a": 1.0, "b": 25', {"a": 1, "b": 25}),
    ('{"a": 17, "b": 25', {}),
    ('{"a": 17, "b": 25', {"INVALID_JSON": '{"a": 17, "b": 25'}),
]
EDITS: list[tuple[Any, Any]] = [
    ('{"a": 17, "b": 25', {"a": 17, "b": 26}),
    ('{"a": 17, "b": 25', {"b": 25, "a": 17}),
    ('{"path": "/etc/passwd", "b": 2', {"path": "/etc"}),
    ('{"a": 17, "b": 25}', {}),
    ('{"a": "', "text"),
    ("", {"a": 1}),
    ({"a": 1}, {"a": 2}),
]


@pytest.mark.parametrize(("held", "sent"), REPAIRED)
@pytest.mark.parametrize("as_text", [False, True])
def test_a_repair_is_the_held_call(held: str, sent: Any, as_text: bool) -> None:
    assert is_repair(held, json.dumps(sent) if as_text else sent)


@pytest.mark.parametrize(("held", "sent"), EDITS)
def test_any_other_change_is_an_edit(held: Any, sent: Any) -> None:
    assert not is_repair(held, sent)
    assert not is_repair(held, json.dumps(sent))
