"""Parsers of error answers from engines, complete or in streams. No I/O."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import orjson

#: Maximum length of a message that is passed on to the client.
MAX_MESSAGE = 2000


class EngineRefusal(NamedTuple):
    """An error message, and its HTTP status if the body contains one."""

    message: str
    code: int | None = None


class Overflow(NamedTuple):
    """A request that exceeds the context window, in tokens.

    Attributes:
        prompt: the length of the prompt.
        limit: the size of the window.
        asked: the requested new tokens, if only prompt and answer together are too long; else None.
    """

    prompt: int
    limit: int
    asked: int | None = None


def parsed_refusal(body: bytes) -> Any:
    """Return the JSON of an error's body, or its text if it is not JSON."""
    try:
        return orjson.loads(body)
    except orjson.JSONDecodeError:
        return body.decode("utf-8", "replace")


def refusal_of(parsed: object) -> EngineRefusal:
    """Return the refusal in an error's body, which is JSON or text. FastAPI puts its message into `detail`."""
    if isinstance(parsed, str):
        return EngineRefusal(parsed[:MAX_MESSAGE].strip() or "no reason was given")
    error_value: object = parsed
    if isinstance(parsed, Mapping):
        error_value = next((parsed[name] for name in ("error", "detail") if parsed.get(name)), parsed)
    if isinstance(error_value, Mapping):
        code, message = error_value.get("code"), error_value.get("message")
        status = code if isinstance(code, int) and 400 <= code < 600 else None
        return EngineRefusal(str(message)[:MAX_MESSAGE] if message else "no reason was given", status)
    return EngineRefusal(str(error_value)[:MAX_MESSAGE])
