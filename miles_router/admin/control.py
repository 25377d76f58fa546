"""The HTTP face of `control.py`: one route for each endpoint that goes to every worker."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from miles_router.asgi.exchange import Exchange
from miles_router.control.fan_out import Control, Endpoint
from miles_router.forwarding.forwarder import outgoing

#: SGLang reads a body only if it is declared as JSON, and refuses a POST to these without one.
AS_JSON = (b"content-type", b"application/json")
WANT_A_BODY = frozenset(
    {"/pause_generation", "/continue_generation", "/release_memory_occupation", "/resume_memory_occupation"}
)


class FanOut:
    """Answers the control endpoints."""

    def __init__(self, control: Control) -> None:
        self._control = control

    def routes(self) -> list[BaseRoute]:
        """One for each row of the table."""
        return [self._route(endpoint) for endpoint in self._control.endpoints.values()]

    def _route(self, endpoint: Endpoint) -> BaseRoute:
        async def answer(request: Request) -> Response:
            exchange = Exchange.of(request.scope)
            body = await exchange.read(request.receive)
            if not body.strip() and endpoint.path in WANT_A_BODY:
                body = b"{}"
            sent = outgoing(request.scope, exchange.request_id, body)
            if body.strip():
                sent.headers = [pair for pair in sent.headers if pair[0] != b"content-type"] + [AS_JSON]
            answered = await self._control.send(endpoint.path, sent, exchange.request_id)
            response = Response(answered.body, answered.status)
            if answered.content_type is not None:
                response.headers["content-type"] = answered.content_type.decode("latin-1")
            return response

        return Route(endpoint.path, answer, methods=list(endpoint.methods))
