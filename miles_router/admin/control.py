"""The HTTP face of control: one route for each row of the table."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from miles_router.asgi.exchange import Exchange
from miles_router.control.control import Control
from miles_router.control.row import Row
from miles_router.forwarding.outgoing import outgoing

#: SGLang reads a body only if it is declared as JSON.
AS_JSON = (b"content-type", b"application/json")


class ControlRoutes:
    """Answers control requests."""

    def __init__(self, control: Control) -> None:
        self._control = control

    def routes(self) -> list[BaseRoute]:
        """One for each row of the table."""
        return [self._route(row) for row in self._control.rows.values()]

    def _route(self, row: Row) -> BaseRoute:
        async def answer(request: Request) -> Response:
            exchange = Exchange.of(request.scope)
            body = await exchange.read(request.receive)
            if not body.strip() and row.needs_body:
                body = b"{}"
            sent = outgoing(request.scope, exchange.request_id, body)
            if body.strip():
                sent.headers = [pair for pair in sent.headers if pair[0] != b"content-type"] + [AS_JSON]
            answered = await self._control.send(row.path, sent, exchange.request_id)
            response = Response(answered.body, answered.status)
            if answered.content_type is not None:
                response.headers["content-type"] = answered.content_type.decode("latin-1")
            return response

        return Route(row.path, answer, methods=list(row.methods))
