"""The base of `RoutedExpertsMiddleware` and `IndexerTopkMiddleware`: a layer that keeps one kind of rows.

The layer asks the engine for rows that are not in memory yet, takes them out of answers while these are relayed, and
stores them compactly. Layers that hold trajectories get the rows for their samples. The rows of any generation can be
fetched by its id.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from starlette.routing import BaseRoute, Route

from middleware_hub.routed_experts.capture import Capture, CaptureContext
from middleware_hub.routed_experts.delivery import Delivery
from middleware_hub.routed_experts.replies import StrippedReply, VerbatimReply
from middleware_hub.routed_experts.shapes import ShapeCheck
from middleware_hub.routed_experts.store import RowStore
from miles_router.engines.paths import GENERATE
from miles_router.engines.rows import ChatRows, GenerateRows, RowFields, RowRequest
from miles_router.errors import ConfigError
from miles_router.middlewares import ASGIApp, Exchange, HasRoutes, Receive, Router, Scope, Send, replay, with_body
from miles_router.middlewares.rows import RowDelivery
from miles_router.middlewares.state import BODY_SAYS, HasOwners
from miles_router.trajectory.rows import RowShape

#: Default limit of rows in memory, in bytes.
MAX_BYTES = 32 * 1024**3


class RowKeeper:
    """A layer that keeps one kind of rows. List it last, inside the layers that hold trajectories.

    Args:
        shape: the shape of the model's rows, if it is known.
        required: whether an answer without rows is an error; if not, samples report them as missing.
        max_bytes: limit of rows in memory; the least recently used are evicted first.
    """

    one_model = True
    #: The engine's fields of this kind of rows.
    fields: ClassVar[RowFields]
    #: The name of the option for the shape.
    shape_option: ClassVar[str]

    def __init__(self, app: ASGIApp, router: Router, shape: RowShape | None, required: bool, max_bytes: int) -> None:
        kind = self.fields.kind
        option = f"{kind.name}_middleware"
        if max_bytes < 1:
            raise ConfigError(f"{option}.max_bytes: must be at least 1, not {max_bytes}")
        own = f"{type(self).__module__}.{type(self).__name__}"
        if [spec.path.replace(":", ".") for spec in router.config.middlewares].count(own) > 1:
            raise ConfigError(f"{option}: listed twice; list it once")
        self.app = app
        channel = router.rows[kind]
        if channel.sources:  # layers are built from the innermost outwards
            raise ConfigError(f"{option}: list it after the middlewares whose rollouts it serves")
        channel.captures, channel.shape, channel.shape_option = True, shape, self.shape_option
        self.store = RowStore(kind, max_bytes)
        channel.max_bytes, channel.hold = max_bytes, self.store.restore
        self.store.when_evicted = lambda rows: channel.when_evicted(rows)
        self._metrics = router.metrics
        self._context = CaptureContext(self.fields, self.store, ShapeCheck(kind, shape), router.fleet.facts, required)
        self._delivery = Delivery(self.store, channel, router.owners)
        router.publish(kind.name, self.store.statistics, shape=channel.describe)

    def routes(self) -> Sequence[BaseRoute]:
        return [Route(f"/{self.fields.kind.name}", self._delivery.answer, methods=["POST"])]

    def owner_name(self, scope: Scope) -> str | None:
        """Return `BODY_SAYS` for the rows' route: the process is chosen by the trajectory in the body."""
        return BODY_SAYS if scope["path"] == f"/{self.fields.kind.name}" else None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Ask the engine for rows, and take them out of the reply. Other requests pass unchanged, as do evaluations."""
        if scope["type"] != "http" or scope["method"] not in ("POST", "PUT"):
            await self.app(scope, receive, send)
            return
        exchange = Exchange.of(scope)
        delivery, native = RowDelivery.of(exchange, self.fields.kind), scope["path"] == GENERATE
        if (delivery is None and not native) or exchange.routing.evaluation is not None:
            await self.app(scope, receive, send)
            return
        body = await exchange.read(receive)
        prefixes = delivery.prefixes if delivery is not None else ()
        start = min((0 if each is None else each.count for each in prefixes), default=0)
        request = RowRequest.write(body, self.fields, start, parse=exchange.loads, client_may=native)
        capture = Capture(self._context, exchange, delivery, start=request.start)
        reader = GenerateRows() if native else ChatRows()
        reply = (VerbatimReply if request.by_client else StrippedReply)(capture, reader, send, self._metrics)
        with self.store.pinned(each.rows for each in prefixes if each is not None):
            await reply.call(self.app, with_body(scope, request.body), replay(request.body, receive))


_routes: type[HasRoutes] = RowKeeper
_owners: type[HasOwners] = RowKeeper
