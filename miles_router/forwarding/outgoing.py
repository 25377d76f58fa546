"""A request on its way to a worker: what is sent, what ties it to earlier ones, and sending it to one given worker."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from miles_router.asgi.headers import REQUEST_DROPPED, RawHeaders, end_to_end
from miles_router.engines.engine import RankWish
from miles_router.fleet.affinity import SESSION_PREFIX, Affinity
from miles_router.fleet.gate import computes, generates
from miles_router.fleet.workers import Worker
from miles_router.forwarding.reply import Reply
from miles_router.forwarding.upstream import Admit, Upstream

if TYPE_CHECKING:
    from miles_router.forwarding.used_names import NameUse

DROPPED = REQUEST_DROPPED | {b"x-request-id"}


class PairHistory:
    """One request's way to prefill/decode pairs."""

    __slots__ = ("interrupted", "sendings", "versions")

    def __init__(self) -> None:
        self.sendings = 0
        #: How often it was asked again since weights changed,
        self.interrupted = 0
        #: and the versions that prefill halves named then.
        self.versions: dict[Worker, str] = {}


class Outgoing:
    """A request on its way to a worker: framing headers removed, the path as it was spelled. One that `generates` is
    written only while the gate is open; one that `computes` is lost when the worker's engine stands still."""

    __slots__ = (
        "body",
        "computes",
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
        generates: bool = False,
        computes: bool = False,
        preferred: str | None = None,
        path: str = "",
    ) -> None:
        self.method = method
        self.target = target
        self.headers = headers
        self.body = body
        self.key = key
        self.generates = generates
        self.computes = computes
        #: The target's path, decoded; empty where no engine has to be asked otherwise.
        self.path = path
        #: The URL of the worker that takes it, while that one takes requests.
        self.preferred = preferred
        #: What it says of ranks, once somebody has looked.
        self.rank_wish: RankWish | None = None
        #: Its names at the worker that has it, where its client gives some.
        self.names: NameUse | None = None
        #: Workers that lost it before a reply began.
        self.tried: tuple[Worker, ...] = ()
        #: Once a pair was asked.
        self.pair: PairHistory | None = None


def outgoing(scope: Mapping[str, Any], request_id: str, body: bytes, affinity: Affinity) -> Outgoing:
    """The request that `scope` and `body` describe, with the request id every worker is told."""
    headers = end_to_end(scope["headers"], DROPPED)
    headers.append((b"x-request-id", request_id.encode("ascii")))
    target = scope["raw_path"]
    if scope["query_string"]:
        target = b"%b?%b" % (target, scope["query_string"])
    path = scope["path"]
    linked = path.startswith(SESSION_PREFIX)
    for name, _ in headers:
        if name in affinity.links:
            linked = True
            break
    key, generating = affinity.named(path, headers) if linked else None, generates(path)
    if key is None:
        key = affinity.in_body(path, body)
    computing = generating or computes(path)
    return Outgoing(scope["method"], target, headers, body, key, generates=generating, computes=computing, path=path)


async def send(
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
) -> Reply:
    """Send `request` to one worker with that worker's key, without a lease. `slot`, `admit` and `fresh` are those of
    `Upstream.open`; `target`, `body` and `headers` are sent in place of the request's. The caller closes the reply.

    Raises:
        UpstreamError, NotAdmitted: as `Upstream.open`.
    """
    headers = request.headers if headers is None else headers
    if worker.engine is not None and (unwanted := worker.engine.unwanted_headers):
        headers = [pair for pair in headers if pair[0] not in unwanted]
    if worker.api_key is not None:
        headers = [pair for pair in headers if pair[0] != b"authorization"]
        headers.append((b"authorization", b"Bearer " + worker.api_key.encode()))
    return await upstream.open(
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
