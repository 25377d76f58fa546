"""One request's record, kept in the ASGI scope: its id, its body, its parse, notes between layers.

The wire is the only truth: a body changes by passing a replayed `receive` inward, never by an attribute on a request
object. What is remembered here is keyed by the identity of the bytes, so it can save work and can never disagree
with what is sent.
"""

from __future__ import annotations

import codecs
import io
import itertools
import secrets
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from typing import Any, NoReturn

import orjson

from miles_router.asgi.flight import Flight
from miles_router.asgi.headers import first
from miles_router.engines import surrogates
from miles_router.errors import BadRequest, BodyTooLarge, ClientDisconnected, RouterError
from miles_router.trajectory.finite import non_finite_literal

# ASGI's own shapes (asgiref), named as Starlette names them; this module stays free of both.
Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
#: Writes an error, with the id of its request, as the JSON of an answer.
ErrorBody = Callable[[RouterError, str], Mapping[str, Any]]

SCOPE_KEY = "miles_router.asgi.exchange"
MAX_REQUEST_ID_LENGTH = 128
#: Distinct bodies whose parse is remembered during one request: what came, and what a few layers made of it.
REMEMBERED_PARSES = 8
#: Levels of nesting in a JSON body. orjson writes 254 of them, and answers put a body's values a few levels deeper.
MAX_DEPTH = 200
_LEVELS_WRITTEN = 254
#: Brackets in a JSON body, those in its texts included: each may be an object, and ten million of them hold the event
#: loop for seconds and take a gigabyte.
MAX_BRACKETS = 1 << 21
#: Commas, those in its texts included: ids of a batch, which cost less.
MAX_COMMAS = 1 << 24
#: Values in a JSON body beside ids: layers look at each by itself, at a microsecond or more. A history of 2,000
#: messages with calls has some 20,000.
MAX_VALUES = 1 << 18
#: Bytes from which on JSON is written sooner than its brackets are counted.
LONG = 1 << 13
NUMBERS = frozenset({int, float})
UNBOUNDED = 1 << 62

_process = secrets.token_hex(4)
_count = itertools.count(1)


class ReadOnlyObject(dict[str, Any]):
    """A parsed JSON object that layers share. `orjson.dumps` takes it; changing it raises TypeError."""

    def _refuse(self, *args: object, **kwargs: object) -> NoReturn:
        raise TypeError("the parsed body is shared between layers; change a copy: {**parsed, ...}")

    __setitem__ = __delitem__ = clear = pop = popitem = setdefault = update = __ior__ = _refuse


class Exchange:
    """What the layers of one request share. Get it with `Exchange.of(scope)`."""

    __slots__ = (
        "_parses",
        "adapter",
        "error_body",
        "flight",
        "max_answer_bytes",
        "max_body_bytes",
        "notes",
        "pool",
        "request_id",
    )

    def __init__(self, request_id: str, *, max_body_bytes: int = UNBOUNDED, max_answer_bytes: int = UNBOUNDED) -> None:
        self.request_id = request_id
        self.max_body_bytes = max_body_bytes
        #: Bytes of the reply that a layer which reads it holds at most.
        self.max_answer_bytes = max_answer_bytes
        #: Free for middlewares to leave each other things; keys are dotted names (`"my_package.thing"`).
        self.notes: dict[str, Any] = {}
        #: Where it is on its way to a worker.
        self.flight = Flight()
        #: How an error of the router's own is written: a layer that speaks another API sets it.
        self.error_body: ErrorBody = _body_of
        #: The name of the pool that takes it; None for the default one, which the layers are there for.
        self.pool: str | None = None
        #: The adapter of its model that it names.
        self.adapter: str | None = None
        self._parses: list[tuple[bytes, Any]] = []

    @classmethod
    def of(cls, scope: Scope) -> Exchange:
        """The record of the request that `scope` belongs to, made at the first call."""
        exchange: Exchange | None = scope.get(SCOPE_KEY)
        if exchange is None:
            exchange = scope[SCOPE_KEY] = cls(request_id(scope))
        return exchange

    async def read(self, receive: Receive) -> bytes:
        """The whole request body.

        Raises:
            BodyTooLarge: more than `max_body_bytes`.
            ClientDisconnected: the client left before it had sent all of it.
        """
        message = await receive()
        if message["type"] == "http.request" and not message.get("more_body", False):
            body: bytes = message.get("body", b"")
            self._check_size(len(body))
            return body
        return await self._read_parts(message, receive)

    async def _read_parts(self, message: Message, receive: Receive) -> bytes:
        body = io.BytesIO()  # not a list: what comes byte by byte must not take a hundred times its size
        while True:
            if message["type"] == "http.disconnect":
                raise ClientDisconnected("the client left before it had sent its request")
            body.write(message.get("body", b""))
            self._check_size(body.tell())
            if not message.get("more_body", False):
                return body.getvalue()
            message = await receive()

    def check_announced_size(self, scope: Scope) -> None:
        """Refuse a request by its Content-Length, before a byte of its body is read (or asked for with 100-continue).

        Raises:
            BodyTooLarge: it announces more than `max_body_bytes`.
        """
        announced = first(scope["headers"], b"content-length")
        if announced is not None and announced.isdigit():
            self._check_size(int(announced))

    def _check_size(self, size: int) -> None:
        if size > self.max_body_bytes:
            raise BodyTooLarge(f"the request body is larger than {self.max_body_bytes} bytes (--max-request-bytes)")

    def loads(self, body: bytes, read: Callable[[bytes], Any] | None = None) -> Any:
        """Parse JSON, at most once per distinct body. An object comes read-only: change a copy, `{**parsed, ...}`.

        Args:
            read: gives what `read_json` gives, sooner.

        Raises:
            BadRequest: as `read_json`.
        """
        for known, parsed in self._parses:
            if known is body:
                return parsed
        parsed = (read or read_json)(body)
        if isinstance(parsed, dict):
            parsed = ReadOnlyObject(parsed)
        self._parses = [*self._parses[1 - REMEMBERED_PARSES :], (body, parsed)]
        return parsed


def _body_of(error: RouterError, request_id: str) -> Mapping[str, Any]:
    return error.body(request_id)


def read_json(body: bytes) -> Any:
    """Parse a request's body. Halves of surrogate pairs, and bytes that are no UTF-8, are read as U+FFFD;
    a byte order mark is skipped.

    Raises:
        BadRequest: not JSON, deeper than `MAX_DEPTH`, or with more than `MAX_BRACKETS`, `MAX_COMMAS` or `MAX_VALUES`.
    """
    body = body.removeprefix(codecs.BOM_UTF8)
    if len(body) > MAX_BRACKETS and body.count(b"[") + body.count(b"{") > MAX_BRACKETS:
        raise BadRequest(f"the request body has more than {MAX_BRACKETS} brackets")
    if len(body) > MAX_COMMAS and body.count(b",") > MAX_COMMAS:
        raise BadRequest(f"the request body has more than {MAX_COMMAS} commas")
    try:
        parsed = surrogates.loads(body)
    except orjson.JSONDecodeError as error:
        reason = non_finite_literal(body, error.pos, error.msg) or error
        raise BadRequest(f"the request body is not valid JSON: {reason}") from None
    refuse_many_values(body, parsed, MAX_VALUES)
    if is_too_deep(body, parsed):
        raise BadRequest(f"the request body is nested deeper than {MAX_DEPTH} levels")
    return parsed


def refuse_many_values(body: bytes, parsed: Any, most: int) -> None:
    """Refuse a body that has too many values beside ids: `most` of them are small enough to look at each.

    Raises:
        BadRequest: it has more.
    """
    if may_have_many_values(body, most) and _has_many_values(parsed, most):
        raise BadRequest(f"the request body has more than {most} values beside lists of ids")


def may_have_many_values(body: bytes, most: int) -> bool:
    """Return whether JSON may have more than `most` values, as its length, or else its commas, say."""
    return len(body) > most and body.count(b",") + body.count(b"[") + body.count(b"{") > most


def _has_many_values(parsed: Any, most: int) -> bool:
    """Return whether there are more than `most` values, without looking at many more. Ids count nothing: lists of
    numbers that a field of the body is, or that stand in a list which is one."""
    fields = list(parsed.values()) if isinstance(parsed, dict) else [parsed]
    lists = [value for value in fields if isinstance(value, list)]
    waiting = [value for value in fields if isinstance(value, dict)]
    count = len(fields)
    for each in lists:
        if not _are_numbers(each):
            count += len(each)
            if count > most:
                return True
            waiting += [value for value in each if not _are_numbers(value)]
    while waiting and count <= most:
        value = waiting.pop()
        if isinstance(value, (dict, list)):
            count += len(value)
            if count <= most:
                waiting += value.values() if isinstance(value, dict) else value
    return count > most


def _are_numbers(value: object) -> bool:
    return isinstance(value, list) and NUMBERS.issuperset(map(type, value))


def is_too_deep(body: bytes, parsed: Any) -> bool:
    """Whether JSON has more than `MAX_DEPTH` levels."""
    few = len(body) < LONG and body.count(b"[") + body.count(b"{") <= MAX_DEPTH
    return not few and nests_too_deep(parsed)


def nests_too_deep(parsed: Any) -> bool:
    """Whether a JSON value has more than `MAX_DEPTH` levels, as its writer finds out: it stops within so many more."""
    for _ in range(_LEVELS_WRITTEN - MAX_DEPTH):
        parsed = [parsed]
    try:
        orjson.dumps(parsed)
    except orjson.JSONEncodeError:
        return True
    return False


def replay(body: bytes, receive: Receive) -> Receive:
    """A `receive` that gives `body` as the whole request and then whatever the client still says (its leaving)."""
    given = False

    async def replayed() -> Message:
        nonlocal given
        if given:
            return await receive()
        given = True
        return {"type": "http.request", "body": body, "more_body": False}

    return replayed


def with_body(scope: Scope, body: bytes) -> Scope:
    """A copy of `scope` for a changed body: the old Content-Length would be a lie to the layers inside."""
    headers = [(name, value) for name, value in scope["headers"] if name != b"content-length"]
    headers.append((b"content-length", str(len(body)).encode("ascii")))
    return {**scope, "headers": headers}


def request_id(scope: Mapping[str, Any]) -> str:
    """The client's `X-Request-Id` if it can safely be logged and sent on, else a new one."""
    for name, value in scope.get("headers", ()):
        if name == b"x-request-id":
            if 0 < len(value) <= MAX_REQUEST_ID_LENGTH and value.isascii() and value.decode().isprintable():
                return str(value, "ascii")
            break
    return f"mr-{_process}-{next(_count):x}"
