"""The interface of a dialect: the requests of one training framework, in addition to the sessions' own routes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from starlette.routing import BaseRoute

from middleware_hub.openai_session.export.routes import SessionRoutes
from middleware_hub.openai_session.turns.endpoint import SessionEndpoint
from miles_router.middlewares import Receive, Router, Scope, Send


class Dialect(Protocol):
    """The interface between the middleware and a dialect."""

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
        """Return the routes under the dialect's own path segments."""
        ...

    def owner_name(self, scope: Scope) -> str | None:
        """Return the session of a request outside `/sessions/{id}`, or None. As `HasOwners.owner_name`."""
        ...

    async def answer(self, scope: Scope, receive: Receive, send: Send) -> bool:
        """Answer any other request of this dialect; return False for a request of none."""
        ...
