"""A middleware that does nothing, to see what a layer costs: `--middleware-paths tests.benchmarks.noop.NoOp`."""

from __future__ import annotations

from typing import Any

from starlette.types import ASGIApp, Receive, Scope, Send


class NoOp:
    """A pure ASGI layer that is interested in no path at all."""

    def __init__(self, app: ASGIApp, *, router: Any) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self.app(scope, receive, send)
