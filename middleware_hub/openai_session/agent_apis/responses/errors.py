"""Errors as OpenAI's API has them: `{"error": {"message", "type", "param", "code"}}` (its reference, "Error codes").

`code` is the router's own error type where the API has no code.
"""

from __future__ import annotations

from typing import Any

import orjson

from middleware_hub.openai_session.errors import ContextOverflow
from miles_router.engines.known import overflow_of
from miles_router.engines.refusals import Overflow, parsed_refusal, refusal_of
from miles_router.errors import BadRequest, RouterError

INVALID, SERVER_ERROR = "invalid_request_error", "server_error"
OVERFLOW = "context_length_exceeded"
TOO_LONG = "Your input exceeds the context window of this model. Please adjust your input and try again."


class InvalidParameter(BadRequest):
    """The request is invalid, or asks for what a traced session does not support; `param` names the field."""

    def __init__(self, param: str, message: str, code: str | None = "invalid_value") -> None:
        super().__init__(message)
        self.param = param
        self.code = code


def missing(param: str) -> InvalidParameter:
    return InvalidParameter(param, f"Missing required parameter: '{param}'.", "missing_required_parameter")


def wrong_type(param: str, expected: str) -> InvalidParameter:
    return InvalidParameter(param, f"Invalid type for '{param}': expected {expected}.", "invalid_type")


def unavailable(param: str, what: str) -> InvalidParameter:
    """Return the error for a feature of the API that traced sessions do not support."""
    return InvalidParameter(param, f"{what} is not available in a traced session.", "unsupported_value")


def no_compaction(param: str, what: str) -> InvalidParameter:
    """Return the error for compaction at the server. Its message tells how to make Codex compact by itself: Codex
    asks the server only if the provider is named OpenAI or Azure."""
    hint = (
        "the agent must compact its history itself, which is traced. Codex does so where the model provider in its "
        "config.toml has a `name` other than OpenAI and Azure"
    )
    return InvalidParameter(param, f"{what} is not available in a traced session: {hint}.", "unsupported_value")


def error(status: int, message: str, *, code: str | None = None, param: str | None = None) -> dict[str, Any]:
    """Return the value of `error` in the body."""
    return {"message": message, "type": INVALID if status < 500 else SERVER_ERROR, "param": param, "code": code}


def router_error(failure: RouterError, request_id: str) -> dict[str, Any]:
    """Return the body for a router error."""
    if isinstance(failure, InvalidParameter):
        detail = error(failure.status, str(failure), code=failure.code, param=failure.param)
    elif isinstance(failure, ContextOverflow):
        detail = {**overflow_error(failure), "reason": failure.reason}
    else:
        detail = error(failure.status, str(failure), code=failure.type)
    return {"error": {**detail, "request_id": request_id}}


def overflow_error(failure: ContextOverflow) -> dict[str, Any]:
    """Return the value of `error` for a full context window."""
    words = f"{TOO_LONG} ({failure.why})" if failure.overflow is None else too_long(failure.overflow)
    return error(400, words, code=OVERFLOW, param="input")


def engine_error(parsed: object, status: int) -> dict[str, Any]:
    """Return the value of `error` for an engine's error response, or for an error event in its stream."""
    overflow = overflow_of(parsed)
    if overflow is not None:
        return error(400, too_long(overflow), code=OVERFLOW, param="input")
    refusal = refusal_of(parsed)
    status = refusal.code or status
    return error(status, refusal.message, code=None if status < 500 else SERVER_ERROR)


def refusal_body(body: bytes, status: int) -> bytes:
    """Return the encoded body for an engine's error response, which may not be JSON."""
    return orjson.dumps({"error": engine_error(parsed_refusal(body), status)})


def too_long(overflow: Overflow) -> str:
    """Return the message of a context overflow. Agents recognize these words; they compact their history or ask for
    fewer tokens."""
    asked = f" and {overflow.asked} tokens asked for" if overflow.asked is not None else ""
    return f"{TOO_LONG} ({overflow.prompt} tokens{asked}; the window holds {overflow.limit}.)"
