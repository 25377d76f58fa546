"""A forwarded request: its outgoing form, the generation names (`rid`) that engines may still use, and the worker's
reply with the lease on that worker.

SGLang 0.5.23 checks only every 4 s whether the client of a non-streamed answer is still connected, and refuses a second
use of its name until then. 2 s after the end of a stream it aborts the generation that has the stream's name at that
time (`TokenizerManager`). So a client that disconnects and repeats its request at once would get a refusal or an
aborted answer.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Collection, Coroutine, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any

from miles_router import tasks
from miles_router.asgi.wire import REQUEST_DROPPED, RawHeaders, end_to_end, first_header
from miles_router.engines.actions import Abort
from miles_router.engines.engine import CannotServe, RankWish
from miles_router.engines.json_bytes import read_json, sampled_tokens
from miles_router.engines.known import COMPUTED, GENERATION, USUAL
from miles_router.engines.names import engine_names
from miles_router.errors import BadRequest, UpstreamError
from miles_router.fleet.gate import endpoint
from miles_router.fleet.placement.sessions import SESSION_PREFIX, Affinity
from miles_router.fleet.pool import WorkerPool
from miles_router.fleet.worker_table import Lease
from miles_router.fleet.workers import Worker
from miles_router.forwarding.parts import MergedStream
from miles_router.forwarding.reply import Reply
from miles_router.forwarding.translated import EVENTS, HeldReply, RewrittenStream
from miles_router.forwarding.upstream import Admit, Upstream

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


#: Seconds after the end of a request during which its worker gets no generation with the same name.
KEPT = 30.0
#: Maximum number of names remembered after the end of their requests; the oldest are dropped first.
MAX_NAMES = 10_000
#: Maximum number of aborts for one abandoned request. The engine detects the disconnect of the rest by itself.
MAX_ABORTS = 256
#: Maximum number of aborts in progress.
ABORTS_AT_ONCE = 32


class NameUse:
    """The generation names of one request at the workers that got the request.

    Args:
        own: the client's names, if the workers got those.
        others: the names that the workers got in place of the client's.
    """

    __slots__ = ("_ended", "_table", "others", "own", "workers")

    def __init__(
        self, table: UsedNames, workers: Sequence[Worker], own: Collection[str], others: Collection[str]
    ) -> None:
        self.workers = workers
        self.own = own
        self.others = others
        self._table = table
        self._ended = False
        table.sent.update((worker, name) for worker in workers for name in own)

    def end(self, *, released: bool) -> None:
        """Record that the request is over. Idempotent.

        Args:
            released: True if the workers certainly do not use the names any more.
        """
        if not self._ended:
            self._ended = True
            self._table.end([(worker, name) for worker in self.workers for name in self.own], released=released)


class UsedNames:
    """The generation names that each worker got from clients and may still use."""

    def __init__(self) -> None:
        self.sent: Counter[tuple[Worker, str]] = Counter()
        self._ended: dict[tuple[Worker, str], float] = {}
        self._aborting: Counter[tuple[Worker, str]] = Counter()

    def __len__(self) -> int:
        return len(self.sent) + len(self._ended)

    def any_used(self, worker: Worker, names: Collection[str]) -> bool:
        """Return True if the worker may still use one of these names, or an abort in progress could match one."""
        oldest_kept = time.monotonic() - KEPT
        while self._ended and (oldest := next(iter(self._ended.items())))[1] < oldest_kept:
            del self._ended[oldest[0]]
        if any((worker, name) in self.sent or (worker, name) in self._ended for name in names):
            return True
        return any(
            each is worker and _abort_matches(name, aborted) for each, aborted in self._aborting for name in names
        )

    def end(self, keys: Sequence[tuple[Worker, str]], *, released: bool) -> None:
        """Record that a request with these names is over (see `NameUse.end`)."""
        for key in keys:
            self.sent[key] -= 1
            if not self.sent[key]:
                del self.sent[key]
            if not released:
                self._ended.pop(key, None)
                self._ended[key] = time.monotonic()
        while len(self._ended) > MAX_NAMES:
            del self._ended[next(iter(self._ended))]

    def would_end_others(self, worker: Worker, name: str) -> bool:
        """Return True if an abort of this name could also end a generation of another running request."""
        return any(each is worker and _abort_matches(sent, name) for each, sent in self.sent)

    @contextmanager
    def aborting(self, worker: Worker, name: str) -> Iterator[None]:
        """Mark an abort of this name as in progress while the block runs, so that `any_used` reports matching names."""
        key = (worker, name)
        self._aborting[key] += 1
        try:
            yield
        finally:
            self._aborting[key] -= 1
            if not self._aborting[key]:
                del self._aborting[key]


def _abort_matches(name: str, aborted: str) -> bool:
    """Return True if an abort of `aborted` could end the generation `name`.

    SGLang aborts by prefix, and a list of prompts with the name `r` runs as `r_0`, `r_1`.
    """
    return name.startswith(aborted) or aborted.startswith(f"{name}_")


class AbandonedRequests:
    """A sender of aborts for requests whose clients have disconnected. Aborts run in the background."""

    def __init__(self, names: UsedNames, upstream: Upstream, pool: WorkerPool) -> None:
        self._names = names
        self._upstream = upstream
        self._pool = pool
        self._slots = asyncio.Semaphore(ABORTS_AT_ONCE)

    def abort(self, request: Outgoing) -> None:
        """Start aborts of the request's generations at its workers; return without waiting."""
        use, request.names = request.names, None
        if use is not None:
            for worker in use.workers:
                tasks.spawn(self._abort_at(worker, use, request), name=f"aborts at {worker.url}")

    async def _abort_at(self, worker: Worker, use: NameUse, request: Outgoing) -> None:
        names = use.others
        if not names:
            with suppress(BadRequest):  # the engine has refused an unreadable body too
                names = engine_names(request.endpoint, request.body, read_json)
        for name in sorted(names)[:MAX_ABORTS]:
            async with self._slots:
                # SGLang aborts all names that begin with this one. If that would hit other requests, send no abort: the
                # engine ends the generation when it detects the disconnect.
                if self._pool.find(worker.url) is worker and not self._names.would_end_others(worker, name):
                    with self._names.aborting(worker, name):
                        await self._send_abort(worker, name)

    async def _send_abort(self, worker: Worker, name: str) -> None:
        # If the abort fails, the engine ends the generation when it detects the disconnect.
        with suppress(CannotServe, UpstreamError, TimeoutError):
            order = (worker.engine or USUAL).order(Abort(name))
            asked = Outgoing(order.method, order.target, [(b"content-type", b"application/json")], order.body)
            sending = send(self._upstream, worker, asked, slot=False)
            reply = await tasks.within(self._upstream.connect_timeout, sending, name=f"abort at {worker.url}")
            reply.close()


#: From this status on the engine refused the request and has nothing of it in its cache.
REFUSED = 400
#: The reply types of all ways to send a request.
AnyReply = Reply | HeldReply | RewrittenStream | MergedStream


class Forwarded:
    """A reply and the lease on its worker; `close` ends both."""

    __slots__ = ("_names", "lease", "reply", "worker")

    def __init__(self, lease: Lease, reply: AnyReply, names: NameUse | None) -> None:
        self.lease = lease
        self.worker: Worker = lease.worker
        self.reply = reply
        self._names = names

    def close(self) -> None:
        """Close the reply, release the lease, and record that its generation names are free. Idempotent."""
        lease, answered = self.lease, self.reply.status < REFUSED
        if self._names is not None:
            streams = (first_header(self.reply.headers, b"content-type") or b"").startswith(EVENTS)
            # The engine may have refused because it still has the name. It aborts a stream's name 2 s after the end.
            self._names.end(released=answered and self.reply.exhausted and not streams)
        self.reply.close()
        lease.release(
            answered=answered, sampled=sampled_tokens(self.reply.end) if answered and lease.measures_pace else 0
        )
