"""Every error the router raises by type; the one edge in `edge.py` renders them.

    RouterError                     500 internal_error
    ├── ConfigError                 start-up stops with one line naming the setting
    │   └── MiddlewareLoadError     a dotted path or an option that cannot be used
    ├── BadRequest                  400 invalid_request
    │   ├── Unauthorized            401 unauthorized
    │   ├── ForeignOrigin           403 foreign_origin
    │   ├── NotFound                404 not_found
    │   │   └── UnknownModel        404 model_not_found
    │   ├── MethodNotAllowed        405 method_not_allowed
    │   ├── BodyTooLarge            413 request_too_large
    │   ├── RequestTimeout          408 request_timeout
    │   └── GroupAborted            409 group_aborted
    ├── PolicyFault                 500 policy_failed: a policy of one's own failed, or chose what it may not
    ├── ClientDisconnected          nothing is rendered: the client is gone
    ├── NoWorkerAvailable           503 no_worker_available, with Retry-After
    ├── TooManyConnections          503 too_many_connections, with Retry-After
    ├── OwnerUnavailable            503 owner_unavailable, with Retry-After: its process is being started again
    ├── OwnerLost                   502 owner_lost: its process was lost while it was asked, and may have done it
    ├── NodeUnleased                503 node_unleased, with Retry-After: this machine may not act now
    ├── FleetPaused                 503 fleet_paused, with Retry-After: held too long, or too many held
    │   └── FleetFull               503 fleet_full, the same for a session that no worker has room for
    ├── ControlUnavailable      503 control_unavailable, with Retry-After: the router's leader is away
    ├── PartlyFailed                502 fan_out_failed
    ├── StateError                  500 state_failed: what `--state-dir` holds cannot be read or written
    │   ├── StateForeign            500 state_foreign: not this router's file, or another format
    │   ├── StateDamaged            500 state_damaged: a file is torn, or lacks what was acknowledged
    │   ├── StateFull               507 state_full: no room on the disk
    │   ├── StateHeld               503 state_held, with Retry-After: another running router has it
    │   └── StateOutdated           503 state_outdated: a younger epoch has the slot
    ├── UnsupportedByEngine         501 unsupported_by_engine: no routable worker's engine can do it
    └── UpstreamError               502 upstream_error
        ├── UpstreamUnreachable     502 upstream_unreachable; another worker may be tried
        ├── UpstreamInvalidResponse 502 upstream_invalid_response: the worker does not speak HTTP
        ├── UpstreamTimeout         504 upstream_timeout
        ├── PromptNotRead           502 prompt_not_read: the engine read another prompt than it was given
        └── UpstreamBroken          lost inside the body: the client's connection is broken off

Answers of workers, 4xx and 5xx included, are replies and never become exceptions.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar


class RouterError(Exception):
    """An error with an answer: `status` and `type` go to the client, `retryable` tells whether a retry is safe. One
    without a type of its own is answered as a defect: its message goes to the log alone."""

    status: int = 500
    type: str = "internal_error"
    retryable: bool = False
    headers: ClassVar[Mapping[str, str]] = {}

    def body(self, request_id: str) -> dict[str, dict[str, str]]:
        """The JSON that every error of the router's own is rendered as."""
        return {"error": {"type": self.type, "message": str(self), "request_id": request_id}}


class ConfigError(RouterError, ValueError):
    """A setting that cannot be used; the message is one line that names it."""

    type = "configuration_error"


class MiddlewareLoadError(ConfigError):
    """A middleware that cannot be loaded, or an option it does not take."""


class BadRequest(RouterError):
    """The client's fault; nothing was changed."""

    status = 400
    type = "invalid_request"


class Unauthorized(BadRequest):
    """The api key is missing or wrong."""

    status = 401
    type = "unauthorized"
    headers: ClassVar[Mapping[str, str]] = {"WWW-Authenticate": "Bearer"}


class ForeignOrigin(BadRequest):
    """A web page of another origin tries to change something, and no key is set."""

    status = 403
    type = "foreign_origin"


class NotFound(BadRequest):
    """The named object does not exist."""

    status = 404
    type = "not_found"


class UnknownModel(NotFound):
    """A request names a model that no worker has, or names none where there are several."""

    type = "model_not_found"

    def __init__(self, message: str, parameter: str = "model") -> None:
        super().__init__(message)
        self._parameter = parameter

    def body(self, request_id: str) -> dict[str, dict[str, str]]:
        """Return the error in the form of OpenAI's API and SGLang."""
        error = {"message": str(self), "type": "invalid_request_error", "param": self._parameter, "code": self.type}
        return {"error": {**error, "request_id": request_id}}


class MethodNotAllowed(BadRequest):
    """A path of the router's own, or of a middleware's, that does not take this method."""

    status = 405
    type = "method_not_allowed"


class BodyTooLarge(BadRequest):
    """The request body exceeds `--max-request-bytes`."""

    status = 413
    type = "request_too_large"


class RequestTimeout(BadRequest):
    """The request did not arrive in time (`--head-timeout`)."""

    status = 408
    type = "request_timeout"


class GroupAborted(BadRequest):
    """The group that the request belongs to was aborted, and nothing can be given of what was sampled for it."""

    status = 409
    type = "group_aborted"


class PolicyFault(RouterError):
    """A policy of one's own (`--policy`) has failed, or chose what it may not."""

    type = "policy_failed"


class ClientDisconnected(RouterError):
    """The client is gone; 499 is what metrics and logs call it (nginx's convention)."""

    status = 499
    type = "client_disconnected"


class NoWorkerAvailable(RouterError):
    """No worker is registered, or none is routable."""

    status = 503
    type = "no_worker_available"
    retryable = True
    headers: ClassVar[Mapping[str, str]] = {"Retry-After": "1"}


class TooManyConnections(RouterError):
    """The router has its maximum of client connections, and none of them is idle."""

    status = 503
    type = "too_many_connections"
    retryable = True
    headers: ClassVar[Mapping[str, str]] = {"Retry-After": "1"}


class OwnerUnavailable(RouterError):
    """The process that owns the session or text does not take requests: it restarts, or too many wait for it."""

    status = 503
    type = "owner_unavailable"
    retryable = True
    headers: ClassVar[Mapping[str, str]] = {"Retry-After": "1"}


class OwnerLost(RouterError):
    """The process that has what a request is about was lost while it was asked: it may have done what was asked."""

    status = 502
    type = "owner_lost"


class NodeUnleased(RouterError):
    """This shard has not heard from the leader for longer than it may act without it: it may not answer."""

    status = 503
    type = "node_unleased"
    retryable = True
    headers: ClassVar[Mapping[str, str]] = {"Retry-After": "1"}


class FleetPaused(RouterError):
    """The fleet is paused or asleep, and this request cannot wait (any longer)."""

    status = 503
    type = "fleet_paused"
    retryable = True
    headers: ClassVar[Mapping[str, str]] = {"Retry-After": "1"}


class FleetFull(FleetPaused):
    """No worker has room for another session, and this one cannot wait (any longer)."""

    type = "fleet_full"


class ControlUnavailable(RouterError):
    """The router's leader is away, or was lost while it was asked: it may have done what was asked."""

    status = 503
    type = "control_unavailable"
    headers: ClassVar[Mapping[str, str]] = {"Retry-After": "1"}


class PartlyFailed(RouterError):
    """Some worker did not do what all were asked to."""

    status = 502
    type = "fan_out_failed"


class StateError(RouterError):
    """The state directory cannot be read or written; nothing recorded is lost."""

    type = "state_failed"

    def written(self) -> list[str]:
        """For another process: type and message."""
        return [self.type, str(self)]

    @staticmethod
    def read(written: Sequence[str]) -> StateError:
        """Return the error that `written` describes, the inverse property."""
        type_, message = written
        kinds = (StateForeign, StateDamaged, StateFull, StateHeld, StateOutdated)
        return next((kind for kind in kinds if kind.type == type_), StateError)(message)


class StateForeign(StateError):
    """A file under `--state-dir` belongs to another program, or has a format that this version does not read."""

    type = "state_foreign"


class StateDamaged(StateError):
    """A file under `--state-dir` is torn, or lacks commits that were acknowledged."""

    type = "state_damaged"


class StateFull(StateError):
    """The disk of `--state-dir` has no room left: nothing new is held until it has. What is held can be read."""

    status = 507
    type = "state_full"


class StateHeld(StateError):
    """Another running router has this part of `--state-dir` open."""

    status = 503
    type = "state_held"
    headers: ClassVar[Mapping[str, str]] = {"Retry-After": "1"}


class StateOutdated(StateError):
    """Another router has taken this part of `--state-dir` over."""

    status = 503
    type = "state_outdated"


class UnsupportedByEngine(RouterError):
    """No routable worker has an engine that answers this as it is meant; none was asked."""

    status = 501
    type = "unsupported_by_engine"


class UpstreamError(RouterError):
    """Talking to a worker failed."""

    status = 502
    type = "upstream_error"
    #: True when this machine has no descriptor, memory or port left, which says nothing of the worker.
    exhausted = False


class PromptNotRead(UpstreamError):
    """The engine read another prompt than it was given. SGLang does so with `--allow-auto-truncate`: it cuts a prompt
    that is too long for its context window or its KV cache, and answers 200. Nothing is recorded."""

    type = "prompt_not_read"

    @classmethod
    def of(cls, worker: str | None, given: int, read: int) -> PromptNotRead:
        """Return the error of a worker that read so many tokens of a prompt of `given` tokens."""
        advice = "start it without --allow-auto-truncate, give it more memory, or send shorter prompts"
        return cls(f"worker {worker} read {read} tokens of a prompt of {given}: {advice}")


class UpstreamUnreachable(UpstreamError):
    """No connection, or it was lost before a reply began: no part of a reply exists, so another worker may be tried."""

    type = "upstream_unreachable"
    retryable = True

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
        #: True when the request was written before to a kept connection that was lost, whatever became of the next one.
        self.written = written
        #: True when a kept connection was lost, and the worker takes new ones: it had most likely closed it while idle.
        self.kept = kept
        #: True when no connection could be made in time: the worker was silent.
        self.timed_out = timed_out
        self.exhausted = exhausted
        #: True when the router broke it off itself: another connection to the same worker would be no better.
        self.given_up = given_up
        #: True when no connection could be made at all, which speaks against the worker itself.
        self.refused = refused
        #: How many workers were tried.
        self.attempts = 1


class UpstreamInvalidResponse(UpstreamError):
    """The worker's bytes are not an HTTP reply, or an answer that a layer must read is too large or cannot be read."""

    type = "upstream_invalid_response"


class UpstreamTimeout(UpstreamError):
    """The worker did not finish within `--request-timeout`."""

    status = 504
    type = "upstream_timeout"


class UpstreamBroken(UpstreamError):
    """The reply was cut after it had begun; what the client has is incomplete and must not look complete."""

    type = "upstream_broken"
