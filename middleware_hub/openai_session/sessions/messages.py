"""Chat messages: checks of the messages in a request, their memory size, and small helpers."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping, Sequence
from operator import methodcaller
from typing import Any

from miles_router.engines import client_json
from miles_router.engines.client_json import is_too_deep
from miles_router.errors import BadRequest, ConfigError

Message = Mapping[str, Any]

_role, _content = methodcaller("get", "role"), methodcaller("get", "content")

TEXT_PARTS = ("text", "input_text", "output_text")


def checked_messages(parsed: object) -> Sequence[Message]:
    """Return the messages of a parsed request.

    Raises:
        BadRequest: the request is not an object, or its messages are not a list of objects with a role.
    """
    if not isinstance(parsed, Mapping):
        raise BadRequest("the request body must be a JSON object")
    messages = parsed.get("messages")
    if not isinstance(messages, list) or not messages:
        raise BadRequest("messages must be a list with at least one message")
    if {*map(type, messages)} != {dict} or {*map(type, map(_role, messages))} != {str}:
        for place, message in enumerate(messages):
            if not isinstance(message, dict) or not isinstance(message.get("role"), str):
                raise BadRequest(f"messages[{place}] must be an object with a role")
    return messages


def only_text(messages: Sequence[Message]) -> bool:
    """Return True if every part of every message is text, so that token ids alone represent the messages."""
    return all(
        part.get("type") in TEXT_PARTS if isinstance(part, Mapping) else isinstance(part, str)
        for content in map(_content, messages)
        if isinstance(content, list)
        for part in content
    )


def parse_text(text: str) -> Any:
    """Parse JSON in a text of a message, such as the arguments of a call. Lone surrogates become U+FFFD.

    Raises:
        ValueError: the text is not JSON, or is nested too deep to be compared or serialized.
    """
    data = text.encode("utf-8", "surrogatepass")
    parsed = client_json.loads(data)
    if is_too_deep(data, parsed):
        raise ValueError("nested too deep")
    return parsed


def common_prefix(one: str, other: str) -> int:
    """Return the length of the common prefix of two texts."""
    low, high = 0, min(len(one), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if one[low:middle] == other[low:middle] else (low, middle - 1)
    return low


def message_bytes(message: object) -> int:
    """Return the memory size in bytes of a message, or of a value in it. Keys are few and shared, and do not count."""
    own = sys.getsizeof(message)
    if isinstance(message, str):  # first, because most values are strings
        return own
    if isinstance(message, (dict, Mapping)):  # dict first: the check against Mapping is slow
        return own + sum(map(message_bytes, message.values()))
    if isinstance(message, (list, tuple)):
        return own + sum(map(message_bytes, message))
    return own


def load_function(path: str, option: str, names: Mapping[str, object]) -> Callable[..., Any]:
    """Import a function by its dotted path, for an option of the middleware that also accepts `names`.

    Raises:
        ConfigError: the path is not a dotted path, cannot be imported, or is not callable.
    """
    module, _, attribute = path.rpartition(".")
    where = f"openai_session_middleware.{option}"
    if not module:
        raise ConfigError(f"{where}: must be one of {', '.join(names)} or a dotted path, not {path!r}")
    try:
        found = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"{where}: cannot load {path!r}: {error}") from None
    if not callable(found):
        raise ConfigError(f"{where}: {path!r} is not a function")
    return found  # type: ignore[no-any-return]  # the operator's own function


def function_of(holder: object) -> Mapping[str, Any]:
    """Return the `function` object of a tool, a tool call or a `tool_choice`; empty if it is missing."""
    function = holder.get("function") if isinstance(holder, Mapping) else None
    return function if isinstance(function, Mapping) else {}
