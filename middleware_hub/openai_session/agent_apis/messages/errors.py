"""Errors as Anthropic's API has them: `{"type": "error", "error": {"type", "message"}}` (its documentation, "Errors").

The official clients know these types. The router's own error type is in `details.error_code`.
"""

from __future__ import annotations

from typing import Any

import orjson

from middleware_hub.openai_session.agent_apis.agent_api import UNKNOWN_HINT
from middleware_hub.openai_session.errors import ContextOverflow
from miles_router.engines.known import overflow_of
from miles_router.engines.refusals import Overflow, parsed_refusal, refusal_of
from miles_router.errors import BadRequest, RouterError

API_ERROR, OVERLOADED, INVALID = "api_error", "overloaded_error", "invalid_request_error"
#: The words by which harnesses recognize a full context window.
TOO_LONG = "prompt is too long"
TYPES = {
    401: "authentication_error",
    402: "billing_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    409: "conflict_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: OVERLOADED,
    504: "timeout_error",
    529: OVERLOADED,
}


def invalid(where: str, what: str) -> BadRequest:
    """Return an error in this API's form: `messages.0.content: ...`."""
    return BadRequest(f"{where}: {what}")


def unknown_field(name: str) -> BadRequest:
    """Return the error for a field that this API does not have."""
    return invalid(name, f"Extra inputs are not permitted; {UNKNOWN_HINT}")


def type_of(status: int) -> str:
    return TYPES.get(status) or (INVALID if 400 <= status < 500 else API_ERROR)


def error(kind: str, message: str, *, code: str | None = None, request_id: str | None = None) -> dict[str, Any]:
    detail: dict[str, Any] = {"type": kind, "message": message}
    if code is not None:
        detail["details"] = {"error_code": code}
    body: dict[str, Any] = {"type": "error", "error": detail}
    return body if request_id is None else {**body, "request_id": request_id}


def router_error(failure: RouterError, request_id: str) -> dict[str, Any]:
    """Return the body for a router error."""
    if isinstance(failure, ContextOverflow):
        overflow = failure.overflow
        words = f"{TOO_LONG}: {failure.why}" if overflow is None else too_long(overflow)
        written = error(INVALID, words, code=failure.type, request_id=request_id)
        written["error"]["details"]["reason"] = failure.reason
        return written
    return error(type_of(failure.status), str(failure), code=failure.type, request_id=request_id)


def engine_error(parsed: object, status: int) -> dict[str, Any]:
    """Return the body for an engine's error response, or for an error event in its stream."""
    overflow = overflow_of(parsed)
    if overflow is not None:
        return error(INVALID, too_long(overflow))
    refusal = refusal_of(parsed)
    return error(type_of(refusal.code or status), refusal.message)


def refusal_body(body: bytes, status: int) -> bytes:
    """Return the encoded body for an engine's error response, which may not be JSON."""
    return orjson.dumps(engine_error(parsed_refusal(body), status))


def too_long(overflow: Overflow) -> str:
    """Return the message of a context overflow. Harnesses parse these words; they compact their history or ask for
    fewer tokens."""
    if overflow.asked is None:
        return f"{TOO_LONG}: {overflow.prompt} tokens > {overflow.limit} maximum"
    return (
        f"input length and `max_tokens` exceed context limit: {overflow.prompt} + {overflow.asked} > {overflow.limit}, "
        "decrease input length or `max_tokens` and try again"
    )
