"""Which turns are one trace: those of a session, and those of a text that goes on.

A session's trace is named by its session, so that every process and every start of a router gives it the same one. Its
first span has the whole episode, and is told when that is over.
"""

from __future__ import annotations

import os
import time
from collections import OrderedDict
from collections.abc import Callable
from hashlib import blake2b
from typing import Protocol

from miles_router.asgi.headers import TRACE_HEADERS, RawHeaders
from miles_router.traces.context import (
    SPAN_BYTES,
    TRACE_BYTES,
    TRACEPARENT,
    TraceContext,
    new_traces,
)
from miles_router.traces.encoding import attribute, span
from miles_router.traces.turn import TurnTrace

#: Sessions whose episode is not over, and generations that a text may go on from. The oldest are let go.
MAX_EPISODES, MAX_TEXTS = 65_536, 262_144
#: What tells runs apart that name their sessions alike.
_ABOUT_THE_RUN = ("OTEL_SERVICE_NAME", "OTEL_RESOURCE_ATTRIBUTES")


class TraceSampling(Protocol):
    """Decides what is kept: OpenTelemetry's sampler. `all_begin`: whether each trace is, and nobody has to be asked."""

    all_begin: bool

    def begins(self, trace_id: bytes) -> bool:
        """Whether a trace is."""
        ...

    def follows(self, parent: TraceContext) -> bool:
        """Whether what is part of another process's span is."""
        ...


class EpisodeSpan:
    """The span of a session."""

    __slots__ = ("began_ns", "context", "ended_ns", "over", "running", "session", "turns")

    def __init__(self, session: str, context: TraceContext) -> None:
        self.session = session
        self.context = context
        self.began_ns = self.ended_ns = time.time_ns()
        self.turns = 0
        self.running = 0
        #: Nobody adds to it any more but those that run.
        self.over = False

    def written(self) -> bytes:
        """It, as OTLP spells it."""
        about = attribute("session.id", self.session) + attribute("miles_router.turns", self.turns)
        return span(self.context, None, b"episode", self.began_ns, self.ended_ns, about)


class EpisodeTraces:
    """Places turns.

    Args:
        take: is given the span of each episode that is over, written.
    """

    def __init__(self, sampling: TraceSampling, take: Callable[[bytes], None]) -> None:
        self._sampling = sampling
        #: First spans of traces of their own.
        self.new = new_traces(None if sampling.all_begin else sampling.begins)
        self._take = take
        run = "\n".join(os.environ.get(name, "") for name in _ABOUT_THE_RUN)
        self._run = blake2b(run.encode("utf-8", "surrogateescape"), digest_size=32).digest()
        self._open: OrderedDict[str, EpisodeSpan] = OrderedDict()
        self._texts: OrderedDict[str, TraceContext] = OrderedDict()

    def place(self, turn: TurnTrace, headers: RawHeaders | None = None, key: str | None = None) -> bytes:
        """Find out which trace a turn belongs to: its client's, its session's, that of the text that it goes on from,
        or its own. Gives the `traceparent` that names its span to an engine.

        Args:
            headers: of the request, which may name its client's span.
            key: what ties it to earlier ones: its session, where no layer has said which that is.
        """
        parent = None if headers is None else _parent(turn, headers)
        details = turn.details
        if key is not None and (details is None or details.session is None):
            details = turn.detailed()
            details.session = key
        if details is not None:
            if parent is not None:
                details.has_parent = True
                return turn.follows(parent, self._sampling.follows(parent))
            if details.session is not None:
                details.episode = self._enter(details.session)
                return turn.follows(details.episode.context, details.episode.context.sampled)
            if details.earlier is not None:
                return turn.follows(details.earlier, details.earlier.sampled)
        turn.traceparent = next(self.new)
        return turn.traceparent

    def _enter(self, session: str) -> EpisodeSpan:
        episode = self._open.get(session)
        if episode is None:
            digest = blake2b(
                session.encode("utf-8", "surrogatepass"), digest_size=TRACE_BYTES + SPAN_BYTES, key=self._run
            ).digest()
            trace_id, span_id = digest[:TRACE_BYTES], digest[TRACE_BYTES:]
            context = TraceContext(trace_id, span_id, self._sampling.begins(trace_id))
            episode = self._open[session] = EpisodeSpan(session, context)
            if len(self._open) > MAX_EPISODES:
                self._end(next(iter(self._open)))
        else:
            self._open.move_to_end(session)
        episode.running += 1
        return episode

    def leave(self, episode: EpisodeSpan, began_at: float) -> None:
        """A turn of it is over, which began then by `time.perf_counter()`."""
        episode.running -= 1
        episode.turns += 1
        episode.ended_ns = time.time_ns()
        episode.began_ns = min(episode.began_ns, episode.ended_ns - int((time.perf_counter() - began_at) * 1e9))
        if episode.over and not episode.running:
            self._tell(episode)

    def end(self, session: str) -> None:
        """A session's episode is over; harmless for one that nobody knows."""
        if session in self._open:
            self._open[session].ended_ns = time.time_ns()
            self._end(session)

    def _end(self, session: str) -> None:
        episode = self._open.pop(session)
        episode.over = True
        if not episode.running:
            self._tell(episode)

    def _tell(self, episode: EpisodeSpan) -> None:
        if episode.context.sampled:
            self._take(episode.written())

    def end_all(self) -> None:
        """The router ends."""
        for session in list(self._open):
            self._end(session)

    def generated(self, turn: TurnTrace, name: str) -> None:
        """A text may go on from the generation of this name, which belongs to a turn."""
        assert turn.context is not None
        details = turn.detailed()
        self._texts[name] = turn.context if details.earlier is None or details.has_parent else details.earlier
        if len(self._texts) > MAX_TEXTS:
            self._texts.popitem(last=False)

    def first_turn(self, name: str) -> TraceContext | None:
        """The first turn of the text that this generation belongs to."""
        return self._texts.get(name)


def _parent(turn: TurnTrace, headers: RawHeaders) -> TraceContext | None:
    """The client's span. One that is named twice is none."""
    parents: list[bytes] = []
    for name, value in headers:
        if name in TRACE_HEADERS:
            turn.detailed().has_headers = True
            if name == TRACEPARENT:
                parents.append(value)
    return TraceContext.read(parents[0]) if len(parents) == 1 else None
