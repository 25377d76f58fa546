"""When a message that an agent sends back is the one that is held, and when a prompt is made alike."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
from openai.types.chat import ChatCompletionMessage

from middleware_hub.openai_session.sessions.edits import message_edit
from middleware_hub.openai_session.sessions.equality import (
    EQUALITIES,
    MEANING,
    STRICT,
    Likeness,
    compact_text,
    equality,
)
from middleware_hub.openai_session.sessions.messages import Message
from miles_router.errors import ConfigError
from tests.support.sessions import assistant, call, tool, user

ARGUMENTS = '{"b": 1, "a": [2.0]}'
#: As SGLang 0.5.23 gives it.
HELD: Message = {
    "role": "assistant",
    "content": "",
    "reasoning_content": "Let me add.",
    "tool_calls": [{**call("add", ARGUMENTS), "index": 0}],
}
SPOKEN: Message = {"role": "assistant", "content": "Five.", "reasoning_content": None, "tool_calls": None}
TOOLS = [{"type": "function", "function": {"name": name}} for name in ("add", "sub")]


def by_openai(message: Message) -> ChatCompletionMessage:
    return ChatCompletionMessage.model_validate(message)


ECHOES: Mapping[str, Callable[[Message], Message]] = {
    "openai, model_dump": lambda held: by_openai(held).model_dump(),
    "openai, exclude_none": lambda held: by_openai(held).model_dump(exclude_none=True),
    "openai, to_dict": lambda held: by_openai(held).to_dict(),
    "litellm": lambda held: {
        "content": held["content"] or None,
        "role": "assistant",
        "tool_calls": held.get("tool_calls"),
        "function_call": None,
        "provider_specific_fields": {"refusal": None, "reasoning_content": held.get("reasoning_content")},
        "reasoning_content": held.get("reasoning_content"),
        "thinking_blocks": None,
    },
    "openai-agents": lambda held: {
        "role": "assistant",
        "content": held["content"] or None,
        **(
            {"tool_calls": [{k: c[k] for k in ("id", "type", "function")} for c in held["tool_calls"]]}
            if held.get("tool_calls")
            else {}
        ),
    },
    "one text part": lambda held: {**held, "content": [{"type": "text", "text": held["content"]}]},
    "an annotated part": lambda held: {
        **held,
        "content": [{"type": "output_text", "text": held["content"], "annotations": []}],
    },
    "no parts": lambda held: {**held, "content": [] if not held["content"] else held["content"]},
    "reasoning under its other name": lambda held: {
        "reasoning": held.get("reasoning_content"),
        **{name: held[name] for name in held if name != "reasoning_content"},
    },
    "empty reasoning": lambda held: {**held, "reasoning_content": ""},
    "no tool calls": lambda held: {**held, "tool_calls": held.get("tool_calls") or []},
}


@pytest.mark.parametrize("held", [HELD, SPOKEN], ids=["a call", "a text"])
@pytest.mark.parametrize("echo", ECHOES.values(), ids=ECHOES)
@pytest.mark.parametrize("equal", EQUALITIES.values(), ids=EQUALITIES)
def test_an_answer_is_known_again_as_clients_send_it_back(
    equal: Callable[[Message, Message], bool], echo: Callable[[Message], Message], held: Message
) -> None:
    assert equal(held, echo(held))


OTHERS: list[tuple[Message, Mapping[str, Any]]] = [
    (SPOKEN, {"role": "user"}),
    (SPOKEN, {"content": "Six."}),
    (SPOKEN, {"content": None}),
    (SPOKEN, {"content": [{"type": "text", "text": "Five."}, {"type": "text", "text": "Six."}]}),
    (SPOKEN, {"content": [{"type": "refusal", "refusal": "Five."}]}),
    (SPOKEN, {"tool_call_id": "call_1"}),
    (SPOKEN, {"tools": TOOLS}),
    (SPOKEN, {"reasoning_content": "I know."}),
    (SPOKEN, {"reasoning": "I know."}),
    (SPOKEN, {"tool_calls": [call()]}),
    (HELD, {"tool_calls": []}),
    (HELD, {"tool_calls": [call("add", ARGUMENTS, "call_2")]}),
    (HELD, {"tool_calls": [call("sub", ARGUMENTS)]}),
    (HELD, {"tool_calls": [call("add", '{"b": 2, "a": [2.0]}')]}),
    (HELD, {"tool_calls": [call("add", ARGUMENTS), call("add", ARGUMENTS)]}),
    (HELD, {"tool_calls": ["add"]}),
    (HELD, {"tool_calls": [{"id": "call_1", "function": "add"}]}),
]


@pytest.mark.parametrize(("held", "changed"), OTHERS)
@pytest.mark.parametrize("equal", EQUALITIES.values(), ids=EQUALITIES)
def test_a_message_that_reads_otherwise_is_another(
    equal: Callable[[Message, Message], bool], held: Message, changed: Mapping[str, Any]
) -> None:
    assert not equal(held, {**held, **changed})


@pytest.mark.parametrize(("held", "sent"), [("true", "1"), ("[0]", "[false]"), ('{"b": 1}', '{"b":true}')])
@pytest.mark.parametrize("equal", EQUALITIES.values(), ids=EQUALITIES)
def test_a_truth_value_is_no_number(equal: Likeness, held: str, sent: str) -> None:
    one, other = ({**HELD, "tool_calls": [call("add", f'{{"a": {value}}}')]} for value in (held, sent))
    difference = equal.difference(one, other)
    assert difference is not None
    assert difference.field == "tool_calls[0].function.arguments"


def text(*parts: str, **fields: Any) -> list[dict[str, Any]]:
    return [{"type": "text", "text": part, **fields} for part in parts]


THOUGHT = {**SPOKEN, "content": "\n\nFive. Or six.", "reasoning_content": "\nLet me add.\n"}
THINKING = {"type": "thinking", "thinking": "Let me add.", "signature": "abc"}
#: What a client makes of an answer: pairs of what was given, and what comes back.
SPELLINGS: Mapping[str, tuple[Message, Message]] = {
    "trimmed": (THOUGHT, {**THOUGHT, "content": "Five. Or six."}),
    "in parts": (THOUGHT, {**THOUGHT, "content": text("Five. ", "Or six.")}),
    "in lines": (THOUGHT, {**THOUGHT, "content": text("Five.", "Or six.", cache_control={"type": "ephemeral"})}),
    "thinking as a part": (THOUGHT, assistant("", content=[THINKING, *text("Five. Or six.")])),
    "thinking as a hidden part": (
        THOUGHT,
        assistant("", content=[{"type": "redacted_thinking"}, *text("Five. Or six.")]),
    ),
    "thinking in blocks": (THOUGHT, assistant("Five. Or six.", thinking_blocks=[THINKING])),
    "thinking in the text": (THOUGHT, assistant("<think>\nLet me add.\n</think>\n\nFive. Or six.")),
    "thinking taken out of the text": (assistant("<think>Hm.</think>Five."), assistant("Five.", reasoning="Hm.")),
    "thinking left out of the text": (assistant("<think>Hm.</think>Five."), assistant("Five.")),
    "null beside calls": ({**HELD, "content": "\n\n"}, {**HELD, "content": None}),
    "no arguments": (
        {**HELD, "tool_calls": [call("add", "")]},
        {**HELD, "tool_calls": [call("add", "{}")]},
    ),
}


@pytest.mark.parametrize(("held", "sent"), SPELLINGS.values(), ids=SPELLINGS)
def test_an_answer_means_the_same_in_every_spelling(held: Message, sent: Message) -> None:
    assert MEANING(held, sent)
    assert not STRICT(held, sent)


EDITS: Mapping[str, tuple[Message, Message, str]] = {
    "a word": (THOUGHT, {**THOUGHT, "content": text("Five.", "Or seven.")}, "content"),
    "space inside": (assistant("Five. Or six."), assistant("Five.  Or six."), "content"),
    "a lost part": (THOUGHT, {**THOUGHT, "content": text("Five.")}, "content"),
    "another thought": (
        THOUGHT,
        assistant("Five. Or six.", thinking_blocks=[{**THINKING, "thinking": "I see."}]),
        "reasoning_content",
    ),
    "a thought of its own": (SPOKEN, assistant("<think>Hm.</think>Five."), "reasoning_content"),
    "what the user says": (user("a b"), user("a\nb"), "content"),
    "where a user's text begins": (user("a"), user(" a"), "content"),
    "an argument": (
        HELD,
        {**HELD, "tool_calls": [call("add", '{"b": 1, "a": [2.5]}')]},
        "tool_calls[0].function.arguments",
    ),
    "a name": (HELD, {**HELD, "tool_calls": [call("sub", ARGUMENTS)]}, "tool_calls[0].function.name"),
    "an id": (HELD, {**HELD, "tool_calls": [call("add", ARGUMENTS, "x")]}, "tool_calls[0].id"),
    "a call more": (SPOKEN, {**SPOKEN, "tool_calls": [call()]}, "tool_calls[0]"),
    "whose result": (tool("1"), tool("1", "call_2"), "tool_call_id"),
    "an image": (user("a"), {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}, "content"),
    "a reminder more": (user("a <system-reminder>b</system-reminder>"), user("a"), "content"),
    "another reminder": (
        user("a <system-reminder>b</system-reminder>"),
        user("<system-reminder>c</system-reminder> a"),
        "content",
    ),
    "text beside a reminder": (
        user("a <system-reminder>b</system-reminder>"),
        user("<system-reminder>b</system-reminder> x"),
        "content",
    ),
    "a reminder without an end": (user("a <system-reminder>b"), user("<system-reminder>b a"), "content"),
}


@pytest.mark.parametrize(("held", "sent", "field"), EDITS.values(), ids=EDITS)
def test_an_edit_is_one_and_its_field_is_known(held: Message, sent: Message, field: str) -> None:
    found = MEANING.difference(held, sent)
    assert found is not None
    assert found.field == field
    assert not MEANING(held, sent)


def test_a_user_s_text_may_be_cut_into_parts_and_joined_again() -> None:
    whole, parts = user("a\nb c"), {"role": "user", "content": text("a", "b c")}
    others = {"role": "user", "content": text("a\nb", "", "c")}
    for held, sent in (
        (whole, parts),
        (parts, whole),
        (whole, others),
        (parts, {"role": "user", "content": ["a\nb c"]}),
    ):
        assert MEANING(held, sent)
    assert not MEANING(whole, {"role": "user", "content": text("a", "bc")})


def test_a_reminder_may_change_its_place_in_a_message() -> None:
    note = "<system-reminder>\nMind the rules.\n</system-reminder>"
    behind = user(f"Go on.\n{note}")
    assert MEANING(behind, {"role": "user", "content": text(note, "Go on.")})
    assert not STRICT(behind, {"role": "user", "content": text(note, "Go on.")})


ODD: list[Any] = [None, 7, 1.5, True, "x", [], [7], {}, {"type": [1]}, [{"type": [1]}], [{"type": "text", "text": [7]}]]


@pytest.mark.parametrize("equal", EQUALITIES.values(), ids=EQUALITIES)
@pytest.mark.parametrize("field", ["content", "reasoning_content", "thinking_blocks", "tool_calls", "name"])
def test_what_is_no_message_is_compared_all_the_same(equal: Likeness, field: str) -> None:
    for one in ODD:
        for other in ODD:
            held, sent = {**SPOKEN, field: one}, {**SPOKEN, "refusal": 1, field: other}
            assert equal(held, sent) is (equal.difference(held, sent) is None)
            message_edit(0, held, sent)
            compact_text(sent)


@pytest.mark.parametrize(
    ("path", "reason"),
    [
        ("stricter", "must be one of meaning, strict, tool-arguments-as-json or a dotted path, not 'stricter'"),
        ("no_such_module.f", "cannot load 'no_such_module.f'"),
        (f"{__name__}.no_such_function", "cannot load"),
        (f"{__name__}.ARGUMENTS", "is not a function"),
    ],
)
def test_an_equality_that_is_none_stops_the_start(path: str, reason: str) -> None:
    with pytest.raises(ConfigError, match=f"openai_session_middleware.message_equality: .*{reason}"):
        equality(path)
