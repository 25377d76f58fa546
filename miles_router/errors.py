"""The router's errors by type. `edge.py` renders them as replies.

    RouterError                     500 internal_error
    ├── ConfigError                 start-up stops with one line that names the setting
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
    ├── PolicyFault                 500 policy_failed: a custom policy failed, or returned a unit it was not given
    ├── ClientDisconnected          nothing is rendered: the client is gone
    ├── NoWorkerAvailable           503 no_worker_available, with Retry-After
    ├── TooManyConnections          503 too_many_connections, with Retry-After
    ├── OwnerUnavailable            503 owner_unavailable, with Retry-After: the owner process is restarting
    ├── OwnerLost                   502 owner_lost: the owner was lost, and may have executed the request
    ├── NodeUnleased                503 node_unleased, with Retry-After: this shard's right to act has expired
    ├── FleetPaused                 503 fleet_paused, with Retry-After: held too long, or too many held
    │   └── FleetFull               503 fleet_full, the same for a session that no worker has room for
    ├── ControlUnavailable          503 control_unavailable, with Retry-After: the leader cannot be reached
    ├── PartlyFailed                502 fan_out_failed
    ├── StateError                  500 state_failed: `--state-dir` cannot be read or written
    │   ├── StateForeign            500 state_foreign: a file of another program, or in another format
    │   ├── StateDamaged            500 state_damaged: a file is torn, or lacks acknowledged commits
    │   ├── StateFull               507 state_full: the disk is full
    │   ├── StateHeld               503 state_held, with Retry-After: another running router has it open
    │   └── StateOutdated           503 state_outdated: a newer epoch has the slot
    ├── UnsupportedByEngine         501 unsupported_by_engine: no routable worker's engine supports the request
    └── UpstreamError               502 upstream_error
        ├── UpstreamUnreachable     502 upstream_unreachable; another worker may be tried
        ├── UpstreamInvalidResponse 502 upstream_invalid_response: the worker does not speak HTTP
        ├── UpstreamTimeout         504 upstream_timeout
        ├── PromptNotRead           502 prompt_not_read: the engine truncated the prompt
        └── UpstreamBroken          lost inside the body: the client's connection is closed

Replies of workers, including 4xx and 5xx, are relayed and never become exceptions.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar


class RouterError(Exception):
    """An error that is rendered as a reply with `status` and `type`; `retryable`: a retry is safe.

    An error without its own type is answered as a bug of the router: its message goes only to the log.
    """

    status: int = 500
    type: str = "internal_error"
    retryable: bool = False
    headers: ClassVar[Mapping[str, str]] = {}

    def body(self, request_id: str) -> dict[str, dict[str, str]]:
        """Return the JSON body of the reply."""
        return {"error": {"type": self.type, "message": str(self), "request_id": request_id}}


class ConfigError(RouterError, ValueError):
    """A setting that cannot be used; the message is one line that names it."""

    type = "configuration_error"


class MiddlewareLoadError(ConfigError):
    """A middleware that cannot be loaded, or an option it does not take."""


class BadRequest(RouterError):
    """The request is invalid; nothing was changed."""

    status = 400
    type = "invalid_request"


class Unauthorized(BadRequest):
    """The API key is missing or wrong."""

    status = 401
    type = "unauthorized"
    headers: ClassVar[Mapping[str, str]] = {"WWW-Authenticate": "Bearer"}


class ForeignOrigin(BadRequest):
    """A web page of another origin tries to change something, and no key is set."""

    status = 403
    type = "foreign_origin"


class NotFound(BadRequest):
    """The path, or an object that the request names, does not exist."""

    status = 404
    type = "not_found"


class UnknownModel(NotFound):
    """The request names a model that no worker has, or names no model and there are several."""

    type = "model_not_found"

    def __init__(self, message: str, parameter: str = "model") -> None:
        super().__init__(message)
        self._parameter = parameter

    def body(self, request_id: str) -> dict[str, dict[str, str]]:
        """Return the body in the format of OpenAI's API and SGLang."""
        error = {"message": str(self), "type": "invalid_request_error", "param": self._parameter, "code": self.type}
        return {"error": {**error, "request_id": request_id}}


class MethodNotAllowed(BadRequest):
    """The path belongs to the router or a middleware and does not take this method."""

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
    """The group of the request was aborted, and none of its sampled tokens can be returned."""

    status = 409
    type = "group_aborted"


class PolicyFault(RouterError):
    """A custom policy (`--policy`) raised an exception, or returned a unit that was not a candidate."""

    type = "policy_failed"


class ClientDisconnected(RouterError):
    """The client is gone. Metrics and logs show status 499 (nginx's convention)."""

    status = 499
    type = "client_disconnected"


class NoWorkerAvailable(RouterError):
    """No worker is registered, or none is routable."""

    status = 503
    type = "no_worker_available"
    retryable = True
    headers: ClassVar[Mapping[str, str]] = {"Retry-After": "1"}


class TooManyConnections(RouterError):
    """The router has its maximum number of client connections, and none of them is idle."""

    status = 503
    type = "too_many_connections"
    retryable = True
    headers: ClassVar[Mapping[str, str]] = {"Retry-After": "1"}


class OwnerUnavailable(RouterError):
    """Another process owns the session or text of the request, and does not accept the request: it is restarting, or
    too many requests wait for it."""

    status = 503
    type = "owner_unavailable"
    retryable = True
    headers: ClassVar[Mapping[str, str]] = {"Retry-After": "1"}


class OwnerLost(RouterError):
    """The process that owns the session or text was lost during the request, and may have executed it."""

    status = 502
    type = "owner_lost"


class NodeUnleased(RouterError):
    """This shard has not heard from the leader for so long that it may not answer any more."""

    status = 503
    type = "node_unleased"
    retryable = True
    headers: ClassVar[Mapping[str, str]] = {"Retry-After": "1"}


class FleetPaused(RouterError):
    """The fleet is paused or asleep, and the request cannot wait, or has waited for too long."""

    status = 503
    type = "fleet_paused"
    retryable = True
    headers: ClassVar[Mapping[str, str]] = {"Retry-After": "1"}


class FleetFull(FleetPaused):
    """No worker has room for another session, and the request cannot wait, or has waited for too long."""

    type = "fleet_full"


class ControlUnavailable(RouterError):
    """The router's leader cannot be reached, or was lost during the request and may have executed it."""

    status = 503
    type = "control_unavailable"
    headers: ClassVar[Mapping[str, str]] = {"Retry-After": "1"}


class PartlyFailed(RouterError):
    """A request to all workers failed on at least one of them."""

    status = 502
    type = "fan_out_failed"


class StateError(RouterError):
    """`--state-dir` cannot be read or written; nothing that was stored is lost."""

    type = "state_failed"

    def written(self) -> list[str]:
        """Return type and message, to pass the error to another process."""
        return [self.type, str(self)]

    @staticmethod
    def read(written: Sequence[str]) -> StateError:
        """Build the error from the result of `written`."""
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
    """The disk of `--state-dir` is full. Nothing new is stored until it has space; stored data can be read."""

    status = 507
    type = "state_full"


class StateHeld(StateError):
    """Another running router has this part of `--state-dir` open."""

    status = 503
    type = "state_held"
    headers: ClassVar[Mapping[str, str]] = {"Retry-After": "1"}


class StateOutdated(StateError):
    """Another router has taken over this part of `--state-dir`."""

    status = 503
    type = "state_outdated"


class UnsupportedByEngine(RouterError):
    """No routable worker has an engine that supports the request; it was not sent."""

    status = 501
    type = "unsupported_by_engine"


class UpstreamError(RouterError):
    """A request to a worker failed."""

    status = 502
    type = "upstream_error"
    #: True when this machine has no descriptor, memory or port left, so the worker is not at fault.
    exhausted = False


class PromptNotRead(UpstreamError):
    """The engine read another prompt than it was sent; nothing is recorded. SGLang with `--allow-auto-truncate` cuts a
    prompt that is too long for its context window or KV cache, and answers 200."""

    type = "prompt_not_read"

    @classmethod
    def of(cls, worker: str | None, given: int, read: int) -> PromptNotRead:
        """Return the error for a worker that read `read` tokens of a prompt of `given` tokens."""
        advice = "start it without --allow-auto-truncate, give it more memory, or send shorter prompts"
        return cls(f"worker {worker} read {read} tokens of a prompt of {given}: {advice}")


class UpstreamUnreachable(UpstreamError):
    """No connection to the worker, or it was lost before a reply began, so another worker may be tried."""

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
        #: True when the request had been written to a keep-alive connection that was lost, whatever came afterwards.
        self.written = written
        #: True when a keep-alive connection was lost and the worker accepts new ones: it probably closed an idle one.
        self.kept = kept
        #: True when the worker did not accept a connection in time.
        self.timed_out = timed_out
        self.exhausted = exhausted
        #: True when the router itself gave up: another connection to the same worker would not help.
        self.given_up = given_up
        #: True when no connection could be made at all, so the worker is probably down.
        self.refused = refused
        #: How many workers were tried.
        self.attempts = 1


class UpstreamInvalidResponse(UpstreamError):
    """The worker's bytes are not an HTTP reply, or a reply that a middleware must read is too large or unreadable."""

    type = "upstream_invalid_response"


class UpstreamTimeout(UpstreamError):
    """The worker did not finish within `--request-timeout`."""

    status = 504
    type = "upstream_timeout"


class UpstreamBroken(UpstreamError):
    """The worker's reply broke off after it had begun. The part that the client has must not look complete."""

    type = "upstream_broken"
