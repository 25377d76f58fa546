"""Starts the actors of a router, and ends them."""

from __future__ import annotations

import secrets
import time
from argparse import Namespace
from typing import Any

from miles_router.cluster.nodes.machines import LEASE, Machines
from miles_router.errors import ConfigError
from miles_router.middlewares.loading import class_at, load_middlewares
from miles_router.settings.config import RouterConfig

try:
    import ray
    from ray.util.placement_group import placement_group, remove_placement_group
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy
except ImportError as error:
    raise ImportError("several machines need Ray: pip install 'miles-router[ray]'") from error

from miles_router.ray.actors import ControlActor, NodeActor

#: Seconds for which machines are waited for.
PATIENCE = 120.0
#: Seconds beside `shutdown_timeout` in which a machine ends; one that is lost does not.
SPARE = 15.0
#: Of a core that Ray is told an actor takes: it places them by this, and limits nothing.
CORE = 0.01
LOOK = 0.1
LOCAL = ("127.0.0.1", "localhost", "::1", "[::1]")


class RayRouter:
    """A router that runs on a Ray cluster. `urls` are those of its machines, any of which may be asked."""

    def __init__(self, control: Any, nodes: list[Any], group: Any, ending: float) -> None:
        self._ending = ending
        self.control = control
        self.nodes = nodes
        self._group = group
        self.urls: list[str] = []

    def find_urls(self) -> list[str]:
        """Where the machines are now; one that was started again may be elsewhere.

        Raises:
            ConfigError: a setting that cannot be used.
            TimeoutError: some are not there.
        """
        ends = time.monotonic() + PATIENCE
        while not all(addresses := self._addresses()):
            if time.monotonic() > ends:
                raise TimeoutError(f"not all machines listen after {PATIENCE:g} s")
            time.sleep(LOOK)
        return [f"http://{host}:{port}" for host, port in filter(None, addresses)]

    def _addresses(self) -> list[tuple[str, int] | None]:
        try:
            found: list[tuple[str, int] | None] = ray.get([each.address.remote() for each in self.nodes])
        except ray.exceptions.RayTaskError as error:
            if isinstance(error.cause, ConfigError):
                raise ConfigError(str(error.cause)) from None
            raise
        except ray.exceptions.ActorUnavailableError:  # it is being started again
            return [None]
        return found

    def stop(self) -> None:
        """End it: the machines in order, then the control plane."""
        for actors in (self.nodes, [self.control]):
            ends = [each.stop.remote() for each in actors]
            ray.wait(ends, num_returns=len(ends), timeout=self._ending)
        self.kill()

    def kill(self) -> None:
        """End it at once."""
        for each in (*self.nodes, self.control):
            ray.kill(each)
        remove_placement_group(self._group)


def start(
    config: RouterConfig,
    *,
    nodes: int,
    args: Namespace | None = None,
    name: str = "miles-router",
    lease: float = LEASE,
) -> RayRouter:
    """Run one router on so many machines of the Ray cluster that this program is connected to, until it ends.

    Args:
        config: `state_dir` is a directory that all of them share.
        args: a framework's own arguments, as of `create_app`.
        name: of the control actor, in this program's namespace.
        lease: seconds after which a machine that is lost is succeeded by others, and refuses turns.

    Raises:
        ConfigError: a setting that cannot be used on several machines.
        TimeoutError: the cluster has not so many machines.
    """
    _check(config, nodes)
    machines = Machines(nodes, config.processes, secrets.token_hex(32), lease)
    group = placement_group([{"CPU": CORE}] * nodes, strategy="STRICT_SPREAD")
    if not group.wait(PATIENCE):
        remove_placement_group(group)
        raise TimeoutError(f"the Ray cluster has no {nodes} machines with room for a router")
    options: dict[str, Any] = {"max_restarts": -1, "max_task_retries": 0}
    control = ray.remote(ControlActor).options(name=name, num_cpus=0, **options).remote(config, args, machines)
    actors = []
    for index in range(nodes):
        place = PlacementGroupSchedulingStrategy(placement_group=group, placement_group_bundle_index=index)
        made = ray.remote(NodeActor).options(num_cpus=CORE, scheduling_strategy=place, **options)
        actors.append(made.remote(config, args, machines, index, control))
    router = RayRouter(control, actors, group, ending=config.shutdown_timeout + SPARE)
    try:
        router.urls = router.find_urls()
    except BaseException:
        router.kill()
        raise
    return router


def _check(config: RouterConfig, nodes: int) -> None:
    if nodes < 1:
        raise ConfigError(f"nodes: {nodes} machines are none")
    if config.state_dir is None:
        raise ConfigError("state_dir: several machines need a directory that all of them share")
    if config.otel:
        raise ConfigError("otel: turns of several machines are not traced")
    if config.state_sync != "machine":
        raise ConfigError("state_sync: several machines need machine: what one has written, another must find")
    if nodes > 1 and config.host in LOCAL:
        raise ConfigError(f"host: other machines cannot reach {config.host}; 0.0.0.0 serves them")
    for each in load_middlewares(config.middlewares):
        if getattr(class_at(each.path, "middlewares"), "one_machine", False):
            raise ConfigError(f"middlewares: {each.path} keeps what only its own machine can find")
