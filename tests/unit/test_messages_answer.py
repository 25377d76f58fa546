"""Answers in Anthropic's Messages API: whole, and as events that the official types take."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pytest
from anthropic.types import Message, RawMessageStreamEvent
from pydantic import TypeAdapter

from middleware_hub.openai_session.errors import AnswerCut
from middleware_hub.openai_session.faces.messages import errors
from middleware_hub.openai_session.faces.messages.answer import AnswerEnd
from middleware_hub.openai_session.faces.messages.echo import input_of, signature
from middleware_hub.openai_session.faces.messages.models import in_anthropic_format
from middleware_hub.openai_session.faces.messages.stream import MessagesWriter
from miles_router.engines.events import LAST_EVENT, Event, write_event
from miles_router.errors import BadRequest, InternalError, NotFound, RouterError, Unauthorized, UpstreamTimeout
from tests.support.sessions import call

EVENTS: TypeAdapter[Any] = TypeAdapter(RawMessageStreamEvent)
USAGE = {"prompt_tokens": 30, "completion_tokens": 5}


def writer(*, prompt_tokens: int | None = 30, most: int = 5, omits_thinking: bool = False) -> MessagesWriter:
    return MessagesWriter(AnswerEnd(["#"], most, prompt_tokens), omits_thinking=omits_thinking)


def chunk(delta: Any = None, finish: str | None = None, *, matched: Any = None, **fields: Any) -> dict[str, Any]:
    choice = {"index": 0, "delta": delta or {}, "finish_reason": finish, "matched_stop": matched}
    return {"id": "r1", "model": "m", "choices": [choice], **fields}


def words(text: str) -> dict[str, Any]:
    return chunk({"content": text})


def thought(text: str) -> dict[str, Any]:
    return chunk({"reasoning_content": text})


def calling(arguments: str, name: str | None = None, index: int = 0) -> dict[str, Any]:
    function = {"name": name, "arguments": arguments}
    call_id = f"c{index}" if name else None
    return chunk({"tool_calls": [{"index": index, "id": call_id, "type": "function", "function": function}]})


def events(raw: bytes) -> list[Any]:
    """The events, each of which the official types take."""
    read = [Event.read(each + b"\n\n") for each in raw.split(b"\n\n")[:-1]]
    for event in read:
        assert event.parse()["type"].encode() == event.name
        if event.name not in (b"ping", b"error"):
            EVENTS.validate_json(event.data, strict=True)
    return [event.parse() for event in read]


def stream(*chunks: dict[str, Any], made: MessagesWriter | None = None) -> list[Any]:
    """The events of a whole stream."""
    made = made or writer()
    usage = {"id": "r1", "model": "m", "choices": [], "usage": USAGE}
    pieces = [made.write_chunk(each, b"") for each in (chunk({"role": "assistant", "content": ""}), *chunks, usage)]
    return events(b"".join([*pieces, made.write_other(Event.read(LAST_EVENT))]))


def told(found: Sequence[Any]) -> list[tuple[Any, ...]]:
    """Blocks: type, and what was put together; a block that did not start or stop in order fails."""
    blocks: list[list[Any]] = []
    growing = False
    for event in found:
        if event["type"] == "content_block_start":
            assert not growing
            assert event["index"] == len(blocks)
            growing = True
            block = event["content_block"]
            blocks.append([block["type"], "", block.get("name"), None])
        elif event["type"] == "content_block_delta":
            assert growing
            assert event["index"] == len(blocks) - 1
            delta = event["delta"]
            if delta["type"] == "signature_delta":
                blocks[-1][3] = delta["signature"]
            else:
                blocks[-1][1] += next(value for name, value in delta.items() if name != "type")
        elif event["type"] == "content_block_stop":
            assert growing
            growing = False
    assert not growing
    return [tuple(value for value in block if value is not None) for block in blocks]


STOP = chunk(finish="stop", matched=151645)
CALLED = chunk(finish="tool_calls")


# Streams


def test_a_stream_begins_with_its_message_and_ends_with_reason_and_usage() -> None:
    found = stream(words("Hel"), words("lo"), STOP)
    assert [event["type"] for event in found] == [
        *("message_start", "ping", "content_block_start", "content_block_delta", "content_block_delta"),
        *("content_block_stop", "message_delta", "message_stop"),
    ]
    begun = found[0]["message"]
    assert (begun["id"], begun["content"], begun["usage"]["input_tokens"]) == ("msg_r1", [], 30)
    assert found[-2]["delta"] == {"stop_reason": "end_turn", "stop_sequence": None}
    assert found[-2]["usage"] == {"input_tokens": 30, "output_tokens": 5}


def test_events_come_with_the_chunk_that_makes_them() -> None:
    made = writer()
    assert [event["type"] for event in events(made.write_chunk(chunk({"role": "assistant"}), b""))] == [
        "message_start",
        "ping",
    ]
    assert [event["type"] for event in events(made.write_chunk(words("H"), b""))] == [
        "content_block_start",
        "content_block_delta",
    ]
    assert [event["type"] for event in events(made.write_chunk(words("i"), b""))] == ["content_block_delta"]


def test_blocks_come_in_the_order_in_which_they_were_sampled() -> None:
    two = (calling("", "add"), calling('{"a"'), calling(": 1}"), calling('{"b": {}', "sub", 1), calling("}", index=1))
    found = stream(thought("H"), thought("m"), words("\n\nOk"), *two, words("Then"), CALLED)
    assert told(found) == [
        ("thinking", "Hm", signature("Hm")),
        ("text", "\n\nOk"),
        ("tool_use", '{"a": 1}', "add"),
        ("tool_use", '{"b": {}}', "sub"),
        ("text", "Then"),
    ]
    assert found[-2]["delta"]["stop_reason"] == "tool_use"


def test_reasoning_that_is_omitted_leaves_its_signature() -> None:
    found = stream(thought("H"), thought("m"), words("Ok"), STOP, made=writer(omits_thinking=True))
    assert told(found) == [("thinking", "", signature("Hm")), ("text", "Ok")]


def test_white_space_alone_is_no_block() -> None:
    assert told(stream(thought("Hm"), words("\n"), words("\n"), calling("{}", "go"), words("\n"), CALLED)) == [
        ("thinking", "Hm", signature("Hm")),
        ("tool_use", "{}", "go"),
    ]
    assert told(stream(words("\n"), words(" a"), words("\n"), STOP)) == [("text", "\n a\n")]


def test_arguments_come_when_they_are_whole_and_empty_deltas_before() -> None:
    made = writer(most=9)
    fragments = ['{"a": {"b": 1}', ', "c": "', "long text } with } braces", '" ', "}", " "]
    shown = []
    for fragment in [calling("", "go"), *map(calling, fragments), CALLED]:
        found = events(made.write_chunk(fragment, b""))
        shown.append([each["delta"]["partial_json"] for each in found if each["type"] == "content_block_delta"])
    assert shown == [[], *[[""]] * len(fragments), ["".join(fragments)]]


@pytest.mark.parametrize("arguments", ["", "{}", "null", "[1]", '"a"', '{"a": tru}', '{"a": 1', '{"a": 1}', "x", " "])
def test_streams_and_whole_answers_show_the_same_input(arguments: str) -> None:
    (*_, block) = told(stream(calling(arguments[:3], "go"), calling(arguments[3:]), CALLED))
    assert json.loads(block[1] or "{}") == input_of(arguments)


def test_a_call_without_arguments_is_a_block() -> None:
    assert told(stream(calling("", "go"), CALLED)) == [("tool_use", "", "go")]


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
    *before, last = told(stream(words("Ok"), *fragments, chunk(finish=finish)))
    assert before == [("text", "Ok")]
    with pytest.raises(json.JSONDecodeError):
        json.loads(last[1])


def test_a_call_that_was_cut_before_its_arguments_is_not_shown() -> None:
    assert told(stream(words("Ok"), calling("", "add"), chunk(finish="length"))) == [("text", "Ok")]


def test_calls_before_the_one_that_was_cut_are_whole() -> None:
    found = stream(calling('{"a": 1}', "add"), calling('{"a": 2}', "add", 1), chunk(finish="length"))
    assert told(found) == [("tool_use", '{"a": 1}', "add"), ("tool_use", '{"a": 2', "add")]
    assert found[-2]["delta"]["stop_reason"] == "max_tokens"


@pytest.mark.parametrize(
    ("finish", "matched", "most", "expected"),
    [
        ("stop", 151645, 5, ("end_turn", None)),
        ("stop", "#", 5, ("stop_sequence", "#")),
        ("stop", "engine's", 5, ("end_turn", None)),
        ("length", None, 5, ("max_tokens", None)),
        ("length", None, 6, ("model_context_window_exceeded", None)),
        ("content_filter", None, 5, ("refusal", None)),
    ],
)
def test_why_an_answer_ended(finish: str, matched: Any, most: int, expected: Any) -> None:
    streamed = stream(words("a"), chunk(finish=finish, matched=matched), made=writer(most=most))[-2]["delta"]
    choice = {"message": {"content": "a"}, "finish_reason": finish, "matched_stop": matched}
    whole: Any = writer(most=most).write_answer({"id": "r", "model": "m", "choices": [choice], "usage": USAGE})
    assert (streamed["stop_reason"], streamed["stop_sequence"]) == expected
    assert (whole["stop_reason"], whole["stop_sequence"]) == expected


def test_an_answer_that_was_cut_off_is_an_error() -> None:
    *_, before, last = stream(words("a"), chunk(finish="abort"))
    assert (before["type"], last["type"], last["error"]["type"]) == ("content_block_stop", "error", "overloaded_error")
    choice = {"message": {"content": "a"}, "finish_reason": "abort"}
    with pytest.raises(AnswerCut):
        writer().write_answer({"id": "r", "model": "m", "choices": [choice], "usage": USAGE})


def test_a_stream_without_a_finish_reason_is_an_error() -> None:
    assert stream(words("a"))[-1]["type"] == "error"


def test_nothing_comes_behind_an_error() -> None:
    made = writer()
    made.write_chunk(words("a"), b"")
    told_of = write_event({"error": {"message": "Out of memory", "code": 500}})
    (failed,) = events(made.write_other(Event.read(told_of)))
    assert failed == {"type": "error", "error": {"type": "api_error", "message": "Out of memory"}}
    assert made.write_other(Event.read(told_of)) + made.write_other(Event.read(LAST_EVENT)) == b""


def test_what_no_event_is_keeps_the_connection_alive_or_is_left_out() -> None:
    made = writer()
    assert made.write_other(Event.read(b": ping\n\n")) == b": ping\n\n"
    assert made.write_other(Event.read(b"event: odd\ndata: no json\n\n")) == b""


def test_a_prompt_of_unknown_length_waits_for_the_first_usage() -> None:
    made = writer(prompt_tokens=None)
    assert made.write_chunk(chunk({"role": "assistant", "content": ""}), b"") == b""
    begun, *_ = events(made.write_chunk(chunk({"content": "a"}, usage=USAGE), b""))
    assert begun["message"]["usage"]["input_tokens"] == 30


# Whole


def test_a_whole_answer_has_its_blocks_and_usage() -> None:
    said = {
        "content": "Ok",
        "reasoning_content": "Hm",
        "tool_calls": [call("add", '{"a": 1}'), call("go", "", "c2"), call("go", "[1]", "c3")],
    }
    choice = {"message": said, "finish_reason": "tool_calls"}
    answer = {"id": "r", "model": "m", "choices": [choice], "usage": USAGE}
    extra = {"sglext": {"cached_tokens_details": {"device": 20, "host": 4}}}
    found: Any = writer().write_answer({**answer, **extra})
    Message.model_validate(found, strict=True)
    assert found["content"] == [
        {"type": "thinking", "thinking": "Hm", "signature": signature("Hm")},
        {"type": "text", "text": "Ok"},
        {"type": "tool_use", "id": "call_1", "name": "add", "input": {"a": 1}},
        {"type": "tool_use", "id": "c2", "name": "go", "input": {}},
        {"type": "tool_use", "id": "c3", "name": "go", "input": {"INVALID_JSON": "[1]"}},
    ]
    assert found["stop_reason"] == "tool_use"
    assert found["usage"] == {
        "input_tokens": 6,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": 24,
        "output_tokens": 5,
    }


def test_cached_tokens_are_told_as_the_engine_tells_them() -> None:
    usage = {**USAGE, "prompt_tokens_details": {"cached_tokens": 40}}
    choice = {"message": {"content": "\n"}, "finish_reason": "stop"}
    found: Any = writer().write_answer({"id": "r", "model": "m", "choices": [choice], "usage": usage})
    assert (found["usage"]["input_tokens"], found["usage"]["cache_read_input_tokens"]) == (0, 30)
    assert found["content"] == []


# Errors


@pytest.mark.parametrize(
    ("failure", "kind"),
    [
        (BadRequest("full"), "invalid_request_error"),
        (Unauthorized("no"), "authentication_error"),
        (NotFound("no"), "not_found_error"),
        (AnswerCut("cut"), "overloaded_error"),
        (UpstreamTimeout("late"), "timeout_error"),
        (InternalError("bug"), "api_error"),
    ],
)
def test_an_error_of_the_router_s_has_the_api_s_words(failure: RouterError, kind: str) -> None:
    assert errors.router_error(failure, "req-1") == {
        "type": "error",
        "error": {"type": kind, "message": str(failure), "details": {"error_code": failure.type}},
        "request_id": "req-1",
    }


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


def test_a_context_window_that_is_too_small_is_told_in_the_words_that_harnesses_know() -> None:
    long = "The input (300 tokens) is longer than the model's context length (256 tokens)."
    many = (
        "Requested token count exceeds the model's maximum context length of 256 tokens. You requested a total of 300 "
        "tokens: 200 tokens from the input messages and 100 tokens for the completion. Please reduce it."
    )
    found = [
        errors.engine_error({"message": message, "code": 400}, 400)["error"]["message"] for message in (long, many)
    ]
    assert found[0] == "prompt is too long: 300 tokens > 256 maximum"
    assert found[1].startswith("input length and `max_tokens` exceed context limit: 200 + 100 > 256, ")


# Models


def test_models_are_listed_in_this_api_s_form() -> None:
    card = {"id": "m", "object": "model", "created": 60, "owned_by": "x", "max_model_len": 512}
    model: Any = in_anthropic_format(card)
    assert (model["type"], model["id"], model["created_at"]) == ("model", "m", "1970-01-01T00:01:00Z")
    assert in_anthropic_format({"object": "list", "data": [card]}) == {
        "data": [model],
        "has_more": False,
        "first_id": "m",
        "last_id": "m",
    }
    assert in_anthropic_format({"data": []}) == {"data": [], "has_more": False, "first_id": None, "last_id": None}
