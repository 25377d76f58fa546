"""Errors of sessions and of requests within one.

BadRequest
├── SessionLost         410 not_found: its process has ended
├── ContextOverflow     400 context_length_exceeded: the contract's budget or the context window is used up
└── UnusableSample      422 invalid_sample: the sample violates an invariant and is withheld, or nothing was traced
TooManySessions         503 unavailable, with Retry-After
UnusableAnswer          502 upstream_error: the worker's answer cannot be recorded exactly
AnswerCut               503 unavailable, with Retry-After: the turn was recorded, but the agent's API cannot express its
                        finish reason
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from miles_router.engines.refusals import Overflow
from miles_router.errors import REPEAT, BadRequest, NotFound, Unavailable, UpstreamError


class SessionLost(BadRequest):
    """The process that held the session has ended, and its memory is lost."""

    status = 410
    type = NotFound.type


class ContextOverflow(BadRequest):
    """The session's contract or the engine's context window leaves no room for the turn. Agents' harnesses know how to
    handle a full context window: they compact their history, or end. So every exhausted budget is reported as a full
    window, in the words that harnesses of each API look for.

    Attributes:
        reason: the budget that is used up, as in the session's `end_reason`.
        overflow: the prompt's tokens and the limit, where they are known.
    """

    type = "context_length_exceeded"

    def __init__(self, reason: str, why: str = "", overflow: Overflow | None = None) -> None:
        self.reason = reason
        self.overflow = overflow
        self.why = why or (_in_numbers(overflow) if overflow is not None else reason)
        super().__init__(self.why)

    def body(self, request_id: str) -> dict[str, Any]:
        """Return the error in the words of OpenAI's chat API."""
        message = f"This model's maximum context length is reached: {self.why}"
        if self.overflow is not None:
            length = f"This model's maximum context length is {self.overflow.limit} tokens. "
            message = f"{length}However, your messages resulted in {self.overflow.prompt} tokens."
        about = {"type": "invalid_request_error", "code": self.type, "param": "messages", "reason": self.reason}
        return {"error": {"message": message, **about, "request_id": request_id}}


def _in_numbers(overflow: Overflow) -> str:
    return f"the prompt has {overflow.prompt} tokens; prompt and answer together may have {overflow.limit}"


class UnusableSample(BadRequest):
    """A sample would violate an invariant, or none of the session's requests was traced; `invariant` names which."""

    status = 422
    type = "invalid_sample"

    def __init__(self, invariant: str, message: str) -> None:
        super().__init__(f"{invariant}: {message}")
        self.invariant = invariant


class TooManySessions(Unavailable):
    """The router has reached its limit of sessions, or of their bytes."""

    headers: Mapping[str, str] = {"Retry-After": "5"}


class UnusableAnswer(UpstreamError):
    """A worker's answer cannot be recorded exactly: ids, logprobs or versions are missing or inconsistent."""


class AnswerCut(UpstreamError):
    """A pause or the engine cut the answer off, and the agent's API cannot express that finish reason. The sampled
    tokens are recorded, and the agent asks again."""

    status = 503
    type = Unavailable.type
    headers: Mapping[str, str] = REPEAT
