"""The part of a router that one process runs: by default all of it. The leader and the shards override some methods."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from starlette.routing import BaseRoute

from miles_router.admin.routes import Admin
from miles_router.control.control import Control
from miles_router.control.fan_out import FanOut
from miles_router.control.health import HealthMonitor
from miles_router.fleet.fleet import Fleet
from miles_router.fleet.pool import WorkerPool
from miles_router.fleet.workers import Worker, WorkerActivity
from miles_router.forwarding.upstream import Upstream
from miles_router.pools.pools import Pools
from miles_router.pools.registrations import Registrations
from miles_router.settings.config import RouterConfig
from miles_router.slots import ALL_SLOTS

if TYPE_CHECKING:
    from miles_router.shards.membership import Membership


class ProcessRole:
    """The role of a process that is the whole router."""

    #: Whether clients' requests arrive in this process.
    serves_clients = True
    #: Whether this process sends requests to workers and watches over them.
    sends_requests = True
    #: Whether this process runs the health checks of workers.
    checks_health = True
    #: The slots of the state directory that only this process may open.
    slots: Collection[int] = ALL_SLOTS
    #: Whether routers on other machines use the same state directory.
    shares_state = False
    #: The lease under which this process acts, if a lease can run out.
    lease: Membership | None = None

    def config(self, config: RouterConfig) -> RouterConfig:
        """Return the settings for this process, made from the settings of the whole router."""
        return config

    def first_workers(self, config: RouterConfig) -> Sequence[str]:
        """Return the URLs of the workers to start with."""
        return config.worker_urls

    def pool(self, name: str, **settings: Any) -> WorkerPool:
        """Create the worker pool of a model."""
        return WorkerPool(**settings)

    def fleet(self, **parts: Any) -> Fleet:
        return Fleet(**parts)

    def fan_out(self, upstream: Upstream) -> FanOut:
        """Create the sender of control requests to engines."""
        return FanOut(upstream)

    def control(self, name: str, **parts: Any) -> Control:
        return Control(**parts)

    def activity(self, name: str, upstream: Upstream) -> Callable[[Worker], Awaitable[WorkerActivity]]:
        """Return a function that reports the activity of a silent worker in this pool."""

        async def own(worker: Worker) -> WorkerActivity:
            return upstream.activity(worker)

        return own

    def is_paused(self, name: str, health: HealthMonitor) -> Callable[[str], Awaitable[bool]]:
        """Return a function that tells whether another program has paused the worker at a URL."""
        return health.is_paused

    def admin(self, pools: Pools, registrations: Registrations, stack: list[dict[str, object]]) -> Admin:
        """Create the handlers of the router's own routes."""
        return Admin(pools, registrations, stack)

    def routes(self, routes: Sequence[BaseRoute]) -> Sequence[BaseRoute]:
        """Return the admin routes as this process answers them."""
        return routes

    async def restore(self, registrations: Registrations) -> None:
        """Restore the workers that were registered before. Raises the errors of `Registrations.check_model` and
        `restore`."""
        await registrations.check_model()
        await registrations.restore()

    def running(self, pools: Pools) -> AbstractAsyncContextManager[None]:
        """Return a context manager inside which this process works."""
        return _running(pools)


@asynccontextmanager
async def _running(pools: Pools) -> AsyncIterator[None]:
    """Enter after the first check of the workers, so that the first requests find workers that answer."""
    await pools.default.health.first_checks()
    yield


def without_keys(config: RouterConfig) -> RouterConfig:
    """Return the settings without keys and middlewares, for a process reached only by others of its router."""
    nothing: dict[str, Any] = dict.fromkeys(("api_key", "api_key_file", "admin_api_key", "admin_api_key_file"))
    return replace(config, middlewares=(), otel=False, dashboard=False, **nothing)
