"""What one process does of a router. By default that is all of it; the leader and shards do a part."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import replace
from typing import Any

from starlette.routing import BaseRoute

from miles_router.admin.routes import Admin
from miles_router.control.control import Control
from miles_router.control.fan_out import FanOut
from miles_router.control.health import HealthMonitor
from miles_router.fleet.fleet import Fleet
from miles_router.fleet.gate import ActsUnderLease
from miles_router.fleet.pool import WorkerPool
from miles_router.fleet.workers import Signs, Worker
from miles_router.forwarding.upstream import Upstream
from miles_router.pools.pools import Pools
from miles_router.pools.registrations import Registrations
from miles_router.settings.config import RouterConfig
from miles_router.slots import ALL_SLOTS


class Duty:
    """The whole router, in one process."""

    #: Whether clients' requests come in here.
    counts = True
    #: Whether requests are sent to workers here, and are looked after.
    sends = True
    #: Whether workers are checked here.
    checks = True
    #: What this process alone may open of what outlives it.
    slots: Collection[int] = ALL_SLOTS
    #: Whether routers on other machines have the state directory, too.
    shares_state = False
    #: What it acts under, where that can run out.
    lease: ActsUnderLease | None = None

    def config(self, config: RouterConfig) -> RouterConfig:
        """The settings as they are for this process."""
        return config

    def first_workers(self, config: RouterConfig) -> Sequence[str]:
        """The URLs of the workers to start with."""
        return config.worker_urls

    def pool(self, name: str, **settings: Any) -> WorkerPool:
        """The pool of a model."""
        return WorkerPool(**settings)

    def fleet(self, **parts: Any) -> Fleet:
        """Its fleet."""
        return Fleet(**parts)

    def fan_out(self, upstream: Upstream) -> FanOut:
        """How engines are told anything beside requests."""
        return FanOut(upstream)

    def control(self, name: str, **parts: Any) -> Control:
        """Its control requests."""
        return Control(**parts)

    def signs(self, name: str, upstream: Upstream) -> Callable[[Worker], Awaitable[Signs]]:
        """How it is asked what speaks for a silent worker of this pool."""

        async def own(worker: Worker) -> Signs:
            return upstream.signs(worker)

        return own

    def is_paused(self, name: str, health: HealthMonitor) -> Callable[[str], Awaitable[bool]]:
        """How it is asked whether somebody else has paused a worker."""
        return health.is_paused

    def admin(self, pools: Pools, registrations: Registrations, stack: list[dict[str, object]]) -> Admin:
        """The router's own routes."""
        return Admin(pools, registrations, stack)

    def routes(self, routes: Sequence[BaseRoute]) -> Sequence[BaseRoute]:
        """Those that are behind the key of administration, as they are answered here."""
        return routes

    async def restore(self, registrations: Registrations) -> None:
        """Have those workers again that were registered. Raises as `Registrations.restore`."""
        await registrations.restore()

    def running(self, pools: Pools) -> AbstractAsyncContextManager[None]:
        """While it is entered, this process does its duty."""
        return _running(pools)


@asynccontextmanager
async def _running(pools: Pools) -> AsyncIterator[None]:
    """Ready once the first workers were asked: the router's first requests find those that answer."""
    await pools.default.health.first_look()
    yield


def without_keys(config: RouterConfig) -> RouterConfig:
    """For a process that only others of the same router reach."""
    nothing: dict[str, Any] = dict.fromkeys(("api_key", "api_key_file", "admin_api_key", "admin_api_key_file"))
    return replace(config, middlewares=(), otel=False, **nothing)
