"""One request's record, kept in the ASGI scope: its id, its body, its parse, notes between layers.

The wire is the only truth: a body changes by passing a replayed `receive` inward, never by an attribute on a request
object. What is remembered here is keyed by the identity of the bytes, so it can save work and can never disagree
with what is sent.
"""

from __future__ import annotations

import io
import itertools
import secrets
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from time import perf_counter
from typing import Any, NoReturn

from miles_router.asgi.flight import Flight
from miles_router.asgi.headers import first_header
from miles_router.engines.client_json import read_json
from miles_router.errors import BodyTooLarge, ClientDisconnected, RouterError

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
        "began_at",
        "error_body",
        "flight",
        "forwarded",
        "max_answer_bytes",
        "max_body_bytes",
        "notes",
        "pool",
        "request_id",
    )

    def __init__(self, request_id: str, *, max_body_bytes: int = UNBOUNDED, max_answer_bytes: int = UNBOUNDED) -> None:
        self.request_id = request_id
        #: `time.perf_counter()` at the request's head.
        self.began_at = perf_counter()
        self.max_body_bytes = max_body_bytes
        #: Bytes of the reply that a layer which reads it holds at most.
        self.max_answer_bytes = max_answer_bytes
        #: Free for middlewares to leave each other things; keys are dotted names (`"my_package.thing"`).
        self.notes: dict[str, Any] = {}
        #: Where it is on its way to a worker.
        self.flight = Flight()
        #: Another process answers it.
        self.forwarded = False
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
        announced = first_header(scope["headers"], b"content-length")
        if announced is not None and announced.isdigit():
            self._check_size(int(announced))

    def _check_size(self, size: int) -> None:
        if size > self.max_body_bytes:
            raise BodyTooLarge(f"the request body is larger than {self.max_body_bytes} bytes (--max-request-bytes)")

    def loads(self, body: bytes) -> Any:
        """Parse JSON, at most once per distinct body. An object comes read-only: change a copy, `{**parsed, ...}`.

        Raises:
            BadRequest: as `read_json`.
        """
        for known, parsed in self._parses:
            if known is body:
                return parsed
        parsed = read_json(body)
        if isinstance(parsed, dict):
            parsed = ReadOnlyObject(parsed)
        self._parses = [*self._parses[1 - REMEMBERED_PARSES :], (body, parsed)]
        return parsed


def _body_of(error: RouterError, request_id: str) -> Mapping[str, Any]:
    return error.body(request_id)


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
