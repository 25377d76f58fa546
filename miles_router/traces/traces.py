"""All traces of one router: turns that begin and end, and what layers tell of them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

from miles_router.asgi.exchange import Exchange, Receive, Scope, Send
from miles_router.fleet.gate import SESSION_PREFIX, endpoint
from miles_router.forwarding.outgoing import AFFINITY_HEADERS, MAX_KEY_LENGTH
from miles_router.metrics.metrics import route_class
from miles_router.traces.context import TRACEPARENT, TraceContext
from miles_router.traces.episodes import EpisodeTraces, Sampling
from miles_router.traces.forwarding import TracedForwarder, TracedProxy
from miles_router.traces.layer import TurnTracing
from miles_router.traces.queue import SpanQueue
from miles_router.traces.turn import CURRENT, TurnTrace

ROUTING_HEADER, SESSION_HEADER = AFFINITY_HEADERS


class Traces:
    """What layers tell goes to the turn that their task is in; outside of one it goes nowhere.

    Args:
        close: ends the sending of spans.
    """

    #: What a router is made of that traces its turns.
    forwarder, proxy = TracedForwarder, TracedProxy

    def __init__(self, sampling: Sampling, queue: SpanQueue, close: Callable[[], None]) -> None:
        self._queue = queue
        self._close = close
        self._episodes = EpisodeTraces(sampling, queue.put)
        #: What `GET /metrics` shows.
        self.statistics = queue.statistics

    def around(self, app: Callable[[Scope, Receive, Send], Awaitable[None]]) -> TurnTracing:
        """The layers of a router, in the one that makes a trace of each turn."""
        return TurnTracing(app, self)

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """While it is entered, spans are sent; at its end the last ones."""
        self._queue.start()
        try:
            yield
        finally:
            self._episodes.end_all()
            await asyncio.to_thread(self._queue.close)
            self._close()

    def begin(self, scope: Scope) -> TurnTrace:
        """A turn begins."""
        path, parents = scope["path"], []
        session: bytes | None = None
        for name, value in scope["headers"]:
            if name == TRACEPARENT:
                parents.append(value)
            elif name == SESSION_HEADER or (name == ROUTING_HEADER and session is None):
                session = value
        key = None if session is None else session[:MAX_KEY_LENGTH].decode("latin-1")
        if path.startswith(SESSION_PREFIX):
            key = path[len(SESSION_PREFIX) :].partition("/")[0][:MAX_KEY_LENGTH]
        parent = TraceContext.read(parents[0]) if len(parents) == 1 else None
        return TurnTrace(path, Exchange.of(scope).request_id, key, parent, self._episodes.place)

    def finish(self, turn: TurnTrace, status: int, error: str | None) -> None:
        """A turn is over.

        Args:
            status: that its client was sent; 0 for none.
            error: the type of what has failed.
        """
        if turn.placed().sampled:
            self._queue.put(*turn.spans(route_class(endpoint(turn.path)), status, error))
        self._episodes.leave(turn)

    # What layers tell

    def prompt(self, mode: str, tokens: int, *, goes_on: str | None = None) -> None:
        """A layer has read the request.

        Args:
            mode: what it makes of it: `session` or `text`.
            tokens: of the prompts.
            goes_on: the engine's name of the generation that the text goes on from.
        """
        if (turn := CURRENT.get()) is not None:
            turn.mode, turn.given = mode, tokens
            if goes_on is not None:
                turn.earlier = self._episodes.first_turn(goes_on)

    def answer(self, tokens: int, finish: str, version: str | None, *, name: str | None = None) -> None:
        """A layer has read one answer.

        Args:
            tokens: that were sampled.
            finish: why it ended.
            version: of the weights that sampled its last token.
            name: the engine's of the generation, where a text may go on from it.
        """
        if (turn := CURRENT.get()) is not None:
            turn.sampled = max(turn.sampled, 0) + tokens
            turn.answers.append(finish)
            turn.version = version or turn.version
            if name is not None:
                self._episodes.generated(turn, name)

    def end_session(self, session: str) -> None:
        """A session's episode is over."""
        self._episodes.end(session)
