"""One turn on its way: when each part of it began and ended, and what layers have told of it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import TYPE_CHECKING

from miles_router.fleet.workers import Worker
from miles_router.traces.context import SPAN_BYTES, TraceContext
from miles_router.traces.encoding import ERROR, SERVER, attribute, repeated_attribute, span

if TYPE_CHECKING:
    from miles_router.traces.episodes import EpisodeSpan

#: Of a request in which no layer has read anything.
PASSTHROUGH = "passthrough"
_LAST_ID = (1 << 8 * SPAN_BYTES) - 1
#: A part of a turn: its name, begin, end and attributes.
Part = tuple[bytes, float, float, bytes]


class TurnTrace:
    """What is known of one turn. Its moments are those of `time.perf_counter()`.

    Args:
        path: decoded.
        session: what names its session, in the path or a header.
        parent: the client's span, where it has sent one.
        place: finds out which trace it belongs to: sets `context`, `parent_id` and `episode`.
    """

    __slots__ = (
        *("answers", "began_at", "began_ns", "context", "earlier", "episode", "given", "legs", "mode", "parent"),
        *("parent_id", "path", "reached_at", "request_id", "sampled", "session", "version", "waits", "_place"),
    )

    def __init__(
        self,
        path: str,
        request_id: str,
        session: str | None,
        parent: TraceContext | None,
        place: Callable[[TurnTrace], None],
    ) -> None:
        self.began_ns = time.time_ns()
        self.began_at = time.perf_counter()
        self.path = path
        self.request_id = request_id
        self.session = session
        self.parent = parent
        self._place = place
        #: Its own span, once somebody has to know,
        self.context: TraceContext | None = None
        #: and the one that it is part of.
        self.parent_id: bytes | None = None
        self.episode: EpisodeSpan | None = None
        #: The first turn of the text that it goes on from.
        self.earlier: TraceContext | None = None
        #: Which layer has read it.
        self.mode = PASSTHROUGH
        #: Tokens; -1 where nobody has counted them.
        self.given = self.sampled = -1
        #: Why each answer has ended.
        self.answers: list[str] = []
        self.version: str | None = None
        #: When the innermost app had it first.
        self.reached_at: float | None = None
        self.waits: list[Part] = []
        self.legs: list[Leg] = []

    def placed(self) -> TraceContext:
        """Its own span. From now on it is decided which trace that belongs to."""
        if self.context is None:
            self._place(self)
            assert self.context is not None
        return self.context

    def spans(self, route: str, status: int, error: str | None) -> tuple[bytes, int]:
        """Its span and those of its parts, and how many they are.

        Args:
            status: that its client was sent; 0 for none.
            error: the type of what has failed.
        """
        context, now = self.placed(), time.perf_counter()
        rest, remote = b"".join(self._about(route, status, error)), self.parent is not None
        begin, end = self.began_ns, self._ns(now)
        written = [span(context, self.parent_id, b"turn", begin, end, rest, kind=SERVER, remote=remote)]
        number = int.from_bytes(context.span_id, "big")
        for name, part_began, part_ended, about in self._parts(now):
            number = number + 1 & _LAST_ID or 1
            own = TraceContext(context.trace_id, number.to_bytes(SPAN_BYTES, "big"), True)
            written.append(span(own, context.span_id, name, self._ns(part_began), self._ns(part_ended), about))
        return b"".join(written), len(written)

    def _ns(self, moment: float) -> int:
        return self.began_ns + int((moment - self.began_at) * 1e9)

    def _parts(self, now: float) -> Iterator[Part]:
        is_read = self.mode != PASSTHROUGH  # else nothing is done before the innermost app, and nothing after it
        if is_read and self.reached_at is not None:
            yield b"prepare", self.began_at, self.reached_at, b""
        yield from self.waits
        for leg in self.legs:
            about = leg.about()
            head_at = leg.ended_at if leg.head_at is None else leg.head_at
            yield b"first_byte", leg.began_at, head_at, about
            if leg.head_at is not None:
                yield b"generation", leg.head_at, leg.ended_at, about
        if is_read and self.legs:
            yield b"parsing", max(leg.ended_at for leg in self.legs), now, b""

    def _about(self, route: str, status: int, error: str | None) -> Iterator[bytes]:
        yield repeated_attribute("miles_router.route", route)
        yield repeated_attribute("miles_router.mode", self.mode)
        yield attribute("miles_router.request_id", self.request_id)
        if self.session is not None:
            yield attribute("session.id", self.session)
        last = self.legs[-1] if self.legs else None
        if last is not None and last.worker is not None:
            yield repeated_attribute("miles_router.worker", last.worker)
        version = self.version or (last.version if last is not None else None)
        if version is not None:
            yield repeated_attribute("miles_router.weight_version", version)
        if self.given >= 0:
            yield attribute("gen_ai.usage.input_tokens", self.given)
        if self.sampled >= 0:
            yield attribute("gen_ai.usage.output_tokens", self.sampled)
        if self.answers:
            yield attribute("gen_ai.response.finish_reasons", self.answers)
        if status:
            yield attribute("http.response.status_code", status)
        if error is not None:
            yield repeated_attribute("error.type", error)
        if error is not None or status >= 500:
            yield ERROR


class Leg:
    """One asking of a worker, after those that could not be reached."""

    __slots__ = ("began_at", "ended_at", "head_at", "retries", "version", "worker")

    def __init__(self) -> None:
        self.began_at = time.perf_counter()
        #: When the worker's reply began.
        self.head_at: float | None = None
        #: When the last of it came; 0 while it does.
        self.ended_at = 0.0
        self.worker: str | None = None
        #: The weight version that the router knows of that one.
        self.version: str | None = None
        self.retries = 0

    def about(self) -> bytes:
        """Its attributes."""
        about = b"" if self.worker is None else repeated_attribute("miles_router.worker", self.worker)
        if self.version is not None:
            about += repeated_attribute("miles_router.weight_version", self.version)
        return about + attribute("miles_router.retries", self.retries) if self.retries else about

    def begins(self, worker: Worker) -> None:
        """The reply of this worker has begun."""
        self.head_at = time.perf_counter()
        self.worker, self.version = worker.url, worker.weight_version

    def over(self) -> None:
        """All of it has come, or no more will."""
        if not self.ended_at:
            self.ended_at = time.perf_counter()


#: The turn that this task is in.
CURRENT: ContextVar[TurnTrace | None] = ContextVar("miles_router.traces.turn", default=None)
