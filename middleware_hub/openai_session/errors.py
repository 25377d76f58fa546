"""What can be wrong with a session or a request in one.

BadRequest
├── SessionNotFound     404 session_not_found
├── SessionExists       409 session_exists
├── SessionFinalized    409 session_finalized: it takes no further turns
├── SessionFull         400 session_full: more turns or bytes than one session may have
└── UnusableSample       422 invalid_sample: it would break an invariant, and is not given
TooManySessions         503 too_many_sessions, with Retry-After
UnusableAnswer          502 unusable_answer: the worker's answer cannot be recorded exactly
AnswerCut               503 answer_cut, with Retry-After: recorded, and of no end that the agent's API has a word for
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from miles_router.errors import BadRequest, NotFound, RouterError, UpstreamError


class SessionNotFound(NotFound):
    """No session has this id: never made, deleted, or expired."""

    type = "session_not_found"


class SessionExists(BadRequest):
    """A session with this id is there already; two episodes must not mix."""

    status = 409
    type = "session_exists"


class SessionFull(BadRequest):
    """The session has as many turns, or bytes, as one may have."""

    type = "session_full"


class UnusableSample(BadRequest):
    """A sample that would break an invariant; `invariant` names it."""

    status = 422
    type = "invalid_sample"

    def __init__(self, invariant: str, message: str) -> None:
        super().__init__(f"{invariant}: {message}")
        self.invariant = invariant


class TooManySessions(RouterError):
    """The router holds as many sessions, or bytes of them, as it may."""

    status = 503
    type = "too_many_sessions"
    retryable = True
    headers: ClassVar[Mapping[str, str]] = {"Retry-After": "5"}


class UnusableAnswer(UpstreamError):
    """A worker's answer that cannot be recorded exactly: ids, logprobs or versions are missing or do not fit."""

    type = "unusable_answer"


class AnswerCut(UpstreamError):
    """An answer that a pause or the engine cut off, for an agent whose API has no word for such an end: what was
    sampled is recorded, and the agent asks again."""

    status = 503
    type = "answer_cut"
    retryable = True
    headers: ClassVar[Mapping[str, str]] = {"Retry-After": "1"}


class SessionFinalized(BadRequest):
    """The session was finalized; it takes no further turns."""

    status = 409
    type = "session_finalized"
