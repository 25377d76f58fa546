"""The outermost layer: it makes a trace of each request that generates."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Protocol

from miles_router.asgi.exchange import Receive, Scope, Send
from miles_router.asgi.outlet import Outlet
from miles_router.errors import RouterError
from miles_router.fleet.gate import generates
from miles_router.traces.turn import CURRENT, TurnTrace


class Recorder(Protocol):
    """Takes turns: `Traces`."""

    def begin(self, scope: Scope) -> TurnTrace:
        """One begins."""
        ...

    def finish(self, turn: TurnTrace, status: int, error: str | None) -> None:
        """One is over; as `TurnTrace.spans`."""
        ...


class TurnTracing:
    """The layer."""

    def __init__(self, app: Callable[[Scope, Receive, Send], Awaitable[None]], traces: Recorder) -> None:
        self._app = app
        self._traces = traces

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Run one request."""
        if scope["type"] != "http" or not generates(scope["path"]):
            await self._app(scope, receive, send)
            return
        turn = self._traces.begin(scope)
        outer, refused, error = CURRENT.set(turn), 0, None
        try:
            await self._app(scope, receive, send)
        except BaseException as raised:
            error = raised.type if isinstance(raised, RouterError) else type(raised).__name__
            refused = raised.status if isinstance(raised, RouterError) else 0
            raise
        finally:
            CURRENT.reset(outer)
            status = send.status if isinstance(send, Outlet) else 0
            self._traces.finish(turn, status or refused, error)
