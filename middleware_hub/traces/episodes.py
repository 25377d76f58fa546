"""The traces of turns: one for each session, and one for each text that is continued.

The ids of a session's trace are derived from the session's name, so that all processes, also after a restart, use the
same trace.
"""

from __future__ import annotations

import os
from collections import OrderedDict
from hashlib import blake2b

from opentelemetry.context import Context
from opentelemetry.sdk.trace.id_generator import RandomIdGenerator
from opentelemetry.trace import Span, SpanContext, Tracer, set_span_in_context

#: The most open episodes, and the most generations that a text may continue; the oldest are dropped.
MAX_EPISODES, MAX_TEXTS = 65_536, 262_144
#: The variables that distinguish runs with equal session names.
ABOUT_RUN = ("OTEL_SERVICE_NAME", "OTEL_RESOURCE_ATTRIBUTES")
TRACE_BYTES, SPAN_BYTES = 16, 8


class EpisodeIds(RandomIdGenerator):
    """A generator of random ids. While `session` is set, the ids are derived from the session's name instead."""

    def __init__(self) -> None:
        self.session: str | None = None
        run = "\n".join(os.environ.get(name, "") for name in ABOUT_RUN)
        self._run = blake2b(run.encode("utf-8", "surrogateescape"), digest_size=32).digest()

    def generate_trace_id(self) -> int:
        """Return a trace id of 128 bits."""
        return super().generate_trace_id() if self.session is None else self._of(self.session, TRACE_BYTES)

    def generate_span_id(self) -> int:
        """Return a span id of 64 bits."""
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

    def enter(self, session: str, began_ns: int, mount: str = "") -> Context:
        """Count a turn of a session that began at this Unix time in nanoseconds, and return the parent of its span.
        `mount` is that of the session's model: equal names of two models are two sessions."""
        name = _name(session, mount)
        span, turns = self._open.pop(name, (None, 0))
        if span is None:
            self._ids.session = name
            try:
                about = {"session.id": session}
                span = self._tracer.start_span("episode", Context(), attributes=about, start_time=began_ns)
            finally:  # a sampler that is not ours may raise
                self._ids.session = None
        self._open[name] = span, turns + 1
        if len(self._open) > MAX_EPISODES:
            self._end(next(iter(self._open)))
        return set_span_in_context(span, Context())

    def end(self, session: str, mount: str = "") -> None:
        """End the span of a session. Do nothing for an unknown session."""
        if (name := _name(session, mount)) in self._open:
            self._end(name)

    def end_all(self) -> None:
        for each in [*self._open]:
            self._end(each)

    def _end(self, name: str) -> None:
        span, turns = self._open.pop(name)
        span.set_attribute("miles_router.turns", turns)
        span.end()

    def generated(self, rid: str, first: SpanContext) -> None:
        """Record the first turn of the text to which the generation `rid` belongs."""
        self._texts[rid] = first
        if len(self._texts) > MAX_TEXTS:
            self._texts.popitem(last=False)

    def first_turn(self, rid: str | None) -> SpanContext | None:
        """Return the first turn of the text that contains the generation `rid`; None if it is unknown."""
        return None if rid is None else self._texts.get(rid)


def _name(session: str, mount: str) -> str:
    return f"{mount}/sessions/{session}" if mount else session
