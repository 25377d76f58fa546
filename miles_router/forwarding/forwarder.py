"""One request to one worker of the pool: choose, send, and on a failure that is safe to repeat choose another.

The innermost ASGI app and `Router.forward` both go through here, so that leases, retries and their metrics have one
home. Repeating is safe exactly as long as no part of a reply exists (`UpstreamUnreachable`).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

from miles_router.asgi.headers import REQUEST_DROPPED, RawHeaders, end_to_end
from miles_router.errors import UpstreamUnreachable
from miles_router.fleet.gate import SESSION_PREFIX
from miles_router.fleet.workers import Lease, Policy, Worker, WorkerPool
from miles_router.forwarding.connection import Reply
from miles_router.forwarding.upstream import Upstream
from miles_router.metrics import Metrics

logger = logging.getLogger(__name__)

AFFINITY_HEADERS = (b"x-smg-routing-key", b"x-session-id")
MAX_KEY_LENGTH = 512
DROPPED = REQUEST_DROPPED | {b"x-request-id"}


class Outgoing:
    """A request on its way to a worker: framing headers removed, the path as it was spelled."""

    __slots__ = ("body", "headers", "key", "method", "target")

    def __init__(self, method: str, target: bytes, headers: RawHeaders, body: bytes, key: str | None = None) -> None:
        self.method = method
        self.target = target
        self.headers = headers
        self.body = body
        self.key = key


def outgoing(scope: Mapping[str, Any], request_id: str, body: bytes) -> Outgoing:
    """The request that `scope` and `body` describe, with the request id every worker is told."""
    headers = end_to_end(scope["headers"], DROPPED)
    headers.append((b"x-request-id", request_id.encode("ascii")))
    target = scope["raw_path"]
    if scope["query_string"]:
        target = b"%b?%b" % (target, scope["query_string"])
    return Outgoing(scope["method"], target, headers, body, affinity_key(scope["path"], headers))


def affinity_key(path: str, headers: RawHeaders) -> str | None:
    """What ties this request to earlier ones: a routing key, a session header, or the session in the path."""
    found: bytes | None = None
    for name, value in headers:
        if name == AFFINITY_HEADERS[0]:
            found = value
            break
        if name == AFFINITY_HEADERS[1]:
            found = value
    if found is not None:
        return found[:MAX_KEY_LENGTH].decode("latin-1")
    if path.startswith(SESSION_PREFIX):
        return path[len(SESSION_PREFIX) :].partition("/")[0][:MAX_KEY_LENGTH] or None
    return None


class Forwarded:
    """A reply together with the lease that pays for it."""

    __slots__ = ("lease", "reply")

    def __init__(self, lease: Lease, reply: Reply) -> None:
        self.lease = lease
        self.reply = reply

    @property
    def worker(self) -> Worker:
        """Who answers."""
        return self.lease.worker

    def close(self) -> None:
        """Give up both; harmless when repeated."""
        self.reply.close()
        self.lease.release()


class Forwarder:
    """Sends requests into the pool."""

    def __init__(
        self, *, pool: WorkerPool, policy: Policy, upstream: Upstream, metrics: Metrics, max_retries: int
    ) -> None:
        self._pool = pool
        self._policy = policy
        self._upstream = upstream
        self._metrics = metrics
        self._max_retries = max_retries

    async def open(self, request: Outgoing, chosen: Callable[[Worker], None] | None = None) -> Forwarded:
        """Send `request` to the worker that policy chooses and wait for the head of its reply.

        The caller closes what it gets; `chosen` is told of every worker before that is asked. A worker that cannot be
        reached is replaced by another, `max_retries` times.

        Raises:
            NoWorkerAvailable: no routable worker at all.
            UpstreamUnreachable: those that were tried could not be reached.
            UpstreamInvalidResponse: a worker answered something that is not HTTP.
        """
        tried: list[Worker] = []
        while True:
            lease = self._pool.lease(self._policy, request.key, tried)
            if chosen is not None:
                chosen(lease.worker)
            try:
                return Forwarded(lease, await self.send_to(lease.worker, request))
            except UpstreamUnreachable as error:
                lease.release()
                tried.append(lease.worker)
                self._unreachable(lease.worker, error)
                if len(tried) > self._max_retries or not self._others(tried):
                    error.attempts = len(tried)
                    raise
                self._metrics.retries += 1
            except BaseException:
                lease.release()
                raise

    async def send_to(self, worker: Worker, request: Outgoing, *, slot: bool = True) -> Reply:
        """Send `request` to one worker, without a lease: control requests and such, which take no `slot` of
        `--max-connections` either. The caller closes the reply.

        Raises:
            UpstreamError: as `Upstream.open`.
        """
        headers = request.headers
        if worker.api_key is not None:
            headers = [pair for pair in headers if pair[0] != b"authorization"]
            headers.append((b"authorization", b"Bearer " + worker.api_key.encode()))
        return await self._upstream.open(
            worker.address, request.method, request.target, headers, request.body, slot=slot
        )

    def _unreachable(self, worker: Worker, error: UpstreamUnreachable) -> None:
        logger.warning("worker_unreachable", extra={"fields": {"worker": worker.url, "reason": str(error)}})
        if error.refused:
            self._pool.record_failure(worker, str(error))

    def _others(self, tried: list[Worker]) -> bool:
        return any(worker not in tried for worker in self._pool.routable)
