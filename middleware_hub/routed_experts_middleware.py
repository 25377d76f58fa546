"""RoutedExpertsMiddleware: the experts that routed each token, kept for replay in training (R3).

It asks the engine for the rows that nobody holds yet, takes them out of answers while they go by, and keeps them in a
byte or two an id. Trajectories that other layers hold have their rows with them, in samples too; any generation's rows
can be fetched by its id.
"""

from __future__ import annotations

from collections.abc import Sequence

from starlette.routing import BaseRoute, Route

from middleware_hub.routed_experts.asking import ask
from middleware_hub.routed_experts.capture import Capture
from middleware_hub.routed_experts.delivery import Delivery
from middleware_hub.routed_experts.model import Model, configured_shape, parse_shape
from middleware_hub.routed_experts.replies import Reply
from middleware_hub.routed_experts.store import ExpertStore
from miles_router import Exchange, Router, replay
from miles_router.asgi.exchange import Receive, Scope, Send, with_body
from miles_router.errors import ConfigError
from miles_router.middlewares.contract import ASGIApp, HasRoutes
from miles_router.middlewares.experts import Handover

GENERATE = "/generate"
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
        self.store = ExpertStore(max_bytes)
        self._required = required
        told = parse_shape(moe_shape) if moe_shape else configured_shape(router.model_config)
        self._model = Model(router.experts, told)
        self._delivery = Delivery(self.store, router.experts)
        self._experts = router.experts
        self._experts.captured = True
        if router.experts.sources:  # layers are made from the innermost outwards
            raise ConfigError("routed_experts_middleware: list it behind the middlewares whose rollouts it serves")
        router.publish(NAME, self.store.statistics, shape=self._shown_shape)

    def routes(self) -> Sequence[BaseRoute]:
        """`POST /routed_experts`."""
        return [Route(DELIVER, self._delivery.answer, methods=["POST"])]

    def _shown_shape(self) -> object:
        return None if self._experts.shape is None else self._experts.shape._asdict()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Ask for rows on the way in, take them on the way out; what generates nothing is none of our business."""
        if scope["type"] != "http" or scope["method"] not in ("POST", "PUT"):
            await self.app(scope, receive, send)
            return
        exchange = Exchange.of(scope)
        handover, native = Handover.of(exchange), scope["path"] == GENERATE
        if handover is None and not native:
            await self.app(scope, receive, send)
            return
        body = await exchange.read(receive)
        held = handover.held if handover is not None else ()
        start = min((0 if each is None else each.count for each in held), default=0)
        asked = ask(exchange, body, start, may_want=native)
        capture = Capture(self.store, self._model, exchange, asked, handover, required=self._required)
        reply = Reply(capture, send, native=native)
        with self.store.pinned(each.rows for each in held if each is not None):
            await self.app(_readable(with_body(scope, asked.body)), replay(asked.body, receive), reply.send)


def _readable(scope: Scope) -> Scope:
    """Asking for an answer that can be read here, whatever encodings the client could read."""
    return {**scope, "headers": [pair for pair in scope["headers"] if pair[0] != b"accept-encoding"]}


_routes: type[HasRoutes] = RoutedExpertsMiddleware
