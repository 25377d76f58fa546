"""Which messages a request has, and when one that an agent sends back is the one that is held."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
from openai.types.chat import ChatCompletionMessage

from middleware_hub.openai_session.sessions.messages import (
    EQUALITIES,
    Message,
    checked,
    equality,
    message_bytes,
    only_text,
    strict,
    tool_arguments_as_json,
)
from miles_router.errors import BadRequest, ConfigError
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


OTHERS: list[Mapping[str, Any]] = [
    {"role": "user"},
    {"content": "Six."},
    {"content": None},
    {"content": [{"type": "text", "text": "Five."}, {"type": "text", "text": "Six."}]},
    {"content": [{"type": "refusal", "refusal": "Five."}]},
    {"name": "bob"},
    {"tool_call_id": "call_1"},
    {"tools": TOOLS},
    {"reasoning_content": "I know."},
    {"reasoning": "I know."},
    {"tool_calls": [call()]},
]


@pytest.mark.parametrize("changed", OTHERS)
@pytest.mark.parametrize("equal", EQUALITIES.values(), ids=EQUALITIES)
def test_a_message_that_reads_otherwise_is_another(
    equal: Callable[[Message, Message], bool], changed: Mapping[str, Any]
) -> None:
    assert not equal(SPOKEN, {**SPOKEN, **changed})


@pytest.mark.parametrize(
    "calls",
    [
        [],
        [call("add", ARGUMENTS, "call_2")],
        [call("sub", ARGUMENTS)],
        [call("add", '{"b": 2, "a": [2.0]}')],
        [call("add", ARGUMENTS), call("add", ARGUMENTS)],
        ["add"],
        [{"id": "call_1", "function": "add"}],
    ],
)
@pytest.mark.parametrize("equal", EQUALITIES.values(), ids=EQUALITIES)
def test_a_changed_call_is_another(equal: Callable[[Message, Message], bool], calls: list[object]) -> None:
    assert not equal(HELD, {**HELD, "tool_calls": calls})


@pytest.mark.parametrize("spelled", ['{"a":[2.0],"b":1}', '{"b": 1, "a": [2]}', {"a": [2.0], "b": 1}])
def test_arguments_written_anew_are_the_same_only_as_json(spelled: object) -> None:
    sent = {**HELD, "tool_calls": [{**call(), "function": {"name": "add", "arguments": spelled}}]}
    assert not strict(HELD, sent)
    assert tool_arguments_as_json(HELD, sent)


def test_arguments_that_are_no_json_are_compared_as_text() -> None:
    held = {**HELD, "tool_calls": [call("add", '{"a": ')]}
    assert tool_arguments_as_json(held, {**held, "refusal": None})
    assert not tool_arguments_as_json(held, {**held, "tool_calls": [call("add", '{"a":')]})
    assert not tool_arguments_as_json(held, {**held, "tool_calls": [call("add", '["not JSON", "{\\"a\\": "]')]})


def test_text_parts_are_their_text_alone() -> None:
    marked = {"type": "text", "text": "b", "cache_control": {"type": "ephemeral"}}
    held = {"role": "user", "content": [{"type": "text", "text": "a"}, marked]}
    sent = {"role": "user", "content": [{**marked, "text": "a"}, {"type": "text", "text": "b"}]}
    assert strict(held, sent)
    assert not strict(held, {"role": "user", "content": "ab"})


def test_a_text_part_without_text_is_an_empty_string() -> None:
    assert strict(user(""), {"role": "user", "content": [{"type": "text", "text": None}]})


def test_parts_and_calls_of_another_form_are_compared_as_they_are() -> None:
    for held, sent in (
        ({"content": ["a", "b"]}, {"content": ["a", "c"]}),
        ({"tool_calls": ["a"]}, {"tool_calls": [3]}),
    ):
        assert strict({"role": "user", **held}, {"role": "user", "name": None, **held})
        assert not strict({"role": "user", **held}, {"role": "user", **sent})


def test_images_are_compared_as_they_are() -> None:
    def seen(url: str) -> Message:
        return {"role": "user", "content": [{"type": "image_url", "image_url": {"url": url}}]}

    assert strict(seen("a"), {**seen("a"), "name": None})
    assert not strict(seen("a"), {**seen("b"), "name": None})


def test_reasoning_is_the_same_under_either_name() -> None:
    assert strict({**SPOKEN, "reasoning": "Hm."}, {**SPOKEN, "reasoning_content": "Hm."})
    assert not strict({**SPOKEN, "reasoning": "Hm."}, {**SPOKEN, "reasoning_content": "Well."})


@pytest.mark.parametrize("name", list(EQUALITIES))
def test_an_equality_is_found_by_its_name(name: str) -> None:
    assert equality(name) is EQUALITIES[name]


def test_an_equality_is_found_at_its_dotted_path() -> None:
    assert equality(f"{__name__}.by_role") is by_role


def by_role(held: Message, sent: Message) -> bool:
    return bool(held["role"] == sent["role"])


@pytest.mark.parametrize(
    ("path", "reason"),
    [
        ("stricter", "must be one of strict, tool-arguments-as-json or a dotted path, not 'stricter'"),
        ("no_such_module.f", "cannot load 'no_such_module.f'"),
        (f"{__name__}.no_such_function", "cannot load"),
        (f"{__name__}.ARGUMENTS", "is no function"),
    ],
)
def test_an_equality_that_is_none_stops_the_start(path: str, reason: str) -> None:
    with pytest.raises(ConfigError, match=f"openai_session_middleware.message_equality: .*{reason}"):
        equality(path)


@pytest.mark.parametrize(
    ("parsed", "reason"),
    [
        ([], "must be a JSON object"),
        ({}, "a list with at least one message"),
        ({"messages": []}, "a list with at least one message"),
        ({"messages": {"role": "user"}}, "a list with at least one message"),
        ({"messages": [user("a"), "b"]}, r"messages\[1\] must be an object with a role"),
        ({"messages": [{"content": "a"}]}, r"messages\[0\] must be an object with a role"),
        ({"messages": [{"role": 1}]}, r"messages\[0\] must be an object with a role"),
    ],
)
def test_a_request_without_messages_is_refused(parsed: object, reason: str) -> None:
    with pytest.raises(BadRequest, match=reason):
        checked(parsed)


def test_messages_are_those_of_the_request_and_no_copies() -> None:
    messages = [user("a"), assistant("b")]
    found = checked({"messages": messages, "model": "m"})
    assert [id(one) for one in found] == [id(one) for one in messages]


def test_parts_that_ids_alone_do_not_carry_are_told_from_text() -> None:
    text = [{"type": "text", "text": "a"}, {"type": "input_text", "text": "b"}, "c"]
    assert only_text([user("a"), {"role": "user", "content": text}, {"role": "assistant"}, tool("1")])
    for part in ({"type": "image_url", "image_url": {"url": "x"}}, {"type": "input_audio"}, {}, 3):
        assert not only_text([user("a"), {"role": "user", "content": [*text, part]}])


def test_the_memory_of_a_message_is_that_of_its_text() -> None:
    assert 1000 <= message_bytes(user("a" * 1000)) - message_bytes(user("")) <= 1100
    assert message_bytes(user("🚀" * 1000)) - message_bytes(user("")) >= 4000
    assert message_bytes(assistant("", tool_calls=[call("f", "x" * 500)])) > 500
