"""A whole answer given as a stream: what a client puts together out of it is the answer."""

from __future__ import annotations

from typing import Any

import orjson
from openai.lib.streaming.chat import ChatCompletionStreamState
from openai.types.chat import ChatCompletionChunk

from middleware_hub.openai_session.faces.answers import GrowingMessage
from middleware_hub.openai_session.faces.buffered import HEADERS, chat_stream
from miles_router.engines.events import DATA, LAST_EVENT, EventReader
from tests.support.sessions import call

CALLS = [call("add", '{"a": 1}', "call_1"), call("sub", "{}", "call_2")]
LOGPROBS = {"content": [{"token": "a", "bytes": [97], "logprob": -0.5, "top_logprobs": []}]}


def choice(index: int = 0, finish: str = "stop", logprobs: Any = None, **message: Any) -> dict[str, Any]:
    return {
        "index": index,
        "message": {"role": "assistant", "content": "", **message},
        "logprobs": logprobs,
        "finish_reason": finish,
        "matched_stop": 151645,
    }


def answer(*choices: dict[str, Any]) -> dict[str, Any]:
    usage = {"prompt_tokens": 3, "completion_tokens": 1, "total_tokens": 4}
    return {"id": "r", "object": "chat.completion", "created": 1, "model": "m", "choices": choices, "usage": usage}


def chunks(whole: dict[str, Any], *, include_usage: bool = False) -> list[dict[str, Any]]:
    events = list(EventReader().feed(chat_stream(whole, include_usage=include_usage)))
    assert events.pop() == LAST_EVENT
    return [orjson.loads(event[len(DATA) :]) for event in events]


def put_together(whole: dict[str, Any]) -> Any:
    state: ChatCompletionStreamState[None] = ChatCompletionStreamState()
    for chunk in chunks(whole):
        state.handle_chunk(ChatCompletionChunk.model_validate(chunk))
    return state.get_final_completion()


def test_openai_s_client_puts_the_answer_together_again() -> None:
    whole = answer(
        choice(0, content="a", reasoning_content="hm", logprobs=LOGPROBS),
        choice(1, "tool_calls", tool_calls=CALLS),
    )
    text, calls = put_together(whole).choices
    assert (text.message.content, text.message.reasoning_content, text.finish_reason) == ("a", "hm", "stop")
    assert text.logprobs.content[0].logprob == -0.5
    assert calls.finish_reason == "tool_calls"
    assert [(each.id, each.function.name, each.function.arguments) for each in calls.message.tool_calls] == [
        ("call_1", "add", '{"a": 1}'),
        ("call_2", "sub", "{}"),
    ]


def test_each_choice_is_a_role_then_its_answer_then_why_it_ended() -> None:
    found = chunks(answer(choice(0, content="a"), choice(1, "length")))
    assert [chunk["choices"][0]["index"] for chunk in found] == [0, 0, 0, 1, 1, 1]
    assert {chunk["object"] for chunk in found} == {"chat.completion.chunk"}
    assert {(chunk["id"], chunk["created"], chunk["model"]) for chunk in found} == {("r", 1, "m")}
    role, said, end = (chunk["choices"][0] for chunk in found[:3])
    assert role["delta"] == {"role": "assistant", "content": ""}
    assert (said["delta"], said["finish_reason"]) == ({"content": "a"}, None)
    assert (end["delta"], end["finish_reason"], end["matched_stop"]) == ({}, "stop", 151645)
    assert found[4]["choices"][0]["delta"] == {}
    assert found[5]["choices"][0]["finish_reason"] == "length"
    assert all(chunk["choices"][0].keys() >= {"finish_reason", "logprobs"} for chunk in found)


def test_it_is_announced_as_a_stream_of_events() -> None:
    assert HEADERS == [(b"content-type", b"text/event-stream; charset=utf-8")]


def test_our_own_reader_puts_the_message_together_as_it_was() -> None:
    message = {"content": "a", "reasoning_content": "hm", "tool_calls": CALLS}
    growing = GrowingMessage()
    for chunk in chunks(answer(choice(0, "tool_calls", **message))):
        growing.take(chunk["choices"][0]["delta"])
    assert growing.message() == {"role": "assistant", **message}


def test_usage_comes_last_and_only_if_it_was_asked_for() -> None:
    whole = answer(choice(content="a"))
    assert all(chunk["choices"] for chunk in chunks(whole))
    *others, usage = chunks(whole, include_usage=True)
    assert (usage["choices"], usage["usage"]) == ([], whole["usage"])
    assert not any("usage" in chunk for chunk in others)
