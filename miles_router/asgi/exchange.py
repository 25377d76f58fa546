"""One request as all layers share it, kept in the ASGI scope: id, limits, parsed bodies, routing, the outermost `send`.

A layer changes a body by passing a replayed `receive` inward, never by setting an attribute. Parsed bodies are cached
by the identity of the bytes, so the cache can never disagree with the bytes that are sent.
"""

from __future__ import annotations

import io
import itertools
import secrets
from collections.abc import Awaitable, Callable, Collection, Iterator, Mapping, MutableMapping, Sequence
from time import perf_counter
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

from miles_router.asgi.wire import first_header
from miles_router.engines.json_bytes import read_json
from miles_router.errors import BodyTooLarge, ClientDisconnected, RouterError

if TYPE_CHECKING:
    from miles_router.asgi.wire import RawHeaders
    from miles_router.fleet.evaluation import Evaluation
    from miles_router.fleet.workers import Worker
    from miles_router.partial_rollouts.moves.moved import Relocation
    from miles_router.serving.client_request import ClientRequest

_arrivals = itertools.count(1)


class UsedCache(NamedTuple):
    """A prefix cache that an engine used for sampling.

    `versions` returns the weight versions that may have filled it so far, oldest first; None stands for weights of
    unknown version.
    """

    number: int
    versions: Callable[[], Sequence[str | None]]


class Mark(NamedTuple):
    """A moment of a request.

    Attributes:
        at: `time.perf_counter()`.
        request: the `Routing.number` of the attempt, which differs between generations that run side by side.
    """

    name: str
    at: float
    request: int
    facts: Mapping[str, Any]


class Routing:
    """The routing and abort state of one request. The proxy writes it; an abort marks it."""

    __slots__ = (
        *(
            "aborted",
            "excluded_workers",
            "caches",
            "first_byte_at",
            "continued_cache",
            "evaluation",
            "group",
            "inward",
            "marks",
            "model",
            "movable",
            "move",
            "number",
        ),
        *("preferred", "prefill_url", "private", "rank", "rids", "stop", "waited", "waits", "worker_headers"),
        "worker_url",
    )

    def __init__(self) -> None:
        #: Arrival order: lower for an earlier request.
        self.number = next(_arrivals)
        #: The requested model, if it was not the name of an adapter when the request arrived.
        self.model: str | None = None
        #: The worker that answered, or the last worker that was tried.
        self.worker_url: str | None = None
        #: The prefill worker of a prefill/decode pair, while it computes the prompt.
        self.prefill_url: str | None = None
        #: The rank on `worker_url`; None if the router does not choose ranks there.
        self.rank: int | None = None
        #: The URL of the worker to use next, as long as it is routable.
        self.preferred: str | None = None
        #: Returns the workers that must not get the request; called at each choice of a worker. None: all may.
        self.excluded_workers: Callable[[], Collection[Worker]] | None = None
        #: True if another worker can continue the generation: `/generate` without a session key or a cache to keep.
        self.movable = False
        #: The move to another worker that is in progress.
        self.move: Relocation | None = None
        #: `time.perf_counter()` at the head of the worker's reply.
        self.first_byte_at: float | None = None
        #: The one weight version that may sample the request; None if it is not part of an evaluation.
        self.evaluation: Evaluation | None = None
        #: The number of the prefix cache to use, because the request continues tokens that were sampled with it.
        self.continued_cache: int | None = None
        #: The prefix caches that its attempts were sampled with, in order.
        self.caches: list[UsedCache] = []
        #: How many of its generations wait now, at the gate or for admission.
        self.waits = 0
        #: Seconds in which at least one of its generations has waited, in total.
        self.waited = 0.0
        #: True after a client asked to abort it: the router must not resume the generation.
        self.aborted = False
        #: The value of `X-Group-Id`: requests of one group can be aborted together.
        self.group: bytes | None = None
        #: Breaks the request off with an error; set while the request is at a worker.
        self.stop: Callable[[RouterError], None] | None = None
        #: Ids that workers gave its generations (SGLang's `meta_info.id`), as far as a layer has read them.
        self.rids: set[str] = set()
        #: Outer name (`rid`) of a generation -> the name used for it one step closer to the engine. Outer names are the
        #: client's, or the name of one attempt.
        self.inward: dict[str, str] = {}
        #: True if the client's generation names are private to it, so that engines get other names.
        self.private = False
        #: The moments of the request, kept where a middleware has put a list here.
        self.marks: list[Mark] | None = None
        #: Returns the headers for the worker in place of those given, with the key that ties the request to earlier
        #: ones; called for each attempt to generate.
        self.worker_headers: Callable[[RawHeaders, str | None], RawHeaders] | None = None

    def mark(self, name: str, worker: Worker | None = None, **facts: object) -> None:
        """Keep this moment where a middleware wants the request's."""
        if self.marks is not None:
            if worker is not None:
                facts.update(worker=worker.url, weight_version=worker.weight_version)
            self.marks.append(Mark(name, perf_counter(), self.number, facts))

    @property
    def urls(self) -> set[str]:
        """The URLs of the workers that process the request."""
        return {url for url in (self.worker_url, self.prefill_url) if url is not None}

    def names_inward(self, name: str) -> Iterator[str]:
        """Yield the inner names of the generation that the client calls `name`. Outdated names may be among them."""
        while name in self.inward:
            name = self.inward[name]
            yield name

    @property
    def cache(self) -> int | None:
        """The number of the prefix cache used last; a request that continues these tokens uses the same one."""
        return self.caches[-1].number if self.caches else None

    @property
    def cache_versions(self) -> list[str | None]:
        """The weight versions that may have computed the cached prefixes that engines used, without repeats."""
        return list(dict.fromkeys(version for used in self.caches for version in used.versions()))


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


#: The key in the scope's `extensions` under which the router's own server offers its request, which writes body bytes
#: directly to the client's connection.
SINK = "miles_router.sink"
X_REQUEST_ID = b"x-request-id"


class Outlet:
    """The outermost `send`: adds `X-Request-Id` to the reply and records its status.

    An ASGI message for each event of a stream wakes a task, creates a dictionary and calls every layer. If no layer has
    wrapped `send`, no code reads these messages, so the worker's bytes are written directly to the client's connection,
    the `sink`. A layer that wraps it sees every message; the wrapper has no `sink`, which turns this fast path off.
    """

    __slots__ = ("_request_id", "_send", "sink", "status")

    def __init__(self, send: Send, scope: Scope, request_id: str) -> None:
        self._send = send
        self._request_id = request_id.encode("ascii")
        #: 0 until a reply has begun.
        self.status = 0
        self.sink: ClientRequest | None = scope["extensions"].get(SINK) if "extensions" in scope else None

    def __call__(self, message: Message) -> Awaitable[None]:
        """Send one ASGI message. Not a coroutine, because it runs for every chunk."""
        if message["type"] != "http.response.start":
            return self._send(message)
        headers = [*message.get("headers", ())]
        if first_header(headers, X_REQUEST_ID) is not None:
            headers = [pair for pair in headers if pair[0] != X_REQUEST_ID]
        headers.append((X_REQUEST_ID, self._request_id))
        sent = self._send({**message, "headers": headers})
        self.status = message["status"]  # only now: if the server refuses the message, no reply has begun
        return sent
