"""What an engine says in place of an answer: its errors, whole and in streams. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import orjson

#: The longest message that is given on.
MAX_MESSAGE = 2000


class EngineRefusal(NamedTuple):
    """An error in words, and its status where the body says one."""

    message: str
    code: int | None = None


class Overflow(NamedTuple):
    """A request that the context window does not hold: tokens of the prompt, of the window, and those that were asked
    for, where these are what was too much."""

    prompt: int
    limit: int
    asked: int | None = None


def parsed_refusal(body: bytes) -> Any:
    """An error's body, parsed; as a text where it is no JSON."""
    try:
        return orjson.loads(body)
    except orjson.JSONDecodeError:
        return body.decode("utf-8", "replace")


def refusal_of(parsed: object) -> EngineRefusal:
    """An error's body, parsed, or a text that is no JSON. FastAPI puts what it refuses into `detail`."""
    if isinstance(parsed, str):
        return EngineRefusal(parsed[:MAX_MESSAGE].strip() or "no reason was given")
    said: object = parsed
    if isinstance(parsed, Mapping):
        said = next((parsed[name] for name in ("error", "detail") if parsed.get(name)), parsed)
    if isinstance(said, Mapping):
        code, message = said.get("code"), said.get("message")
        status = code if isinstance(code, int) and 400 <= code < 600 else None
        return EngineRefusal(str(message)[:MAX_MESSAGE] if message else "no reason was given", status)
    return EngineRefusal(str(said)[:MAX_MESSAGE])
