"""Computes the deltas that a stream's client still lacks of a message. Pure.

Source: SGLang 0.5.23, `serving_chat.py`. The parsers of a stream show only certain text. A whole text is read by other
parsers, which trim the text around tool calls. So the missing deltas come from a comparison of both messages.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from miles_router.engines.answers import UnreadableAnswer

EMPTY_DELTA: Mapping[str, Any] = {"role": None, "content": None, "reasoning_content": None}


def missing_deltas(shown: Mapping[str, Any], message: Mapping[str, Any], text: str) -> Iterator[dict[str, Any]]:
    """Yield the deltas that complete the message `shown` to `message`.

    Args:
        text: the text from which the content and calls of `message` were parsed.

    Raises:
        UnreadableAnswer: `shown` contains something that `message` does not contain.
    """
    reasoning = _missing_text(shown.get("reasoning_content") or "", message.get("reasoning_content") or "", "reasoning")
    if reasoning:
        yield {**EMPTY_DELTA, "reasoning_content": reasoning}
    content = _missing_content(shown.get("content") or "", _as_streamed(message, text))
    if content:
        yield {**EMPTY_DELTA, "content": content}
    yield from missing_call_deltas(shown.get("tool_calls") or [], message.get("tool_calls") or [])


def missing_call_deltas(
    begun: Sequence[Mapping[str, Any]], calls: Sequence[Mapping[str, Any]]
) -> Iterator[dict[str, Any]]:
    """Yield the deltas that complete the tool calls `begun` to `calls`.

    Raises:
        UnreadableAnswer: a call in `begun` has another function, or other arguments.
    """
    for place, call in enumerate(calls):
        yield from _missing_call_delta(place, begun[place] if place < len(begun) else None, call)


def _missing_call_delta(
    place: int, begun: Mapping[str, Any] | None, call: Mapping[str, Any]
) -> Iterator[dict[str, Any]]:
    function, arguments = call["function"], call["function"]["arguments"]
    if begun is None:
        named = {"id": call["id"], "index": place, "type": "function"}
        yield _call_delta({**named, "function": {"name": function["name"], "arguments": ""}})
    elif begun["function"]["name"] != function["name"]:
        raise UnreadableAnswer("tokens_taken_back", "the streamed tool call names another function than the parsed")
    else:
        arguments = missing_arguments(begun["function"]["arguments"], arguments)
    if arguments:
        rest = {"name": None, "arguments": arguments}
        yield _call_delta({"id": None, "index": place, "type": "function", "function": rest})


def _call_delta(call: Mapping[str, Any]) -> dict[str, Any]:
    return {**EMPTY_DELTA, "tool_calls": [call]}


def _missing_text(shown: str, whole: str, what: str) -> str:
    if not whole.startswith(shown):
        raise UnreadableAnswer("tokens_taken_back", f"the streamed {what} differs from the parsed {what}")
    return whole[len(shown) :]


def _missing_content(shown: str, whole: str) -> str:
    """Return the content that was not shown yet. Differences in whitespace around the content are ignored."""
    if whole.startswith(shown):
        return whole[len(shown) :]
    if shown.strip() == whole.strip():
        return ""
    return _missing_text(shown.lstrip(), whole.lstrip(), "content")


def _as_streamed(message: Mapping[str, Any], text: str) -> str:
    """Return the content of a message with the surrounding whitespace that parsers trim but a stream shows."""
    content: str = message.get("content") or ""
    begin = text.find(content) if content else len(text) - len(text.lstrip())
    if begin < 0:
        return content
    head, tail = text[:begin], text[begin + len(content) :]
    return head[len(head.rstrip()) :] + content + tail[: len(tail) - len(tail.lstrip())]


def missing_arguments(shown: str, whole: str) -> str:
    """Return the arguments of a call that were not shown yet. Parsers may differ in whitespace outside of strings.

    Raises:
        UnreadableAnswer: other arguments were shown.
    """
    if whole.startswith(shown):
        return whole[len(shown) :]
    at, quoted, escaped = 0, False, False
    for character in shown:
        if not quoted and character.isspace():
            continue
        while not quoted and whole[at : at + 1].isspace():
            at += 1
        if whole[at : at + 1] != character:
            raise UnreadableAnswer("tokens_taken_back", "the streamed arguments differ from the parsed arguments")
        at += 1
        if character == '"' and not escaped:
            quoted = not quoted
        escaped = quoted and character == "\\" and not escaped
    return whole[at:]
