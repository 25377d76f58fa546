"""A whole answer given as the stream that the agent asked for, where the engine cannot stream what recording needs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import orjson

from miles_router.engines.events import DATA, END, LAST_EVENT

HEADERS = [(b"content-type", b"text/event-stream; charset=utf-8")]
OF_THE_ANSWER = ("id", "created", "model")


def chat_stream(answer: Mapping[str, Any], *, include_usage: bool) -> bytes:
    """The events of a chat answer: each choice in one piece."""
    head = {name: answer.get(name) for name in OF_THE_ANSWER} | {"object": "chat.completion.chunk"}
    chunks = [{**head, "choices": [choice]} for each in answer["choices"] for choice in _chunks_of(each)]
    if include_usage:
        chunks.append({**head, "choices": [], "usage": answer.get("usage")})
    return b"".join(DATA + orjson.dumps(chunk) + END for chunk in chunks) + LAST_EVENT


def _chunks_of(choice: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    index, message = choice["index"], choice["message"]
    yield {"index": index, "delta": {"role": "assistant", "content": ""}, "finish_reason": None, "logprobs": None}
    delta: dict[str, Any] = {}
    if message.get("reasoning_content"):
        delta["reasoning_content"] = message["reasoning_content"]
    if message.get("content"):
        delta["content"] = message["content"]
    if message.get("tool_calls"):
        delta["tool_calls"] = [{**call, "index": place} for place, call in enumerate(message["tool_calls"])]
    yield {"index": index, "delta": delta, "finish_reason": None, "logprobs": choice.get("logprobs")}
    yield {
        "index": index,
        "delta": {},
        "finish_reason": choice["finish_reason"],
        "matched_stop": choice.get("matched_stop"),
        "logprobs": None,
    }
