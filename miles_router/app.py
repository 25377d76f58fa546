"""The composition root: puts the parts together, and is the one edge where errors become answers.

A request's way: `RouterApp` looks the first path segment up in a dictionary; the router's own routes go to Starlette,
all else through the middleware stack to the `Proxy`.
"""

from __future__ import annotations

import logging
import time
from argparse import Namespace
from collections.abc import AsyncIterator, Awaitable, Iterable
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import orjson
from starlette.routing import BaseRoute, Match, Route
from starlette.routing import Router as Routes
from starlette.types import Lifespan

from miles_router.admin import Admin
from miles_router.auth import Key
from miles_router.config import RouterConfig
from miles_router.control import Control
from miles_router.errors import (
    ClientDisconnected,
    ConfigError,
    MethodNotAllowed,
    MiddlewareLoadError,
    RouterError,
    UpstreamBroken,
)
from miles_router.exchange import SCOPE_KEY, Exchange, Message, Receive, Scope, Send, request_id
from miles_router.fan_out import FanOut
from miles_router.forwarding import Forwarder
from miles_router.gate import Gate
from miles_router.headers import first
from miles_router.health import HealthMonitor, log_transition
from miles_router.inflight import InFlight
from miles_router.metrics import GateCollector, Metrics
from miles_router.middleware import (
    ASGIApp,
    HasLifespan,
    HasMetrics,
    HasRoutes,
    LoadedMiddleware,
    build_stack,
    load_middlewares,
)
from miles_router.partial_rollouts import PartialRollouts
from miles_router.policies import KeyAffinity, LeastInFlight
from miles_router.proxy import Proxy
from miles_router.router import Router
from miles_router.upstream import Upstream
from miles_router.worker_url import parse_worker_url
from miles_router.workers import WorkerPool, WorkerState

logger = logging.getLogger(__name__)
access_logger = logging.getLogger("miles_router.access")

_OPEN = Key(None)


class RouterApp:
    """The whole router as one ASGI app. `router` is the handle that middlewares have too."""

    def __init__(
        self,
        *,
        config: RouterConfig,
        router: Router,
        routes: Routes,
        doors: dict[str, Key],
        data_key: Key,
        stack: ASGIApp,
    ) -> None:
        self.router = router
        self._routes = routes
        self._doors = doors  # first path segment of the router's own routes -> the key they need
        self._stack = stack
        self._data_key = data_key
        self._max_body_bytes = config.max_request_bytes
        self._access_log = config.access_log
        self._metrics = router.metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI entry: HTTP and lifespan; anything else is refused."""
        if scope["type"] == "http":
            await self._http(scope, receive, send)
        elif scope["type"] == "lifespan":
            await self._routes(scope, receive, send)
        else:
            await send({"type": "websocket.close", "code": 1003})

    async def _http(self, scope: Scope, receive: Receive, send: Send) -> None:
        started_at = time.perf_counter()
        exchange = Exchange(request_id(scope), max_body_bytes=self._max_body_bytes)
        scope[SCOPE_KEY] = exchange
        status = 0

        def send_with_id(message: Message) -> Awaitable[None]:  # no coroutine of its own: it runs for every chunk
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                headers = [pair for pair in message.get("headers", ()) if pair[0] != b"x-request-id"]
                headers.append((b"x-request-id", exchange.request_id.encode("ascii")))
                message = {**message, "headers": headers}
            return send(message)

        try:
            await self._dispatch(scope, receive, send_with_id)
        except RouterError as error:
            self._report(error, exchange, scope, began=status != 0)
            if status == 0 and not isinstance(error, ClientDisconnected):
                await _answer(error, exchange, send_with_id, close=first(scope["headers"], b"expect") is not None)
            status = status or error.status
        except Exception as error:  # the edge: a defect is logged whole and answered, never hidden
            logger.error("internal_error", exc_info=error, extra={"fields": _fields(exchange, scope)})
            if status == 0:
                await _answer(RouterError("the router failed; its log has the details"), exchange, send_with_id)
        finally:
            self._finished(scope, exchange, status, started_at)

    async def _dispatch(self, scope: Scope, receive: Receive, send: Send) -> None:
        path: str = scope["path"]
        end = path.find("/", 1)
        door = self._doors.get(path)
        if door is None and end > 0:
            door = self._doors.get(path[:end])
        if door not in (None, self._data_key) and not self._is_own(scope):
            door = None  # `/health/x` is not ours because `/health` is: it goes to a worker, with the key that needs
        key = self._data_key if door is None else door
        if key.required:
            key.check(scope)
        scope[SCOPE_KEY].check_announced_size(scope)
        await (self._stack if door is None else self._routes)(scope, receive, send)

    def _is_own(self, scope: Scope) -> bool:
        return any(route.matches(scope)[0] is Match.FULL for route in self._routes.routes)

    def _report(self, error: RouterError, exchange: Exchange, scope: Scope, *, began: bool) -> None:
        """One line for each failure. A reply that had begun ends here without its end: the server breaks it off."""
        fields = {**_fields(exchange, scope), "type": error.type, "reason": str(error)}
        if isinstance(error, ClientDisconnected):
            self._metrics.client_disconnects += 1
            logger.debug("client_disconnected", extra={"fields": fields})
            return
        if isinstance(error, UpstreamBroken) or began:
            self._metrics.broken_replies += 1
        level = logging.WARNING if error.status >= 500 else logging.INFO
        logger.log(level, "request_failed", extra={"fields": {**fields, "status": error.status, "broken_off": began}})

    def _finished(self, scope: Scope, exchange: Exchange, status: int, started_at: float) -> None:
        seconds = time.perf_counter() - started_at
        to_head = None if exchange.first_byte_at is None else exchange.first_byte_at - started_at
        self._metrics.finished(scope["path"], status, exchange.worker_url, seconds, to_head)
        if self._access_log:
            fields = {**_fields(exchange, scope), "status": status, "seconds": round(seconds, 4)}
            access_logger.info("request", extra={"fields": fields})


def _fields(exchange: Exchange, scope: Scope) -> dict[str, object]:
    fields = {"request_id": exchange.request_id, "method": scope["method"], "path": scope["path"]}
    return fields if exchange.worker_url is None else {**fields, "worker": exchange.worker_url}


async def _answer(error: RouterError, exchange: Exchange, send: Send, *, close: bool = False) -> None:
    """`close` where a client may have been told no before it was asked for its body: what it would send next is either
    that body or another request, and nobody could tell which (RFC 9110 section 10.1.1)."""
    body = orjson.dumps(error.body(exchange.request_id))
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode("ascii"))]
    headers += [(name.lower().encode("ascii"), value.encode("ascii")) for name, value in error.headers.items()]
    headers += [(b"connection", b"close")] * close
    await send({"type": "http.response.start", "status": error.status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


def create_app(config: RouterConfig | None = None, *, args: Namespace | None = None) -> RouterApp:
    """Build a router. Give the result to any ASGI server; its lifespan runs the health checks and the middlewares.

    Args:
        config: every setting; None takes the defaults.
        args: a framework's own Namespace, shown to middlewares as `router.args`.

    Raises:
        ConfigError: a middleware that cannot be loaded, or a worker URL that is none.
    """
    config = config or RouterConfig()
    loaded = load_middlewares(config.middlewares)
    pool = WorkerPool(failure_threshold=config.health_check_failure_threshold, readmit=config.readmit)
    pool.listeners.append(log_transition)
    metrics = Metrics(pool)
    upstream = Upstream(connect_timeout=config.connect_timeout, max_connections=config.max_connections)
    forwarder = Forwarder(
        pool=pool,
        policy=KeyAffinity(LeastInFlight()),
        upstream=upstream,
        metrics=metrics,
        max_retries=config.max_retries,
    )
    gate = Gate(max_held=config.gate_max_held, timeout=config.gate_timeout)
    pool.listeners.append(lambda _: gate.workers_paused(_all_paused(pool)))
    in_flight = InFlight()
    health = HealthMonitor(
        pool=pool,
        upstream=upstream,
        interval=config.health_check_interval,
        timeout=config.health_check_timeout,
        deep_interval=config.deep_health_check_interval,
        gate=gate,
    )
    control = Control(
        pool=pool,
        forwarder=forwarder,
        gate=gate,
        in_flight=in_flight,
        extra=config.fan_out,
        on_new_weights=health.check_all,
    )
    router = Router(
        config=config, pool=pool, forwarder=forwarder, metrics=metrics, gate=gate, control=control, args=args
    )
    metrics.register(GateCollector(gate))
    innermost: ASGIApp = Proxy(
        forwarder, metrics, gate=gate, in_flight=in_flight, request_timeout=config.request_timeout
    )
    if config.partial_rollout == "resume" or config.resume_on_worker_loss:
        innermost = PartialRollouts(
            innermost,
            router=router,
            in_flight=in_flight,
            is_paused=health.is_paused,
            resume_cut=config.partial_rollout == "resume",
            resume_lost=config.resume_on_worker_loss,
        )
    stack, layers = build_stack(innermost, loaded, router)
    for url in config.worker_urls:
        pool.add(parse_worker_url(url))
    data_key = Key(config.api_key)
    guarded = Key(config.effective_admin_key)
    admin = Admin(router, _described(loaded), health.weight_version)
    routes, doors = _own_routes(admin, FanOut(control), guarded, data_key, layers, stack)
    routes.lifespan_context = _lifespan(layers, health, upstream)
    _register_metrics(metrics, layers)
    return RouterApp(config=config, router=router, routes=routes, doors=doors, data_key=data_key, stack=stack)


def _own_routes(
    admin: Admin, fan_out: FanOut, guarded: Key, data: Key, layers: Iterable[ASGIApp], stack: ASGIApp
) -> tuple[Routes, dict[str, Key]]:
    """The router's own routes and those of the middlewares, and the key that each first path segment needs. Control
    endpoints are found by their whole path: their first segment may have others behind it."""
    opened, administration, control = admin.open_routes(), admin.guarded_routes(), fan_out.routes()
    extra = [route for layer in layers if isinstance(layer, HasRoutes) for route in layer.routes()]
    doors = {_first_segment(route): _OPEN for route in opened}
    doors |= {_first_segment(route): guarded for route in administration}
    doors |= {_path(route): guarded for route in control}
    for route in extra:
        segment = _first_segment(route)
        if doors.get(segment, data) is not data:
            raise MiddlewareLoadError(f"a middleware wants to answer {segment!r}, which is the router's own")
        doors[segment] = data
    own = {_path(route) for route in (*opened, *administration)}
    if taken := own & {_path(route) for route in control}:
        raise ConfigError(f"fan_out: {min(taken)} is the router's own")
    every = [*opened, *administration, *control]
    fences = [Route(path, _WrongMethod()) for path in dict.fromkeys(_path(route) for route in every)]
    return Routes([*every, *fences, *extra], redirect_slashes=False, default=stack), doors


def _all_paused(pool: WorkerPool) -> bool:
    """Whether nobody takes traffic and somebody would, were it not paused."""
    return not pool.routable and any(worker.state is WorkerState.PAUSED for worker in pool)


def _path(route: BaseRoute) -> str:
    path = getattr(route, "path", None)
    if not isinstance(path, str):
        raise MiddlewareLoadError(f"a middleware's route {route!r} has no path")
    return path


def _first_segment(route: BaseRoute) -> str:
    segment = "/" + _path(route).lstrip("/").partition("/")[0]
    if segment == "/" or "{" in segment:
        raise MiddlewareLoadError(f"a middleware's route {_path(route)!r} must begin with a fixed path segment")
    return segment


class _WrongMethod:
    """Stands behind the router's own routes, for methods that none of them takes."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        raise MethodNotAllowed(f"{scope['path']} does not take {scope['method']}")


def _register_metrics(metrics: Metrics, layers: Iterable[ASGIApp]) -> None:
    for layer in layers:
        if isinstance(layer, HasMetrics):
            for collector in layer.metrics():
                metrics.register(collector)


def _lifespan(layers: Iterable[ASGIApp], health: HealthMonitor, upstream: Upstream) -> Lifespan[Any]:
    """Health checks and middlewares, entered outermost first, left in reverse; connections are closed last."""

    @asynccontextmanager
    async def lifespan(app: object) -> AsyncIterator[None]:
        async with AsyncExitStack() as running:
            running.push_async_callback(upstream.close)
            await running.enter_async_context(health.running())
            for layer in layers:
                if isinstance(layer, HasLifespan):
                    await running.enter_async_context(layer.lifespan())
            yield

    return lifespan


def _described(loaded: Iterable[LoadedMiddleware]) -> list[dict[str, object]]:
    """The stack for `GET /router/info`, outermost first."""
    return [{"name": each.name, "path": each.path, "options": dict(each.options)} for each in loaded]
