"""TracesMiddleware: where the time of each turn went, as spans of OpenTelemetry."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

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
    """Traces turns as the variables `OTEL_*` say. It is listed first: the turn's span has the time of all layers."""

    def __init__(self, app: ASGIApp, *, router: Router) -> None:
        self.app = app
        self.router = router
        self._exporter = span_exporter()
        self._counts = router.publish("traces", SpanStatistics())
        self._tracer: Tracer | None = None

    @asynccontextmanager
    async def lifespan(self) -> AsyncIterator[None]:
        """While it runs, spans are sent; at its end those that wait."""
        if self._exporter is None:
            yield
            return
        ids = EpisodeIds()
        provider = tracer_provider(self._exporter, ids, self._counts)
        self._tracer = provider.get_tracer("miles-router")
        self._episodes = Episodes(self._tracer, ids)
        self.router.on_session_end.append(self._episodes.end)
        try:
            yield
        finally:
            self._episodes.end()
            await shut_down(provider)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Follow a request; it passes as it came, but for the headers that name its span to engines."""
        if scope["type"] != "http" or self._tracer is None:
            await self.app(scope, receive, send)
            return
        exchange = Exchange.of(scope)
        turn = TracedTurn(self._tracer, self._episodes, exchange)
        status = 0
        problem: str | None = "internal_error"
        try:
            await self.app(scope, receive, send)
            problem = None
        except RouterError as error:
            status, problem = error.status, error.type
            raise
        finally:
            status = getattr(send, "status", 0) or status
            turn.end(self.router.metrics.route(scope["path"]), status, problem)
