"""Sending of one request into the fleet: lease a worker, send, and retry on another worker while that is safe.

The innermost ASGI app and `Router.forward` both use it, so leases, retries and their metrics are handled here only. A
retry is safe as long as no part of a reply exists (`UpstreamUnreachable`).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Collection, Sequence
from contextlib import suppress

from miles_router.asgi.exchange import Routing, UsedCache
from miles_router.engines.engine import CannotServe, Parts, Translation
from miles_router.engines.facts import UnkeyedPaths
from miles_router.engines.json_bytes import prompt_tokens, read_json
from miles_router.engines.known import USUAL
from miles_router.engines.names import NO_NAMES, GivenNames, Names, RenamedRequest, given_names, must_rename
from miles_router.errors import FleetPaused, NoWorkerAvailable, UnsupportedByEngine, UpstreamUnreachable
from miles_router.fleet.fleet import Fleet
from miles_router.fleet.inflight import InFlight
from miles_router.fleet.worker_table import Lease
from miles_router.fleet.workers import DECODE, Unit, Worker
from miles_router.forwarding.forwarded import (
    AbandonedRequests,
    AnyReply,
    Forwarded,
    NameUse,
    Outgoing,
    PairHistory,
    UsedNames,
    send,
)
from miles_router.forwarding.pairs import Halves, PairExchange, PairInterrupted, PrefillLost
from miles_router.forwarding.parts import ask_parts
from miles_router.forwarding.ranks import Ranks
from miles_router.forwarding.reply import Reply
from miles_router.forwarding.translated import HeldReply, RewrittenStream, translated
from miles_router.forwarding.translating import translation_for
from miles_router.forwarding.upstream import Admit, NotAdmitted, Upstream
from miles_router.metrics import Metrics

logger = logging.getLogger(__name__)

ABORTED = "the request was aborted while it waited for the fleet to resume"


class Forwarder:
    """A sender of requests into one fleet."""

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
        self.abandoned = AbandonedRequests(self._used_names, upstream, fleet.pool)
        self._max_answer_bytes = max_answer_bytes
        self._fleet = fleet
        self._upstream = upstream
        self._metrics = metrics
        self._ranks = Ranks(fleet, metrics)
        self._max_retries = max_retries

    async def open(self, request: Outgoing, routing: Routing | None = None) -> Forwarded:
        """Send `request` to the worker that the policy chooses, and wait for the head of its reply.

        If a worker is unreachable, another one is tried, up to `max_retries` times. `routing` is updated before each
        worker is asked. The caller closes the result.

        Raises:
            NotAdmitted: the gate closed or the worker's weights changed before a byte was written, or (as
                `PairInterrupted`) before a pair's answer began. Wait at the gate and call again.
            NoWorkerAvailable: no worker is routable.
            UpstreamUnreachable, UpstreamError: all tried workers were unreachable, or a reply is not HTTP.
            UnsupportedByEngine: no routable worker's engine can serve the request; it was not sent.
            WeightsChanged: the request is of an evaluation, and the worker has other weights; it was not sent.
            BadRequest: the request must be translated for the engine, and its body cannot be read.
        """
        unable: tuple[Worker, ...] = ()
        tokens, body = (prompt_tokens(request.body), request.body) if request.generates else (0, b"")
        while True:
            barred = _excluded_workers(routing)
            excluded, generates = (*request.tried, *unable, *barred), request.generates
            rank = self._ranks.requested_rank(request) if self._fleet.pool.snapshot.ranked else None
            lease = self._fleet.lease(request.key, excluded, request.preferred, rank, tokens, body, generates=generates)
            worker = lease.unit.worker
            if routing is not None:
                routing.worker_url, routing.rank = worker.url, lease.unit.rank
                routing.mark("worker_chosen", worker)
            try:
                if routing is None or routing.evaluation is None or not generates:
                    return await self._open_at(lease, request, routing)
                with routing.evaluation.sent_to(worker.weight_version):
                    return await self._open_at(lease, request, routing)
            except CannotServe as refusal:
                lease.release(answered=False)
                unable += (worker,)
                if not self._has_other_workers(request, (*request.tried, *unable, *barred)):
                    raise UnsupportedByEngine(f"the engine of {worker.url} cannot serve this: {refusal}") from None
            except UpstreamUnreachable as error:
                lease.release(answered=False)
                lost = error.worker if isinstance(error, PrefillLost) else worker
                request.tried += (lost,)
                if routing is not None:
                    routing.mark("worker_lost", lost)
                self._record_unreachable(lost, error)
                replaceable = self._has_other_workers(request, (*request.tried, *barred))
                if len(request.tried) > self._max_retries or not replaceable:
                    error.attempts = len(request.tried)
                    raise
                self._metrics.retries += 1
            except BaseException:
                lease.release(answered=False)
                raise

    async def _open_at(
        self, lease: Lease, request: Outgoing, routing: Routing | None, *, again: bool = True
    ) -> Forwarded:
        """Send to the leased unit.

        Args:
            again: if a kept-alive connection was lost, send once more, with new generation names.

        Raises:
            The errors of `_send_to_unit`.
        """
        request.names = None
        try:
            reply = await self._send_to_unit(lease.unit, request, routing)
        except BaseException as error:
            if request.names is not None:
                unwritten = isinstance(error, NotAdmitted) and not isinstance(error, PairInterrupted)
                request.names.end(released=unwritten)
                request.names = None if unwritten else request.names
            if not (again and isinstance(error, UpstreamUnreachable) and error.kept):
                raise
        else:
            return Forwarded(lease, reply, request.names)
        return await self._open_at(lease, request, routing, again=False)

    async def _send_to_unit(self, unit: Unit, request: Outgoing, routing: Routing | None) -> AnyReply:
        """Send the request to one unit in the form that its engine needs.

        Raises:
            CannotServe: the engine cannot answer this request correctly; it was not sent.
            The errors of `open`.
        """
        worker = unit.worker
        engine = worker.engine if request.computes else None
        if request.computes and (engine is None or engine.translates):
            engine = await self._fleet.engine(worker)
        if request.generates and worker.role is DECODE:
            return await self._send_to_pair(unit, request, routing)
        translation: Translation | Parts | None = None
        if engine is not None and engine.translates:
            translation = await translation_for(self._upstream, worker, engine, request)
        given = self._given_names(request) if translation is None else None
        if given is not None:
            if self._must_rename(request, routing, [worker], given):
                translation = RenamedRequest(request.endpoint, request.body, read_json)
            self._record_names(request, [worker], given, None if translation is None else translation.rids.values())
        if translation is None:
            if request.generates:
                return await self._generate(unit, request, None, routing, slot=True)
            return await send(self._upstream, worker, request)
        if routing is not None:
            routing.inward |= translation.rids
        if isinstance(translation, Parts):
            return await ask_parts(
                translation,
                lambda part, slot: self._send_translated(unit, request, part, routing, slot=slot),
                self._max_answer_bytes,
            )
        return await self._send_translated(unit, request, translation, routing)

    async def _send_translated(
        self,
        unit: Unit,
        request: Outgoing,
        translation: Translation,
        routing: Routing | None,
        *,
        slot: bool = True,
    ) -> Reply | HeldReply | RewrittenStream:
        """Send a translated request to one unit and translate its reply. Raises the errors of `_send_to_unit`."""
        worker = unit.worker
        version = worker.weight_version
        if request.generates:
            reply = await self._generate(unit, request, translation, routing, slot=slot)
        else:
            reply = await send(self._upstream, worker, request, target=translation.target, body=translation.body)
        try:
            return await translated(
                reply, translation, lambda: worker.weight_version, sent_under=version, limit=self._max_answer_bytes
            )
        except BaseException:
            reply.close()
            raise

    def _given_names(self, request: Outgoing) -> GivenNames | None:
        """Return the generation names (`rid`) that the client gave, as `engines.names.given_names` does.

        Raises:
            BadRequest: the body contains names and cannot be parsed.
        """
        return given_names(request.endpoint, request.body, read_json) if request.computes else None

    def _must_rename(
        self, request: Outgoing, routing: Routing | None, workers: Sequence[Worker], given: GivenNames | None
    ) -> bool:
        """Return True if the client's names must be replaced: they are unsafe for the engines, or may still be in use.

        Raises:
            BadRequest: the body contains names and cannot be parsed.
        """
        if given is None:
            return False
        if any(self._used_names.any_used(worker, given.valid) for worker in workers):
            return True
        private = self._in_flight.private or (routing is not None and routing.private)
        return must_rename(request.endpoint, request.body, read_json, given, private=private)

    def _record_names(
        self, request: Outgoing, workers: Sequence[Worker], given: GivenNames | None, others: Collection[str] | None
    ) -> None:
        """Record the names (`rid`) that the workers get: `others`, or the client's names (`given`) if that is None."""
        if given is not None and given.valid:
            own = given.valid if others is None else ()
            request.names = NameUse(self._used_names, workers, own, others or ())

    async def _generate(
        self, unit: Unit, request: Outgoing, translation: Translation | None, routing: Routing | None, *, slot: bool
    ) -> Reply:
        """Send a generation. After the first weight change, a cache key separates it from prefixes of old weights."""
        worker = unit.worker
        gate, caches, cache = self._fleet.gate, worker.caches, 0
        target, body = (None, None) if translation is None else (translation.target, translation.body)
        now = caches.number
        if now:
            body, cache = await self._choose_cache(worker, request, body, translation, routing)

        def admit() -> bool:
            return not gate.closed and worker.caches is caches and caches.number == now and not unit.retired

        if unit.rank is None:
            reply = await send(self._upstream, worker, request, target=target, body=body, slot=slot, admit=admit)
        else:
            reply = await self._send_to_rank(unit, request, target, body, admit, slot=slot)
        if routing is not None:
            routing.caches.append(UsedCache(cache, lambda: caches.versions(cache, worker.weight_version)))
        return reply

    async def _send_to_rank(
        self, unit: Unit, request: Outgoing, target: bytes | None, body: bytes | None, admit: Admit, *, slot: bool
    ) -> Reply:
        """Send a generation so that the unit's rank answers it."""
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
        self._ranks.check_reply(reply, unit, pin.rank, request.path)
        return reply

    async def _send_to_pair(self, decode: Unit, request: Outgoing, routing: Routing | None) -> AnyReply:
        """Lease a prefill worker, and send the request to it and to the decode worker.

        The prefix cache that is recorded is the prefill worker's.

        Raises:
            PrefillLost: the prefill worker is unreachable.
            CannotServe: the pair cannot answer this request correctly; it was not sent.
            The errors of `_send_to_unit`.
        """
        self._ranks.check_no_rank(request)
        paired = (decode.worker.engine or USUAL).paired(request.endpoint, request.body, read_json)
        history = request.pair = request.pair or PairHistory()
        gate = self._fleet.gate
        cuts = gate.aborting_pauses
        excluded = (*request.tried, *_excluded_workers(routing))
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
            if history.attempts or self._must_rename(request, routing, workers, given):
                body, names = Names.renamed(request.endpoint, body, read_json)
            self._record_names(request, workers, given, names.inward.values() if names else None)
            history.attempts += 1
            if routing is not None:
                routing.inward |= names.inward
            caches, now = worker.caches, worker.caches.number
            chosen, cache = await self._choose_cache(worker, request, body, None, routing) if now else (None, 0)

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
                cut=lambda: gate.aborting_pauses != cuts or (routing is not None and routing.aborted),
                limit=self._max_answer_bytes,
            )
            reply = await exchange.open(routing)
        finally:
            lease.release(answered=False)  # does nothing if the prefill worker has answered
        if routing is not None:
            routing.caches.append(UsedCache(cache, lambda: caches.versions(cache, worker.weight_version)))
        return reply

    async def _choose_cache(
        self,
        worker: Worker,
        request: Outgoing,
        body: bytes | None,
        translation: Translation | None,
        routing: Routing | None,
    ) -> tuple[bytes | None, int]:
        """Choose the prefix cache of a generation. Return the body with its key and the cache's number.

        A body of None means that the request's own body is sent.
        """
        cache = worker.caches.choose(None if routing is None else routing.continued_cache)
        if cache and await self._takes_cache_key(worker, request, translation):
            engine = worker.engine or USUAL
            return engine.with_cache_key(request.body if body is None else body, worker.caches.key(cache)), cache
        return body, 0

    async def _takes_cache_key(self, worker: Worker, request: Outgoing, translation: Translation | None) -> bool:
        """Return True if the engine supports a cache key in this request; if not, count and log it."""
        facts = await self._fleet.facts(worker.url)
        encoded = any(name == b"content-encoding" for name, _ in request.headers)
        heeded = translation is None or translation.heeds_cache_key
        if heeded and not encoded and (worker.engine or USUAL).takes_cache_key(facts, request.path):
            return True
        self._metrics.unkeyed_generations += 1
        path = request.endpoint  # without the session id, so that the set stays small
        if path not in (unkeyed := facts.learned(UnkeyedPaths)):
            unkeyed.add(path)
            logger.warning("prefix_caches_not_separated", extra={"fields": {"worker": worker.url, "path": path}})
        return False

    def must_wait(self, request: Outgoing, routing: Routing) -> bool:
        """Return True if a generation must wait before it is sent.

        The gate holds it, or the new session has no room, or an abort is in progress that could match its names.
        """
        return request.generates and bool(self._in_flight.pending_aborts or self._must_wait_at_gate(request, routing))

    def _must_wait_at_gate(self, request: Outgoing, routing: Routing) -> bool:
        """Return True if the gate holds the request or the new session has no room.

        A request that continues sampled tokens begins no session.
        """
        gate = self._fleet.gate
        if gate.holds(routing):
            return True
        continues = routing.caches or routing.continued_cache is not None
        begins = not continues and self._fleet.pool.admission.begins_session(request.key)
        return begins and gate.queue.must_wait(request.key, prompt_tokens(request.body))

    async def wait(self, request: Outgoing, waiting: Routing) -> None:
        """Wait until the request can be sent, or is aborted.

        Raises:
            FleetPaused: it waited too long, or too many requests wait.
            NoWorkerAvailable: the requested model became the name of an adapter during the wait.
        """
        await self._wait(request, waiting)
        if waiting.model is None or waiting.aborted:
            return
        if (adapter := self._fleet.adapter_of(waiting.model)) is not None:
            raise NoWorkerAvailable(f"the adapter {adapter!r} was loaded while the request waited: send it again")

    async def _wait(self, request: Outgoing, waiting: Routing) -> None:
        gate, arrived_at = self._fleet.gate, asyncio.get_running_loop().time()
        while True:
            await gate.wait(waiting, arrived_at)
            if request.key is not None and self._must_wait_at_gate(request, waiting):
                with gate.waiting(waiting, "queue"):
                    await gate.queue.wait(waiting, request.key, prompt_tokens(request.body), arrived_at)
            if waiting.aborted or not self._in_flight.pending_aborts:
                return  # no `await` before it takes its room, so no other request can take it first
            await self._in_flight.wait_for_aborts(request.body)
            if not self._must_wait_at_gate(request, waiting):
                return

    async def open_when_admitted(self, request: Outgoing, waiting: Routing) -> Forwarded:
        """Wait until the request can be sent, then `open` it. An abort of `waiting` ends the wait.

        Raises:
            FleetPaused: it was aborted while waiting, waited too long, or too many requests wait.
            The errors of `open`, but not NotAdmitted.
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

    def _record_unreachable(self, worker: Worker, error: UpstreamUnreachable) -> None:
        logger.warning("worker_unreachable", extra={"fields": {"worker": worker.url, "reason": str(error)}})
        if not error.timed_out:
            if error.refused:
                self._fleet.pool.record_failure(worker, str(error))
        elif not self._fleet.snapshot.excuses_silence(
            worker, self._upstream.activity(worker), self._upstream.connect_timeout
        ):
            self._fleet.record_silence(worker, str(error))

    def _has_other_workers(self, request: Outgoing, tried: tuple[Worker, ...]) -> bool:
        snapshot = self._fleet.snapshot
        return bool(snapshot.routable and snapshot.remaining(tried, generates=request.generates))


def _excluded_workers(routing: Routing | None) -> Collection[Worker]:
    """Return the workers that must not get the request now."""
    return () if routing is None or routing.excluded_workers is None else routing.excluded_workers()
