"""HTTP routes for the engines' control requests (pause, weight updates, ...), which go to all workers of a pool."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from miles_router.asgi.exchange import Exchange, Scope
from miles_router.engines.control import ControlRequest
from miles_router.fleet.placement.sessions import Affinity
from miles_router.forwarding.forwarded import outgoing
from miles_router.pools.pools import Pools

#: Query parameter that names the pool.
MODEL_ID = "model_id"
#: SGLang reads a body only if its content type is JSON.
AS_JSON = (b"content-type", b"application/json")


class ControlRoutes:
    """The handlers of control requests."""

    def __init__(self, pools: Pools) -> None:
        self._pools = pools

    def routes(self) -> list[BaseRoute]:
        """Return one route for each control path that the engines know."""
        return [self._route(known) for known in self._pools.default.router.control.by_path.values()]

    def _route(self, known: ControlRequest) -> BaseRoute:
        async def answer(request: Request) -> Response:
            exchange = Exchange.of(request.scope)
            pool = self._pools.of_path(exchange, request.query_params.get(MODEL_ID))
            body = await exchange.read(request.receive)
            if not body.strip() and known.needs_body:
                body = b"{}"
            sent = outgoing(_without_model_id(request.scope), exchange.request_id, body, Affinity())
            if body.strip():
                sent.headers = [pair for pair in sent.headers if pair[0] != b"content-type"] + [AS_JSON]
            answered = await pool.router.control.send(known.path, sent, exchange.request_id)
            pool.forget_adapters()
            response = Response(answered.body, answered.status)
            if answered.content_type is not None:
                response.headers["content-type"] = answered.content_type.decode("latin-1")
            return response

        route = Route(known.path, answer, methods=list(known.methods))
        route.methods = {*known.methods}  # Starlette adds HEAD, which gives no order
        return route


def _without_model_id(scope: Scope) -> Scope:
    """Return the scope without the `model_id` parameter, which only the router understands."""
    query = scope["query_string"]
    if MODEL_ID.encode() not in query:
        return scope
    kept = [part for part in query.split(b"&") if part.partition(b"=")[0] != MODEL_ID.encode()]
    return {**scope, "query_string": b"&".join(kept)}
