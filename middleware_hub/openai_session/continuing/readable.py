"""Histories in the form that an engine and its template take.

SGLang 0.5.23 refuses a request in whose history one call has arguments that are no JSON object: whatever its agent
does, every later turn is refused. Templates of Mistral refuse call ids that have not just 9 characters, and SGLang's
own have 29. So the engine is given a copy: such arguments are wrapped in an object, such ids are made shorter.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from hashlib import blake2b
from typing import Any

import orjson

from middleware_hub.openai_session.sessions.messages import Message, function_of
from miles_router.engines import client_json

#: The key of an object around arguments that are none, as Anthropic's documentation names it for this purpose.
INVALID_JSON = "INVALID_JSON"
#: Messages that are named as wrapped.
MAX_NAMED = 64
SHORT = 9
ENGINE_ID = re.compile(r"call_[0-9a-f]{24}")


def wrapped(messages: Sequence[Message]) -> tuple[Sequence[Message], list[str]]:
    """Return messages whose calls have arguments that are objects, and where others stood; the same list if none did.
    Empty arguments are those of a call without any."""
    changed: dict[int, Message] = {}
    where: list[str] = []
    for place, message in enumerate(messages):
        calls = message.get("tool_calls") if message.get("role") == "assistant" else None
        if not isinstance(calls, list):
            continue
        now = [_wrapped_call(call) for call in calls]
        others = [number for number, (one, other) in enumerate(zip(calls, now, strict=True)) if one is not other]
        if others:
            changed[place] = {**message, "tool_calls": now}
            where += [f"messages[{place}].tool_calls[{each}]" for each in others if _is_wrapped(now[each])]
    if not changed:
        return messages, []
    return [changed.get(place, message) for place, message in enumerate(messages)], where[:MAX_NAMED]


def _wrapped_call(call: Any) -> Any:
    function = function_of(call)
    arguments = function.get("arguments")
    if not function or isinstance(arguments, Mapping) or _is_object(arguments):
        return call
    if arguments is None or (isinstance(arguments, str) and arguments.strip() in ("", "null", "[]")):
        said = "{}"
    else:
        text = arguments if isinstance(arguments, str) else orjson.dumps(arguments).decode()
        said = orjson.dumps({INVALID_JSON: text}).decode()
    return {**call, "function": {**function, "arguments": said}}


def _is_wrapped(call: Mapping[str, Any]) -> bool:
    return bool(call["function"]["arguments"] != "{}")


def _is_object(arguments: object) -> bool:
    if not isinstance(arguments, str):
        return False
    try:
        return isinstance(client_json.loads(arguments.encode()), dict)
    except ValueError:
        return False


def shortened(message: Message) -> Message:
    """Return a message with call ids of 9 letters and digits, the same one for the same id."""
    calls, call_id = message.get("tool_calls"), message.get("tool_call_id")
    if isinstance(calls, list):
        short = [
            {**call, "id": short_id(call["id"])}
            if isinstance(call, Mapping) and isinstance(call.get("id"), str)
            else call
            for call in calls
        ]
        message = {**message, "tool_calls": short}
    return {**message, "tool_call_id": short_id(call_id)} if isinstance(call_id, str) else message


def short_id(call_id: str) -> str:
    """Return 9 letters and digits for a call id. Those of an engine are cut as opencode cuts them."""
    if len(call_id) == SHORT and call_id.isascii() and call_id.isalnum():
        return call_id
    if ENGINE_ID.fullmatch(call_id):
        return call_id.replace("_", "")[:SHORT]
    return blake2b(call_id.encode("utf-8", "surrogatepass")).hexdigest()[:SHORT]
