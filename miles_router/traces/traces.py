"""All traces of one router: turns that are over, and what layers tell of them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial

from miles_router.asgi.exchange import Exchange
from miles_router.asgi.flight import Flight
from miles_router.fleet.pool import WorkerPool
from miles_router.traces.context import SAMPLED
from miles_router.traces.episodes import EpisodeTraces, TraceSampling
from miles_router.traces.plain import PlainTurn
from miles_router.traces.queue import SpanQueue
from miles_router.traces.sending import TracedProxy
from miles_router.traces.turn import TurnTrace, begin_turn
from miles_router.traces.waiting import TracedGate


class Traces:
    """The traces of a router.

    Args:
        close: ends the sending of spans.
    """

    #: What a router is made of that traces its turns.
    gate = TracedGate
    #: How the `traceparent` of a span that is kept ends.
    kept = SAMPLED

    def __init__(self, sampling: TraceSampling, queue: SpanQueue[PlainTurn], close: Callable[[], None]) -> None:
        #: It takes plain turns from whoever finishes requests.
        self.queue = queue
        self._close = close
        self._episodes = EpisodeTraces(sampling, queue.put)
        #: What `GET /metrics` shows.
        self.statistics = queue.statistics

    def proxy(self, workers: WorkerPool) -> Callable[..., TracedProxy]:
        """What makes the innermost app of the pool with these workers."""
        return partial(TracedProxy, self._episodes, workers)

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """While it is entered, spans are sent; at its end the last ones."""
        self.queue.start()
        try:
            yield
        finally:
            self._episodes.end_all()
            await asyncio.to_thread(self.queue.close)
            self._close()

    def finish(self, exchange: Exchange, turn: TurnTrace, path: str, status: int, began_at: float) -> None:
        """A turn is over that is no plain one: a layer has read it, it has waited, or nobody has answered it.

        Args:
            path: that its client asked.
            status: that its client was sent; 0 for none.
            began_at: by `time.perf_counter()`.
        """
        if turn.traceparent is None:  # refused before anybody was asked
            self._episodes.place(turn)
        if turn.is_sampled:
            self.queue.put(turn.spans(exchange, path, status, began_at))
        if turn.details is not None and turn.details.episode is not None:
            self._episodes.leave(turn.details.episode, began_at)

    # What layers tell

    def reads(self, flight: Flight, mode: str, *, session: str | None = None, goes_on: str | None = None) -> None:
        """A layer reads a request, before anybody is asked.

        Args:
            mode: what it makes of it: `session` or `text`.
            session: the session that it belongs to.
            goes_on: the engine's name of the generation that the text goes on from.
        """
        turn = flight.trace = flight.trace or begin_turn()
        details = turn.detailed()
        details.mode, details.session = mode, session
        if goes_on is not None:
            details.earlier = self._episodes.first_turn(goes_on)

    def prompt(self, flight: Flight, tokens: int) -> None:
        """The prompts of a request have so many tokens."""
        if flight.trace is not None:
            flight.trace.detailed().given = tokens

    def answer(self, flight: Flight, tokens: int, finish: str, version: str | None, *, name: str | None = None) -> None:
        """A layer has read one answer.

        Args:
            tokens: that were sampled.
            finish: why it ended.
            version: of the weights that sampled its last token.
            name: the engine's of the generation, where a text may go on from it.
        """
        turn = flight.trace
        if turn is None or turn.traceparent is None:
            return
        details = turn.detailed()
        details.sampled = max(details.sampled, 0) + tokens
        details.answers = [*details.answers, finish]
        details.version = version or details.version
        if name is not None:
            self._episodes.generated(turn, name)

    def end_session(self, session: str) -> None:
        """A session's episode is over."""
        self._episodes.end(session)
