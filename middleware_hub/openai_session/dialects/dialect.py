"""A dialect: what one training framework expects of sessions beside their own routes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from starlette.routing import BaseRoute

from middleware_hub.openai_session.export.routes import SessionRoutes
from middleware_hub.openai_session.turns.endpoint import SessionEndpoint
from miles_router.middlewares import Receive, Router, Scope, Send


class Dialect(Protocol):
    """What the middleware asks of every dialect."""

    def __init__(
        self,
        router: Router,
        sessions: SessionRoutes,
        endpoint: SessionEndpoint,
        *,
        one_weight_version: bool = False,
        context_window: int = 0,
    ) -> None: ...

    def routes(self) -> Sequence[BaseRoute]:
        """Those under path segments of their own."""
        ...

    def owner_name(self, scope: Scope) -> str | None:
        """Whose a request is that is not within a session's own path. As `HasOwners.owner_name`."""
        ...

    async def answer(self, scope: Scope, receive: Receive, send: Send) -> bool:
        """Answer any other request that speaks the dialect; False for one that does not."""
        ...
