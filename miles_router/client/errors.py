"""What can go wrong between rollout code and the router, by what its caller would do about it.

    RouterClientError
    ├── NotConnected        no connection was made and nothing was sent; may be asked again
    ├── ConnectionLost      broken off before the reply's end: it was done, or it was not
    │   └── TimedOut        the same, after as many seconds as were allowed
    ├── ErrorReply          the reply is an error, the router's or a worker's
    │   ├── NotFound        404 not_found, session_not_found
    │   ├── SessionExists   409 session_exists
    │   ├── UntracedEpisode 422 untraced_episode: no samples, because nothing was traced
    │   └── FanOutFailed    502 fan_out_failed: some worker did not do what all were asked to
    ├── InvalidReply        a good reply that is not what was asked for
    └── InvalidSample       arrays that no rollout can have: refused by the router, or here on arrival

A `Sample` that a program makes itself raises `InvalidTrajectory`, of which `InvalidSample` is made on arrival.

They can be pickled, for they cross processes in a trainer.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import orjson

from miles_router.trajectory import InvalidTrajectory, Malformed

#: Errors of the router's own that come without `Retry-After`, and after which a worker has no part of a reply.
UPSTREAM_UNREACHABLE = "upstream_unreachable"
SHOWN = 500  # characters of a body that is not JSON, in a message


class RouterClientError(Exception):
    """A request that failed.

    Attributes:
        status: of the HTTP reply; 0 where none came.
        type: the router's name for it, as in docs/errors.md; of a worker's error its own name, or "".
        request_id: under which the router's log has it; None where no reply came.
        retryable: whether asking again is safe whatever was asked.
        retry_after: seconds to wait before that, where the router named them.
        body: the reply's JSON, or its text.
    """

    def __init__(
        self,
        message: str,
        *,
        status: int = 0,
        type: str = "",
        request_id: str | None = None,
        retryable: bool = False,
        retry_after: float | None = None,
        body: Any = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.status = status
        self.type = type
        self.request_id = request_id
        self.retryable = retryable
        self.retry_after = retry_after
        self.body = body

    def __str__(self) -> str:
        facts = [f"{self.status} {self.type}".strip()] if self.status else []
        facts += [f"request {self.request_id}"] if self.request_id else []
        return f"{self.message} ({', '.join(facts)})" if facts else self.message


class NotConnected(RouterClientError):
    """No connection to the router could be made; nothing was sent."""


class ConnectionLost(RouterClientError):
    """The connection broke before the reply was complete: nobody knows whether the request was carried out."""


class TimedOut(ConnectionLost):
    """The reply was not complete in as many seconds as the client allows."""


class ErrorReply(RouterClientError):
    """The router, or a worker through it, answered with an error status or an error event."""


class NotFound(ErrorReply):
    """What the request names is not there: a session, a generation, a worker, a text that nobody generated."""


class SessionExists(ErrorReply):
    """A session with this id is there already."""


class UntracedEpisode(ErrorReply):
    """A session has no samples, and was asked for what the router does not trace: the message says what, and why."""


class FanOutFailed(ErrorReply):
    """Some worker did not do what all were asked to; others may have."""

    @property
    def workers(self) -> Mapping[str, Mapping[str, Any]]:
        """By worker URL what it said: `{"status", "body"}`; status 0 where it gave no answer."""
        found = self.body.get("workers") if isinstance(self.body, dict) else None
        return found if isinstance(found, dict) else {}


class InvalidReply(RouterClientError):
    """The reply is good, and is not what its request is answered with: another service, or another version."""


class InvalidSample(RouterClientError):
    """A sample that breaks an invariant, named by `invariant`; its tokens must not be trained on.

    `status` is 422 where the router refused to give it, 0 where it was refused on arrival.
    """

    def __init__(self, message: str, **facts: Any) -> None:
        super().__init__(message, **facts)
        self.invariant = message.partition(":")[0]


BY_TYPE: Mapping[str, type[RouterClientError]] = {
    "not_found": NotFound,
    "session_not_found": NotFound,
    "session_exists": SessionExists,
    "untraced_episode": UntracedEpisode,
    "fan_out_failed": FanOutFailed,
    "invalid_sample": InvalidSample,
}


@contextmanager
def reading(path: str) -> Iterator[None]:
    """The errors of who reads a reply, as errors of the request to `path`.

    Raises:
        InvalidReply, InvalidSample: its form is another, or what it holds breaks an invariant.
    """
    try:
        yield
    except Malformed as error:
        raise InvalidReply(f"no answer of {path}: {error}") from None
    except InvalidTrajectory as error:
        raise InvalidSample(str(error)) from None


def read_error(status: int, headers: Mapping[str, str], raw: bytes) -> RouterClientError:
    """The error that a reply stands for.

    The router's own errors name their `request_id` in the body; it sends `Retry-After` with those that may be asked
    again. What workers say passes through it in forms of their own and is never asked again.
    """
    body = _parsed(raw)
    found = body.get("error") if isinstance(body, dict) else None
    described: Mapping[str, Any] = found if isinstance(found, dict) else {}
    own = "request_id" in described
    name = str(described.get("type") or "")
    retry_after = _seconds(headers.get("Retry-After")) if own else None
    kind = BY_TYPE.get(name, ErrorReply) if own else ErrorReply
    return kind(
        _message(body) or f"status {status} without a word",
        status=status,
        type=name,
        request_id=described["request_id"] if own else headers.get("X-Request-Id"),
        retryable=own and (retry_after is not None or name == UPSTREAM_UNREACHABLE),
        retry_after=retry_after,
        body=body,
    )


def _parsed(raw: bytes) -> Any:
    try:
        return orjson.loads(raw)
    except orjson.JSONDecodeError:
        return raw.decode("utf-8", "replace")


def _message(body: Any) -> str:
    """What it says, in the forms of the router, OpenAI, SGLang and FastAPI."""
    while isinstance(body, dict):
        body = next((body[name] for name in ("error", "message", "detail") if body.get(name)), "")
    return str(body)[:SHOWN]


def _seconds(value: str | None) -> float | None:
    """`Retry-After`, where it is a number; its other form, a date, the router never sends."""
    return float(value) if value is not None and value.isascii() and value.isdigit() else None
