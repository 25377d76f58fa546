"""The innermost app: it tells engines whose span they are part of, and takes down what layers cannot see."""

from __future__ import annotations

from collections.abc import Awaitable, Coroutine
from time import perf_counter
from typing import Any

from miles_router.asgi.exchange import Exchange, Message, Receive, Scope, Send
from miles_router.asgi.flight import Flight, Move, ReplyReceiver
from miles_router.asgi.headers import TRACE_HEADERS
from miles_router.fleet.pool import WorkerPool
from miles_router.forwarding.outgoing import Outgoing, outgoing
from miles_router.forwarding.proxy import Proxy
from miles_router.forwarding.upstream import NotAdmitted
from miles_router.traces.context import TRACEPARENT
from miles_router.traces.episodes import EpisodeTraces
from miles_router.traces.turn import LegTimes, TurnDetails, TurnTrace, begin_turn


class TracedProxy(Proxy):
    """The innermost app of a pool.

    Where no layer has wrapped `send`, what a turn needs to know stands in its flight anyway, and nothing is taken down.
    """

    def __init__(self, episodes: EpisodeTraces, workers: WorkerPool, *parts: Any, **options: Any) -> None:
        super().__init__(*parts, **options)
        self._episodes = episodes
        self._new = episodes.new
        self._workers = workers

    def _outgoing(self, scope: Scope, exchange: Exchange, body: bytes) -> Outgoing:
        request = outgoing(scope, exchange.request_id, body, self._affinity)
        if request.generates:
            flight = exchange.flight
            if flight.trace is None and not request.linked:
                traceparent = next(self._new)
                turn = flight.trace = TurnTrace()  # sooner than `_place` does it
                turn.traceparent = traceparent
                turn.request, turn.workers, turn.reached_at, turn.details = request, self._workers, perf_counter(), None
                request.headers.append((TRACEPARENT, traceparent))
            else:
                self._place(request, flight)
        return request

    def _place(self, request: Outgoing, flight: Flight) -> None:
        turn = flight.trace
        if turn is None:
            turn = flight.trace = begin_turn()
        turn.sent(request, self._workers)
        traceparent = turn.traceparent or self._episodes.place(turn, request.headers, request.key)
        if turn.details is not None and turn.details.has_headers:
            _drop(turn.details, request)
        request.headers.append((TRACEPARENT, traceparent))

    def _forward_to_layer(
        self, request: Outgoing, flight: Flight, scope: Scope, receive: Receive, send: Send
    ) -> Coroutine[Any, Any, ReplyReceiver | None]:
        if flight.trace is None:
            return self._forward(request, flight, scope, receive, send)
        return self._forward_leg(flight.trace, request, flight, scope, receive, send)

    async def _forward_leg(
        self, turn: TurnTrace, request: Outgoing, flight: Flight, scope: Scope, receive: Receive, send: Send
    ) -> ReplyReceiver | None:
        leg, details = LegTimes(), turn.detailed()
        details.legs = [*details.legs, leg]
        try:
            return await self._forward(request, flight, scope, receive, _LegSend(send, leg, flight, self._workers))
        except NotAdmitted:  # nobody was asked
            details.legs = [each for each in details.legs if each is not leg]
            raise
        finally:
            leg.over()
            if leg.head_at is None:
                leg.worker = flight.worker_url

    def _reply_receiver(
        self, move: Move, flight: Flight, scope: Scope, receive: Receive, send: Send
    ) -> ReplyReceiver | None:
        receiver, turn = super()._reply_receiver(move, flight, scope, receive, send), flight.trace
        if receiver is not None and turn is not None:
            leg = send.leg if isinstance(send, _LegSend) else turn.first_leg()
            leg.begins(flight, self._workers)
        return receiver


def _drop(turn: TurnDetails, request: Outgoing) -> None:
    """The turn's own span goes in place of the client's. Unless it follows that one, the client's `tracestate` says
    nothing of it, and goes too."""
    dropped = (TRACEPARENT,) if turn.has_parent else TRACE_HEADERS
    request.headers = [pair for pair in request.headers if pair[0] not in dropped]


class _LegSend:
    """The `send` of one leg: told of the last message after the leg is over. What a layer does with the whole answer
    is no part of the generation."""

    __slots__ = ("_flight", "_send", "_workers", "leg")

    def __init__(self, send: Send, leg: LegTimes, flight: Flight, workers: WorkerPool) -> None:
        self._send = send
        self._flight = flight
        self._workers = workers
        self.leg = leg

    def __call__(self, message: Message) -> Awaitable[None]:
        if message["type"] == "http.response.start":
            self.leg.begins(self._flight, self._workers)
        elif not message.get("more_body", True):
            self.leg.over()
        return self._send(message)
