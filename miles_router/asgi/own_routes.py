"""A Starlette router for the routes of the router and its middlewares, indexed by the first path segment."""

from __future__ import annotations

from collections.abc import Iterable

from starlette.routing import BaseRoute, Router
from starlette.types import ASGIApp, Receive, Scope, Send

from miles_router.asgi.access import first_segment


class OwnRoutes(Router):
    """A router that matches a request only against the routes with the same first path segment.

    The first segment of every route must be fixed (not a parameter).
    """

    def __init__(self, routes: Iterable[BaseRoute], default: ASGIApp) -> None:
        super().__init__([*routes], redirect_slashes=False, default=default)
        segments: dict[str, list[BaseRoute]] = {}
        for route in self.routes:
            segments.setdefault(first_segment(getattr(route, "path", "")), []).append(route)
        self._beneath = {
            segment: Router(found, redirect_slashes=False, default=default) for segment, found in segments.items()
        }

    async def app(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Call the route that matches the path, or the default app."""
        if scope["type"] != "http":
            await super().app(scope, receive, send)
            return
        beneath = self._beneath.get(first_segment(scope["path"]))
        await (self.default if beneath is None else beneath.app)(scope, receive, send)
