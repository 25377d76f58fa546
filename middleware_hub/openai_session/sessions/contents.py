"""Conversion of message contents, as agent libraries write them, into parts that the engine accepts.

SGLang 0.5.23 refuses a whole request for one part of an unknown type, and an agent sends its whole history with every
turn. Parts of other APIs that are text become text. Media and all other parts follow the media policy.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from typing import Any

import orjson

from middleware_hub.openai_session.sessions.documents import as_parts, text_of
from middleware_hub.openai_session.sessions.media import KINDS, Media, text_of_data
from middleware_hub.openai_session.sessions.messages import TEXT_PARTS, Message, function_of

ASSISTANT, RESULTS = "assistant", ("tool", "function")
THINKING, REDACTED = ("thinking", "reasoning"), "redacted_thinking"
#: Fields of a thinking part that a model does not read, if the part has no text.
UNREADABLE = frozenset(("type", "id", "thinking", "text", "reasoning", "signature", "encrypted_content"))
#: The engine accepts this part, and a chat template may render it.
TOOL_REFERENCE = "tool_reference"


def readable_contents(messages: Sequence[Message], media: Media) -> Sequence[Message]:
    """Return the messages with contents that the engine accepts; the same object if nothing changes.

    Raises:
        BadRequest: a message has media or unknown parts, and the media policy refuses them.
    """
    changed = [_message(message, f"messages[{place}]", media) for place, message in enumerate(messages)]
    return messages if all(map(operator.is_, messages, changed)) else changed


def _message(message: Message, where: str, media: Media) -> Message:
    content, calls, role = message.get("content"), message.get("tool_calls"), message["role"].lower()
    if isinstance(calls, list):
        typed = [*map(_call, calls)]
        if not all(map(operator.is_, calls, typed)):
            message = {**message, "tool_calls": typed}
    if isinstance(content, str):
        return message
    if content is None:
        return {**message, "content": ""} if role == "user" and "content" in message else message
    if role in RESULTS:
        content = as_parts(content)
    if not isinstance(content, list):
        return message if content is message["content"] else {**message, "content": content}
    parts = [_part(part, role, where, media) for part in content]
    if content is message["content"] and all(map(operator.is_, content, parts)):
        return message
    return {**message, "content": [part for part in parts if part is not None]}


def _call(call: Any) -> Any:
    """Return the call with a type if its own is null, and with arguments that are a string or an object."""
    if not isinstance(call, Mapping):
        return call
    function = function_of(call)
    if not isinstance(arguments := function.get("arguments"), str | Mapping | None):
        call = {**call, "function": {**function, "arguments": orjson.dumps(arguments).decode()}}
    return {**call, "type": "function"} if call.get("type", "") is None else call


def _part(part: Any, role: str, where: str, media: Media) -> Any:
    """Return the part in the engine's form, None for an empty part, or an invalid part unchanged.

    The engine refuses the invalid part.
    """
    if isinstance(part, str):
        return _text(part)
    if not isinstance(part, Mapping):
        return part
    kind, text = part.get("type"), part.get("text")
    if kind in TEXT_PARTS or (kind is None and isinstance(text, str)):
        is_plain = kind == "text" and isinstance(text, str)
        is_readable = "text" in part and isinstance(text, str | None)
        return _text(text or "") if is_readable and not is_plain else part
    if role == ASSISTANT and kind in THINKING:
        return _thinking(part, where, media)
    if role == ASSISTANT and kind == REDACTED:
        return None
    if kind == TOOL_REFERENCE:
        return part
    if kind == "refusal" and isinstance(part.get("refusal"), str):
        return _text(part["refusal"])
    file = part.get("file")
    text = text_of_data(file.get("file_data")) if isinstance(file, Mapping) else None
    if kind is None:
        part = {**part, "type": next((name for name in part if name in KINDS), None)}
    return _text(text_of(part, where, media) if text is None else text)


def _thinking(part: Mapping[str, Any], where: str, media: Media) -> Any:
    """Return a part with exactly one text, as SGLang requires, or None if the part has no text."""
    texts = [text for name in ("thinking", "text", "reasoning") if isinstance(text := part.get(name), str)]
    if texts:
        is_plain = len(texts) == 1 and part.get("reasoning") is None
        return part if is_plain else {"type": "thinking", "thinking": texts[0]}
    if any(part[name] for name in part.keys() - UNREADABLE):
        # A part such as a summary: no template renders it, so it is dropped and counted.
        media.replace_unknown(part["type"], where)
    return None


def _text(text: str) -> dict[str, str]:
    return {"type": "text", "text": text}
