"""The traces of turns: one for each session, and one for each text that is continued.

A session's trace is named by its session, so that every process and every start of a router gives it the same one.
"""

from __future__ import annotations

import os
from collections import OrderedDict
from hashlib import blake2b

from opentelemetry.context import Context
from opentelemetry.sdk.trace.id_generator import RandomIdGenerator
from opentelemetry.trace import Span, SpanContext, Tracer, set_span_in_context

#: Sessions whose episode is not over, and generations that a text may go on from. The oldest are let go.
MAX_EPISODES, MAX_TEXTS = 65_536, 262_144
#: The variables that tell runs apart whose sessions have the same names.
ABOUT_RUN = ("OTEL_SERVICE_NAME", "OTEL_RESOURCE_ATTRIBUTES")
TRACE_BYTES, SPAN_BYTES = 16, 8


class EpisodeIds(RandomIdGenerator):
    """Random ids, but for the span of a session, whose ids are made from the session's name while `session` is set."""

    def __init__(self) -> None:
        self.session: str | None = None
        run = "\n".join(os.environ.get(name, "") for name in ABOUT_RUN)
        self._run = blake2b(run.encode("utf-8", "surrogateescape"), digest_size=32).digest()

    def generate_trace_id(self) -> int:
        """Return 128 bits."""
        return super().generate_trace_id() if self.session is None else self._of(self.session, TRACE_BYTES)

    def generate_span_id(self) -> int:
        """Return 64 bits."""
        return super().generate_span_id() if self.session is None else self._of(self.session, SPAN_BYTES)

    def _of(self, session: str, size: int) -> int:
        name = session.encode("utf-8", "surrogatepass")
        return int.from_bytes(blake2b(name, digest_size=size, key=self._run).digest(), "big")


class Episodes:
    """The spans of sessions, each open from the first turn to the session's end, and the first turns of texts."""

    def __init__(self, tracer: Tracer, ids: EpisodeIds) -> None:
        self._tracer = tracer
        self._ids = ids
        self._open: OrderedDict[str, tuple[Span, int]] = OrderedDict()
        self._texts: OrderedDict[str, SpanContext] = OrderedDict()

    def enter(self, session: str, began_ns: int) -> Context:
        """Count a turn of a session, which began at this Unix time, and return the parent of its span."""
        span, turns = self._open.pop(session, (None, 0))
        if span is None:
            self._ids.session = session
            try:
                about = {"session.id": session}
                span = self._tracer.start_span("episode", Context(), attributes=about, start_time=began_ns)
            finally:  # a sampler that is not ours may raise
                self._ids.session = None
        self._open[session] = span, turns + 1
        if len(self._open) > MAX_EPISODES:
            self.end(next(iter(self._open)))
        return set_span_in_context(span, Context())

    def end(self, session: str | None = None) -> None:
        """End the span of a session that is over, or of all; harmless for an unknown one."""
        for each in [*self._open] if session is None else {session} & self._open.keys():
            span, turns = self._open.pop(each)
            span.set_attribute("miles_router.turns", turns)
            span.end()

    def generated(self, rid: str, first: SpanContext) -> None:
        """Note the first turn of the text that the engine's generation `rid` belongs to."""
        self._texts[rid] = first
        if len(self._texts) > MAX_TEXTS:
            self._texts.popitem(last=False)

    def first_turn(self, rid: str | None) -> SpanContext | None:
        """Return the first turn of the text that goes on from this generation."""
        return None if rid is None else self._texts.get(rid)
