"""Errors of sessions and of requests within one.

BadRequest
├── SessionNotFound     404 session_not_found
├── SessionLost         410 session_lost: its process has ended
├── SessionExists       409 session_exists
├── SessionFinalized    409 session_finalized: it takes no further turns
├── SessionFull         400 session_full: more turns or bytes than one session may have
├── MediaNotTraced      400 media_not_traced: an image or other media in a session
├── ContextOverflow     400 context_length_exceeded: the contract's budget or the context window is used up
├── StaleWeights        400 stale_weights: the weights are older than the contract allows
├── OutsideContract     400 outside_contract: the contract cannot be enforced on this request
├── UntracedEpisode     422 untraced_episode: there is no sample, because nothing was traced
└── UnusableSample      422 invalid_sample: the sample violates an invariant and is withheld
TooManySessions         503 too_many_sessions, with Retry-After
ContextWindowFull       413 context_overflow: the option `context_window` is used up, in a dialect's format
TrajectoryVersionChanged 502 trajectory_version_changed: the fleet's weights differ from those of earlier turns
UnusableAnswer          502 unusable_answer: the worker's answer cannot be recorded exactly
AnswerCut               503 answer_cut, with Retry-After: the turn was recorded, but the agent's API cannot express its
                        finish reason
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from miles_router.engines.refusals import Overflow
from miles_router.errors import BadRequest, NotFound, RouterError, UpstreamError


class SessionNotFound(NotFound):
    """The session does not exist: it was never created, or it was deleted or has expired."""

    type = "session_not_found"


class SessionLost(BadRequest):
    """The process that held the session has ended, and its memory is lost."""

    status = 410
    type = "session_lost"


class SessionExists(BadRequest):
    """A session with this id exists already. Two episodes must not mix."""

    status = 409
    type = "session_exists"


class SessionFull(BadRequest):
    """The session has reached its limit of turns or bytes."""

    type = "session_full"


class MediaNotTraced(BadRequest):
    """A turn contains an image, audio, video or a file, which no sample can represent. Requests outside of sessions
    may."""

    type = "media_not_traced"


class UntracedEpisode(BadRequest):
    """The session has no sample, but requests passed through it untraced: the episode is unknown, not empty. The
    message names the requests and why they were not traced."""

    status = 422
    type = "untraced_episode"


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


class ContextWindowFull(RouterError):
    """The option `context_window` leaves no room for a chat turn of a session that is named by a header. The answer's
    `error` is the same as for `context_length_exceeded`."""

    status = 413
    type = "context_overflow"


class StaleWeights(BadRequest):
    """The turn would use weights that are older than the session's contract allows."""

    type = "stale_weights"


class OutsideContract(BadRequest):
    """The session's contract cannot be enforced: the request is not traced, or its length is not known."""

    type = "outside_contract"


class UnusableSample(BadRequest):
    """A sample would violate an invariant; `invariant` names it."""

    status = 422
    type = "invalid_sample"

    def __init__(self, invariant: str, message: str) -> None:
        super().__init__(f"{invariant}: {message}")
        self.invariant = invariant


class TooManySessions(RouterError):
    """The router has reached its limit of sessions, or of their bytes."""

    status = 503
    type = "too_many_sessions"
    retryable = True
    headers: ClassVar[Mapping[str, str]] = {"Retry-After": "5"}


class UnusableAnswer(UpstreamError):
    """A worker's answer cannot be recorded exactly: ids, logprobs or versions are missing or inconsistent."""

    type = "unusable_answer"


class TrajectoryVersionChanged(RouterError):
    """The fleet's weights differ from those that answered a session named in headers; `one_weight_version` refuses
    that."""

    status = 502
    type = "trajectory_version_changed"


class AnswerCut(UpstreamError):
    """A pause or the engine cut the answer off, and the agent's API cannot express that finish reason. The sampled
    tokens are recorded, and the agent asks again."""

    status = 503
    type = "answer_cut"
    retryable = True
    headers: ClassVar[Mapping[str, str]] = {"Retry-After": "1"}


class SessionFinalized(BadRequest):
    """The session was finalized and takes no further turns."""

    status = 409
    type = "session_finalized"
