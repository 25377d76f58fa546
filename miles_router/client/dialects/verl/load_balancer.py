"""`RouterLoadBalancer`, which verl loads by its dotted name: `router_class` in the file at
`rollout.router_config_path`."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from miles_router.client.dialects.verl.server_manager import RolloutConfig, ServerManager, TokenOutput
from miles_router.client.errors import NotFound
from miles_router.client.router_client import RouterClient

URL = "router_url"
#: Required fields of the file: verl sends no bound with a generation, and a default would cut its responses.
REQUIRED = (URL, "prompt_length", "response_length")


@dataclass(frozen=True)
class RoutedGenerate:
    """The `generate` of an actor handle, sent through the router.

    Args:
        rollout: verl's id of the rollout: its generations stay on one worker while that pays.
    """

    url: str
    config: RolloutConfig
    rollout: str

    async def remote(self, *, request_id: str, **fields: Any) -> TokenOutput:
        """Generate as `ServerManager.generate` does, with its errors. `request_id` is verl's name of one generation,
        and is not sent."""
        async with RouterClient(self.url) as client:
            return await ServerManager(client, self.config).generate(self.rollout, **fields)


@dataclass(frozen=True)
class RoutedServer:
    """The object that verl uses as the actor handle of a server: `await server.generate.remote(...)`."""

    generate: RoutedGenerate


class RouterLoadBalancer:
    """A replacement of verl's `RequestLoadBalancer` by a running router: verl's replicas become workers of the router,
    and every generation goes to the router, which chooses the worker.

    verl makes a Ray actor of it, and calls its methods one at a time. No method is a coroutine: Ray would then run all
    of them on one event loop, where they could not wait for the router.

    Args:
        servers: the replicas, by the `host:port` of their HTTP servers; their actor handles are not used.
        router_kwargs: the contents of the file: `router_url` and fields of `RolloutConfig`, as in
            `actor_rollout_ref.rollout`; `prompt_length` and `response_length` are required.

    Raises:
        ValueError: a field is missing.
        TypeError: a field is unknown.
        RouterClientError: the router cannot be reached, or refuses a worker.
    """

    def __init__(self, servers: Mapping[str, Any], router_kwargs: Mapping[str, Any]) -> None:
        if missing := [name for name in REQUIRED if name not in router_kwargs]:
            raise ValueError(f"{missing[0]} is missing in the file at rollout.router_config_path")
        fields = {name: value for name, value in router_kwargs.items() if name not in (URL, "router_class")}
        self._url, self._config = str(router_kwargs[URL]), RolloutConfig(**fields)
        self._servers: set[str] = set()
        self._in_flight = 0
        self.add_servers(servers)

    def require_acquire_fields(self) -> list[str]:
        """Return the arguments of `generate` that `acquire_server` needs: none."""
        return []

    def require_release_fields(self) -> list[str]:
        """Return the arguments of `generate` that `release_server` needs: none."""
        return []

    def acquire_server(self, request_id: str) -> tuple[str, RoutedServer]:
        """Return the router's URL, and an object that generates through it.

        Raises:
            RuntimeError: there is no replica; verl recognizes this message and waits.
        """
        if not self._servers:
            raise RuntimeError("No available servers in load balancer")
        self._in_flight += 1
        return self._url, RoutedServer(RoutedGenerate(self._url, self._config, request_id))

    def release_server(self, server_id: str, request_id: str | None = None) -> None:
        """Count a generation as ended."""
        self._in_flight = max(0, self._in_flight - 1)

    def add_servers(self, servers: Mapping[str, Any]) -> None:
        """Register replicas as workers of the router."""
        asyncio.run(_register(self._url, servers))
        self._servers.update(servers)

    def remove_servers(self, server_ids: Iterable[str]) -> None:
        """Remove replicas from the router; replicas that it does not have are ignored."""
        gone = self._servers.intersection(server_ids)
        asyncio.run(_unregister(self._url, gone))
        self._servers -= gone

    def get_all_servers(self) -> list[str]:
        """Return the addresses of the replicas."""
        return sorted(self._servers)

    def get_status(self) -> dict[str, Any]:
        """Return the number of requests in flight at each replica, and of verl's generations in progress."""
        loads = asyncio.run(_loads(self._url, self._servers))
        return {"servers": loads, "total_inflight": self._in_flight, "active_servers": len(self._servers)}

    def clear_sticky_cache(self) -> dict[str, Any]:
        """Clear nothing: the router decides with every generation whether its rollout's worker still pays."""
        return {"cleared_entries": 0, "server_loads": asyncio.run(_loads(self._url, self._servers))}

    def get_total_inflight(self) -> int:
        """Return the number of verl's generations in progress."""
        return self._in_flight


async def _register(url: str, addresses: Iterable[str]) -> None:
    async with RouterClient(url) as client:
        for each in addresses:
            await client.add_worker(f"http://{each}")


async def _unregister(url: str, addresses: Iterable[str]) -> None:
    async with RouterClient(url) as client:
        for each in addresses:
            with suppress(NotFound):
                await client.remove_worker(f"http://{each}")


async def _loads(url: str, addresses: Iterable[str]) -> dict[str, int]:
    async with RouterClient(url) as client:
        workers = {worker["url"]: worker["in_flight"] for worker in await client.workers()}
    return {each: workers.get(f"http://{each}", 0) for each in sorted(addresses)}
