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
    #: Of its flight, once it is over: when a reply began, who answered last, and with which weights by our knowledge.
    head_at: float | None = None
    worker: str | None = None
    known_version: str | None = None
    #: What its client asked and was sent.
    request_id = ""
    path = ""
    status = 0
    #: When it began and ended by `time.perf_counter()`, and when it began in Unix nanoseconds.
    began_at = 0.0
    ended_at = 0.0
    began_ns = 0

    def ends(self, exchange: Exchange, path: str, status: int, began_at: float) -> None:
        """It is over. From here on it holds nothing of the request itself.

        Args:
            path: that its client asked.
            status: that its client was sent; 0 for none.
            began_at: by `time.perf_counter()`.
        """
        self.began_at, self.ended_at = began_at, time.perf_counter()
        self.began_ns = time.time_ns() - int((self.ended_at - began_at) * 1e9)
        self.request_id, self.path, self.status = exchange.request_id, path, status
        flight = exchange.flight
        self.head_at, self.worker = flight.first_byte_at, flight.worker_url
        if self.request is not None and self.workers is not None:
            self.lost += len(self.request.tried)
            self.known_version = self.workers.version_of(flight.worker_url)
            self.request = self.workers = None

    def _ns(self, moment: float) -> int:
        return self.began_ns + int((moment - self.began_at) * 1e9)

    def sent(self, request: Outgoing, workers: WorkerPool) -> None:
        """The innermost app has it, and asks one of these workers."""
        if self.request is None:
            self.reached_at = time.perf_counter()
        else:
            self.lost += len(self.request.tried)
        self.request, self.workers = request, workers

    def spans(self) -> bytes:
        """Its span and those of its parts."""
        context, remote = self.context, self.has_parent
        assert context is not None
        begin, end = self.began_ns, self._ns(self.ended_at)
        if self.mode is PASSTHROUGH and not self.waits and not self.legs and self.error is None:
            rest = self._about_nobody()
            if self.head_at is not None:
                rest += event(b"first_byte", self._ns(self.head_at))
            return span(context, self.parent_id, b"turn", begin, end, rest, kind=SERVER, remote=remote)
        rest = b"".join(self._about())
        written = [span(context, self.parent_id, b"turn", begin, end, rest, kind=SERVER, remote=remote)]
        number = int.from_bytes(context.span_id, "big")
        for name, part_began, part_ended, about in self._parts():
            number = number + 1 & _LAST_ID or 1
            own = TraceContext(context.trace_id, number.to_bytes(SPAN_BYTES, "big"), True)
            written.append(span(own, context.span_id, name, self._ns(part_began), self._ns(part_ended), about))
        return b"".join(written)

    def _parts(self) -> Iterator[Part]:
        is_read = self.mode is not PASSTHROUGH  # else nothing is done before the innermost app, and nothing after it
        if is_read and self.reached_at:
            yield b"prepare", self.began_at, self.reached_at, b""
        yield from self.waits
        for leg in self.legs or self._only_leg():
            about = leg.about()
            yield b"first_byte", leg.began_at, leg.ended_at if leg.head_at is None else leg.head_at, about
            if leg.head_at is not None:
                yield b"generation", leg.head_at, leg.ended_at, about
        if is_read and self.legs:
            yield b"parsing", max(leg.ended_at for leg in self.legs), self.ended_at, b""

    def _only_leg(self) -> list[LegTimes]:
        """That of a turn which no layer has read."""
        if self.worker is None:
            return []
        leg = LegTimes(max([self.reached_at, *(wait[2] for wait in self.waits)]))
        leg.worker, leg.version = self.worker, self.known_version
        leg.head_at, leg.ended_at = self.head_at, self.ended_at
        return [leg]

    def _about_nobody(self) -> bytes:
        """The attributes of a turn that no layer has read."""
        key = self.path, self.worker, self.known_version, self.status
        known = _known.get(key)
        if known is None:
            if len(_known) >= MAX_KNOWN:
                _known.clear()
            known = _known[key] = b"".join(self._common(self.worker, self.known_version))
        return known + self._own()

    def _own(self) -> bytes:
        """The attributes that hardly two turns share."""
        own = request_id(self.request_id)
        if self.session is not None:
            own += attribute("session.id", self.session)
        return own + attribute("miles_router.lost_workers", self.lost) if self.lost else own

    def _common(self, worker: str | None, version: str | None) -> Iterator[bytes]:
        yield attribute("miles_router.route", route_class(endpoint(self.path)))
        yield attribute("miles_router.mode", self.mode)
        if worker is not None:
            yield repeated_attribute("miles_router.worker", worker)
        if version is not None:
            yield repeated_attribute("miles_router.weight_version", version)
        if self.status:
            yield attribute("http.response.status_code", self.status)
        if self.status >= 500:
            yield ERROR

    def _about(self) -> Iterator[bytes]:
        last = self.legs[-1] if self.legs else None
        worker = self.worker if last is None else last.worker
        yield from self._common(worker, self.version or (self.known_version if last is None else last.version))
        yield self._own()
        if self.given >= 0:
            yield attribute("gen_ai.usage.input_tokens", self.given)
        if self.sampled >= 0:
            yield attribute("gen_ai.usage.output_tokens", self.sampled)
        if self.answers:
            yield attribute("gen_ai.response.finish_reasons", self.answers)
        if self.error is not None:
            yield repeated_attribute("error.type", self.error)
            if self.status < 500:  # else it is there
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
