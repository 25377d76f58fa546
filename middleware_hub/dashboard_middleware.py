"""DashboardMiddleware: the dashboard, and the routes of episodes and of the run that it reads."""

from __future__ import annotations

from collections.abc import Coroutine, Sequence
from typing import Any

from starlette.routing import BaseRoute

from middleware_hub.dashboard.episodes import EpisodeRoutes
from middleware_hub.dashboard.page import dashboard_routes
from miles_router.middlewares import ASGIApp, Receive, Router, Scope, Send


class DashboardMiddleware:
    """A middleware that adds routes and passes every request on unchanged.

    It shows the episodes of the other middlewares, so its place in the list does not matter.
    """

    def __init__(self, app: ASGIApp, *, router: Router) -> None:
        self.app = app
        self._episodes = EpisodeRoutes(router)

    def open_routes(self) -> Sequence[BaseRoute]:
        """Return the page and its files. They contain nothing about the router; the page asks for the key."""
        return dashboard_routes()

    def admin_routes(self) -> Sequence[BaseRoute]:
        """Return the routes of episodes and of the run."""
        return self._episodes.routes()

    def __call__(self, scope: Scope, receive: Receive, send: Send) -> Coroutine[Any, Any, None]:
        return self.app(scope, receive, send)
