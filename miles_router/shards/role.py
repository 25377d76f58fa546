"""The part of a router that one process runs: by default all of it. The leader and the shards override some methods."""

from __future__ import annotations

from collections.abc import AsyncIterator, Collection, Sequence
from contextlib import asynccontextmanager

from starlette.routing import BaseRoute

from miles_router.admin.routes import Admin
from miles_router.control.fan_out import FanOut
from miles_router.forwarding.upstream import Upstream
from miles_router.pools.pools import ModelPool, Pools
from miles_router.pools.registrations import Registrations
from miles_router.settings.config import RouterConfig
from miles_router.slots import ALL_SLOTS


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

    def config(self, config: RouterConfig) -> RouterConfig:
        """Return the settings for this process, made from the settings of the whole router."""
        return config

    def fan_out(self, upstream: Upstream) -> FanOut:
        """Create the sender of control requests to engines."""
        return FanOut(upstream)

    def connect(self, pool: ModelPool) -> None:
        """Connect a new pool to the other processes."""

    def show(self, pools: Pools, admin: Admin) -> None:
        """Connect the router's own routes to the other processes."""

    def routes(self, routes: Sequence[BaseRoute]) -> Sequence[BaseRoute]:
        """Return the admin routes as this process answers them."""
        return routes

    async def restore(self, registrations: Registrations) -> None:
        """Restore the workers that were registered before. Raises the errors of `Registrations.check_model` and
        `restore`."""
        await registrations.check_model()
        await registrations.restore()

    @asynccontextmanager
    async def running(self, pools: Pools) -> AsyncIterator[None]:
        """Work while entered. Enter after the first check of the workers, so that the first requests find one."""
        await pools.default.health.first_checks()
        yield
