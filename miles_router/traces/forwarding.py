"""The innermost app, and what sends for it, with the moments of each turn taken down."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Iterator
from contextlib import contextmanager

from miles_router.asgi.exchange import Message, Receive, Scope, Send
from miles_router.asgi.flight import Flight, Relief
from miles_router.asgi.outlet import Outlet
from miles_router.forwarding.forwarder import Forwarded, Forwarder
from miles_router.forwarding.outgoing import Outgoing
from miles_router.forwarding.proxy import Proxy
from miles_router.forwarding.upstream import NotAdmitted
from miles_router.traces.turn import CURRENT, Leg


class TracedForwarder(Forwarder):
    """Takes down how long turns wait, and for what."""

    async def wait_at_gate(self, waiting: Flight, came_at: float) -> None:
        """As every forwarder does."""
        if self._fleet.gate.closed:
            with _timed(b"gate"):
                await super().wait_at_gate(waiting, came_at)

    async def wait_for_room(self, request: Outgoing, key: str, waiting: Flight, came_at: float) -> None:
        """As every forwarder does."""
        with _timed(b"queue"):
            await super().wait_for_room(request, key, waiting, came_at)


@contextmanager
def _timed(name: bytes) -> Iterator[None]:
    turn, begin = CURRENT.get(), time.perf_counter()
    try:
        yield
    finally:
        if turn is not None:
            turn.waits.append((name, begin, time.perf_counter(), b""))


class TracedProxy(Proxy):
    """Takes down when each worker was asked, and when its reply began and ended; tells it which span that is part
    of."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """As every proxy does."""
        if (turn := CURRENT.get()) is not None:
            if turn.reached_at is None:
                turn.reached_at = time.perf_counter()
            headers = turn.placed().written(scope["headers"], follows=turn.parent is not None)
            scope = {**scope, "headers": headers}
        await super().__call__(scope, receive, send)

    async def _forward(
        self, request: Outgoing, flight: Flight, scope: Scope, receive: Receive, send: Send
    ) -> Relief | None:
        if (turn := CURRENT.get()) is None:
            return await super()._forward(request, flight, scope, receive, send)
        leg, tried = Leg(), len(request.tried)
        turn.legs.append(leg)
        try:
            return await super()._forward(request, flight, scope, receive, _LegSend(send, leg))
        except NotAdmitted:  # nobody was asked
            turn.legs.remove(leg)
            raise
        finally:
            leg.over()
            leg.retries = len(request.tried) - tried
            if leg.head_at is None:
                leg.worker = flight.worker_url

    async def _relay(self, forwarded: Forwarded, send: Send) -> None:
        if isinstance(send, _LegSend):
            send.leg.begins(forwarded.worker)
            if isinstance(send.inner, Outlet):  # nobody reads the answer on its way, and it may take the short cut
                send = send.inner
        await super()._relay(forwarded, send)


class _LegSend:
    """The `send` of one leg. A layer's is told of the last message after the leg is over: what it does with the whole
    answer is no part of the generation."""

    __slots__ = ("inner", "leg")

    def __init__(self, inner: Send, leg: Leg) -> None:
        self.inner = inner
        self.leg = leg

    def __call__(self, message: Message) -> Awaitable[None]:
        if not message.get("more_body", True):
            self.leg.over()
        return self.inner(message)
