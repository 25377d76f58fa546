"""The actors of a router on a Ray cluster, and the functions that start and stop them."""

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
from miles_router.shards.topology import LEASE, Shard, Shards
from miles_router.version import __version__

try:
    import ray
    from ray.util.placement_group import placement_group, remove_placement_group
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy
except ImportError as error:
    raise ImportError("several machines need Ray: pip install 'miles-router[ray]'") from error

logger = logging.getLogger(__name__)

NAMESPACE = "miles-router"
#: Seconds to wait for machines, and seconds that an actor may take to end beyond `shutdown_timeout`.
PATIENCE, STOP_MARGIN = 120.0, 15.0
#: Seconds between two checks of a process, and seconds without a sign of life after which it is killed.
POLL_INTERVAL, SILENT = 0.2, 10.0
#: The part of a core that Ray reserves for an actor. Ray places actors by it, and limits nothing.
CORE = 0.01
LOCAL = ("127.0.0.1", "localhost", "::1", "[::1]")


class Actor:
    """The actor of the leader or of one shard. When its process ends, the actor ends too, and Ray restarts it.

    Args:
        leader: the leader's actor; None: this is the leader.
    """

    def __init__(self, config: RouterConfig, args: Namespace | None, shards: Shards, index: int, leader: Any) -> None:
        host = ray.util.get_node_ip_address()
        directory = Path(tempfile.mkdtemp(prefix="miles-router-ray-"))
        listener = listen(config.host, 0) if leader is None else _listener(config, index)
        self._address = f"[{host}]" if ":" in host else host, int(listener.getsockname()[1])
        place: Shards | Shard = shards
        if leader is not None:
            self._leader, self._leader_file = leader, directory / "leader"
            threading.Thread(target=self._follow_leader, daemon=True).start()
            place = Shard(shards, index, directory, "http://{}:{}".format(*self._address), self._leader_file)
        self._process, self._read = spawn(Assignment(config, args, place, os.getpid(), 1, listener=listener.fileno()))
        listener.close()
        self._status, self._stopping = b"", False
        threading.Thread(target=self._watch, daemon=True).start()

    def _watch(self) -> None:
        os.set_blocking(self._read, False)
        heard_at = None
        while self._process.poll() is None:
            time.sleep(POLL_INTERVAL)
            try:
                text = os.read(self._read, 4096)
            except BlockingIOError:
                text = b""
            self._status += text.replace(ALIVE, b"")
            if ALIVE in text:
                heard_at = time.monotonic()
            if heard_at is not None and time.monotonic() - heard_at > SILENT:
                self._process.kill()
        if not self._stopping and self._status in (b"", READY):
            os._exit(1)

    def _follow_leader(self) -> None:
        written = ""
        while True:
            try:
                address = ray.get(self._leader.address.remote(), timeout=SILENT)
            except ray.exceptions.RayError:  # it is being started again
                address = None
            if address is not None and (now := "{}:{}".format(*address)) != written:
                new_file = self._leader_file.with_suffix(".new")
                new_file.write_text(now, encoding="ascii")
                os.replace(new_file, self._leader_file)
                written = now
            time.sleep(5 * POLL_INTERVAL if written else POLL_INTERVAL)

    def address(self) -> tuple[str, int]:
        """Return the host and port where the process listens."""
        return self._address

    def ready(self) -> bool:
        """Return whether the process serves.

        Raises:
            ConfigError: the process cannot start.
        """
        if self._status not in (b"", READY):
            raise ConfigError(self._status.decode(errors="replace"))
        return self._status == READY

    def node(self) -> str:
        """Return Ray's id of the machine that the actor runs on."""
        found: str = ray.get_runtime_context().get_node_id()
        return found

    def pid(self) -> int:
        return self._process.pid

    def stop(self) -> None:
        """Stop the process gracefully; return when it has ended."""
        self._stopping = True
        self._process.terminate()
        self._process.wait()


def _listener(config: RouterConfig, index: int) -> socket.socket:
    """Return the listening socket of a shard: on the same port at every start. If another process took that port after
    a machine was lost, use a free one."""
    port = config.port + index % config.processes if config.port else 0
    try:
        return listen(config.host, port)
    except ConfigError as error:
        logger.warning("port_taken", extra={"fields": {"port": port, "reason": str(error)}})
        return listen(config.host, 0)


class RayRouter:
    """A router that runs on a Ray cluster. `urls` are the URLs of its shards; a client may use any of them."""

    def __init__(self, leader: Any, shards: list[Any], group: Any, stop_timeout: float) -> None:
        self.leader = leader
        self.shards = shards
        self.urls: list[str] = []
        self._group = group
        self._stop_timeout = stop_timeout

    def find_urls(self) -> list[str]:
        """Wait until all shards serve, and return their URLs. A restarted shard may have another URL than before.

        Raises:
            ConfigError: a setting is invalid.
            TimeoutError: some shards do not serve after `PATIENCE` seconds.
        """
        deadline = time.monotonic() + PATIENCE
        while not (urls := self._urls()):
            if time.monotonic() > deadline:
                raise TimeoutError(f"not all shards serve after {PATIENCE:g} s")
            time.sleep(POLL_INTERVAL)
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
        """Stop the shards gracefully, then the leader."""
        for actors in (self.shards, [self.leader]):
            stops = [each.stop.remote() for each in actors]
            ray.wait(stops, num_returns=len(stops), timeout=self._stop_timeout)
        self.kill()

    def kill(self) -> None:
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
    """Run one router on `nodes` machines of the Ray cluster that this program is connected to, and return it once it
    serves.

    Args:
        config: `state_dir` is a directory that all machines share; `processes` is the number of shards on each
            machine.
        args: a framework's own arguments, as in `create_app`.
        name: of the leader's actor, in this program's namespace.
        lease: seconds after which a lost shard is replaced; the lost shard refuses turns from then on.

    Raises:
        ConfigError: a setting cannot be used on several machines.
        TimeoutError: the cluster has fewer machines.
    """
    _check(config, nodes)
    count = nodes * config.processes
    shards = Shards(count, lease, secrets.token_hex(32), shared_state=True)
    group = placement_group([{"CPU": CORE * config.processes}] * nodes, strategy="SPREAD")
    if len([each for each in ray.nodes() if each["Alive"]]) < nodes or not group.wait(PATIENCE):
        remove_placement_group(group)
        raise TimeoutError(f"the Ray cluster does not have {nodes} machines with free CPU for a router")
    options: dict[str, Any] = {"max_restarts": -1, "max_task_retries": 0}
    actor = ray.remote(Actor)
    leader = actor.options(name=name, num_cpus=0, **options).remote(config, args, shards, 0, None)
    actors = []
    for index in range(count):
        place = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=index // config.processes)
        made = actor.options(num_cpus=CORE, scheduling_strategy=place, **options)
        actors.append(made.remote(config, args, shards, index, leader))
    router = RayRouter(leader, actors, group, stop_timeout=config.shutdown_timeout + STOP_MARGIN)
    try:
        router.urls = router.find_urls()
    except BaseException:
        router.kill()
        raise
    return router


def _check(config: RouterConfig, nodes: int) -> None:
    if nodes < 1:
        raise ConfigError(f"nodes: must be at least 1, got {nodes}")
    if config.state_dir is None:
        raise ConfigError("state_dir: several machines need a directory that all of them share")
    if config.state_sync != "machine":
        raise ConfigError("state_sync: several machines need the value machine: each must read what another wrote")
    if nodes > 1 and config.host in LOCAL:
        raise ConfigError(f"host: other machines cannot reach {config.host}; 0.0.0.0 serves them")


def run(config: RouterConfig, address: str, nodes: int) -> None:
    """Run a router on the machines of a cluster until SIGTERM or SIGINT: the command `miles-router ray`.

    Raises:
        ConfigError: a setting is invalid, there is no cluster at `address`, or it has fewer than `nodes` machines.
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
            while True:  # a signal may arrive in one of Ray's threads, and would not end a blocking wait of this one
                time.sleep(POLL_INTERVAL)
        except (KeyboardInterrupt, SystemExit):
            router.stop()
    finally:
        ray.shutdown()
        log.flush()


def _stop(number: int, frame: FrameType | None) -> None:
    sys.exit(0)
