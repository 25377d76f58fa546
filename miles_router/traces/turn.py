"""One turn on its way: when each part of it began and ended, and what layers have told of it."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from time import perf_counter
from typing import TYPE_CHECKING, NamedTuple

from miles_router.asgi.exchange import Exchange
from miles_router.asgi.flight import Flight
from miles_router.fleet.gate import endpoint
from miles_router.fleet.pool import WorkerPool
from miles_router.forwarding.outgoing import Outgoing
from miles_router.metrics.metrics import route_class
from miles_router.traces.context import SAMPLED, SPAN_BYTES, TraceContext, new_span_id
from miles_router.traces.encoding import ERROR, REQUEST_ID, SERVER, attribute, event, repeated_attribute, span

if TYPE_CHECKING:
    from miles_router.traces.episodes import EpisodeSpan

#: Of a request in which no layer has read anything.
PASSTHROUGH = "passthrough"
_LAST_ID = (1 << 8 * SPAN_BYTES) - 1
#: A part of a turn: its name, begin, end and attributes. Moments are those of `time.perf_counter()`.
Part = tuple[bytes, float, float, bytes]


class TurnTrace:
    """One turn on its way: what its flight does not know of it. `begin_turn` makes one; where each costs too much, a
    call of our own included, it is made in place."""

    __slots__ = ("details", "reached_at", "request", "traceparent", "workers")

    #: What names its own span to engines, once it is decided which trace that belongs to.
    traceparent: bytes | None
    #: What was sent last, and to workers of which pool.
    request: Outgoing | None
    workers: WorkerPool | None
    #: When the innermost app had it first; 0 before that.
    reached_at: float
    #: What most turns of texts do not have.
    details: TurnDetails | None

    @property
    def context(self) -> TraceContext | None:
        """Its own span, once it is decided which trace that belongs to."""
        return None if self.traceparent is None else TraceContext.read(self.traceparent)

    @property
    def is_sampled(self) -> bool:
        """Whether its spans are kept; False before it is decided."""
        return self.traceparent is not None and self.traceparent.endswith(SAMPLED)

    def follows(self, parent: TraceContext, sampled: bool) -> bytes:
        """Its own span is part of that one. Gives the `traceparent` that names it."""
        self.traceparent = value = TraceContext(parent.trace_id, new_span_id(), sampled).value()
        self.detailed().parent_id = parent.span_id
        return value

    def detailed(self) -> TurnDetails:
        """Its details, for somebody who has some to tell."""
        if self.details is None:
            self.details = TurnDetails()
        return self.details

    def sent(self, request: Outgoing, workers: WorkerPool) -> None:
        """The innermost app has it, and asks one of these workers."""
        if self.request is None:
            self.reached_at = perf_counter()
        elif self.request.tried:
            self.detailed().lost += len(self.request.tried)
        self.request, self.workers = request, workers

    def first_leg(self) -> LegTimes:
        """The asking that is under way, in a turn that nobody reads. It ends where the one that follows begins."""
        details = self.detailed()
        leg = details.unread_leg(self.reached_at)
        details.legs = [leg]
        return leg

    def spans(self, exchange: Exchange, path: str, status: int, began_at: float) -> bytes:
        """Its span and those of its parts, now that it is over.

        Args:
            path: that its client asked.
            status: that its client was sent; 0 for none.
            began_at: by `time.perf_counter()`.
        """
        context, flight, request = self.context, exchange.flight, self.request
        assert context is not None
        worker = flight.worker_url
        if request is not None and request.tried:
            self.detailed().lost += len(request.tried)
        moments = began_at, self.reached_at, flight.first_byte_at, perf_counter(), time.time_ns()
        version = None if self.workers is None else self.workers.version_of(worker)
        end = TurnEnd(exchange.request_id, path, status, *moments, worker, version)
        return b"".join(self.detailed().spans(context, end))


def begin_turn() -> TurnTrace:
    """One of which nothing is known."""
    turn = TurnTrace()
    turn.traceparent = turn.request = turn.workers = turn.details = None
    turn.reached_at = 0.0
    return turn


class TurnDetails:
    """What is known of a turn that a layer reads, that belongs to others, that waits or that fails. Most of it is
    never set."""

    #: The span that it is part of, and whether that is its client's.
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
    #: Workers that could not be reached.
    lost = 0
    waits: Sequence[Part] = ()
    legs: Sequence[LegTimes] = ()

    def spans(self, context: TraceContext, end: TurnEnd) -> Iterator[bytes]:
        """The turn's span, which has this context, and those of its parts."""
        rest = b"".join(self._about(end))
        is_one = self.mode is PASSTHROUGH and not self.waits and not self.legs and self.error is None
        if is_one and end.head_at is not None:
            rest += event(b"first_byte", end.unix(end.head_at))
        begin = end.unix(end.began_at)
        yield span(context, self.parent_id, b"turn", begin, end.ended_ns, rest, kind=SERVER, remote=self.has_parent)
        number = int.from_bytes(context.span_id, "big")
        for name, part_began, part_ended, about in () if is_one else self._parts(end):
            number = number + 1 & _LAST_ID or 1
            own = TraceContext(context.trace_id, number.to_bytes(SPAN_BYTES, "big"), True)
            yield span(own, context.span_id, name, end.unix(part_began), end.unix(part_ended), about)

    def _parts(self, end: TurnEnd) -> Iterator[Part]:
        is_read = self.mode is not PASSTHROUGH  # else nothing is done before the innermost app, and nothing after it
        if is_read and end.reached_at:
            yield b"prepare", end.began_at, end.reached_at, b""
        yield from self.waits
        for leg in self._ended_legs(end):
            about = leg.about()
            yield b"first_byte", leg.began_at, leg.ended_at if leg.head_at is None else leg.head_at, about
            if leg.head_at is not None:
                yield b"generation", leg.head_at, leg.ended_at, about
        if is_read and self.legs:
            yield b"parsing", max(leg.ended_at for leg in self.legs), end.ended_at, b""

    def _ended_legs(self, end: TurnEnd) -> Sequence[LegTimes]:
        legs = self.legs or self._only_leg(end)
        for leg, next_began in zip(legs, [*(each.began_at for each in legs[1:]), end.ended_at], strict=True):
            leg.ended_at = leg.ended_at or next_began
        return legs

    def unread_leg(self, reached_at: float) -> LegTimes:
        """An asking of which nothing was taken down, in a turn that the innermost app had first at that moment."""
        return LegTimes(max([reached_at, *(wait[2] for wait in self.waits)]))

    def _only_leg(self, end: TurnEnd) -> list[LegTimes]:
        """That of a turn which no layer has read."""
        if end.worker is None:
            return []
        leg = self.unread_leg(end.reached_at)
        leg.worker, leg.version = end.worker, end.version
        leg.head_at, leg.ended_at = end.head_at, end.ended_at
        return [leg]

    def _about(self, end: TurnEnd) -> Iterator[bytes]:
        last = self.legs[-1] if self.legs else None
        worker, known = (end.worker, end.version) if last is None else (last.worker, last.version)
        yield from common_attributes(end.path, self.mode, worker, self.version or known, end.status)
        yield attribute(REQUEST_ID, end.request_id)
        if self.session is not None:
            yield attribute("session.id", self.session)
        if self.lost:
            yield attribute("miles_router.lost_workers", self.lost)
        if self.given >= 0:
            yield attribute("gen_ai.usage.input_tokens", self.given)
        if self.sampled >= 0:
            yield attribute("gen_ai.usage.output_tokens", self.sampled)
        if self.answers:
            yield attribute("gen_ai.response.finish_reasons", self.answers)
        if self.error is not None:
            yield repeated_attribute("error.type", self.error)
            if end.status < 500:  # else it is there
                yield ERROR


class TurnEnd(NamedTuple):
    """What is known of a turn once it is over. Moments are those of `time.perf_counter()`."""

    request_id: str
    #: What its client asked, and was sent.
    path: str
    status: int
    began_at: float
    #: When the innermost app had it first; 0 where it never had.
    reached_at: float
    #: When a reply began.
    head_at: float | None
    ended_at: float
    #: The same in Unix nanoseconds.
    ended_ns: int
    #: Who answered last, and with which weights by our knowledge.
    worker: str | None
    version: str | None

    def unix(self, moment: float) -> int:
        """A moment in Unix nanoseconds."""
        return self.ended_ns - int((self.ended_at - moment) * 1e9)


def common_attributes(path: str, mode: str, worker: str | None, version: str | None, status: int) -> Iterator[bytes]:
    """The attributes that many turns share."""
    yield attribute("miles_router.route", route_class(endpoint(path)))
    yield attribute("miles_router.mode", mode)
    if worker is not None:
        yield repeated_attribute("miles_router.worker", worker)
    if version is not None:
        yield repeated_attribute("miles_router.weight_version", version)
    if status:
        yield attribute("http.response.status_code", status)
    if status >= 500:
        yield ERROR


class LegTimes:
    """One asking of a worker, after those that could not be reached."""

    __slots__ = ("began_at", "ended_at", "head_at", "version", "worker")

    def __init__(self, began_at: float | None = None) -> None:
        self.began_at = perf_counter() if began_at is None else began_at
        #: When the worker's reply began.
        self.head_at: float | None = None
        #: When the last of it came; 0 while it does.
        self.ended_at = 0.0
        self.worker: str | None = None
        #: The weight version that the router knew of that one.
        self.version: str | None = None

    def begins(self, flight: Flight, workers: WorkerPool) -> None:
        """The reply of the worker that has it by now, one of these, has begun."""
        self.head_at, self.worker = flight.first_byte_at, flight.worker_url
        self.version = workers.version_of(self.worker)

    def over(self) -> None:
        """All of it has come, or no more will."""
        if not self.ended_at:
            self.ended_at = perf_counter()

    def about(self) -> bytes:
        """Its attributes."""
        about = b"" if self.worker is None else repeated_attribute("miles_router.worker", self.worker)
        return (
            about if self.version is None else about + repeated_attribute("miles_router.weight_version", self.version)
        )
