"""Anthropic's Messages API: requests as chat requests, and answers as events that the official types take."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pytest
from anthropic.types import RawMessageStreamEvent
from pydantic import TypeAdapter

from middleware_hub.openai_session.agent_apis.messages import errors
from middleware_hub.openai_session.agent_apis.messages.answer import AnswerEnd
from middleware_hub.openai_session.agent_apis.messages.echo import Echo, input_of, signature
from middleware_hub.openai_session.agent_apis.messages.request import MessagesRequest, read
from middleware_hub.openai_session.agent_apis.messages.stream import MessagesWriter
from miles_router.engines.events import LAST_EVENT, Event
from miles_router.errors import BadRequest
from tests.support.sessions import Scene, assistant, call, user

EVENTS: TypeAdapter[Any] = TypeAdapter(RawMessageStreamEvent)
USAGE = {"prompt_tokens": 30, "completion_tokens": 5}


def writer() -> MessagesWriter:
    return MessagesWriter(AnswerEnd(["#"], 5, 30), omits_thinking=False)


def chunk(delta: Any = None, finish: str | None = None, **fields: Any) -> dict[str, Any]:
    choice = {"index": 0, "delta": delta or {}, "finish_reason": finish, "matched_stop": None}
    return {"id": "r1", "model": "m", "choices": [choice], **fields}


def words(text: str) -> dict[str, Any]:
    return chunk({"content": text})


def calling(arguments: str, name: str | None = None) -> dict[str, Any]:
    function = {"name": name, "arguments": arguments}
    call_id = "c0" if name else None
    return chunk({"tool_calls": [{"index": 0, "id": call_id, "type": "function", "function": function}]})


def events(raw: bytes) -> list[Any]:
    """The events, each of which the official types take."""
    read = [Event.read(each + b"\n\n") for each in raw.split(b"\n\n")[:-1]]
    for event in read:
        assert event.parse()["type"].encode() == event.name
        if event.name not in (b"ping", b"error"):
            EVENTS.validate_json(event.data, strict=True)
    return [event.parse() for event in read]


def stream(*chunks: dict[str, Any]) -> list[Any]:
    made = writer()
    usage = {"id": "r1", "model": "m", "choices": [], "usage": USAGE}
    pieces = [made.write_chunk(each, b"") for each in (chunk({"role": "assistant", "content": ""}), *chunks, usage)]
    return events(b"".join([*pieces, made.write_other(Event.read(LAST_EVENT))]))


def told(*chunks: dict[str, Any]) -> tuple[str, str]:
    """The text of a stream, and the JSON of its call's input."""
    deltas = [event["delta"] for event in stream(*chunks) if event["type"] == "content_block_delta"]
    return "".join(each.get("text", "") for each in deltas), "".join(each.get("partial_json", "") for each in deltas)


CALLED = chunk(finish="tool_calls")


@pytest.mark.parametrize("arguments", ["", "{}", "null", "[1]", '"a"', '{"a": tru}', '{"a": 1', '{"a": 1}', "x", " "])
def test_streams_and_whole_answers_show_the_same_input(arguments: str) -> None:
    _, given = told(calling(arguments[:3], "go"), calling(arguments[3:]), CALLED)
    assert json.loads(given or "{}") == input_of(arguments)


@pytest.mark.parametrize("finish", ["length", "abort"])
@pytest.mark.parametrize(
    "fragments",
    [
        [calling('{"a": ', "add"), calling('{"b": 1'), calling("}}")],
        [calling("{}", "add")],
        [calling('{"a": 1}', "add")],
        [calling('{"a": "x', "add"), calling('"}')],
    ],
)
def test_a_call_that_was_cut_never_looks_complete(finish: str, fragments: Sequence[Any]) -> None:
    text, given = told(words("Ok"), *fragments, chunk(finish=finish))
    assert text == "Ok"
    with pytest.raises(json.JSONDecodeError):
        json.loads(given)


def test_what_no_event_is_keeps_the_connection_alive_or_is_left_out() -> None:
    made = writer()
    assert made.write_other(Event.read(b": ping\n\n")) == b": ping\n\n"
    assert made.write_other(Event.read(b"event: odd\ndata: no json\n\n")) == b""


@pytest.mark.parametrize(
    ("body", "status", "kind", "message"),
    [
        (b'{"object":"error","message":"bad","code":400}', 400, "invalid_request_error", "bad"),
        (b'{"error":{"message":"no","code":404}}', 404, "not_found_error", "no"),
        (b'{"detail":[{"msg":"Field required"}]}', 422, "invalid_request_error", "[{'msg': 'Field required'}]"),
        (b"<html>bad gateway", 502, "api_error", "<html>bad gateway"),
        (b"", 503, "overloaded_error", "no reason was given"),
        (b"[]", 429, "rate_limit_error", "[]"),
    ],
)
def test_an_error_of_the_engine_s_has_the_api_s_words(body: bytes, status: int, kind: str, message: str) -> None:
    found = json.loads(errors.refusal_body(body, status))
    assert found == {"type": "error", "error": {"type": kind, "message": message}}


SCHEMA = {
    "type": "object",
    "properties": {
        "path": {"type": "string"},
        "all": {"type": "boolean", "default": False},
        "n": {"type": "integer"},
        "more": {"type": "array", "items": {"type": "object", "properties": {"n": {"default": 1}}}},
    },
    "required": ["path"],
}
EDIT: dict[str, Any] = {"name": "edit", "description": "Edits.", "input_schema": SCHEMA}
FETCH: dict[str, Any] = {"name": "fetch", "input_schema": {"type": "object"}, "defer_loading": True}
EMPTY = {"role": "system", "content": ""}
HI = {"role": "user", "content": "Hi"}


def asked(*messages: Any, echo: Echo | None = None, system_anywhere: bool = True, **fields: Any) -> MessagesRequest:
    request = {"model": "m", "max_tokens": 9, "messages": list(messages) or [HI], **fields}
    return read(request, echo or Echo(), system_anywhere=system_anywhere)


def said(*messages: Any, **options: Any) -> list[Any]:
    return list(asked(*messages, **options).fields["messages"])


def blocks(role: str, *content: Any) -> dict[str, Any]:
    return {"role": role, "content": [text(each) if isinstance(each, str) else each for each in content]}


def text(words: str, **fields: Any) -> dict[str, Any]:
    return {"type": "text", "text": words, **fields}


def use(name: str = "edit", call_id: str = "c1", **given: Any) -> dict[str, Any]:
    return {"type": "tool_use", "id": call_id, "name": name, "input": given}


def result(call_id: str, content: Any = "ok", **fields: Any) -> dict[str, Any]:
    return {"type": "tool_result", "tool_use_id": call_id, "content": content, **fields}


def refusal(*messages: Any, **fields: Any) -> str:
    with pytest.raises(BadRequest) as refused:
        asked(*messages, **fields)
    return str(refused.value)


def test_tools_that_come_and_go_on_the_way_are_told_where_they_do() -> None:
    by_value = {"type": "tool_definition", "definition": {"name": "late", "input_schema": {"type": "object"}}}
    changes = [
        {"type": "tool_addition", "tool": {"type": "tool_reference", "name": "fetch"}},
        {"type": "tool_addition", "tool": by_value},
        {"type": "tool_removal", "tool": {"type": "tool_reference", "name": "edit"}},
    ]
    found = asked(HI, {"role": "system", "content": changes}, tools=[EDIT, FETCH])
    assert [tool["function"]["name"] for tool in found.fields["tools"]] == ["edit", "fetch", "late"]
    words = found.fields["messages"][-1]["content"].split("\n")
    assert words[:2] == ["The tool edit is not available any more.", "<functions>"]
    assert [each.count('"name":"') for each in words] == [0, 0, 1, 1, 0]
    assert len(found.contexts(found.fields)) == 3, "rendered with none, the first, or both of those that were added"


def recorded(*calls: Any, **fields: Any) -> Echo:
    scene = Scene()
    scene.turn([user("Hi")], assistant("", tool_calls=list(calls), **fields))
    return Echo.of(scene.session)


@pytest.mark.parametrize(
    ("sampled", "given"),
    [
        ('{"path":  "a"}', {"path": "a"}),
        ('{"path": "a"}', {"all": False, "path": "a"}),
        ('{"path": "a", "all": false}', {"path": "a"}),
        ('{"path": "a", "n": "5", "all": "true"}', {"path": "a", "n": 5, "all": True}),
        ('{"path": "a", "more": [{"text": "b"}]}', {"path": "a", "more": [{"text": "b", "n": 1}], "all": False}),
        ('{"path": "one  \\n\\ttwo \\n\\n"}', {"path": "one\n\ttwo\n\n"}),
        ('{"command": "cd /work/a && ls"}', {"command": "ls"}),
        ('{"command": "find . -exec rm {} \\\\\\\\;"}', {"command": "find . -exec rm {} \\;"}),
    ],
)
def test_a_call_that_says_the_same_is_the_one_that_was_sampled(sampled: str, given: Any) -> None:
    held = call("edit", sampled, "c1")
    (message,) = said(HI, blocks("assistant", use(**given)), echo=recorded(held), tools=[EDIT])[1:]
    assert message["tool_calls"] == [held]


@pytest.mark.parametrize(("held", "sent"), [('{"n": 1}', {"n": True}), ('{"n": [0]}', {"n": [False]})])
def test_true_is_not_one(held: str, sent: Any) -> None:
    echo = recorded(call("edit", held, "c1"))
    assert echo.match_call("c1", "edit", sent, None)["function"]["arguments"] != held
    assert recorded(call("edit", '{"n": 1.0}', "c1")).match_call("c1", "edit", {"n": 1}, None)["function"]["arguments"]


def test_reasoning_comes_back_as_text_or_by_its_signature() -> None:
    echo = recorded(reasoning_content="Hm.")

    def reasoning(**block: Any) -> Any:
        answer = blocks("assistant", {"type": "thinking", **block}, "ok")
        return said(HI, answer, HI, echo=echo)[1].get("reasoning_content")

    assert reasoning(thinking="Hm.", signature=signature("Hm.")) == "Hm."
    assert reasoning(thinking="", signature=signature("Hm.")) == "Hm."
    assert reasoning(thinking="Edited.", signature=signature("Hm.")) == "Edited."
    assert reasoning(thinking="Somebody's.", signature="EqQB...") == "Somebody's."
    assert reasoning(thinking="", signature="EqQB...") is None
    assert said(HI, blocks("assistant", {"type": "redacted_thinking", "data": "x"}, "ok"), HI)[1] == assistant("ok")


@pytest.mark.parametrize(
    ("thinking", "expected"),
    [
        ({"type": "enabled", "budget_tokens": 2000}, {"thinking": True, "enable_thinking": True}),
        ({"type": "disabled"}, {"thinking": False, "enable_thinking": False}),
        ({"type": "adaptive", "display": "omitted"}, None),
        (None, None),
    ],
)
def test_thinking_is_the_templates_setting(thinking: Any, expected: Any) -> None:
    assert asked(thinking=thinking).fields.get("chat_template_kwargs") == expected


@pytest.mark.parametrize(
    ("fields", "where"),
    [
        ({"max_tokens": None}, "max_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": True}, "max_tokens"),
        ({"model": None}, "model"),
        ({"system": [{"type": "image"}]}, "system.0"),
        ({"system": 7}, "system"),
        ({"stop_sequences": "#"}, "stop_sequences"),
        ({"stream": "yes"}, "stream"),
        ({"stream": 1}, "stream"),
        ({"thinking": {"type": "always"}}, "thinking.type"),
        ({"thinking": "enabled"}, "thinking.type"),
        ({"output_config": {"mood": "good"}}, "output_config.mood"),
        ({"output_config": {"format": {"type": "xml"}}}, "output_config.format"),
        ({"tools": {}}, "tools"),
        ({"tools": [7]}, "tools.0"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools.0"),
        ({"tools": [{"type": "bash_20250124", "name": "bash"}]}, "tools.0"),
        ({"tools": [EDIT, {**EDIT, "description": "Others."}]}, "tools.1"),
        ({"tools": [{"name": "a"}]}, "tools.0"),
        ({"tools": [{**EDIT, "description": 7}]}, "tools.0.description"),
        ({"tools": [{**EDIT, "mood": 7}]}, "tools.0.mood"),
        ({"tools": [{**EDIT, "allowed_callers": ["code_execution_20250825"]}]}, "tools.0.allowed_callers"),
        ({"tool_choice": {"type": "any"}}, "tool_choice"),
        ({"tool_choice": {"type": "tool", "name": "look"}, "tools": [EDIT]}, "tool_choice"),
        ({"tool_choice": {"type": "maybe"}, "tools": [EDIT]}, "tool_choice.type"),
        ({"tool_choice": "any", "tools": [EDIT]}, "tool_choice"),
        ({"mcp_servers": [{"url": "x"}]}, "mcp_servers"),
        ({"container": "c"}, "container"),
        ({"surprise": 1}, "surprise"),
    ],
    ids=repr,
)
def test_what_cannot_be_traced_is_refused_by_name(fields: Any, where: str) -> None:
    assert refusal(**fields).split(": ")[0] == where


@pytest.mark.parametrize(
    ("messages", "where"),
    [
        ([7], "messages.0"),
        ([{"role": "tool", "content": "x"}], "messages.0.role"),
        ([{"role": "user"}], "messages.0.content"),
        ([{"role": "user", "content": [7]}], "messages.0.content.0"),
        ([{"role": "user", "content": [{"type": "text"}]}], "messages.0.content.0.text"),
        ([blocks("user", {"type": "image", "source": {}})], "messages.0.content.0"),
        ([blocks("user", {"type": "document", "source": {}})], "messages.0.content.0"),
        ([blocks("user", {"type": ["text"]})], "messages.0.content.0"),
        ([HI, blocks("assistant", {"type": "server_tool_use", "id": "s"})], "messages.1.content.0"),
        ([HI, blocks("assistant", {"type": "thinking"})], "messages.1.content.0.thinking"),
        ([HI, blocks("assistant", {"type": "tool_use", "id": 1})], "messages.1.content.0"),
        ([blocks("user", {"type": "tool_result"})], "messages.0.content.0.tool_use_id"),
        ([blocks("user", result("c1", [{"type": "image"}]))], "messages.0.content.0.content.0"),
        ([HI, {"role": "system", "content": [{"type": "tool_addition"}]}], "messages.1.content.0.tool"),
        ([HI, {"role": "system", "content": [{"type": "tool_removal"}]}], "messages.1.content.0"),
        ([HI, {"role": "system", "content": [{"type": "image"}]}], "messages.1.content.0"),
    ],
    ids=repr,
)
def test_a_message_that_cannot_be_traced_is_refused_by_its_place(messages: Sequence[Any], where: str) -> None:
    assert refusal(*messages).split(": ")[0] == where


@pytest.mark.parametrize(
    "request_", [None, [], {"messages": []}, {"messages": "Hi"}, {"messages": {}}, {"messages": [EMPTY]}]
)
def test_what_is_no_request_is_refused(request_: Any) -> None:
    with pytest.raises(BadRequest):
        read(request_, Echo(), system_anywhere=True)
