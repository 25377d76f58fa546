"""The composition root: `create_app` is the only place that puts the parts together."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import AsyncIterator, Iterable
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

from starlette.routing import BaseRoute, Route
from starlette.routing import Router as Routes
from starlette.types import Lifespan

from miles_router.admin.control import ControlRoutes
from miles_router.admin.routes import Admin
from miles_router.asgi.exchange import Receive, Scope, Send
from miles_router.asgi.keys import Key
from miles_router.control.control import Control
from miles_router.control.fan_out import FanOut
from miles_router.control.health import HealthMonitor
from miles_router.control.probes import Probes
from miles_router.edge import RouterApp
from miles_router.errors import (
    ConfigError,
    MethodNotAllowed,
    MiddlewareLoadError,
)
from miles_router.fleet.fleet import Fleet
from miles_router.fleet.gate import Gate
from miles_router.fleet.inflight import InFlight
from miles_router.fleet.policies import KeyAffinity, LeastInFlight
from miles_router.fleet.pool import WorkerPool
from miles_router.fleet.worker_url import parse_worker_url
from miles_router.forwarding.forwarder import Forwarder
from miles_router.forwarding.proxy import Proxy
from miles_router.forwarding.upstream import Upstream
from miles_router.metrics import Metrics
from miles_router.middlewares.contract import ASGIApp, HasLifespan, HasMetrics, HasRoutes
from miles_router.middlewares.loading import LoadedMiddleware, build_stack, load_middlewares
from miles_router.middlewares.router import Router
from miles_router.partial_rollouts import PartialRollouts
from miles_router.settings.config import RouterConfig

_OPEN = Key(None)


def create_app(
    config: RouterConfig | None = None, *, args: Namespace | None = None, tokenizer: Any = None
) -> RouterApp:
    """Build a router. Give the result to any ASGI server; its lifespan runs the health checks and the middlewares.

    Args:
        config: every setting; None takes the defaults.
        args: a framework's own Namespace, shown to middlewares as `router.args`.
        tokenizer: the one that middlewares get as `router.tokenizer`, in place of the checkpoint's.

    Raises:
        ConfigError: a middleware that cannot be loaded, or a worker URL that is none.
    """
    config = config or RouterConfig()
    loaded = load_middlewares(config.middlewares)
    upstream = Upstream(connect_timeout=config.connect_timeout, max_connections=config.max_connections)
    probes, fan_out = Probes(upstream, timeout=config.health_check_timeout), FanOut(upstream)
    fleet = Fleet(
        pool=WorkerPool(failure_threshold=config.health_check_failure_threshold, readmit=config.readmit),
        gate=Gate(max_held=config.gate_max_held, timeout=config.gate_timeout),
        policy=KeyAffinity(LeastInFlight()),
        questions=probes,
        orders=fan_out,
    )
    metrics = Metrics(fleet)
    forwarder = Forwarder(fleet=fleet, upstream=upstream, metrics=metrics, max_retries=config.max_retries)
    in_flight = InFlight()
    health = HealthMonitor(
        fleet, probes, interval=config.health_check_interval, deep_interval=config.deep_health_check_interval
    )
    control = Control(
        fleet=fleet,
        fan_out=fan_out,
        in_flight=in_flight,
        health=health,
        extra=config.fan_out,
        read_timeout=config.health_check_timeout,
    )
    router = Router(
        config=config,
        fleet=fleet,
        forwarder=forwarder,
        metrics=metrics,
        control=control,
        args=args,
        tokenizer=tokenizer,
    )
    innermost: ASGIApp = Proxy(
        forwarder, metrics, gate=fleet.gate, in_flight=in_flight, request_timeout=config.request_timeout
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
        fleet.pool.add(parse_worker_url(url))
    data_key = Key(config.api_key)
    guarded = Key(config.effective_admin_key)
    admin = Admin(router, _described(loaded))
    routes, doors = _own_routes(admin, ControlRoutes(control), guarded, data_key, layers, stack)
    routes.lifespan_context = _lifespan(layers, health, fleet, upstream)
    _register_metrics(router, layers)
    return RouterApp(config=config, router=router, routes=routes, doors=doors, data_key=data_key, stack=stack)


def _own_routes(
    admin: Admin, control_routes: ControlRoutes, guarded: Key, data: Key, layers: Iterable[ASGIApp], stack: ASGIApp
) -> tuple[Routes, dict[str, Key]]:
    """The router's own routes and those of the middlewares, and the key that each first path segment needs. Control
    endpoints are found by their whole path: their first segment may have others behind it."""
    opened, administration, control = admin.open_routes(), admin.guarded_routes(), control_routes.routes()
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


def _register_metrics(router: Router, layers: Iterable[ASGIApp]) -> None:
    for collector in router.collectors:
        router.metrics.register(collector)
    for layer in layers:
        if isinstance(layer, HasMetrics):
            for collector in layer.metrics():
                router.metrics.register(collector)


def _lifespan(layers: Iterable[ASGIApp], health: HealthMonitor, fleet: Fleet, upstream: Upstream) -> Lifespan[Any]:
    """Health checks and middlewares, entered outermost first, left in reverse; connections are closed last."""

    @asynccontextmanager
    async def lifespan(app: object) -> AsyncIterator[None]:
        async with AsyncExitStack() as running:
            running.push_async_callback(upstream.close)
            running.push_async_callback(fleet.close)
            await running.enter_async_context(health.running())
            for layer in layers:
                if isinstance(layer, HasLifespan):
                    await running.enter_async_context(layer.lifespan())
            yield

    return lifespan


def _described(loaded: Iterable[LoadedMiddleware]) -> list[dict[str, object]]:
    """The stack for `GET /router/info`, outermost first."""
    return [{"name": each.name, "path": each.path, "options": dict(each.options)} for each in loaded]
