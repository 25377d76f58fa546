"""All error types of the router. `edge.py` renders them as HTTP replies.

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
    ├── PolicyFault                 500 policy_failed: a custom policy failed, or made an invalid choice
    ├── ClientDisconnected          no reply: the client is gone
    ├── NoWorkerAvailable           503 no_worker_available, with Retry-After
    ├── TooManyConnections          503 too_many_connections, with Retry-After
    ├── OwnerUnavailable            503 owner_unavailable, with Retry-After: the owning process is down or overloaded
    ├── OwnerLost                   502 owner_lost: the owning process was lost; it may have executed the request
    ├── NodeUnleased                503 node_unleased, with Retry-After: the lease of this shard has expired
    ├── FleetPaused                 503 fleet_paused, with Retry-After: waited too long, or too many requests wait
    │   └── FleetFull               503 fleet_full, the same for a session that no worker has room for
    ├── ControlUnavailable          503 control_unavailable, with Retry-After: the router's leader cannot be reached
    ├── PartlyFailed                502 fan_out_failed
    ├── StateError                  500 state_failed: `--state-dir` cannot be read or written
    │   ├── StateForeign            500 state_foreign: a file of another program, or in another format
    │   ├── StateDamaged            500 state_damaged: a file is torn, or lacks acknowledged commits
    │   ├── StateFull               507 state_full: no room on the disk
    │   ├── StateHeld               503 state_held, with Retry-After: another running router has it open
    │   └── StateOutdated           503 state_outdated: another router has taken the slot over
    ├── UnsupportedByEngine         501 unsupported_by_engine: no routable worker's engine supports the request
    └── UpstreamError               502 upstream_error
        ├── UpstreamUnreachable     502 upstream_unreachable; another worker may be tried
        ├── UpstreamInvalidResponse 502 upstream_invalid_response: the worker does not speak HTTP
        ├── UpstreamTimeout         504 upstream_timeout
        ├── PromptNotRead           502 prompt_not_read: the engine read another prompt than the router sent
        └── UpstreamBroken          the worker was lost inside the body: the router breaks off the client's connection

Replies of workers, including 4xx and 5xx, never become exceptions.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar


class RouterError(Exception):
    """An error that is sent to the client with its `status` and `type`; `retryable` is True if a retry is safe. An
    error without its own `type` is answered as a defect, and its message goes only to the log."""

    status: int = 500
    type: str = "internal_error"
    retryable: bool = False
    headers: ClassVar[Mapping[str, str]] = {}

    def body(self, request_id: str) -> dict[str, dict[str, str]]:
        """Return the JSON body of the error reply."""
        return {"error": {"type": self.type, "message": str(self), "request_id": request_id}}


class ConfigError(RouterError, ValueError):
    """A setting is invalid; the message names it in one line."""

    type = "configuration_error"


class MiddlewareLoadError(ConfigError):
    """A middleware cannot be loaded, or one of its options is invalid."""


class BadRequest(RouterError):
    """The request is invalid; nothing was changed."""

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
    """The group of the request was aborted, and no tokens sampled for the request can be returned."""

    status = 409
    type = "group_aborted"


class PolicyFault(RouterError):
    """A custom policy (`--policy`) failed, or made an invalid choice."""

    type = "policy_failed"


class ClientDisconnected(RouterError):
    """The client disconnected. Metrics and logs show status 499 (nginx's convention)."""

    status = 499
    type = "client_disconnected"


class NoWorkerAvailable(RouterError):
    """No worker is registered, or none is routable."""

    status = 503
    type = "no_worker_available"
    retryable = True
    headers: ClassVar[Mapping[str, str]] = {"Retry-After": "1"}


class TooManyConnections(RouterError):
    """The router has reached its maximum of client connections, and no connection is idle."""

    status = 503
    type = "too_many_connections"
    retryable = True
    headers: ClassVar[Mapping[str, str]] = {"Retry-After": "1"}


class OwnerUnavailable(RouterError):
    """The process that owns the session or text accepts no requests: it restarts, or too many requests wait for it."""

    status = 503
    type = "owner_unavailable"
    retryable = True
    headers: ClassVar[Mapping[str, str]] = {"Retry-After": "1"}


class OwnerLost(RouterError):
    """The process that owns the session or text was lost during the request; it may have executed the request."""

    status = 502
    type = "owner_lost"


class NodeUnleased(RouterError):
    """The lease of this shard has expired, because the leader was silent too long: the shard may not answer."""

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
    """The router's leader cannot be reached, or was lost during the request; it may have executed the request."""

    status = 503
    type = "control_unavailable"
    headers: ClassVar[Mapping[str, str]] = {"Retry-After": "1"}


class PartlyFailed(RouterError):
    """At least one worker did not carry out a request that was sent to all workers."""

    status = 502
    type = "fan_out_failed"


class StateError(RouterError):
    """The state directory cannot be read or written; nothing recorded is lost."""

    type = "state_failed"

    def written(self) -> list[str]:
        """Return type and message, for `read` in another process."""
        return [self.type, str(self)]

    @staticmethod
    def read(written: Sequence[str]) -> StateError:
        """Return the error that `written` described; an unknown type becomes a plain `StateError`."""
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
    """The disk of `--state-dir` is full. New state is refused until there is room; stored state can still be read."""

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
    """No routable worker has an engine that supports the request; the request was sent to no worker."""

    status = 501
    type = "unsupported_by_engine"


class UpstreamError(RouterError):
    """The exchange with a worker failed."""

    status = 502
    type = "upstream_error"
    #: True when this machine has no descriptor, memory or port left; the worker is not at fault.
    exhausted = False


class PromptNotRead(UpstreamError):
    """The engine read another prompt than the router sent. With `--allow-auto-truncate`, SGLang truncates a prompt that
    exceeds its context window or KV cache, and answers 200. Nothing is recorded."""

    type = "prompt_not_read"

    @classmethod
    def of(cls, worker: str | None, given: int, read: int) -> PromptNotRead:
        """Return the error for a worker that read `read` tokens of a prompt of `given` tokens."""
        advice = "start it without --allow-auto-truncate, give it more memory, or send shorter prompts"
        return cls(f"worker {worker} read {read} tokens of a prompt of {given}: {advice}")


class UpstreamUnreachable(UpstreamError):
    """The connection failed, or was lost before a reply began. The request may be tried on another worker."""

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


class UpstreamInvalidResponse(UpstreamError):
    """The worker sent no valid HTTP reply, or a reply that the router must read is unreadable or too large."""

    type = "upstream_invalid_response"


class UpstreamTimeout(UpstreamError):
    """The worker did not finish within `--request-timeout`."""

    status = 504
    type = "upstream_timeout"


class UpstreamBroken(UpstreamError):
    """The reply was cut off after it had begun. The client has an incomplete reply, which must not look complete."""

    type = "upstream_broken"
