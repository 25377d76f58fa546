"""The request context that all layers share, kept in the ASGI scope: id, limits, parsed bodies, notes between layers.

A layer changes a body by passing a replayed `receive` inward, never by setting an attribute. Parsed bodies are cached
by the identity of the bytes, so the cache can never disagree with the bytes that are sent.
"""

from __future__ import annotations

import io
import itertools
import secrets
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from time import perf_counter
from typing import Any, NoReturn

from miles_router.asgi.headers import first_header
from miles_router.asgi.request_routing import Routing
from miles_router.engines.client_json import read_json
from miles_router.errors import BodyTooLarge, ClientDisconnected, RouterError

# The ASGI types under Starlette's names; defined here so that this module imports neither asgiref nor Starlette.
Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
#: Returns the JSON body of the answer for an error; the second argument is the request id.
ErrorBody = Callable[[RouterError, str], Mapping[str, Any]]

SCOPE_KEY = "miles_router.asgi.exchange"
MAX_REQUEST_ID_LENGTH = 128
#: Parsed bodies that are cached for one request: the client's body, and bodies that layers replaced it with.
REMEMBERED_PARSES = 8
UNBOUNDED = 1 << 62

_process = secrets.token_hex(4)
_count = itertools.count(1)


class ReadOnlyObject(dict[str, Any]):
    """A parsed JSON object that layers share. `orjson.dumps` accepts it; changing it raises TypeError."""

    def _refuse(self, *args: object, **kwargs: object) -> NoReturn:
        raise TypeError("the parsed body is shared between layers; change a copy: {**parsed, ...}")

    __setitem__ = __delitem__ = clear = pop = popitem = setdefault = update = __ior__ = _refuse


class Exchange:
    """The context of one request, shared by its layers. Get it with `Exchange.of(scope)`."""

    __slots__ = (
        "_parses",
        "adapter",
        "began_at",
        "error_body",
        "forwarded",
        "max_answer_bytes",
        "max_body_bytes",
        "mount",
        "notes",
        "pool",
        "request_id",
        "routing",
    )

    def __init__(self, request_id: str, *, max_body_bytes: int = UNBOUNDED, max_answer_bytes: int = UNBOUNDED) -> None:
        self.request_id = request_id
        #: `time.perf_counter()` at the request's head.
        self.began_at = perf_counter()
        self.max_body_bytes = max_body_bytes
        #: Maximum bytes of the reply that a layer buffers in order to read it.
        self.max_answer_bytes = max_answer_bytes
        #: Values that middlewares pass to each other; keys are dotted names (`"my_package.thing"`).
        self.notes: dict[str, Any] = {}
        #: The state of routing and aborting the request.
        self.routing = Routing()
        #: True when another process of the router answers the request.
        self.forwarded = False
        #: Formats the router's own errors; a layer that implements another API replaces it.
        self.error_body: ErrorBody = _body_of
        #: The name of the worker pool; None for the default pool.
        self.pool: str | None = None
        #: The beginning of the request's path that named the pool; `scope["path"]` and `raw_path` are without it.
        self.mount = ""
        #: The LoRA adapter that the request's `model` names.
        self.adapter: str | None = None
        self._parses: list[tuple[bytes, Any]] = []

    @classmethod
    def of(cls, scope: Scope) -> Exchange:
        """Return the context of the request that `scope` belongs to; the first call creates it."""
        exchange: Exchange | None = scope.get(SCOPE_KEY)
        if exchange is None:
            exchange = scope[SCOPE_KEY] = cls(request_id(scope))
        return exchange

    async def read(self, receive: Receive) -> bytes:
        """Read and return the whole request body.

        Raises:
            BodyTooLarge: the body is longer than `max_body_bytes`.
            ClientDisconnected: the client disconnected before the end of the body.
        """
        message = await receive()
        if message["type"] == "http.request" and not message.get("more_body", False):
            body: bytes = message.get("body", b"")
            self._check_size(len(body))
            return body
        return await self._read_parts(message, receive)

    async def _read_parts(self, message: Message, receive: Receive) -> bytes:
        body = io.BytesIO()  # not a list: a body that arrives byte by byte would take a hundred times its size
        while True:
            if message["type"] == "http.disconnect":
                raise ClientDisconnected("the client left before it had sent its request")
            body.write(message.get("body", b""))
            self._check_size(body.tell())
            if not message.get("more_body", False):
                return body.getvalue()
            message = await receive()

    def check_announced_size(self, scope: Scope) -> None:
        """Check Content-Length before the router reads the body (or asks for it with `100 Continue`).

        Raises:
            BodyTooLarge: Content-Length is larger than `max_body_bytes`.
        """
        announced = first_header(scope["headers"], b"content-length")
        if announced is not None and announced.isdigit():
            self._check_size(int(announced))

    def _check_size(self, size: int) -> None:
        if size > self.max_body_bytes:
            raise BodyTooLarge(f"the request body is larger than {self.max_body_bytes} bytes (--max-request-bytes)")

    def loads(self, body: bytes) -> Any:
        """Parse JSON, once per bytes object. Objects are read-only at the top level: change a copy, `{**parsed, ...}`.

        Raises:
            BadRequest: `read_json` cannot parse the body.
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
    """Return a `receive` that yields `body` as the whole request, then the client's messages (its disconnect)."""
    given = False

    async def replayed() -> Message:
        nonlocal given
        if given:
            return await receive()
        given = True
        return {"type": "http.request", "body": body, "more_body": False}

    return replayed


def with_body(scope: Scope, body: bytes) -> Scope:
    """Return a copy of `scope` whose Content-Length is the length of `body`."""
    headers = [(name, value) for name, value in scope["headers"] if name != b"content-length"]
    headers.append((b"content-length", str(len(body)).encode("ascii")))
    return {**scope, "headers": headers}


def request_id(scope: Mapping[str, Any]) -> str:
    """Return the client's `X-Request-Id` if it is printable ASCII of at most 128 characters, else a new id."""
    for name, value in scope.get("headers", ()):
        if name == b"x-request-id":
            if 0 < len(value) <= MAX_REQUEST_ID_LENGTH and value.isascii() and value.decode().isprintable():
                return str(value, "ascii")
            break
    return f"mr-{_process}-{next(_count):x}"
