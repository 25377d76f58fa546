"""One turn on its way: when each part of it began and ended, and what layers have told of it."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from miles_router.asgi.exchange import Exchange
from miles_router.fleet.gate import endpoint
from miles_router.fleet.pool import WorkerPool
from miles_router.fleet.workers import Worker
from miles_router.forwarding.outgoing import Outgoing
from miles_router.metrics.metrics import route_class
from miles_router.traces.context import SPAN_BYTES, TraceContext
from miles_router.traces.encoding import ERROR, SERVER, attribute, event, repeated_attribute, request_id, span

if TYPE_CHECKING:
    from miles_router.traces.episodes import EpisodeSpan

#: Of a request in which no layer has read anything.
PASSTHROUGH = "passthrough"
_LAST_ID = (1 << 8 * SPAN_BYTES) - 1
#: A part of a turn: its name, begin, end and attributes. Moments are those of `time.perf_counter()`.
Part = tuple[bytes, float, float, bytes]
#: What spans of turns that nobody reads say beside their names, by what it is made of.
_known: dict[tuple[str, str | None, str | None, int], bytes] = {}
MAX_KNOWN = 4096


class TurnTrace:
    """What is known of one turn beside its flight. Most of it is never set: a request has one, and no list in it."""

    #: Its own span, once it is decided which trace that belongs to,
    context: TraceContext | None = None
    #: the one that it is part of, and whether that is its client's.
    parent_id: bytes | None = None
    has_parent = False
    #: Whether its client has sent headers of traces.
    has_headers = False
    episode: EpisodeSpan | None = None
    #: What names its session.
    session: str | None = None
    #: The first turn of the text that it goes on from.
    earlier: TraceContext | None = None
    #: Which layer reads it.
    mode = PASSTHROUGH
    #: Tokens; -1 where nobody has counted them.
    given = -1
    sampled = -1
    #: Why each answer has ended.
    answers: Sequence[str] = ()
    #: The weights that sampled the last token, where an answer says so.
    version: str | None = None
    #: The type of what has failed.
    error: str | None = None
    #: What was sent last, and to workers of which pool; when the first of it was.
    request: Outgoing | None = None
    workers: WorkerPool | None = None
    reached_at = 0.0
    #: Workers that could not be reached, without those of `request`.
    lost = 0
    waits: Sequence[Part] = ()
    legs: Sequence[LegTimes] = ()
    #: When it began and ended by `time.perf_counter()`, and when it began in Unix nanoseconds.
    began_at = 0.0
    ended_at = 0.0
    began_ns = 0

    def ends(self, began_at: float) -> None:
        """It is over, and began at that moment."""
        self.began_at, self.ended_at = began_at, time.perf_counter()
        self.began_ns = time.time_ns() - int((self.ended_at - began_at) * 1e9)

    def _ns(self, moment: float) -> int:
        return self.began_ns + int((moment - self.began_at) * 1e9)

    def sent(self, request: Outgoing, workers: WorkerPool) -> None:
        """The innermost app has it, and asks one of these workers."""
        if self.request is None:
            self.reached_at = time.perf_counter()
        else:
            self.lost += len(self.request.tried)
        self.request, self.workers = request, workers

    def spans(self, exchange: Exchange, path: str, status: int) -> tuple[bytes, int]:
        """Its span and those of its parts, and how many they are.

        Args:
            path: that its client asked.
            status: that its client was sent; 0 for none.
        """
        context, remote = self.context, self.has_parent
        assert context is not None
        begin, end = self.began_ns, self._ns(self.ended_at)
        if self.mode is PASSTHROUGH and not self.waits and not self.legs and self.error is None:
            rest = self._about_nobody(exchange, path, status)
            head_at = exchange.flight.first_byte_at
            if head_at is not None:
                rest += event(b"first_byte", self._ns(head_at))
            return span(context, self.parent_id, b"turn", begin, end, rest, kind=SERVER, remote=remote), 1
        rest = b"".join(self._about(exchange, path, status))
        written = [span(context, self.parent_id, b"turn", begin, end, rest, kind=SERVER, remote=remote)]
        number = int.from_bytes(context.span_id, "big")
        for name, part_began, part_ended, about in self._parts(exchange):
            number = number + 1 & _LAST_ID or 1
            own = TraceContext(context.trace_id, number.to_bytes(SPAN_BYTES, "big"), True)
            written.append(span(own, context.span_id, name, self._ns(part_began), self._ns(part_ended), about))
        return b"".join(written), len(written)

    def _parts(self, exchange: Exchange) -> Iterator[Part]:
        is_read = self.mode is not PASSTHROUGH  # else nothing is done before the innermost app, and nothing after it
        if is_read and self.request is not None:
            yield b"prepare", self.began_at, self.reached_at, b""
        yield from self.waits
        for leg in self.legs or self._only_leg(exchange):
            about = leg.about()
            yield b"first_byte", leg.began_at, leg.ended_at if leg.head_at is None else leg.head_at, about
            if leg.head_at is not None:
                yield b"generation", leg.head_at, leg.ended_at, about
        if is_read and self.legs:
            yield b"parsing", max(leg.ended_at for leg in self.legs), self.ended_at, b""

    def _only_leg(self, exchange: Exchange) -> list[LegTimes]:
        """That of a turn which no layer has read."""
        flight = exchange.flight
        if self.request is None or flight.worker_url is None:
            return []
        leg = LegTimes(max([self.reached_at, *(wait[2] for wait in self.waits)]))
        leg.worker, leg.version = flight.worker_url, self._version(exchange)
        leg.head_at, leg.ended_at = flight.first_byte_at, self.ended_at
        return [leg]

    def _version(self, exchange: Exchange) -> str | None:
        return None if self.workers is None else self.workers.version_of(exchange.flight.worker_url)

    def _about_nobody(self, exchange: Exchange, path: str, status: int) -> bytes:
        """The attributes of a turn that no layer has read."""
        worker, version = exchange.flight.worker_url, self._version(exchange)
        known = _known.get((path, worker, version, status))
        if known is None:
            if len(_known) >= MAX_KNOWN:
                _known.clear()
            known = _known[path, worker, version, status] = b"".join(self._common(path, worker, version, status))
        known += request_id(exchange.request_id)
        if self.session is not None:
            known += attribute("session.id", self.session)
        if self.request is not None and (self.request.tried or self.lost):
            known += attribute("miles_router.lost_workers", self.lost + len(self.request.tried))
        return known

    def _common(self, path: str, worker: str | None, version: str | None, status: int) -> Iterator[bytes]:
        yield attribute("miles_router.route", route_class(endpoint(path)))
        yield attribute("miles_router.mode", self.mode)
        if worker is not None:
            yield repeated_attribute("miles_router.worker", worker)
        if version is not None:
            yield repeated_attribute("miles_router.weight_version", version)
        if status:
            yield attribute("http.response.status_code", status)
        if status >= 500:
            yield ERROR

    def _about(self, exchange: Exchange, path: str, status: int) -> Iterator[bytes]:
        last = self.legs[-1] if self.legs else None
        worker = exchange.flight.worker_url if last is None else last.worker
        version = self.version or (self._version(exchange) if last is None else last.version)
        yield from self._common(path, worker, version, status)
        yield request_id(exchange.request_id)
        if self.session is not None:
            yield attribute("session.id", self.session)
        if self.request is not None and (self.request.tried or self.lost):
            yield attribute("miles_router.lost_workers", self.lost + len(self.request.tried))
        if self.given >= 0:
            yield attribute("gen_ai.usage.input_tokens", self.given)
        if self.sampled >= 0:
            yield attribute("gen_ai.usage.output_tokens", self.sampled)
        if self.answers:
            yield attribute("gen_ai.response.finish_reasons", self.answers)
        if self.error is not None:
            yield repeated_attribute("error.type", self.error)
            if status < 500:  # else it is there
                yield ERROR


class LegTimes:
    """One asking of a worker, after those that could not be reached."""

    __slots__ = ("began_at", "ended_at", "head_at", "version", "worker")

    def __init__(self, began_at: float | None = None) -> None:
        self.began_at = time.perf_counter() if began_at is None else began_at
        #: When the worker's reply began.
        self.head_at: float | None = None
        #: When the last of it came; 0 while it does.
        self.ended_at = 0.0
        self.worker: str | None = None
        #: The weight version that the router knew of that one.
        self.version: str | None = None

    def begins(self, worker: Worker) -> None:
        """The reply of this worker has begun."""
        self.head_at = time.perf_counter()
        self.worker, self.version = worker.url, worker.weight_version

    def over(self) -> None:
        """All of it has come, or no more will."""
        if not self.ended_at:
            self.ended_at = time.perf_counter()

    def about(self) -> bytes:
        """Its attributes."""
        about = b"" if self.worker is None else repeated_attribute("miles_router.worker", self.worker)
        return (
            about if self.version is None else about + repeated_attribute("miles_router.weight_version", self.version)
        )
