"""TracesMiddleware: OpenTelemetry spans that show how long each part of a turn took."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial

try:
    from opentelemetry.trace import Tracer

    from middleware_hub.traces.provider import SpanStatistics, shut_down, span_exporter, tracer_provider
except ModuleNotFoundError as error:
    raise ImportError(f"traces need the module {error.name!r}: pip install 'miles-router[otel]'") from None

from middleware_hub.traces.episodes import EpisodeIds, Episodes
from middleware_hub.traces.turn import TracedTurn
from miles_router.errors import RouterError
from miles_router.middlewares import ASGIApp, Exchange, Receive, Router, Scope, Send


class TracesMiddleware:
    """A middleware that traces turns, configured by the `OTEL_*` variables.

    It must be the first in the list, so that a turn's span contains the time of all other middlewares.
    """

    def __init__(self, app: ASGIApp, *, router: Router) -> None:
        self.app = app
        self.router = router
        self._exporter = span_exporter()
        self._counts = router.publish("traces", SpanStatistics())
        self._tracer: Tracer | None = None
        self._heard: set[str] = set()  # the mounts of the models whose sessions are ended here

    @asynccontextmanager
    async def lifespan(self) -> AsyncIterator[None]:
        """Send spans in the background; at the end, send the spans that still wait."""
        if self._exporter is None:
            yield
            return
        ids = EpisodeIds()
        provider = tracer_provider(self._exporter, ids, self._counts)
        self._tracer = provider.get_tracer("miles-router")
        self._episodes = Episodes(self._tracer, ids)
        self._hear(self.router)
        try:
            yield
        finally:
            self._episodes.end_all()
            await shut_down(provider)

    def _hear(self, router: Router) -> None:
        self._heard.add(router.mount)
        router.on_session_end.append(partial(self._episodes.end, mount=router.mount))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Trace a request. The request is unchanged except for the trace headers that engines get."""
        if scope["type"] != "http" or self._tracer is None:
            await self.app(scope, receive, send)
            return
        exchange = Exchange.of(scope)
        if exchange.pool is not None and exchange.mount not in self._heard:
            self._hear(self.router.of_model(exchange.pool))
        turn = TracedTurn(self._tracer, self._episodes, exchange)
        status = 0
        problem: str | None = "internal_error"
        try:
            await self.app(scope, receive, send)
            problem = None
        except RouterError as error:
            status, problem = error.status, error.type or problem
            raise
        finally:
            status = getattr(send, "status", 0) or status
            turn.end(self.router.metrics.route(scope["path"]), status, problem)
