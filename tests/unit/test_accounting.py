"""Sampled texts are accounted for in the messages that parsers make of them."""

from __future__ import annotations

from typing import Any

import pytest

from miles_router.engines.facts import Facts
from miles_router.engines.openai.chat import tools_by_name
from miles_router.engines.parsers import PARSE_ERRORS, Parsers
from miles_router.engines.parsers.accounting import (
    ARGUMENT_ALTERED,
    CALL_IN_TEXT,
    CUT_SHORT,
    INVALID_JSON,
    REASONS,
    TEXT_LEFT_OVER,
    UNKNOWN_TOOL,
    account,
)
from tests.support.bare_calls import BARE, DATED, NAMES, UNKNOWN
from tests.support.good_answers import GOOD_ANSWERS
from tests.support.written_turns import FAMILIES, TOOLS, cases

KNOWN = tools_by_name(TOOLS)
UTC = '{"zone": "UTC"}'
NO_JSON = '<tool_call>\n{"name": "get_date", "arguments": {"zone": }}\n</tool_call>'
BASH = "<tool_call>\n<function=get_date>\n<parameter=zone>\n{}\n</parameter>\n</function>\n</tool_call>"
HARMONY = "<|channel|>analysis<|message|>Why?<|end|><|start|>assistant<|channel|>commentary to=functions.get_date{}"
HARMONY += '<|message|>{{"zone": "UTC"}}'
#: Of turns that are not whole, by family and place.
NOT_WHOLE = {
    ("qwen3", 3): [TEXT_LEFT_OVER, UNKNOWN_TOOL],
    ("kimi", 1): [TEXT_LEFT_OVER],
    ("deepseek", 1): [UNKNOWN_TOOL],
    ("deepseekv31", 1): [TEXT_LEFT_OVER, UNKNOWN_TOOL],
    ("deepseekv3", 1): [TEXT_LEFT_OVER, UNKNOWN_TOOL],
    ("deepseekv4", 2): [TEXT_LEFT_OVER, UNKNOWN_TOOL],
    ("gpt-oss", 2): [UNKNOWN_TOOL],
    ("gpt-oss", 3): [TEXT_LEFT_OVER],
}


def message(content: str = "", *calls: tuple[str, str], reasoning: str | None = None) -> dict[str, Any]:
    functions = [{"function": {"name": name, "arguments": arguments}} for name, arguments in calls]
    return {"content": content, "reasoning_content": reasoning, "tool_calls": functions}


def read(name: str, text: str) -> dict[str, Any]:
    """Read a text with the family's parsers."""
    facts = Facts(tool_call_parser=FAMILIES[name].calls, reasoning_parser=FAMILIES[name].thinking)
    thinking, calls = Parsers("local").reasoning_format(facts), Parsers("local").call_format(facts)
    assert thinking is not None
    assert calls is not None
    split = thinking.split(text, thinking=name == "deepseekv4" and "</think>" in text)
    content, found = calls.read(split.rest or "", KNOWN)
    return message(content, *found, reasoning=split.reasoning)


@pytest.mark.parametrize("name", FAMILIES)
def test_turns_of_every_family_are_whole_unless_their_parser_drops_something(name: str) -> None:
    for place, text in enumerate(FAMILIES[name].turns):
        assert account(text, read(name, text), KNOWN) == NOT_WHOLE.get((name, place), []), text


@pytest.mark.parametrize(
    ("text", "shown", "reasons"),
    [
        (f"So.\n{DATED}", message("So.", ("get_date", UTC)), []),
        (BARE, message("", ("get_time", "")), []),
        ("<think>\nI call <tool_call>.\n</think>\n\nSo.", message("So.", reasoning="I call <tool_call>."), []),
        ("a<tool_call>get_date</tool_call>b", message("ab", ("get_date", "{}")), []),
        (BASH.format(r'"\d" &amp; 2.50'), message("", ("get_date", r'{"zone": "\"\\d\" & 2.5"}')), []),
        (r'[get_date(zone=None, a=True)]', message("", ("get_date", '{"zone": null, "a": true}')), []),
        (DATED.replace("UTC", r"\u4e16\ud83d\ude00 ä"), message("", ("get_date", '{"zone": "世😀 \\u00e4"}')), []),
        (r"[get_date(zone='\x1b[31mred\xe9')]", message("", ("get_date", r'{"zone": "\u001b[31mredé"}')), []),
        (HARMONY.format(" code"), message("", ("get_date", UTC), reasoning="Why?"), []),
        (HARMONY.format(" <|constrain|>get_date"), message("", ("get_date", UTC), reasoning="Why?"), []),
        ("<|channel|>final <|constrain|>Answer<|message|>So.", message("So."), []),
        ("<|channel>thought\nWhy?<channel|>So.", message("So.", reasoning="Why?"), []),
        (f'functools[{{"name": "get_date", "arguments": {UTC}}}]', message("", ("get_date", UTC)), []),
        ("[get_date(zone={'a': None})]", message(), [TEXT_LEFT_OVER]),
        (f"{DATED}Then{DATED}", message("", ("get_date", UTC), ("get_date", UTC)), [TEXT_LEFT_OVER]),
        (f'[TOOL_CALLS] [{{"name": "nothing", "arguments": {UTC}}}]', message(), [UNKNOWN_TOOL]),
        ("<tool_call>\nno json\n</tool_call>", message(), [TEXT_LEFT_OVER]),
        (f"{DATED}\n{DATED}", message("", ("get_date", UTC)), [TEXT_LEFT_OVER]),
        ("<think>Why?</think>So.", message("So."), [TEXT_LEFT_OVER]),
        ("<think>Why?</think>So.", {**message("So."), "reasoning": "Why?"}, []),
        (DATED, message("", ("get_date", "{}")), [ARGUMENT_ALTERED]),
        (DATED, message("", ("get_date", '{"zone": "CET"}')), [ARGUMENT_ALTERED]),
        (DATED, message("", ("get_date", '{"zone": "UTC", "days": 1}')), [ARGUMENT_ALTERED]),
        (BASH.format("x</parameter>\n<parameter=b>\n"), message("", ("get_date", '{"zone": "x"}')), [ARGUMENT_ALTERED]),
        (f"In UTC\n{DATED}", message("", ("get_date", UTC)), [TEXT_LEFT_OVER]),
        (UNKNOWN, message(), [UNKNOWN_TOOL]),
        (UNKNOWN, message("", ("nothing", "{}")), [UNKNOWN_TOOL]),
        (BASH.replace("get_date", "nothing"), message(), [UNKNOWN_TOOL]),
        (NO_JSON, message(), [INVALID_JSON]),
        (NO_JSON, message("", ("get_date", '{"zone": }')), [INVALID_JSON]),
        (DATED.replace(UTC, "[1]"), message("", ("get_date", "[1]")), [INVALID_JSON]),
        (f"So.\n{DATED}", message(f"So.\n{DATED}"), [CALL_IN_TEXT]),
        (f"<think>\n{DATED}", message(reasoning=DATED), [CALL_IN_TEXT]),
        (f"<think>\n{DATED}</think>So.", message("So.", reasoning=DATED), []),
    ],
)  # fmt: skip
def test_what_a_message_lacks_is_told_by_reason(text: str, shown: dict[str, Any], reasons: list[str]) -> None:
    assert account(text, shown, NAMES) == reasons


def test_a_call_that_was_cut_is_no_fault_of_a_parser() -> None:
    for end in range(len(DATED) - 1):
        text = f"So.\n{DATED}\n{DATED[:end]}"
        shown = message("So.", ("get_date", UTC))
        assert account(text, shown, NAMES, cut=True) in ([], [CUT_SHORT]), text
    open_call = ("get_date", '{"zone": "U')
    assert account(text[:-22], message("So.", ("get_date", UTC), open_call), NAMES, cut=True) == [CUT_SHORT]


@pytest.mark.parametrize(
    ("begin", "end"),
    [
        ('<tool_call>\n{"name": "get_date", "arguments": {"zo', 'ne": "UTC"}}\n</tool_call>'),
        ("<tool_call>\n<function=get_date>\n<parameter=zone>\n{}", "\n</parameter>\n</function>\n</tool_call>"),
        ("<tool_call>get_date<arg_key>zone</arg_key><arg_value>U", "TC</arg_value></tool_call>"),
    ],
)
def test_a_call_in_the_text_was_cut_or_never_fired(begin: str, end: str) -> None:
    for before in ("So.\n", f"{DATED}\n"):
        never_fired = [CALL_IN_TEXT] if "get_date" in before else []
        text = f"{before}{begin}"
        assert account(text, message(text), NAMES, cut=True) == [*never_fired, CUT_SHORT]
        assert account(text, message(text), NAMES) == [CALL_IN_TEXT]
        assert account(f"{text}{end}\nSo.", message(f"{text}{end}\nSo."), NAMES, cut=True) == [CALL_IN_TEXT]
    thought = f"I may call\n{begin}{end} or"
    assert account(f"<think>{thought}", message(reasoning=thought), NAMES, cut=True) == [], "reasoning was cut"


def test_a_call_that_is_cut_in_its_name_is_cut_short() -> None:
    text = 'So.[TOOL_CALLS] [{"name": "get_date", "argu'
    assert account(text, message("So."), NAMES, cut=True) == [CUT_SHORT]


def test_a_stop_string_is_not_part_of_a_message() -> None:
    assert account("So.\nObservation: x", message("So."), NAMES, stop="Observation") == []


def test_a_text_without_tools_has_no_calls() -> None:
    assert account(DATED, message(DATED), ()) == []


@pytest.mark.parametrize("answer", GOOD_ANSWERS, ids=lambda answer: answer.parser)
def test_a_dropped_call_is_told_in_the_format_of_every_parser(answer: Any) -> None:
    assert account(answer.text, message(answer.text.partition("<")[0]), ["write_file", "get_date"])


@pytest.mark.parametrize("name", FAMILIES)
def test_odd_texts_are_accounted_for(name: str) -> None:
    """A text without what one of its calls has is never whole."""
    for text in cases(name, 300):
        try:
            shown = read(name, text)
        except PARSE_ERRORS:
            continue
        for cut in (False, True):
            assert {*account(text, shown, KNOWN, cut=cut)} <= {*REASONS}, text
        for place, call in enumerate(shown["tool_calls"]):
            others = [each for each in shown["tool_calls"] if each is not call]
            if len(call["function"]["arguments"]) > len("null"):
                assert account(text, {**shown, "tool_calls": others}, KNOWN), (text, place)
