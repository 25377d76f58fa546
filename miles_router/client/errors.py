"""The exceptions of the client, by what a caller would do about them.

    RouterClientError
    ├── NotConnected        no connection was made and nothing was sent; safe to repeat
    ├── ConnectionLost      the connection broke before the reply's end: the request may have been carried out
    │   └── TimedOut        the same, after the allowed number of seconds
    ├── ErrorReply          the reply is an error, the router's or a worker's
    │   ├── NotFound        404 not_found; 410 if it was lost with a process of the router
    │   └── FanOutFailed    502 fan_out_failed: some worker did not do what all were asked to
    ├── InvalidReply        a reply without error that does not have the expected form
    └── InvalidSample       no sample that can be trained on: refused by the router, or by the client on arrival

A `Sample` that a program creates itself raises `InvalidTrajectory` instead of `InvalidSample`.

All can be pickled, since they cross processes in a trainer.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import orjson

from miles_router.trajectory import InvalidTrajectory, Malformed

#: The router's error type that comes without `Retry-After` and is safe to repeat: no worker received the request.
UPSTREAM_UNREACHABLE = "upstream_unreachable"
SHOWN = 500  # characters of a body that is not JSON, in a message


class RouterClientError(Exception):
    """A request that failed.

    Attributes:
        status: of the HTTP reply; 0 if there was none.
        type: the router's name of the error, as in docs/errors.md; for a worker's error the worker's name of it, or
            "".
        request_id: the id of the request in the router's log; None if there was no reply.
        retryable: whether repeating is safe for any kind of request.
        retry_after: seconds to wait before repeating, if the router sent them.
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
    """A failure to connect to the router; nothing was sent."""


class ConnectionLost(RouterClientError):
    """A connection that broke before the reply was complete. The request may or may not have been carried out."""


class TimedOut(ConnectionLost):
    """A reply that was not complete within the client's timeout."""


class ErrorReply(RouterClientError):
    """An error status or an error event, from the router or from a worker through it."""


class NotFound(ErrorReply):
    """A session, generation, worker or recorded text that the request names and the router does not have."""


class FanOutFailed(ErrorReply):
    """A control request that some worker did not carry out; others may have."""

    @property
    def workers(self) -> Mapping[str, Mapping[str, Any]]:
        """By worker URL its reply: `{"status", "body"}`; status 0 if there was none."""
        found = self.body.get("workers") if isinstance(self.body, dict) else None
        return found if isinstance(found, dict) else {}


class InvalidReply(RouterClientError):
    """A reply without error that does not have the expected form: the server is another service, or another version."""


class InvalidSample(RouterClientError):
    """A sample that must not be trained on: it breaks the invariant named by `invariant`, or its session sampled
    nothing and had untraced requests (`an_episode_is_traced`).

    `status` is 422 if the router refused to return it, 0 if the client refused it on arrival.
    """

    def __init__(self, message: str, **facts: Any) -> None:
        super().__init__(message, **facts)
        self.invariant = message.partition(":")[0]


BY_TYPE: Mapping[str, type[RouterClientError]] = {
    "not_found": NotFound,
    "fan_out_failed": FanOutFailed,
    "invalid_sample": InvalidSample,
}


@contextmanager
def convert_errors(path: str) -> Iterator[None]:
    """Convert errors of reading a reply into errors of the request to `path`.

    Raises:
        InvalidReply: the reply does not have the expected form.
        InvalidSample: its contents break an invariant.
    """
    try:
        yield
    except Malformed as error:
        raise InvalidReply(f"the reply of {path} has an unexpected form: {error}") from None
    except InvalidTrajectory as error:
        raise InvalidSample(str(error)) from None


def read_error(status: int, headers: Mapping[str, str], raw: bytes) -> RouterClientError:
    """Return the exception for an error reply.

    The router's own errors have a `request_id` in the body; errors after which a repeat is safe have `Retry-After`.
    Errors of workers pass through the router in their own form, and are never repeated.
    """
    body = _parsed(raw)
    found = body.get("error") if isinstance(body, dict) else None
    described: Mapping[str, Any] = found if isinstance(found, dict) else {}
    own = "request_id" in described
    # OpenAI's form has the router's type as `code`.
    name = str((own and described.get("code")) or described.get("type") or "")
    retry_after = _seconds(headers.get("Retry-After")) if own else None
    kind = BY_TYPE.get(name, ErrorReply) if own else ErrorReply
    return kind(
        _message(body) or f"status {status} without a message",
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
    """Return the message of an error body in the form of the router, OpenAI, SGLang or FastAPI."""
    while isinstance(body, dict):
        body = next((body[name] for name in ("error", "message", "detail") if body.get(name)), "")
    return str(body)[:SHOWN]


def _seconds(value: str | None) -> float | None:
    """Return the seconds of `Retry-After`, or None. The router never sends its other form, a date."""
    return float(value) if value is not None and value.isascii() and value.isdigit() else None
