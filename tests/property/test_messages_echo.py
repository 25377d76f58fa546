"""Whatever an engine answers, and however a client of this API cuts it and writes it anew: what comes back is the
answer that is held. What is changed is not."""

from __future__ import annotations

import json
from collections.abc import Mapping
from decimal import Decimal
from typing import Any

import orjson
from anthropic.lib.streaming._messages import accumulate_event
from anthropic.types import RawMessageStreamEvent
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import TypeAdapter

from middleware_hub.openai_session.agent_apis.messages.answer import AnswerEnd
from middleware_hub.openai_session.agent_apis.messages.echo import Echo, input_of, same_input
from middleware_hub.openai_session.agent_apis.messages.request import read
from middleware_hub.openai_session.agent_apis.messages.stream import MessagesWriter
from middleware_hub.openai_session.sessions.equality import Likeness
from middleware_hub.openai_session.sessions.messages import Message
from miles_router.engines.events import LAST_EVENT, Event
from miles_router.engines.openai.chat_stream import GrowingMessage
from tests.support.sessions import Scene, user
from tests.support.tiers import examples

EVENTS: TypeAdapter[Any] = TypeAdapter(RawMessageStreamEvent)
EQUAL = Likeness(trims=True)
USAGE = {"prompt_tokens": 3, "completion_tokens": 2}

texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=12) | st.sampled_from(["\n\n", " a ", "}", '{"'])
plain = st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats(allow_nan=False, allow_infinity=False)
values = st.recursive(
    plain | texts, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3)
)
inputs = st.dictionaries(texts, values, max_size=3)


@st.composite
def answers(draw: st.DrawFn) -> Message:
    """What an engine answers, as SGLang writes it."""
    message: dict[str, Any] = {"role": "assistant", "content": draw(texts)}
    message["reasoning_content"] = draw(st.none() | texts.filter(bool))
    arguments = [json.dumps(each, ensure_ascii=False) for each in draw(st.lists(inputs, max_size=3))]
    if draw(st.booleans()):
        arguments = [each or "" for each in arguments]
    if arguments:
        message["tool_calls"] = [
            {"id": f"call_{place}", "type": "function", "function": {"name": "go", "arguments": each}}
            for place, each in enumerate(arguments)
        ]
    return message


@st.composite
def chunked(draw: st.DrawFn, answer: Message) -> list[dict[str, Any]]:
    """The deltas of a stream that says it."""

    def cut(text: str) -> list[str]:
        places = sorted(draw(st.sets(st.integers(0, len(text)), max_size=3)))
        return [text[begin:end] for begin, end in zip([0, *places], [*places, len(text)], strict=True)]

    deltas: list[dict[str, Any]] = [{"role": "assistant", "content": ""}]
    deltas += [{"reasoning_content": each} for each in cut(answer.get("reasoning_content") or "")]
    deltas += [{"content": each} for each in cut(answer["content"])]
    for place, call in enumerate(answer.get("tool_calls", ())):
        begun = {"index": place, "id": call["id"], "type": "function", "function": {"name": "go", "arguments": ""}}
        deltas.append({"tool_calls": [begun]})
        for each in cut(call["function"]["arguments"]):
            deltas.append({"tool_calls": [{"index": place, "function": {"name": None, "arguments": each}}]})
    return deltas


def streamed(answer: Message, deltas: list[dict[str, Any]], *, omits_thinking: bool) -> tuple[Message, list[Any]]:
    """What the session holds of a stream, and the blocks that the official client puts together."""
    growing, writer = GrowingMessage(), MessagesWriter(AnswerEnd((), 2, 3), omits_thinking=omits_thinking)
    raw = b""
    for delta in deltas:
        growing.add(delta)
        raw += writer.write_chunk({"id": "r", "model": "m", "choices": [{"index": 0, "delta": delta}]}, b"")
    finish = "tool_calls" if answer.get("tool_calls") else "stop"
    end = {"index": 0, "delta": {}, "finish_reason": finish}
    raw += writer.write_chunk({"id": "r", "model": "m", "choices": [end], "usage": USAGE}, b"")
    raw += writer.write_other(Event.read(LAST_EVENT))
    snapshot: Any = None
    buffers: dict[int, bytes] = {}
    for each in raw.split(b"\n\n")[:-1]:
        event = Event.read(each + b"\n\n")
        if event.name != b"ping":
            parsed = EVENTS.validate_json(event.data)
            snapshot = accumulate_event(event=parsed, current_snapshot=snapshot, json_bufs=buffers)
    return growing.message(), [block.to_dict() for block in snapshot.content]


def as_javascript(value: Any) -> Any:
    """A value as a client in JavaScript reads and writes it."""
    if isinstance(value, dict):
        return {name: as_javascript(each) for name, each in value.items()}
    if isinstance(value, list):
        return [*map(as_javascript, value)]
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return value
    return int(Decimal(repr(float(value)))) if float(value).is_integer() and abs(value) < 1e21 else float(value)


def sent_input(draw: st.DrawFn, given: Any) -> Any:
    """The input of a call as some client sends it back."""
    how = draw(st.sampled_from(["reversed", "rounded", "text", "left out"]))
    if how == "rounded":
        return orjson.loads(json.dumps(as_javascript(given)))
    return {"reversed": dict(reversed(given.items())), "text": json.dumps(given)}.get(how)


def rewritten(draw: st.DrawFn, blocks: list[Any]) -> list[Any]:
    """The same blocks as some client sends them back."""
    sent: list[Any] = []
    drop_thinking = draw(st.booleans())
    for block in blocks:
        if block["type"] == "text":
            place = draw(st.integers(0, len(block["text"])))
            parts = [part for part in (block["text"][:place], block["text"][place:]) if part]
            sent += [{"type": "text", "text": part, "cache_control": {"type": "ephemeral"}} for part in parts]
        elif block["type"] == "tool_use":
            sent.append({**block, "input": sent_input(draw, block["input"])})
        elif not drop_thinking:
            sent.append(block)
    return sent


def returned(answer: Message, blocks: list[Any]) -> Message:
    """What a request with these blocks says, in a session that has recorded the answer."""
    scene = Scene()
    scene.turn([user("Hi")], answer)
    history = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": blocks}]
    request = {"model": "m", "max_tokens": 2, "messages": [*history, {"role": "user", "content": "Go on"}]}
    message: Mapping[str, Any] = read(request, Echo.of(scene.session), system_anywhere=True).fields["messages"][1]
    return message


@settings(max_examples=examples(600))
@given(data=st.data(), answer=answers(), omits_thinking=st.booleans())
def test_what_comes_back_is_what_is_held(data: st.DataObject, answer: Message, omits_thinking: bool) -> None:
    if data.draw(st.booleans(), label="streamed"):
        held, blocks = streamed(answer, data.draw(chunked(answer)), omits_thinking=omits_thinking)
        assert held["content"] == answer["content"]
    else:
        choice = {"message": answer, "finish_reason": "stop"}
        writer = MessagesWriter(AnswerEnd((), 2, 3), omits_thinking=omits_thinking)
        whole: Any = writer.write_answer({"id": "r", "model": "m", "choices": [choice], "usage": USAGE})
        held, blocks = answer, json.loads(json.dumps(whole["content"]))
    sent = data.draw(st.composite(rewritten)(blocks), label="sent")
    assert EQUAL(held, returned(held, sent))


@settings(max_examples=examples(300))
@given(answer=answers(), other=inputs, place=st.integers(0, 2))
def test_what_is_changed_is_an_edit(answer: Message, other: dict[str, Any], place: int) -> None:
    choice = {"message": answer, "finish_reason": "stop"}
    writer = MessagesWriter(AnswerEnd((), 2, 3), omits_thinking=False)
    whole: Any = writer.write_answer({"id": "r", "model": "m", "choices": [choice], "usage": USAGE})
    blocks = whole["content"]
    for number, block in enumerate(blocks):
        if block["type"] == "thinking":
            changed = {**block, "thinking": block["thinking"] + "!"}
        elif block["type"] == "text":
            changed = {**block, "text": block["text"] + "!"}
        else:
            changed = {**block, "input": {**block["input"], "changed": ["!"]}}
        assert not EQUAL(answer, returned(answer, [*blocks[:number], changed, *blocks[number + 1 :]]))
    calls = [block for block in blocks if block["type"] == "tool_use"]
    if calls:
        assert not EQUAL(answer, returned(answer, [block for block in blocks if block is not calls[-1]]))


def test_a_call_sampled_deeper_than_any_request_is_another() -> None:
    held = input_of(f'{{"a":{"[" * 900}{"]" * 900}}}')
    assert not same_input(held, {"a": []}, {})
