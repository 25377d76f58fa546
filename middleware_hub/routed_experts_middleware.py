"""RoutedExpertsMiddleware: the experts that routed each token, kept for replay in training (R3).

It asks the engine for the rows that nobody holds yet, takes them out of answers while they go by, and keeps them in a
byte or two an id. Trajectories that other layers hold have their rows with them, in samples too; any generation's rows
can be fetched by its id.
"""

from __future__ import annotations

from collections.abc import Sequence

from starlette.routing import BaseRoute, Route

from middleware_hub.routed_experts.capture import Capture, CaptureContext
from middleware_hub.routed_experts.delivery import Delivery
from middleware_hub.routed_experts.replies import StrippedReply, VerbatimReply
from middleware_hub.routed_experts.shapes import ShapeCheck, configured_shape, parse_shape
from middleware_hub.routed_experts.store import RowStore
from miles_router.engines.paths import GENERATE
from miles_router.engines.rows import EXPERT_FIELDS, ChatRows, GenerateRows, RowRequest
from miles_router.errors import ConfigError
from miles_router.middlewares import (
    ASGIApp,
    Exchange,
    Handover,
    HasRoutes,
    Receive,
    Router,
    Scope,
    Send,
    replay,
    with_body,
)

DELIVER = "/routed_experts"
NAME = "routed_experts"
GIB = 1024**3


class RoutedExpertsMiddleware:
    """The keeper of routed experts. It is listed last, inside of the layers that hold trajectories.

    Args:
        moe_shape: the model's, as LAYERSxEXPERTSxTOPK (48x128x8); without it, that of the checkpoint's config.json.
        required: whether an answer without routed experts is an error; if not, samples say that theirs are missing.
        max_bytes: bytes of rows held; the least recently used go first.
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        router: Router,
        moe_shape: str = "",
        required: bool = True,
        max_bytes: int = 32 * GIB,
    ) -> None:
        if max_bytes < 1:
            raise ConfigError(f"routed_experts_middleware.max_bytes: must be at least 1, not {max_bytes}")
        own = f"{type(self).__module__}.{type(self).__name__}"
        if [spec.path.replace(":", ".") for spec in router.config.middlewares].count(own) > 1:
            raise ConfigError("routed_experts_middleware: it is listed twice")
        self.app = app
        shape = parse_shape(moe_shape) if moe_shape else configured_shape(router.model_config)
        kind = EXPERT_FIELDS.kind
        channel = router.rows[kind]
        if channel.sources:  # layers are made from the innermost outwards
            raise ConfigError("routed_experts_middleware: list it behind the middlewares whose rollouts it serves")
        channel.captures, channel.shape = True, shape
        self.store = RowStore(kind, max_bytes)
        self._metrics = router.metrics
        self._context = CaptureContext(EXPERT_FIELDS, self.store, ShapeCheck(kind, shape), router.fleet.facts, required)
        self._delivery = Delivery(self.store, channel)
        router.publish(NAME, self.store.statistics, shape=channel.describe)

    def routes(self) -> Sequence[BaseRoute]:
        """`POST /routed_experts`."""
        return [Route(DELIVER, self._delivery.answer, methods=["POST"])]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Ask for rows on the way in, take them on the way out. What generates nothing passes untouched."""
        if scope["type"] != "http" or scope["method"] not in ("POST", "PUT"):
            await self.app(scope, receive, send)
            return
        exchange, fields = Exchange.of(scope), self._context.fields
        handover, native = Handover.of(exchange, fields.kind), scope["path"] == GENERATE
        if handover is None and not native:
            await self.app(scope, receive, send)
            return
        body = await exchange.read(receive)
        prefixes = handover.prefixes if handover is not None else ()
        start = min((0 if each is None else each.count for each in prefixes), default=0)
        request = RowRequest.write(body, fields, start, parse=exchange.loads, client_may=native)
        capture = Capture(self._context, exchange, handover, start=request.start)
        reader = GenerateRows() if native else ChatRows()
        reply = (VerbatimReply if request.by_client else StrippedReply)(capture, reader, send, self._metrics)
        with self.store.pinned(each.rows for each in prefixes if each is not None):
            await reply.call(self.app, with_body(scope, request.body), replay(request.body, receive))


_routes: type[HasRoutes] = RoutedExpertsMiddleware
