"""The spans of one turn, and the trace headers for its engines."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from typing import Any

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from middleware_hub.traces.episodes import Episodes
from middleware_hub.traces.parts import around, parts_of
from miles_router.middlewares import Exchange
from miles_router.middlewares.generation import Mark

Headers = list[tuple[bytes, bytes]]
TRACEPARENT, TRACESTATE = b"traceparent", b"tracestate"
#: The mode of a turn that no middleware has read.
PASSTHROUGH = "passthrough"
PROPAGATOR = TraceContextTextMapPropagator()


class TracedTurn:
    """The turn of one request.

    Its span begins when a worker is first asked: until then a middleware may mark the session or text of the turn.
    """

    def __init__(self, tracer: trace.Tracer, episodes: Episodes, exchange: Exchange) -> None:
        self._tracer = tracer
        self._episodes = episodes
        self._exchange = exchange
        #: Unix nanoseconds at the zero of `time.perf_counter()`.
        self._zero_ns = time.time_ns() - int(time.perf_counter() * 1e9)
        self._span: trace.Span | None = None
        self._session: str | None = None
        #: The first turn of the text that this one continues.
        self._first: trace.SpanContext | None = None
        self._marks: list[Mark] = []
        exchange.routing.marks = self._marks
        exchange.routing.worker_headers = self.headers

    def headers(self, headers: Headers, key: str | None) -> Headers:
        """Return the headers for an engine, with the turn's span in place of the client's."""
        span = self._span or self._begin(headers, key)
        carrier: dict[str, str] = {}
        PROPAGATOR.inject(carrier, trace.set_span_in_context(span, Context()))
        kept = [pair for pair in headers if pair[0] not in (TRACEPARENT, TRACESTATE)]
        return [*kept, *((name.encode(), value.encode()) for name, value in carrier.items())]

    def _begin(self, headers: Headers, key: str | None) -> trace.Span:
        read = self._read()
        self._session = read.get("session") or key
        began_ns, parent = self._unix(self._exchange.began_at), _client_of(headers)
        if trace.get_current_span(parent).get_span_context().is_valid:
            pass
        elif self._session is not None:
            parent = self._episodes.enter(self._session, began_ns, self._exchange.mount)
        elif (first := self._episodes.first_turn(read.get("continues"))) is not None:
            self._first, parent = first, trace.set_span_in_context(trace.NonRecordingSpan(first), Context())
        self._span = self._tracer.start_span("turn", parent, trace.SpanKind.SERVER, start_time=began_ns)
        return self._span

    def _facts(self, name: str) -> list[Mapping[str, Any]]:
        return [mark.facts for mark in self._marks if mark.name == name]

    def _read(self) -> Mapping[str, Any]:
        return next(iter(self._facts("read")), {})

    def _unix(self, moment: float) -> int:
        return self._zero_ns + int(moment * 1e9)

    def end(self, route: str, status: int, error: str | None) -> None:
        """End the turn's span, and add the spans of its parts. A request that does not generate has no span.

        Args:
            status: the status that the client got; 0 if it got none.
            error: the type of the error, or None.
        """
        self._exchange.routing.worker_headers = None  # it refers to this object: break the cycle
        if self._span is None and not self._read():
            return
        span = self._span or self._begin([], None)
        for answer in self._facts("answer"):
            if answer.get("rid") is not None:
                self._episodes.generated(answer["rid"], self._first or span.get_span_context())
        if not span.is_recording():
            return
        ended_at, mode = time.perf_counter(), self._read().get("mode", PASSTHROUGH)
        span.set_attributes({"miles_router.route": route, **dict(self._about(mode, status, error))})
        if status >= 500 or error is not None:
            span.set_status(trace.StatusCode.ERROR)
        parts = sorted(parts_of(self._marks, ended_at), key=lambda part: part.began_at)
        if mode != PASSTHROUGH:
            parts = [*around(parts, self._exchange.began_at, ended_at)]
        elif error is None and [part.name for part in parts] == ["first_byte", "generation"]:
            span.add_event("first_byte", timestamp=self._unix(parts[0].ended_at))
            parts = []
        context = trace.set_span_in_context(span, Context())
        for name, began_at, part_ended_at, worker in parts:
            about, began_ns = dict(_of_worker(worker)), self._unix(began_at)
            self._tracer.start_span(name, context, attributes=about, start_time=began_ns).end(self._unix(part_ended_at))
        span.end(self._unix(ended_at))

    def _about(self, mode: str, status: int, error: str | None) -> Iterator[tuple[str, Any]]:
        yield "miles_router.mode", mode
        yield "miles_router.request_id", self._exchange.request_id
        workers = [mark.facts for mark in self._marks if mark.name in ("worker_chosen", "first_byte")]
        yield from _of_worker(workers[-1] if workers else {})
        if self._session is not None:
            yield "session.id", self._session
        if lost := self._facts("worker_lost"):
            yield "miles_router.lost_workers", len(lost)
        if prompts := self._facts("prompt"):
            yield "gen_ai.usage.input_tokens", prompts[-1]["tokens"]
        if answers := self._facts("answer"):
            yield from _of_worker({"weight_version": answers[-1]["version"]})
            yield "gen_ai.usage.output_tokens", sum(answer["tokens"] for answer in answers)
            yield "gen_ai.response.finish_reasons", [answer["finish"] for answer in answers]
        if status:
            yield "http.response.status_code", status
        if error is not None:
            yield "error.type", error


def _of_worker(facts: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    for name in ("worker", "weight_version"):
        if facts.get(name) is not None:
            yield f"miles_router.{name}", facts[name]


def _client_of(headers: Headers) -> Context:
    """Return the trace context of the client's headers; an empty one if there are two parents."""
    parents = [value.decode("latin-1") for name, value in headers if name == TRACEPARENT]
    states = [value.decode("latin-1") for name, value in headers if name == TRACESTATE]
    carrier = {"traceparent": parents[0], "tracestate": ",".join(states)} if len(parents) == 1 else {}
    return PROPAGATOR.extract(carrier, Context())
