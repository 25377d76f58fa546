"""What can be wrong with a session or a request in one.

BadRequest
├── SessionNotFound     404 session_not_found
├── SessionLost         410 session_lost: with the process that had it
├── SessionExists       409 session_exists
├── SessionFinalized    409 session_finalized: it takes no further turns
├── SessionFull         400 session_full: more turns or bytes than one session may have
├── MediaNotTraced      400 media_not_traced: an image or the like in a session
├── ContextOverflow     400 context_length_exceeded: nothing is left of what its contract allows
├── StaleWeights        400 stale_weights: older weights would take part than its contract allows
├── OutsideContract     400 outside_contract: it cannot be held to its contract
├── UntracedEpisode     422 untraced_episode: there is no sample, because nothing was traced
└── UnusableSample      422 invalid_sample: it would break an invariant, and is not given
TooManySessions         503 too_many_sessions, with Retry-After
ContextWindowFull       413 context_overflow: the same, in a dialect's words
TrajectoryVersionChanged 502 trajectory_version_changed: other weights than those that answered before
UnusableAnswer          502 unusable_answer: the worker's answer cannot be recorded exactly
AnswerCut               503 answer_cut, with Retry-After: recorded, and of no end that the agent's API has a word for
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from miles_router.engines.refusals import Overflow
from miles_router.errors import BadRequest, NotFound, RouterError, UpstreamError


class SessionNotFound(NotFound):
    """No session has this id: never made, deleted, or expired."""

    type = "session_not_found"


class SessionLost(BadRequest):
    """The process that had the session has ended, and what it held in memory is gone."""

    status = 410
    type = "session_lost"


class SessionExists(BadRequest):
    """A session with this id is there already; two episodes must not mix."""

    status = 409
    type = "session_exists"


class SessionFull(BadRequest):
    """The session has as many turns, or bytes, as one may have."""

    type = "session_full"


class MediaNotTraced(BadRequest):
    """A turn of a session has an image, audio, video or a file: of these a session could not give a sample. Outside of
    sessions they pass."""

    type = "media_not_traced"


class UntracedEpisode(BadRequest):
    """The session has no sample, and requests that passed without being traced: the episode is not empty, but unknown.
    The message says what was asked and why it was not traced."""

    status = 422
    type = "untraced_episode"


class ContextOverflow(BadRequest):
    """Nothing is left of what the session's contract allows a turn, or the engine's context window does not hold it.
    Agents' harnesses know what to do about a window that is full: they compact their history, or end. So whatever is
    used up is told as that, in the words of each API that they look for. Attributes: reason: what is used up, as in the
    session's `end_reason`. overflow: how many tokens there are, and how many there may be, where that is known."""

    type = "context_length_exceeded"

    def __init__(self, reason: str, why: str = "", overflow: Overflow | None = None) -> None:
        self.reason = reason
        self.overflow = overflow
        self.why = why or (_in_numbers(overflow) if overflow is not None else reason)
        super().__init__(self.why)

    def body(self, request_id: str) -> dict[str, Any]:
        """In the words of OpenAI's chat API."""
        message = f"This model's maximum context length is reached: {self.why}"
        if self.overflow is not None:
            length = f"This model's maximum context length is {self.overflow.limit} tokens. "
            message = f"{length}However, your messages resulted in {self.overflow.prompt} tokens."
        about = {"type": "invalid_request_error", "code": self.type, "param": "messages", "reason": self.reason}
        return {"error": {"message": message, **about, "request_id": request_id}}


def _in_numbers(overflow: Overflow) -> str:
    return f"the prompt has {overflow.prompt} tokens, and prompt and answer may have {overflow.limit}"


class ContextWindowFull(RouterError):
    """The option `context_window` leaves nothing for a chat turn of a session that headers made. `error` in the answer
    is what `context_length_exceeded` has there."""

    status = 413
    type = "context_overflow"


class StaleWeights(BadRequest):
    """A turn in which older weights would take part than the session's contract allows."""

    type = "stale_weights"


class OutsideContract(BadRequest):
    """A request that cannot be held to the session's contract: it is not traced, or its length is not known."""

    type = "outside_contract"


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


class TrajectoryVersionChanged(RouterError):
    """A session named in headers was answered by other weights than the fleet has now, and the option
    `one_weight_version` allows it no others."""

    status = 502
    type = "trajectory_version_changed"


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
