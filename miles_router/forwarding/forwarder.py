"""One request into the fleet: choose, send, and on a failure that is safe to repeat choose another.

The innermost ASGI app and `Router.forward` both go through here, so that leases, retries and their metrics have one
home. Repeating is safe exactly as long as no part of a reply exists (`UpstreamUnreachable`).
"""

from __future__ import annotations

import logging
from contextlib import suppress

from miles_router.asgi.exchange import read_json
from miles_router.asgi.flight import Flight, UsedCache
from miles_router.engines.caches import takes_cache_key, with_cache_key
from miles_router.engines.generate import UnknownShape
from miles_router.engines.profile import CannotServe, Translation
from miles_router.errors import BadRequest, FleetPaused, UnsupportedByEngine, UpstreamUnreachable
from miles_router.fleet.caches import cache_key
from miles_router.fleet.fleet import Fleet
from miles_router.fleet.gate import endpoint
from miles_router.fleet.pool import Lease
from miles_router.fleet.workers import Unit, Worker
from miles_router.forwarding.outgoing import Outgoing, send
from miles_router.forwarding.ranks import Ranks
from miles_router.forwarding.reply import Reply
from miles_router.forwarding.translated import TranslatedReply, translated
from miles_router.forwarding.upstream import NotAdmitted, Upstream
from miles_router.metrics import Metrics

logger = logging.getLogger(__name__)

ABORTED = "aborted while it waited for the fleet to go on"


class Forwarded:
    """A reply together with the lease that pays for it."""

    __slots__ = ("lease", "reply")

    def __init__(self, lease: Lease, reply: Reply | TranslatedReply) -> None:
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


class UnkeyedPaths(set[str]):
    """The paths of one engine process whose requests take no key of their cache. Kept with its facts, and gone with
    them."""


class Forwarder:
    """Sends requests into the fleet."""

    def __init__(
        self, *, fleet: Fleet, upstream: Upstream, metrics: Metrics, max_retries: int, max_answer_bytes: int
    ) -> None:
        self._max_answer_bytes = max_answer_bytes
        self._fleet = fleet
        self._upstream = upstream
        self._metrics = metrics
        self._ranks = Ranks(fleet, metrics)
        self._max_retries = max_retries

    async def open(self, request: Outgoing, flight: Flight | None = None) -> Forwarded:
        """Send `request` to the worker that policy chooses and wait for the head of its reply.

        The caller closes what it gets; `flight` is told of every worker before that is asked. A worker that cannot be
        reached is replaced by another, `max_retries` times.

        Raises:
            NotAdmitted: the gate has closed, or the worker's weights have changed, before a byte of it was written.
                Wait at the gate, and call again.
            NoWorkerAvailable: no routable worker at all.
            UpstreamUnreachable: those that were tried could not be reached.
            UpstreamInvalidResponse: a worker answered something that is not HTTP.
            UnsupportedByEngine: no worker's engine would answer it as it is meant; none was asked.
            BadRequest: an engine has to be asked otherwise, and the body cannot be read.
        """
        unable: tuple[Worker, ...] = ()
        while True:
            rank = self._ranks.wished(request) if self._fleet.snapshot.ranked else None
            lease = self._fleet.lease(request.key, (*request.tried, *unable), request.preferred, rank)
            worker = lease.worker
            if flight is not None:
                flight.worker_url, flight.rank = worker.url, lease.unit.rank
            try:
                return Forwarded(lease, await self._ask(lease.unit, request, flight))
            except CannotServe as refusal:
                lease.release()
                unable += (worker,)
                if not self._others((*request.tried, *unable)):
                    raise UnsupportedByEngine(f"the engine of {worker.url} cannot serve this: {refusal}") from None
            except UpstreamUnreachable as error:
                lease.release()
                request.tried += (worker,)
                self._unreachable(worker, error)
                if len(request.tried) > self._max_retries or not self._others(request.tried):
                    error.attempts = len(request.tried)
                    raise
                self._metrics.retries += 1
            except BaseException:
                lease.release()
                raise

    async def _ask(self, unit: Unit, request: Outgoing, flight: Flight | None) -> Reply | TranslatedReply:
        """Ask one unit as its engine has to be asked.

        Raises:
            CannotServe: the engine would answer something else than is meant; it was not asked.
            The errors of `open`.
        """
        worker = unit.worker
        profile = (worker.profile or await self._fleet.profile(worker)) if request.computes else None
        translation = None
        if profile is not None and profile.translate is not None:
            try:
                translation = profile.translate(request.path, request.body, read_json)
            except UnknownShape as error:
                raise BadRequest(f"the request is none that this engine can be asked: {error.reason}") from None
        if flight is not None and translation is not None:
            flight.inward |= translation.rids
        version = worker.weight_version
        if request.generates:
            reply = await self._generate(unit, request, translation, flight)
        else:
            reply = await send(self._upstream, worker, request, body=None if translation is None else translation.body)
        if translation is None:
            return reply
        try:
            return await translated(
                reply, translation, lambda: worker.weight_version, sent_under=version, limit=self._max_answer_bytes
            )
        except BaseException:
            reply.close()
            raise

    async def _generate(
        self, unit: Unit, request: Outgoing, translation: Translation | None, flight: Flight | None
    ) -> Reply:
        """Send what generates. Once the worker's weights have changed, it is kept apart from older caches."""
        worker = unit.worker
        gate, caches, cache = self._fleet.gate, worker.caches, 0
        body = None if translation is None else translation.body
        now = caches.number
        if now:
            cache = caches.choose(None if flight is None else flight.goes_on)
        if cache and await self._keyed(worker, request, translation):
            body = with_cache_key(request.body if body is None else body, cache_key(cache))
        else:
            cache = 0
        pin = (
            None if unit.rank is None else await self._ranks.pin(unit, request, request.body if body is None else body)
        )
        reply = await send(
            self._upstream,
            worker,
            request,
            body=body if pin is None else pin.body,
            headers=None if pin is None else pin.headers,
            admit=lambda: not gate.closed and worker.caches is caches and caches.number == now and not unit.retired,
        )
        if pin is not None:
            self._ranks.watch(reply, unit, pin.rank, request.path)
        if flight is not None:
            flight.caches.append(UsedCache(cache, lambda: caches.versions(cache, worker.weight_version)))
        return reply

    async def _keyed(self, worker: Worker, request: Outgoing, translation: Translation | None) -> bool:
        """Whether the engine keeps the caches of this request apart by a key. One that does not is counted."""
        facts = await self._fleet.facts(worker.url)
        encoded = any(name == b"content-encoding" for name, _ in request.headers)
        heeded = translation is None or translation.heeds_cache_key
        if heeded and not encoded and takes_cache_key(facts, request.path):
            return True
        self._metrics.unkeyed_generations += 1
        path = endpoint(request.path)  # one of few: a client chooses the rest
        if path not in (unkeyed := facts.learned(UnkeyedPaths)):
            unkeyed.add(path)
            logger.warning("caches_not_kept_apart", extra={"fields": {"worker": worker.url, "path": path}})
        return False

    async def open_when_admitted(self, request: Outgoing, waiting: Flight) -> Forwarded:
        """`open`, and before it a wait at the gate where that is closed. An abort of `waiting` ends the wait.

        Raises:
            FleetPaused: it was aborted there, has waited for too long, or was one too many.
            The errors of `open`.
        """
        gate = self._fleet.gate
        while True:
            if request.generates and gate.closed:
                await gate.wait(waiting)
                if waiting.aborted:
                    raise FleetPaused(ABORTED)
            with suppress(NotAdmitted):
                return await self.open(request)

    def _unreachable(self, worker: Worker, error: UpstreamUnreachable) -> None:
        logger.warning("worker_unreachable", extra={"fields": {"worker": worker.url, "reason": str(error)}})
        if error.refused:
            self._fleet.pool.record_failure(worker, str(error))

    def _others(self, tried: tuple[Worker, ...]) -> bool:
        return any(unit.worker not in tried for unit in self._fleet.snapshot.routable)
