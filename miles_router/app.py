"""The composition root: `create_app` builds a router and connects its parts; no other module does."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import AsyncIterator, Collection, Iterable, Sequence, Set
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

from starlette.routing import BaseRoute, Route, WebSocketRoute
from starlette.types import Lifespan

from miles_router.admin.control import ControlRoutes
from miles_router.admin.routes import Admin
from miles_router.asgi.access import AccessRules, first_segment
from miles_router.asgi.backlog import Backlog
from miles_router.asgi.exchange import Receive, Scope, Send
from miles_router.asgi.keys import Keys
from miles_router.asgi.own_routes import OwnRoutes
from miles_router.control.fan_out import FanOut
from miles_router.control.health import HealthMonitor
from miles_router.control.probes import Probes
from miles_router.control.requests import OwnRequests
from miles_router.control.stalls import StallWatch
from miles_router.edge import RouterApp
from miles_router.engines.known import CLIENT_PATHS
from miles_router.errors import (
    ConfigError,
    MethodNotAllowed,
)
from miles_router.fleet.affinity import Affinity
from miles_router.fleet.fleet import Fleet
from miles_router.fleet.gate import Gate
from miles_router.fleet.inflight import InFlight
from miles_router.fleet.placement.contract import Policy
from miles_router.fleet.placement.policies import LEAST_IN_FLIGHT, Checked, LeastInFlight
from miles_router.fleet.sources import parse_source
from miles_router.fleet.worker_url import parse_worker_url
from miles_router.forwarding.forwarder import Forwarder
from miles_router.forwarding.proxy import Proxy
from miles_router.forwarding.upstream import Upstream
from miles_router.generation.attempt import ResumeServices
from miles_router.metrics import ClientStatistics, LoopDelay, Metrics, StateStatistics
from miles_router.middlewares.contract import (
    ASGIApp,
    HasAdminRoutes,
    HasDataPaths,
    HasKeys,
    HasLifespan,
    HasMetrics,
    HasOpenRoutes,
    HasOwners,
    HasRoutes,
)
from miles_router.middlewares.loading import LoadedMiddleware, build_stack, class_at, load_middlewares
from miles_router.middlewares.owners import Owners
from miles_router.middlewares.router import Router
from miles_router.partial_rollouts import PartialRollouts
from miles_router.partial_rollouts.moves import Mover
from miles_router.pools.apps import Dispatch, Reception
from miles_router.pools.discovery import Discovery
from miles_router.pools.pools import ModelPool, Pools
from miles_router.pools.registrations import Registrations, StandstillRow
from miles_router.reach.route import Reach
from miles_router.settings.config import RouterConfig, paths_problem
from miles_router.settings.keys import admin_keys, data_keys
from miles_router.shards.role import ProcessRole
from miles_router.state.store import StateStore

#: The beginning of paths that a middleware may have opened by the administration key.
ADMIN_PREFIX = "/router/"


def create_app(
    config: RouterConfig | None = None,
    *,
    args: Namespace | None = None,
    tokenizer: Any = None,
    role: ProcessRole | None = None,
    owners: Owners | None = None,
) -> RouterApp:
    """Build a router as an ASGI app for any server. Its lifespan runs the health checks and the middlewares.

    Args:
        config: all settings; None uses the defaults.
        args: the Namespace of a training framework, available to middlewares as `router.args`.
        tokenizer: replaces the checkpoint's tokenizer as `router.tokenizer`.
        role: the part of the router that this process does; None: all of it.
        owners: finds the process that owns a session or text; None: this is the only process.

    Raises:
        ConfigError: a middleware cannot be loaded, or a worker URL is invalid.
    """
    role, owners = role or ProcessRole(), owners or Owners()
    config = role.config(config or RouterConfig())
    loaded = load_middlewares(config.chain)
    clients = ClientStatistics(Backlog())
    upstream = Upstream(
        connect_timeout=config.connect_timeout, max_connections=config.max_connections, backlog=clients.backlog
    )
    probes, fan_out = Probes(upstream, timeout=config.health_check_timeout), role.fan_out(upstream)
    metrics, loop_delay = Metrics(), LoopDelay()
    metrics.register(clients)
    metrics.register(loop_delay)
    store = None
    if config.state_dir:
        store = StateStore(Path(config.state_dir), config.state_sync, shared=role.shares_state)
    if store is not None:
        store.slots = role.slots
        metrics.register(StateStatistics(store))
    dispatch = Dispatch()
    pools = dispatch.pools = Pools(
        config.model_id or "",
        lambda name: _pool(name, config, role, upstream, probes, fan_out, metrics, store, args, tokenizer, owners),
    )
    router = pools.default.router
    outermost, layers = build_stack(dispatch, loaded, router)
    stack = Reception(outermost, pools)
    pools.layered = any(getattr(layer, "one_model", False) for layer in layers)
    for url in role.first_workers(config):
        pools.default.fleet.pool.add_unreached(parse_worker_url(url))
    registrations = Registrations(store, pools)
    admin = role.admin(pools, registrations, _described(loaded))
    routes, access_rules = _own_routes(config, role, admin, ControlRoutes(pools), layers, stack)
    owners.backlog = clients.backlog
    owners.layers = [layer for layer in layers if isinstance(layer, HasOwners)]
    for numbers in owners.numbers():
        metrics.register(numbers)
    discovery = None
    if config.discover and role.checks_health:
        sources = [parse_source(each) for each in config.discover]
        discovery = Discovery(sources, admin.registry, pools, interval=config.health_check_interval)
        router.publish("discovery", discovery.statistics)
    routes.lifespan_context = _lifespan(
        layers, role, owners, pools, upstream, store, registrations, loop_delay, discovery
    )
    _register_metrics(router, layers)
    return RouterApp(
        config=config,
        pools=pools,
        routes=routes,
        access_rules=access_rules,
        stack=stack,
        layers=layers,
        clients=clients,
        counts=role.serves_clients,
    )


def _pool(
    name: str,
    config: RouterConfig,
    role: ProcessRole,
    upstream: Upstream,
    probes: Probes,
    fan_out: FanOut,
    metrics: Metrics,
    store: StateStore | None,
    args: Namespace | None,
    tokenizer: Any,
    owners: Owners,
) -> ModelPool:
    """Build the pool of one model with its own fleet, forwarder, control and health checks.

    The configured checkpoint, chat template and tokenizer belong to the default pool; other pools get none.
    """
    if name != (config.model_id or ""):
        config, tokenizer = replace(config, hf_checkpoint=None, chat_template_path=None), None
    workers = role.pool(
        name,
        failure_threshold=config.health_check_failure_threshold,
        readmit=config.readmit,
        admission=config.admission,
    )
    fleet = role.fleet(
        pool=workers,
        gate=Gate(workers.admission, max_held=config.gate_max_held, timeout=config.gate_timeout),
        policy=policy_named(config.policy),
        probes=probes,
        fan_out=fan_out,
    )
    fleet.gate.lease = role.lease
    if store is not None and role.checks_health:
        fleet.save_standstill = StandstillRow(store, name, fleet).save
    metrics.count(fleet, sends=role.sends_requests, decides=role.checks_health)
    in_flight = InFlight(private=len(set(data_keys(config))) > 1)
    forwarder = Forwarder(
        fleet=fleet,
        upstream=upstream,
        metrics=metrics,
        max_retries=config.max_retries,
        max_answer_bytes=config.max_answer_bytes,
        in_flight=in_flight,
    )
    health = HealthMonitor(
        fleet,
        probes,
        role.activity(name, upstream),
        interval=config.health_check_interval,
        deep_interval=config.deep_health_check_interval,
    )
    control = role.control(
        name,
        fleet=fleet,
        fan_out=fan_out,
        requests=OwnRequests(in_flight, fleet.gate),
        health=health,
        extra=config.fan_out,
        read_timeout=config.health_check_timeout,
    )
    stalls = StallWatch(fleet, probes, upstream, timeout=config.stall_timeout, excused=lambda: control.may_silence)
    router = Router(
        config=config,
        fleet=fleet,
        forwarder=forwarder,
        metrics=metrics,
        control=control,
        store=store,
        args=args,
        tokenizer=tokenizer,
        owners=owners,
    )
    is_paused = role.is_paused(name, health)
    innermost: ASGIApp = Proxy(
        forwarder,
        metrics,
        in_flight=in_flight,
        request_timeout=config.request_timeout,
        affinity=Affinity(config.affinity_names),
    )
    mover = Mover(
        ResumeServices(router, in_flight, is_paused, resume_cut=False, resume_lost=False),
        innermost,
        fan_out,
        after=config.move_after,
        excused=lambda: control.may_silence,
    )
    if config.partial_rollout == "resume" or config.resume_on_worker_loss:
        router.resume = ResumeServices(
            router,
            in_flight,
            is_paused,
            resume_cut=config.partial_rollout == "resume",
            resume_lost=config.resume_on_worker_loss,
        )
        innermost = PartialRollouts(innermost, router.resume)
    return ModelPool(name, router, innermost, health, lambda: _looking_after(role, fleet, health, stalls, mover))


def policy_named(name: str) -> Policy:
    """Return the built-in policy called `name`, or an instance of the class at this dotted path.

    Raises:
        ConfigError: there is no such policy or class, or the class has no `choose` or needs arguments.
    """
    if name == LEAST_IN_FLIGHT:
        return LeastInFlight()
    if "." not in name and ":" not in name:
        raise ConfigError(f"policy: no policy is called {name!r}; use {LEAST_IN_FLIGHT} or pkg.module.Class")
    made = class_at(name, "policy")
    if not callable(getattr(made, "choose", None)):
        raise ConfigError(f"policy {name!r}: it has no method choose(candidates, request)")
    try:
        return Checked(made())
    except TypeError as error:
        raise ConfigError(f"policy {name!r}: its constructor must take no arguments: {error}") from None


@asynccontextmanager
async def _looking_after(
    role: ProcessRole, fleet: Fleet, health: HealthMonitor, stalls: StallWatch, mover: Mover
) -> AsyncIterator[None]:
    async with AsyncExitStack() as running:
        running.push_async_callback(fleet.close)
        if role.checks_health:
            await running.enter_async_context(health.running())
        if role.sends_requests:
            await running.enter_async_context(stalls.running())
            await running.enter_async_context(mover.running())
        yield


def _own_routes(
    config: RouterConfig,
    role: ProcessRole,
    admin: Admin,
    control_routes: ControlRoutes,
    layers: Iterable[ASGIApp],
    stack: ASGIApp,
) -> tuple[OwnRoutes, AccessRules]:
    """Return the routes of the router and of the middlewares, and the access rules of all paths.

    Raises:
        ConfigError: `fan_out` or `data_paths` contains a path of the router.
        ConfigError: a middleware's route or data path is invalid, or collides with a path of the router.
    """
    own = (*admin.open_routes(), *admin.guarded_routes())
    added = [route for layer in layers if isinstance(layer, HasOpenRoutes) for route in layer.open_routes()]
    guarded = [route for layer in layers if isinstance(layer, HasAdminRoutes) for route in layer.admin_routes()]
    extra = [route for layer in layers if isinstance(layer, HasRoutes) for route in layer.routes()]
    reach = Reach(config.public_url).route()
    groups = [
        [*admin.open_routes(), *added],
        [*role.routes(admin.guarded_routes()), *guarded],  # the process that gets a request answers a middleware's
        role.routes(control_routes.routes()),
    ]
    opened, administration, control = ([_path(route) for route in group] for group in groups)
    layered = [path for layer in layers if isinstance(layer, HasDataPaths) for path in layer.data_paths()]
    # A str in place of a list would yield its characters as paths, and "/" would open every path to client keys.
    if problem := paths_problem(layered):
        raise ConfigError(f"a middleware's data_paths: {problem}")
    for name, paths, others in (
        ("fan_out", config.fan_out, {*opened, *administration}),
        ("data_paths", config.data_paths, {*opened, *administration, *control}),
        ("a middleware's data_paths", layered, {*opened, *administration, *control}),
    ):
        if twice := others & {*paths}:
            raise ConfigError(f"{name}: {min(twice)} is a path of the router's own")
    _check_routes(added, guarded, extra, own={*map(_path, own), _path(reach)}, control={*control})
    access_rules = AccessRules(
        Keys(data_keys(config), admin_keys(config)),
        opened=opened,
        administration=administration,
        control=control,
        routes=(*extra, reach),
        listed=(*CLIENT_PATHS, *config.data_paths, *layered),
        keys_of_layers=[layer.key_of for layer in layers if isinstance(layer, HasKeys)],
    )
    fences = _fences((*opened, *administration, *control))
    layers_own = _fences(_path(route) for route in (*extra, reach) if isinstance(route, Route))
    return OwnRoutes((*chain(*groups), *fences, *extra, reach, *layers_own), default=stack), access_rules


def _check_routes(
    added: Sequence[BaseRoute],
    guarded: Sequence[BaseRoute],
    extra: Sequence[BaseRoute],
    *,
    own: Collection[str],
    control: Set[str],
) -> None:
    """Check the middlewares' routes against the router's own paths and the control paths.

    Args:
        added: the routes that need no key.
        guarded: the routes that need the administration key.
        extra: the routes that need the clients' key.

    Raises:
        ConfigError: a route is invalid, or collides with another path.
    """
    for route in (*added, *guarded):
        if not isinstance(route, Route):  # the access rules know the paths of such routes alone
            raise ConfigError(f"a middleware's open or admin route {_path(route)!r} must be a Route of one path")
    for route in added:
        if "{" in _path(route):
            raise ConfigError(f"a middleware's open route {_path(route)!r} must have no parameters")
    for route in guarded:
        if not _path(route).startswith(ADMIN_PREFIX) or _path(route) in own:
            raise ConfigError(
                f"a middleware's admin route {_path(route)!r} must begin with {ADMIN_PREFIX} "
                "and differ from the router's own paths"
            )
    taken = {*map(first_segment, own), *control}
    for routes in (added, extra):
        segments = [_fixed_segment(route) for route in routes]
        if twice := taken & {*segments} or control & {*map(_path, routes)}:
            raise ConfigError(f"a middleware has a route under {min(twice)!r}, which is a path of the router's own")
        taken |= {*segments}


def _fences(paths: Iterable[str]) -> list[Route]:
    return [Route(path, _WrongMethod()) for path in dict.fromkeys(paths)]


def _path(route: BaseRoute) -> str:
    path = getattr(route, "path", None)
    if not isinstance(path, str) or isinstance(route, WebSocketRoute):  # the router closes every WebSocket
        raise ConfigError(f"a middleware's route {route!r} has no path of HTTP")
    return path


def _fixed_segment(route: BaseRoute) -> str:
    segment = first_segment(_path(route))
    if segment == "/" or "{" in segment:
        raise ConfigError(f"a middleware's route {_path(route)!r} must begin with a fixed path segment")
    return segment


class _WrongMethod:
    """An ASGI app behind the routes of the router and of the middlewares: it refuses methods that no route accepts."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        raise MethodNotAllowed(f"{scope['path']} does not take {scope['method']}")


def _register_metrics(router: Router, layers: Iterable[ASGIApp]) -> None:
    for collector in router.collectors:
        router.metrics.register(collector)
    for layer in layers:
        if isinstance(layer, HasMetrics):
            for collector in layer.metrics():
                router.metrics.register(collector)


def _lifespan(
    layers: Iterable[ASGIApp],
    role: ProcessRole,
    owners: Owners,
    pools: Pools,
    upstream: Upstream,
    store: StateStore | None,
    registrations: Registrations,
    loop_delay: LoopDelay,
    discovery: Discovery | None,
) -> Lifespan[Any]:
    """Return the lifespan: it restores the workers, then starts health checks and middlewares, outermost first.

    Everything stops in reverse order. Connections to workers close after the health checks, and then the state store.
    """

    @asynccontextmanager
    async def lifespan(app: object) -> AsyncIterator[None]:
        async with AsyncExitStack() as running:
            await running.enter_async_context(loop_delay.running())
            if store is not None:
                running.push_async_callback(store.close)
            await role.restore(registrations)
            running.push_async_callback(upstream.close)
            await running.enter_async_context(pools.running())
            await running.enter_async_context(role.running(pools))
            if discovery is not None:
                await running.enter_async_context(discovery.running())
            for layer in layers:
                if isinstance(layer, HasLifespan):
                    await running.enter_async_context(layer.lifespan())
            await running.enter_async_context(owners.running())
            yield

    return lifespan


def _described(loaded: Iterable[LoadedMiddleware]) -> list[dict[str, object]]:
    """Return the middleware stack for `GET /router/info`, outermost first."""
    return [{"name": each.name, "path": each.path, "options": dict(each.options)} for each in loaded]
