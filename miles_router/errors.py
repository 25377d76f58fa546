"""All error types of the router. `edge.py` renders them as HTTP replies.

    RouterError
    ├── InternalError               500 internal_error: a defect
    │   ├── ConfigError             start-up stops with one line naming the setting, the dotted path or the option
    │   └── PolicyFault             a custom policy failed, or made an invalid choice
    ├── BadRequest                  400 invalid_request
    │   ├── Unauthorized            401 unauthorized
    │   ├── ForeignOrigin           403 unauthorized
    │   ├── NotFound                404 not_found
    │   │   └── UnknownModel        404 model_not_found
    │   ├── MethodNotAllowed        405 invalid_request
    │   ├── RequestTimeout          408 invalid_request
    │   ├── Conflict                409 conflict: the request does not fit the state of what it names
    │   │   └── WeightsChanged      409 conflict: an evaluation is never sampled by weights of two versions
    │   └── BodyTooLarge            413 invalid_request
    ├── ClientDisconnected          no reply: the client is gone
    ├── NoWorkerAvailable           503 no_worker_available, with Retry-After
    ├── FleetPaused                 503 unavailable, with Retry-After: waited too long, or too many requests wait
    ├── Unavailable                 503 unavailable, with Retry-After: a process or a bound of the router refuses
    ├── PartlyFailed                502 fan_out_failed
    ├── StateError                  500 state_failed: `--state-dir` cannot be read or written
    │   ├── StateFull               507 state_failed: no room on the disk
    │   ├── StateHeld               503 state_failed, with Retry-After: another running router has it open
    │   └── StateOutdated           503 state_failed: another router has taken the slot over
    ├── UnsupportedByEngine         501 unsupported_by_engine: no routable worker's engine supports the request
    └── UpstreamError               502 upstream_error
        ├── UpstreamUnreachable     502 upstream_unreachable; another worker may be tried
        ├── UpstreamTimeout         504 upstream_error
        ├── PromptNotRead           502 upstream_error: the engine read another prompt than the router sent
        └── UpstreamBroken          the worker was lost inside the body: the router breaks off the client's connection

A client distinguishes errors by `type`, so two errors have one type unless a client acts differently on them; the
message has the particular reason. Replies of workers, including 4xx and 5xx, never become exceptions.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import ClassVar

#: Sent with errors that are safe to repeat.
REPEAT: Mapping[str, str] = {"Retry-After": "1"}


class RouterError(Exception):
    """An error that is sent to the client with its `status`, `type`, `headers` and message. One without a `type` is for
    control flow; if no layer catches it, it is answered as a defect, and its message goes only to the log."""

    status: int = 500
    type: str = ""
    headers: Mapping[str, str] = {}

    def body(self, request_id: str) -> dict[str, dict[str, str]]:
        """Return the JSON body of the error reply."""
        return {"error": {"type": self.type, "message": str(self), "request_id": request_id}}


class InternalError(RouterError):
    """The router, a middleware or a custom policy failed; the log has the details."""

    type = "internal_error"


class ConfigError(InternalError, ValueError):
    """A setting is invalid, or a class that it names cannot be loaded; the message names it in one line."""


class BadRequest(RouterError):
    """The request is invalid; nothing was changed."""

    status = 400
    type = "invalid_request"


class Unauthorized(BadRequest):
    """The api key is missing or wrong."""

    status = 401
    type = "unauthorized"
    headers: Mapping[str, str] = {"WWW-Authenticate": "Bearer"}


class ForeignOrigin(BadRequest):
    """A web page of another origin tries to change something, and no key is set."""

    status = 403
    type = "unauthorized"


class NotFound(BadRequest):
    """The named object does not exist."""

    status = 404
    type = "not_found"


class UnknownModel(NotFound):
    """The request names a model that no worker has, or names no model although there are several."""

    type = "model_not_found"

    def __init__(self, message: str, parameter: str = "model") -> None:
        super().__init__(message)
        self._parameter = parameter

    def body(self, request_id: str) -> dict[str, dict[str, str]]:
        """Return the error in the form of OpenAI's API and SGLang."""
        error = {"message": str(self), "type": "invalid_request_error", "param": self._parameter, "code": self.type}
        return {"error": {**error, "request_id": request_id}}


class MethodNotAllowed(BadRequest):
    """The path belongs to the router or a middleware, and does not support this method."""

    status = 405

    def __init__(self, message: str, allowed: Iterable[str] = ()) -> None:
        super().__init__(message)
        self.headers = {"Allow": ", ".join(allowed)}


class BodyTooLarge(BadRequest):
    """The request body exceeds `--max-request-bytes`."""

    status = 413


class RequestTimeout(BadRequest):
    """The request did not arrive in time (`--head-timeout`)."""

    status = 408


class Conflict(BadRequest):
    """The request conflicts with the state of a session or group: the session id is taken, the session is finalized, or
    the group was aborted."""

    status = 409
    type = "conflict"


class WeightsChanged(Conflict):
    """The weights changed during an evaluation: this request would be sampled by other weights, or was in part."""


class PolicyFault(InternalError):
    """A custom policy (`--policy`) failed, or made an invalid choice."""


class ClientDisconnected(RouterError):
    """The client disconnected. Metrics and logs show status 499 (nginx's convention)."""

    status = 499
    type = "client_disconnected"


class NoWorkerAvailable(RouterError):
    """No worker is registered, none is routable, or none has room for another session."""

    status = 503
    type = "no_worker_available"
    headers: Mapping[str, str] = REPEAT


class Unavailable(RouterError):
    """The router cannot serve the request now: the process that it needs is down, overloaded or may not act, or a limit
    of connections or sessions is reached."""

    status = 503
    type = "unavailable"
    headers: Mapping[str, str] = REPEAT


class FleetPaused(RouterError):
    """The fleet is paused or asleep, and this request cannot wait (any longer)."""

    status = 503
    type = "unavailable"
    headers: Mapping[str, str] = REPEAT


class PartlyFailed(RouterError):
    """At least one worker did not carry out a request that was sent to all workers."""

    status = 502
    type = "fan_out_failed"


class StateError(RouterError):
    """The state directory cannot be read or written; nothing recorded is lost. `label` tells the cause in metrics."""

    type = "state_failed"
    label: ClassVar[str] = "state_failed"

    def written(self) -> list[str]:
        """Return label and message, for `read` in another process."""
        return [self.label, str(self)]

    @staticmethod
    def read(written: Sequence[str]) -> StateError:
        """Return the error that `written` described."""
        label, message = written
        kinds = (StateFull, StateHeld, StateOutdated)
        return next((kind for kind in kinds if kind.label == label), StateError)(message)


class StateFull(StateError):
    """The disk of `--state-dir` is full. New state is refused until there is room; stored state can still be read."""

    status = 507
    label = "state_full"


class StateHeld(StateError):
    """Another running router has this part of `--state-dir` open."""

    status = 503
    label = "state_held"
    headers: Mapping[str, str] = REPEAT


class StateOutdated(StateError):
    """Another router has taken this part of `--state-dir` over."""

    status = 503
    label = "state_outdated"


class UnsupportedByEngine(RouterError):
    """No routable worker has an engine that supports the request; the request was sent to no worker."""

    status = 501
    type = "unsupported_by_engine"


class UpstreamError(RouterError):
    """A worker sent no valid or no usable answer, or was lost after it may have received the request."""

    status = 502
    type = "upstream_error"
    #: True when this machine has no descriptor, memory or port left; the worker is not at fault.
    exhausted = False


class PromptNotRead(UpstreamError):
    """The engine read another prompt than the router sent. With `--allow-auto-truncate`, SGLang truncates a prompt that
    exceeds its context window or KV cache, and answers 200. Nothing is recorded."""

    @classmethod
    def of(cls, worker: str | None, given: int, read: int) -> PromptNotRead:
        """Return the error for a worker that read `read` tokens of a prompt of `given` tokens."""
        advice = "start it without --allow-auto-truncate, give it more memory, or send shorter prompts"
        return cls(f"worker {worker} read {read} tokens of a prompt of {given}: {advice}")


class UpstreamUnreachable(UpstreamError):
    """The connection failed, or was lost before a reply began. The request may be tried on another worker."""

    type = "upstream_unreachable"

    def __init__(
        self,
        message: str,
        *,
        refused: bool = False,
        given_up: bool = False,
        exhausted: bool = False,
        timed_out: bool = False,
        kept: bool = False,
        written: bool = False,
    ) -> None:
        super().__init__(message)
        #: True when the request was already written to a kept-alive connection that was lost, whatever happened next.
        self.written = written
        #: True when a kept connection was lost but the worker accepts new ones: it most likely closed it while idle.
        self.kept = kept
        #: True when the worker did not accept a connection in time.
        self.timed_out = timed_out
        self.exhausted = exhausted
        #: True when the router itself ended the connection: a new connection to the same worker would not help.
        self.given_up = given_up
        #: True when no connection could be made, for a reason that lies with the worker.
        self.refused = refused
        #: The number of workers tried.
        self.attempts = 1


class UpstreamTimeout(UpstreamError):
    """The worker did not finish within `--request-timeout`."""

    status = 504


class UpstreamBroken(UpstreamError):
    """The reply was cut off after it had begun. The client has an incomplete reply, which must not look complete."""
