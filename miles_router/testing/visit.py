"""One request on its way through the worker's routes, and how a route refuses it."""

from dataclasses import dataclass
from typing import Any

import orjson

from miles_router.testing.door import Exchange
from miles_router.testing.engine import Engine
from miles_router.testing.reply import Reply
from miles_router.testing.settings import Settings


class Refusal(Exception):
    """Answer with this status and JSON content instead."""

    def __init__(self, status: int, content: Any) -> None:
        super().__init__(content)
        self.status = status
        self.content = content


@dataclass(slots=True)
class Visit:
    """What a route may use."""

    body: bytes
    query: dict[str, str]
    content_type: str
    path_tail: str
    reply: Reply
    exchange: Exchange
    engine: Engine
    settings: Settings


def error_object(message: str, status: int, kind: str = "BadRequestError") -> dict[str, Any]:
    """SGLang's OpenAI-style error."""
    return {"object": "error", "message": message, "type": kind, "param": None, "code": status}


def invalid_body(message: str) -> Refusal:
    """What FastAPI's validation errors become in SGLang."""
    return Refusal(400, error_object(message, 400, "Bad Request"))


def json_object(body: bytes) -> dict[str, Any]:
    """The body as a JSON object; Refusal with 400 when it is anything else."""
    try:
        value = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise invalid_body(
            f"1 validation error:\n  {{'type': 'json_invalid', 'msg': 'JSON decode error', 'ctx': {error}}}"
        ) from error
    if not isinstance(value, dict):
        raise invalid_body(
            "1 validation error:\n  {'type': 'model_attributes_type', 'msg': 'Input should be an object'}"
        )
    return value


def optional_json_object(body: bytes) -> dict[str, Any]:
    """Like `json_object`, but no body is an empty object."""
    return json_object(body) if body.strip() else {}
