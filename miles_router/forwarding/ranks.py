"""Pinning of generations to one data-parallel rank of a worker, and a check that this rank answers."""

from __future__ import annotations

import logging
from typing import NamedTuple

from miles_router.asgi.wire import RawHeaders, first_header
from miles_router.engines.engine import NO_WISH, CannotServe, RankWish
from miles_router.engines.json_bytes import read_json
from miles_router.engines.known import USUAL
from miles_router.fleet.fleet import Fleet
from miles_router.fleet.workers import Unit
from miles_router.forwarding.forwarded import Outgoing
from miles_router.forwarding.reply import Reply
from miles_router.metrics import Metrics

logger = logging.getLogger(__name__)

EVENTS = b"text/event-stream"


class UnpinnedPaths(set[str]):
    """The paths of one engine process whose requests cannot be pinned to a rank. Stored with its facts."""


class Pin(NamedTuple):
    """Headers and body of a request to one rank; `rank` is None if the engine chooses the rank."""

    headers: RawHeaders
    body: bytes
    rank: int | None


class Ranks:
    """Pinning of generations to ranks.

    A client's own choice of a rank has precedence. If an engine ignores a pin, the router stops choosing its ranks.
    """

    def __init__(self, fleet: Fleet, metrics: Metrics) -> None:
        self._fleet = fleet
        self._metrics = metrics

    def requested_rank(self, request: Outgoing) -> int | None:
        """Return the rank that the client asks for in a generation, or None.

        Raises:
            BadRequest: the body contains a rank and cannot be parsed.
        """
        return self._wish(request).rank if request.generates else None

    def check_no_rank(self, request: Outgoing) -> None:
        """Check that a request to a prefill/decode pair asks for no rank: it could mean either worker.

        Raises:
            CannotServe: the request asks for a rank.
            BadRequest: the body contains a rank and cannot be parsed.
        """
        if self._wish(request) != NO_WISH:
            raise CannotServe("the request asks for a rank, which a prefill/decode pair chooses itself")

    def _wish(self, request: Outgoing) -> RankWish:
        if request.rank_wish is None:
            request.rank_wish = USUAL.rank_wish(request.path, request.headers, request.body, read_json)
        return request.rank_wish

    async def pin(self, unit: Unit, request: Outgoing, body: bytes) -> Pin:
        """Return the generation in the form that makes the unit's rank answer, or the rank that the client asks for.

        Raises:
            BadRequest: the body contains a rank and cannot be parsed.
        """
        facts = await self._fleet.facts(unit.worker.url)  # retires the unit if another process is at this URL now
        wish = self._wish(request)
        if wish.heeded:
            return Pin(request.headers, body, wish.rank)
        assert unit.rank is not None
        rank = unit.rank if wish.rank is None else wish.rank
        encoded = first_header(request.headers, b"content-encoding") is not None
        engine = unit.worker.engine or USUAL
        pinned = engine.pinned(request.path, request.headers, body, rank, encoded=encoded)
        if pinned is None:
            self._metrics.unpinned_generations += 1
            path = request.endpoint  # without the session id, so that the set stays small
            if path not in (unpinned := facts.learned(UnpinnedPaths)):
                unpinned.add(path)
                fields = {"worker": unit.worker.url, "path": path}
                logger.warning("rank_not_pinned", extra={"fields": fields})
            return Pin(request.headers, body, None)
        return Pin(*pinned, rank)

    def check_reply(self, reply: Reply, unit: Unit, rank: int | None, path: str) -> None:
        """Check in the reply that `rank` answers; report a different one to the fleet. Not all replies name a rank."""
        events = (first_header(reply.headers, b"content-type") or b"").startswith(EVENTS)
        read = (unit.worker.engine or USUAL).rank_reader(path, streamed=events)
        if rank is None or read is None:
            return

        def check_rank(data: bytes) -> bool:
            answered = read(data)
            if answered is not None and answered != rank:
                self._metrics.ignored_ranks += 1
                self._fleet.record_ignored_rank(
                    unit, f"a request to {path} for rank {rank} was answered by rank {answered}"
                )
            return answered is not None

        reply.observe(check_rank)
