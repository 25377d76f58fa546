"""The actors of a router on a Ray cluster, and what starts and ends them."""

from __future__ import annotations

import logging
import os
import secrets
import signal
import socket
import sys
import tempfile
import threading
import time
from argparse import Namespace
from pathlib import Path
from types import FrameType
from typing import Any

from miles_router import log
from miles_router.errors import ConfigError
from miles_router.serving.process import ALIVE, READY, Assignment, spawn
from miles_router.serving.server import listen
from miles_router.settings.config import RouterConfig
from miles_router.shards.places import LEASE, Seat, Shards, chance_generation
from miles_router.version import __version__

try:
    import ray
    from ray.util.placement_group import placement_group, remove_placement_group
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy
except ImportError as error:
    raise ImportError("several machines need Ray: pip install 'miles-router[ray]'") from error

logger = logging.getLogger(__name__)

NAMESPACE = "miles-router"
#: Seconds for which machines are waited for; and beside `shutdown_timeout`, in which an actor ends.
PATIENCE, SPARE = 120.0, 15.0
#: Seconds between two looks, and for which a process may give no sign of life.
LOOK, SILENT = 0.2, 10.0
#: Of a core that Ray is told an actor takes: it places them by this, and limits nothing.
CORE = 0.01
LOCAL = ("127.0.0.1", "localhost", "::1", "[::1]")


class Actor:
    """The leader, or the shard in a seat. When its process ends, so does the actor, and Ray starts it anew.

    Args:
        leader: the leader's actor; None: this is it.
    """

    def __init__(self, config: RouterConfig, args: Namespace | None, shards: Shards, index: int, leader: Any) -> None:
        host = ray.util.get_node_ip_address()
        directory = Path(tempfile.mkdtemp(prefix="miles-router-ray-"))
        listener = listen(config.host, 0) if leader is None else _listener(config, index)
        self._address = f"[{host}]" if ":" in host else host, int(listener.getsockname()[1])
        place: Shards | Seat = shards
        if leader is not None:
            self._leader, self._named = leader, directory / "leader"
            threading.Thread(target=self._follow_leader, daemon=True).start()
            place = Seat(shards, index, directory, "http://{}:{}".format(*self._address), self._named)
        self._process, self._read = spawn(
            Assignment(config, args, place, os.getpid(), chance_generation(), listener=listener.fileno())
        )
        listener.close()
        self._told, self._ends = b"", False
        threading.Thread(target=self._watch, daemon=True).start()

    def _watch(self) -> None:
        os.set_blocking(self._read, False)
        heard_at = None
        while self._process.poll() is None:
            time.sleep(LOOK)
            try:
                told = os.read(self._read, 4096)
            except BlockingIOError:
                told = b""
            self._told += told.replace(ALIVE, b"")
            if ALIVE in told:
                heard_at = time.monotonic()
            if heard_at is not None and time.monotonic() - heard_at > SILENT:
                self._process.kill()
        if not self._ends and self._told in (b"", READY):
            os._exit(1)

    def _follow_leader(self) -> None:
        told = ""
        while True:
            try:
                address = ray.get(self._leader.address.remote(), timeout=SILENT)
            except ray.exceptions.RayError:  # it is being started again
                address = None
            if address is not None and (now := "{}:{}".format(*address)) != told:
                beside = self._named.with_suffix(".new")
                beside.write_text(now, encoding="ascii")
                os.replace(beside, self._named)
                told = now
            time.sleep(5 * LOOK if told else LOOK)

    def address(self) -> tuple[str, int]:
        """Where it listens."""
        return self._address

    def ready(self) -> bool:
        """Whether it does its part.

        Raises:
            ConfigError: it cannot be started.
        """
        if self._told not in (b"", READY):
            raise ConfigError(self._told.decode(errors="replace"))
        return self._told == READY

    def node(self) -> str:
        """Ray's id of the machine that it is on."""
        found: str = ray.get_runtime_context().get_node_id()
        return found

    def pid(self) -> int:
        """The id of its process."""
        return self._process.pid

    def stop(self) -> None:
        """End it in order; returns when it has ended."""
        self._ends = True
        self._process.terminate()
        self._process.wait()


def _listener(config: RouterConfig, index: int) -> socket.socket:
    """Return where a shard listens: at the same port whenever it is started, unless another has that on this machine
    since a machine was lost."""
    port = config.port + index % config.processes if config.port else 0
    try:
        return listen(config.host, port)
    except ConfigError as error:
        logger.warning("port_taken", extra={"fields": {"port": port, "reason": str(error)}})
        return listen(config.host, 0)


class RayRouter:
    """A router that runs on a Ray cluster. `urls` are those of its shards, any of which may be asked."""

    def __init__(self, leader: Any, shards: list[Any], group: Any, ending: float) -> None:
        self.leader = leader
        self.shards = shards
        self.urls: list[str] = []
        self._group = group
        self._ending = ending

    def find_urls(self) -> list[str]:
        """Return where the shards are now; one that was started again may be elsewhere.

        Raises:
            ConfigError: a setting that cannot be used.
            TimeoutError: some are not there.
        """
        ends = time.monotonic() + PATIENCE
        while not (urls := self._urls()):
            if time.monotonic() > ends:
                raise TimeoutError(f"not all shards take requests after {PATIENCE:g} s")
            time.sleep(LOOK)
        return urls

    def _urls(self) -> list[str]:
        try:
            if not all(ray.get([each.ready.remote() for each in (self.leader, *self.shards)])):
                return []
            return ["http://{}:{}".format(*each) for each in ray.get([each.address.remote() for each in self.shards])]
        except ray.exceptions.RayTaskError as error:
            if isinstance(error.cause, ConfigError):
                raise ConfigError(str(error.cause)) from None
            raise
        except ray.exceptions.RayActorError:  # it is being started again
            return []

    def stop(self) -> None:
        """End it: the shards in order, then the leader."""
        for actors in (self.shards, [self.leader]):
            ends = [each.stop.remote() for each in actors]
            ray.wait(ends, num_returns=len(ends), timeout=self._ending)
        self.kill()

    def kill(self) -> None:
        """End it at once."""
        for each in (*self.shards, self.leader):
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
        config: `state_dir` is a directory that all of them share; `processes` shards run on each.
        args: a framework's own arguments, as of `create_app`.
        name: of the leader's actor, in this program's namespace.
        lease: seconds after which a shard that is lost has a successor, and refuses turns.

    Raises:
        ConfigError: a setting that cannot be used on several machines.
        TimeoutError: the cluster has not so many machines.
    """
    _check(config, nodes)
    count = nodes * config.processes
    shards = Shards(count, lease, secrets.token_hex(32), shared_state=True)
    group = placement_group([{"CPU": CORE * config.processes}] * nodes, strategy="SPREAD")
    if len([each for each in ray.nodes() if each["Alive"]]) < nodes or not group.wait(PATIENCE):
        remove_placement_group(group)
        raise TimeoutError(f"the Ray cluster has no {nodes} machines with room for a router")
    options: dict[str, Any] = {"max_restarts": -1, "max_task_retries": 0}
    actor = ray.remote(Actor)
    leader = actor.options(name=name, num_cpus=0, **options).remote(config, args, shards, 0, None)
    actors = []
    for index in range(count):
        place = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=index // config.processes)
        made = actor.options(num_cpus=CORE, scheduling_strategy=place, **options)
        actors.append(made.remote(config, args, shards, index, leader))
    router = RayRouter(leader, actors, group, ending=config.shutdown_timeout + SPARE)
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
    if config.state_sync != "machine":
        raise ConfigError("state_sync: several machines need machine: what one has written, another must find")
    if nodes > 1 and config.host in LOCAL:
        raise ConfigError(f"host: other machines cannot reach {config.host}; 0.0.0.0 serves them")


def run(config: RouterConfig, address: str, nodes: int) -> None:
    """Run a router on the machines of a cluster until SIGTERM or SIGINT: the command `miles-router ray`.

    Raises:
        ConfigError: a setting that cannot be used, no cluster at `address`, or not so many machines.
    """
    log.configure(config.log_level, config.log_format)
    try:
        ray.init(address=address, namespace=NAMESPACE, log_to_driver=False, configure_logging=False)
    except ConnectionError as error:
        raise ConfigError(f"ray: no cluster at {address}: {error}") from None
    signal.signal(signal.SIGTERM, _stop)
    try:
        try:
            router = start(config, nodes=nodes)
        except (TimeoutError, ValueError) as error:
            raise ConfigError(f"ray: {error}") from None
        log.show("\n".join([f"miles-router {__version__}", *(f"  listening    {url}" for url in router.urls)]))
        try:
            while True:  # Ray has threads, which may be given the signal: a wait of this one would not end by it
                time.sleep(LOOK)
        except (KeyboardInterrupt, SystemExit):
            router.stop()
    finally:
        ray.shutdown()
        log.flush()


def _stop(number: int, frame: FrameType | None) -> None:
    sys.exit(0)
