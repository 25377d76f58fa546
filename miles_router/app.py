"""The composition root: `create_app` builds a router and connects its parts; no other module does."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

from starlette.types import Lifespan

from miles_router.admin.control import ControlRoutes
from miles_router.admin.entrance import Entrance
from miles_router.admin.routes import Admin
from miles_router.asgi.backlog import Backlog
from miles_router.control.control import Control
from miles_router.control.fan_out import FanOut
from miles_router.control.health import HealthMonitor
from miles_router.control.probes import Probes
from miles_router.control.requests import OwnRequests
from miles_router.control.stalls import StallWatch
from miles_router.edge import RouterApp
from miles_router.errors import ConfigError
from miles_router.fleet.fleet import Fleet
from miles_router.fleet.gate import Gate
from miles_router.fleet.inflight import InFlight
from miles_router.fleet.placement.contract import Policy
from miles_router.fleet.placement.policies import LEAST_IN_FLIGHT, Checked, LeastInFlight
from miles_router.fleet.placement.sessions import Affinity
from miles_router.fleet.pool import WorkerPool
from miles_router.fleet.sources import parse_source
from miles_router.fleet.worker_url import parse_worker_url
from miles_router.fleet.workers import Worker, WorkerActivity
from miles_router.forwarding.forwarder import Forwarder
from miles_router.forwarding.proxy import Proxy
from miles_router.forwarding.upstream import Upstream
from miles_router.generation.attempt import ResumeServices
from miles_router.metrics import ClientStatistics, LoopDelay, Metrics, StateStatistics
from miles_router.metrics.models import merge_models
from miles_router.middlewares.contract import (
    ASGIApp,
    HasLifespan,
    HasMetrics,
    HasOwners,
)
from miles_router.middlewares.loading import LoadedMiddleware, build_stack, class_at, each_once, load_middlewares
from miles_router.middlewares.owners import Owners
from miles_router.middlewares.router import Router
from miles_router.partial_rollouts import PartialRollouts
from miles_router.partial_rollouts.moves import Mover
from miles_router.pools.choice import PoolChoice
from miles_router.pools.discovery import Discovery
from miles_router.pools.pools import Dispatch, ModelPool, Pools, Reception
from miles_router.pools.registrations import Registrations, StandstillRow
from miles_router.reach.route import Reach
from miles_router.settings.config import RouterConfig
from miles_router.settings.keys import data_keys
from miles_router.settings.trained_models import checkpoints, mount_of
from miles_router.shards.role import ProcessRole
from miles_router.state.of_model import StoreOfModel
from miles_router.state.store import StateStore


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
        trained=checkpoints(config.trained_models),
    )
    router = pools.default.router
    routers: dict[str | None, Router] = {None: router}
    routers |= {name: pools[name].router for name in pools.trained}
    outermost, layers_of = build_stack(dispatch, loaded, routers)
    layers = each_once(chain.from_iterable(layers_of.values()))
    stack = Reception(outermost, pools, PoolChoice(pools).choose)
    pools.one_model_only = any(getattr(layer, "one_model", False) for layer in layers)
    for url in config.worker_urls:
        pools.default.fleet.pool.add_unreached(parse_worker_url(url))
    registrations = Registrations(store, pools)
    admin = Admin(pools, registrations, _described(loaded))
    role.show(pools, admin)
    control, reach = ControlRoutes(pools), Reach(config.public_url).route()
    entrances = {
        model: Entrance.build(config, role.routes, admin, control, of_model, reach, stack)
        for model, of_model in layers_of.items()
    }
    owners.backlog = clients.backlog
    owners.layers = [layer for layer in layers_of[None] if isinstance(layer, HasOwners)]
    for numbers in owners.numbers():
        metrics.register(numbers)
    discovery = None
    if config.discover and role.checks_health:
        sources = [parse_source(each) for each in config.discover]
        discovery = Discovery(sources, admin.registry, pools, interval=config.health_check_interval)
        router.publish("discovery", discovery.statistics)
    entrances[None].routes.lifespan_context = _lifespan(
        layers, role, owners, pools, upstream, store, registrations, loop_delay, discovery
    )
    _register_metrics(metrics, routers, layers_of)
    return RouterApp(
        config=config,
        pools=pools,
        entrances=entrances,
        stack=stack,
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

    The configured checkpoint, chat template and tokenizer belong to the default pool. Other trained models have a
    checkpoint of their own, and the rest none.
    """
    mount, own_store = "", store
    if name != (config.model_id or ""):
        checkpoint = checkpoints(config.trained_models).get(name)
        if checkpoint is not None:
            mount, args, own_store = mount_of(name), None, None if store is None else StoreOfModel(store, name)
            config = replace(config, model_id=name, trained_models=())
        config, tokenizer = replace(config, hf_checkpoint=checkpoint, chat_template_path=None), None
    workers = WorkerPool(
        failure_threshold=config.health_check_failure_threshold,
        readmit=config.readmit,
        admission=config.admission,
    )
    fleet = Fleet(
        pool=workers,
        gate=Gate(workers.admission, max_held=config.gate_max_held, timeout=config.gate_timeout),
        policy=policy_named(config.policy),
        probes=probes,
        fan_out=fan_out,
    )
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

    async def activity(worker: Worker) -> WorkerActivity:
        return upstream.activity(worker)

    health = HealthMonitor(
        fleet,
        probes,
        activity,
        interval=config.health_check_interval,
        deep_interval=config.deep_health_check_interval,
    )
    control = Control(
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
        store=own_store,
        args=args,
        tokenizer=tokenizer,
        owners=owners,
        mount=mount,
    )
    is_paused: Callable[[str], Awaitable[bool]] = lambda url: health.is_paused(url)  # noqa: E731  # may be replaced
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
    pool = ModelPool(name, router, innermost, health, lambda: _looking_after(role, fleet, health, stalls, mover))
    role.connect(pool)
    return pool


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


def _register_metrics(
    metrics: Metrics, routers: Mapping[str | None, Router], layers_of: Mapping[str | None, Sequence[ASGIApp]]
) -> None:
    shared = {*map(id, layers_of[None])}
    for model, router in routers.items():
        own = [layer for layer in layers_of[model] if model is None or id(layer) not in shared]
        router.collectors += [each for layer in own if isinstance(layer, HasMetrics) for each in layer.metrics()]
    others = {model: router.collectors for model, router in routers.items() if model is not None}
    for collector in merge_models(routers[None].collectors, others):
        metrics.register(collector)


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
