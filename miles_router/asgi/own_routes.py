"""A Starlette router for the routes of the router and its middlewares, indexed by the first path segment and the number
of segments."""

from __future__ import annotations

from collections.abc import Iterable

from starlette.routing import BaseRoute, Route, Router
from starlette.types import ASGIApp, Receive, Scope, Send

from miles_router.asgi.access import first_segment


class OwnRoutes(Router):
    """A router that matches a request only against routes with the same first path segment and as many segments.

    The first segment of every route must be fixed (not a parameter).
    """

    def __init__(self, routes: Iterable[BaseRoute], default: ASGIApp) -> None:
        super().__init__([*routes], redirect_slashes=False, default=default)
        groups: dict[str, list[BaseRoute]] = {}
        for route in self.routes:
            groups.setdefault(first_segment(getattr(route, "path", "")), []).append(route)
        self._beneath: dict[tuple[str, int | None], Router] = {}
        for segment, group in groups.items():
            depths = [_depth(route) for route in group]
            for depth in {None} if None in depths else {*depths}:
                found = [route for route, own in zip(group, depths, strict=True) if depth in (None, own)]
                self._beneath[segment, depth] = Router(found, redirect_slashes=False, default=default)

    async def app(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Call the route that matches the path, or the default app."""
        if scope["type"] != "http":
            await super().app(scope, receive, send)
            return
        path = scope["path"]
        segment = first_segment(path)
        beneath = self._beneath.get((segment, path.count("/"))) or self._beneath.get((segment, None))
        await (self.default if beneath is None else beneath.app)(scope, receive, send)


def _depth(route: BaseRoute) -> int | None:
    """Return the number of slashes in all paths of a route; None if it differs."""
    return route.path.count("/") if isinstance(route, Route) and ":path}" not in route.path else None
