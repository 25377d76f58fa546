"""One request into the fleet: choose, send, and on a failure that is safe to repeat choose another.

The innermost ASGI app and `Router.forward` both go through here, so that leases, retries and their metrics have one
home. Repeating is safe exactly as long as no part of a reply exists (`UpstreamUnreachable`).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Collection, Sequence
from contextlib import suppress

from miles_router.asgi.flight import Flight, UsedCache
from miles_router.engines.client_json import read_json
from miles_router.engines.engine import CannotServe, Parts, Translation
from miles_router.engines.footprint import prompt_tokens
from miles_router.engines.known import USUAL
from miles_router.engines.names import NO_NAMES, Names, RenamedRequest, given_names, needs_others
from miles_router.errors import FleetPaused, NoWorkerAvailable, UnsupportedByEngine, UpstreamUnreachable
from miles_router.fleet.fleet import Fleet
from miles_router.fleet.gate import endpoint
from miles_router.fleet.inflight import InFlight
from miles_router.fleet.lease import Lease
from miles_router.fleet.workers import Role, Unit, Worker
from miles_router.forwarding.forwarded import AnyReply, Forwarded
from miles_router.forwarding.outgoing import Outgoing, PairHistory, send
from miles_router.forwarding.pairs import Halves, PairExchange, PairInterrupted, PrefillLost
from miles_router.forwarding.parts import ask_parts
from miles_router.forwarding.ranks import Ranks
from miles_router.forwarding.reply import Reply
from miles_router.forwarding.translated import HeldReply, RewrittenStream, translated
from miles_router.forwarding.translating import translation_for
from miles_router.forwarding.upstream import Admit, NotAdmitted, Upstream
from miles_router.forwarding.used_names import LeftRequests, NameUse, UsedNames
from miles_router.metrics import Metrics

logger = logging.getLogger(__name__)

ABORTED = "aborted while it waited for the fleet to go on"


class UnkeyedPaths(set[str]):
    """The paths of one engine process whose requests take no key of their cache. Kept with its facts, and gone with
    them."""


class Forwarder:
    """Sends requests into the fleet."""

    def __init__(
        self,
        *,
        fleet: Fleet,
        upstream: Upstream,
        metrics: Metrics,
        max_retries: int,
        max_answer_bytes: int,
        in_flight: InFlight,
    ) -> None:
        self._in_flight = in_flight
        self._used_names = UsedNames()
        self.left = LeftRequests(self._used_names, upstream, fleet.pool)
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
            NotAdmitted: the gate has closed, or the worker's weights have changed, before a byte of it was written, or
                `PairInterrupted`. Wait at the gate, and call again.
            NoWorkerAvailable: no routable worker at all.
            UpstreamUnreachable: those that were tried could not be reached.
            UpstreamInvalidResponse: a worker answered something that is not HTTP.
            UnsupportedByEngine: no worker's engine would answer it as it is meant; none was asked.
            BadRequest: an engine has to be asked otherwise, and the body cannot be read.
        """
        unable: tuple[Worker, ...] = ()
        tokens, body = (prompt_tokens(request.body), request.body) if request.generates else (0, b"")
        while True:
            barred = _barred(flight)
            excluded, generates = (*request.tried, *unable, *barred), request.generates
            rank = self._ranks.wished(request) if self._fleet.pool.snapshot.ranked else None
            lease = self._fleet.lease(request.key, excluded, request.preferred, rank, tokens, body, generates=generates)
            unit = lease.unit
            worker = unit.worker
            if flight is not None:
                flight.worker_url, flight.rank = worker.url, lease.unit.rank
                flight.mark("worker_chosen", worker)
            try:
                return await self._open_at(lease, request, flight)
            except CannotServe as refusal:
                lease.release(answered=False)
                unable += (worker,)
                if not self._others(request, (*request.tried, *unable, *barred)):
                    raise UnsupportedByEngine(f"the engine of {worker.url} cannot serve this: {refusal}") from None
            except UpstreamUnreachable as error:
                lease.release(answered=False)
                lost = error.worker if isinstance(error, PrefillLost) else worker
                request.tried += (lost,)
                if flight is not None:
                    flight.mark("worker_lost", lost)
                self._unreachable(lost, error)
                if len(request.tried) > self._max_retries or not self._others(request, (*request.tried, *barred)):
                    error.attempts = len(request.tried)
                    raise
                self._metrics.retries += 1
            except BaseException:
                lease.release(answered=False)
                raise

    async def _open_at(self, lease: Lease, request: Outgoing, flight: Flight | None) -> Forwarded:
        """Ask the unit of a lease; once more, under other names, where a kept connection was lost.

        Raises:
            The errors of `_ask`.
        """
        try:
            return await self._open_once(lease, request, flight)
        except UpstreamUnreachable as error:
            if not error.kept:
                raise
        return await self._open_once(lease, request, flight)

    async def _open_once(self, lease: Lease, request: Outgoing, flight: Flight | None) -> Forwarded:
        """Ask the unit of a lease. Raises as `_ask`."""
        request.names = None
        try:
            reply = await self._ask(lease.unit, request, flight)
        except BaseException as error:
            if request.names is not None:
                unwritten = isinstance(error, NotAdmitted) and not isinstance(error, PairInterrupted)
                request.names.end(forgotten=unwritten)
                request.names = None if unwritten else request.names
            raise
        return Forwarded(lease, reply, request.names)

    async def _ask(self, unit: Unit, request: Outgoing, flight: Flight | None) -> AnyReply:
        """Ask one unit as its engine has to be asked.

        Raises:
            CannotServe: the engine would answer something else than is meant; it was not asked.
            The errors of `open`.
        """
        worker = unit.worker
        engine = worker.engine if request.computes else None
        if request.computes and (engine is None or engine.translates):
            engine = await self._fleet.engine(worker)
        if request.generates and worker.role is Role.DECODE:
            return await self._ask_pair(unit, request, flight)
        translation: Translation | Parts | None = None
        if engine is not None and engine.translates:
            translation = await translation_for(self._upstream, worker, engine, request)
        given = self._given_names(request) if translation is None else None
        if translation is None and self._needs_others(request, flight, [worker], given):
            translation = RenamedRequest(endpoint(request.path), request.body, read_json)
        self._use(request, [worker], given, None if translation is None else translation.rids.values())
        if flight is not None and translation is not None:
            flight.inward |= translation.rids
        if isinstance(translation, Parts):
            return await ask_parts(
                translation,
                lambda part, slot: self._ask_as(unit, request, part, flight, slot=slot),
                self._max_answer_bytes,
            )
        return await self._ask_as(unit, request, translation, flight)

    async def _ask_as(
        self,
        unit: Unit,
        request: Outgoing,
        translation: Translation | None,
        flight: Flight | None,
        *,
        slot: bool = True,
    ) -> Reply | HeldReply | RewrittenStream:
        """Ask one unit by a translation. Raises as `_ask`."""
        worker = unit.worker
        version = worker.weight_version
        if request.generates:
            reply = await self._generate(unit, request, translation, flight, slot=slot)
        else:
            target, body = (None, None) if translation is None else (translation.target, translation.body)
            reply = await send(self._upstream, worker, request, target=target, body=body)
        if translation is None:
            return reply
        try:
            return await translated(
                reply, translation, lambda: worker.weight_version, sent_under=version, limit=self._max_answer_bytes
            )
        except BaseException:
            reply.close()
            raise

    def _given_names(self, request: Outgoing) -> Sequence[str] | None:
        """Return the names that a request gives its generations, as `given_names` does.

        Raises:
            BadRequest: it gives some, and cannot be read.
        """
        return given_names(endpoint(request.path), request.body, read_json) if request.computes else None

    def _needs_others(
        self, request: Outgoing, flight: Flight | None, workers: Sequence[Worker], given: Sequence[str] | None
    ) -> bool:
        """Return whether the engines must not see the names that a request gives, or may still have them.

        Raises:
            BadRequest: it gives some, and cannot be read.
        """
        if given is None:
            return False
        if any(self._used_names.any_used(worker, given) for worker in workers):
            return True
        private = self._in_flight.private or (flight is not None and flight.private)
        return needs_others(endpoint(request.path), request.body, read_json, private=private)

    def _use(
        self, request: Outgoing, workers: Sequence[Worker], given: Sequence[str] | None, others: Collection[str] | None
    ) -> None:
        """Note the names under which workers are sent a request."""
        if given:
            own = given if others is None else ()
            request.names = NameUse(self._used_names, workers, own, others or ())

    async def _generate(
        self, unit: Unit, request: Outgoing, translation: Translation | None, flight: Flight | None, *, slot: bool
    ) -> Reply:
        """Send what generates. Once the worker's weights have changed, it is kept apart from older caches."""
        worker = unit.worker
        gate, caches, cache = self._fleet.gate, worker.caches, 0
        target, body = (None, None) if translation is None else (translation.target, translation.body)
        now = caches.number
        if now:
            body, cache = await self._choose_cache(worker, request, body, translation, flight)

        def admit() -> bool:
            return not gate.closed and worker.caches is caches and caches.number == now and not unit.retired

        if unit.rank is None:
            reply = await send(self._upstream, worker, request, target=target, body=body, slot=slot, admit=admit)
        else:
            reply = await self._ask_rank(unit, request, target, body, admit, slot=slot)
        if flight is not None:
            flight.caches.append(UsedCache(cache, lambda: caches.versions(cache, worker.weight_version)))
        return reply

    async def _ask_rank(
        self, unit: Unit, request: Outgoing, target: bytes | None, body: bytes | None, admit: Admit, *, slot: bool
    ) -> Reply:
        """Send it so that this rank answers."""
        pin = await self._ranks.pin(unit, request, request.body if body is None else body)
        reply = await send(
            self._upstream,
            unit.worker,
            request,
            target=target,
            body=pin.body,
            headers=pin.headers,
            slot=slot,
            admit=admit,
        )
        self._ranks.watch(reply, unit, pin.rank, request.path)
        return reply

    async def _ask_pair(self, decode: Unit, request: Outgoing, flight: Flight | None) -> AnyReply:
        """Ask a decode half, and a prefill half for it. The prefix cache is the prefill half's.

        Raises:
            PrefillLost: that one is not there.
            CannotServe: the pair would answer something else than is meant; neither was asked.
            The errors of `_ask`.
        """
        self._ranks.check_unwished(request)
        paired = (decode.worker.engine or USUAL).paired(endpoint(request.path), request.body, read_json)
        history = request.pair = request.pair or PairHistory()
        gate = self._fleet.gate
        cuts = gate.cuts
        excluded = (*request.tried, *_barred(flight))
        lease = self._fleet.lease_prefill(request.key, excluded, prompt_tokens(request.body), request.body)
        prefill = lease.unit
        worker = prefill.worker
        try:
            try:
                await self._fleet.engine(worker)
            except UpstreamUnreachable as error:
                raise PrefillLost(worker, error) from error
            halves = Halves(lease, decode.worker)
            halves.check()
            body, names = paired.body, NO_NAMES
            workers, given = [worker, decode.worker], self._given_names(request)
            if history.sendings or self._needs_others(request, flight, workers, given):
                body, names = Names.renamed(endpoint(request.path), body, read_json)
            self._use(request, workers, given, names.inward.values() if names else None)
            history.sendings += 1
            if flight is not None:
                flight.inward |= names.inward
            caches, now = worker.caches, worker.caches.number
            chosen, cache = await self._choose_cache(worker, request, body, None, flight) if now else (None, 0)

            def admit() -> bool:
                same = worker.caches is caches and caches.number == now
                return not gate.closed and same and not (prefill.retired or decode.retired)

            exchange = PairExchange(
                self._upstream,
                halves,
                request,
                history,
                paired,
                body if chosen is None else chosen,
                names,
                admit=admit,
                cut=lambda: gate.cuts != cuts or (flight is not None and flight.aborted),
                limit=self._max_answer_bytes,
            )
            reply = await exchange.open(flight)
        finally:
            lease.release(answered=False)  # unless it was before
        if flight is not None:
            flight.caches.append(UsedCache(cache, lambda: caches.versions(cache, worker.weight_version)))
        return reply

    async def _choose_cache(
        self,
        worker: Worker,
        request: Outgoing,
        body: bytes | None,
        translation: Translation | None,
        flight: Flight | None,
    ) -> tuple[bytes | None, int]:
        """The prefix cache of a generation: the body that names it (None: the request's own), and its number."""
        cache = worker.caches.choose(None if flight is None else flight.goes_on)
        if cache and await self._keyed(worker, request, translation):
            engine = worker.engine or USUAL
            return engine.with_cache_key(request.body if body is None else body, worker.caches.key(cache)), cache
        return body, 0

    async def _keyed(self, worker: Worker, request: Outgoing, translation: Translation | None) -> bool:
        """Whether the engine keeps the caches of this request apart by a key. One that does not is counted."""
        facts = await self._fleet.facts(worker.url)
        encoded = any(name == b"content-encoding" for name, _ in request.headers)
        heeded = translation is None or translation.heeds_cache_key
        if heeded and not encoded and (worker.engine or USUAL).takes_cache_key(facts, request.path):
            return True
        self._metrics.unkeyed_generations += 1
        path = endpoint(request.path)  # one of few: a client chooses the rest
        if path not in (unkeyed := facts.learned(UnkeyedPaths)):
            unkeyed.add(path)
            logger.warning("caches_not_kept_apart", extra={"fields": {"worker": worker.url, "path": path}})
        return False

    def must_wait(self, request: Outgoing, flight: Flight) -> bool:
        """Whether a request cannot go on now: the gate is closed, or a worker is told to abort what may be meant by its
        name, or there is no room for the session that it begins."""
        return request.generates and bool(self._in_flight.orders or self._is_barred(request, flight))

    def _is_barred(self, request: Outgoing, flight: Flight) -> bool:
        """Whether it has to wait at the gate. What goes on from tokens that were sampled begins no session."""
        gate = self._fleet.gate
        begins = self._fleet.pool.admission.begins(request.key) and not flight.caches and flight.goes_on is None
        if gate.closed or not begins:
            return gate.closed
        return gate.queue.must_wait(request.key, prompt_tokens(request.body))

    async def wait(self, request: Outgoing, waiting: Flight) -> None:
        """Wait until it can, or is aborted.

        Raises:
            FleetPaused: it has waited for too long, or was one too many.
            NoWorkerAvailable: its model was no adapter's name when it came, and is one now.
        """
        await self._wait(request, waiting)
        if waiting.model is None or waiting.aborted:
            return
        if (adapter := self._fleet.adapter_of(waiting.model)) is not None:
            raise NoWorkerAvailable(f"the adapter {adapter!r} was loaded while the request waited: send it again")

    async def _wait(self, request: Outgoing, waiting: Flight) -> None:
        gate, came_at = self._fleet.gate, asyncio.get_running_loop().time()
        while True:
            await gate.wait(waiting, came_at)
            if request.key is not None and self._is_barred(request, waiting):
                with gate.waiting(waiting, "queue"):
                    await gate.queue.wait(waiting, request.key, prompt_tokens(request.body), came_at)
            if waiting.aborted or not self._in_flight.orders:
                return  # and takes its room, before anybody else looks
            await self._in_flight.past_orders(request.body)
            if not self._is_barred(request, waiting):
                return

    async def open_when_admitted(self, request: Outgoing, waiting: Flight) -> Forwarded:
        """`open`, and before it a wait at the gate where that is closed. An abort of `waiting` ends the wait.

        Raises:
            FleetPaused: it was aborted there, has waited for too long, or was one too many.
            The errors of `open`.
        """
        while True:
            if self.must_wait(request, waiting):
                await self.wait(request, waiting)
                if waiting.aborted:
                    raise FleetPaused(ABORTED)
            with suppress(NotAdmitted):
                return await self.open(request)
            if waiting.aborted:
                raise FleetPaused(ABORTED)

    def _unreachable(self, worker: Worker, error: UpstreamUnreachable) -> None:
        logger.warning("worker_unreachable", extra={"fields": {"worker": worker.url, "reason": str(error)}})
        if not error.timed_out:
            if error.refused:
                self._fleet.pool.record_failure(worker, str(error))
        elif not self._fleet.snapshot.excuses(worker, self._upstream.signs(worker), self._upstream.connect_timeout):
            self._fleet.record_silence(worker, str(error))

    def _others(self, request: Outgoing, tried: tuple[Worker, ...]) -> bool:
        snapshot = self._fleet.snapshot
        return bool(snapshot.routable and snapshot.left(tried, generates=request.generates))


def _barred(flight: Flight | None) -> Collection[Worker]:
    """Return the workers that must not take a request now."""
    return () if flight is None or flight.barred is None else flight.barred()
