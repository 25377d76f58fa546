"""The outgoing form of a request, its session key, and sending it to one given worker."""

from __future__ import annotations

from collections.abc import Coroutine, Mapping
from typing import TYPE_CHECKING, Any

from miles_router.asgi.headers import REQUEST_DROPPED, RawHeaders, end_to_end
from miles_router.engines.engine import RankWish
from miles_router.engines.known import COMPUTED, GENERATION
from miles_router.fleet.affinity import SESSION_PREFIX, Affinity
from miles_router.fleet.gate import endpoint
from miles_router.fleet.workers import Worker
from miles_router.forwarding.reply import Reply
from miles_router.forwarding.upstream import Admit, Upstream

if TYPE_CHECKING:
    from miles_router.forwarding.used_names import NameUse

DROPPED = REQUEST_DROPPED | {b"x-request-id"}


class PairHistory:
    """The history of one request's attempts at prefill/decode pairs."""

    __slots__ = ("attempts", "interruptions", "versions")

    def __init__(self) -> None:
        self.attempts = 0
        #: How many attempts ended because weights changed in the meantime.
        self.interruptions = 0
        #: The weight version that each prefill worker reported last.
        self.versions: dict[Worker, str] = {}


class Outgoing:
    """A request to send to a worker, without framing headers and with the original spelling of its path."""

    __slots__ = (
        "body",
        "computes",
        "endpoint",
        "generates",
        "headers",
        "key",
        "method",
        "names",
        "pair",
        "path",
        "preferred",
        "rank_wish",
        "target",
        "tried",
    )

    def __init__(
        self,
        method: str,
        target: bytes,
        headers: RawHeaders,
        body: bytes,
        key: str | None = None,
        *,
        preferred: str | None = None,
        path: str = "",
    ) -> None:
        self.method = method
        self.target = target
        self.headers = headers
        self.body = body
        self.key = key
        #: The decoded path; empty for the router's own requests, which need no translation.
        self.path = path
        #: The engine's part of the path.
        self.endpoint = endpoint(path)
        #: Whether the request is a generation: it is written only while the gate is open.
        self.generates = self.endpoint in GENERATION
        #: Whether the engine works on the request: it fails when the worker's engine stalls.
        self.computes = self.generates or self.endpoint in COMPUTED
        #: The URL of the worker to use, as long as it is routable.
        self.preferred = preferred
        #: The data-parallel rank that the client asks for; None until it was looked up.
        self.rank_wish: RankWish | None = None
        #: The use of its generation names at the present worker; None if the client gave no names.
        self.names: NameUse | None = None
        #: Workers that were lost before a reply began.
        self.tried: tuple[Worker, ...] = ()
        #: The attempts at prefill/decode pairs; None before the first.
        self.pair: PairHistory | None = None


def outgoing(scope: Mapping[str, Any], request_id: str, body: bytes, affinity: Affinity) -> Outgoing:
    """Return the request of `scope` and `body` in the form for workers, with `request_id` as `X-Request-Id`."""
    headers = end_to_end(scope["headers"], DROPPED)
    headers.append((b"x-request-id", request_id.encode("ascii")))
    target = scope["raw_path"]
    if scope["query_string"]:
        target = b"%b?%b" % (target, scope["query_string"])
    path = scope["path"]
    linked = path.startswith(SESSION_PREFIX) or not affinity.header_names.isdisjoint(dict(headers))
    key = affinity.key_from_headers(path, headers) if linked else None
    if key is None:
        key = affinity.key_from_body(path, body)
    return Outgoing(scope["method"], target, headers, body, key, path=path)


def send(
    upstream: Upstream,
    worker: Worker,
    request: Outgoing,
    *,
    target: bytes | None = None,
    body: bytes | None = None,
    headers: RawHeaders | None = None,
    slot: bool = True,
    admit: Admit | None = None,
    fresh: bool = False,
) -> Coroutine[Any, Any, Reply]:
    """Send `request` to one worker with that worker's API key, and wait for the head of the reply. Takes no lease.

    The caller closes the reply.

    Args:
        target, body, headers: sent in place of the request's own.
        slot, admit, fresh: see `Upstream.open`.

    Raises:
        UpstreamError, NotAdmitted: raised by `Upstream.open`.
    """
    headers = request.headers if headers is None else headers
    if worker.engine is not None and (unwanted := worker.engine.unwanted_headers):
        headers = [pair for pair in headers if pair[0] not in unwanted]
    if worker.api_key is not None:
        headers = [pair for pair in headers if pair[0] != b"authorization"]
        headers.append((b"authorization", b"Bearer " + worker.api_key.encode()))
    return upstream.open(
        worker.address,
        request.method,
        request.target if target is None else target,
        headers,
        request.body if body is None else body,
        slot=slot,
        admit=admit,
        pulse=worker.pulse if request.computes else None,
        once=request.computes,
        fresh=fresh,
    )
