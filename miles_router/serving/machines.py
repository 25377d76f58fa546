"""The processes of a router on several machines, which a platform starts: `miles-router --leader` and `--join`."""

from __future__ import annotations

import socket
import tempfile
from argparse import Namespace
from pathlib import Path

from miles_router import log
from miles_router.errors import BadRequest, ConfigError
from miles_router.fleet.worker_url import parse_worker_url
from miles_router.serving.process import run_leader, serve_shard
from miles_router.serving.server import banner, listen, raise_file_limit
from miles_router.settings.config import RouterConfig
from miles_router.shards.topology import LEASE, Shard, Shards

#: Minimum length of the secret, in characters.
MIN_SECRET = 16


def serve_part(config: RouterConfig, options: Namespace) -> None:
    """Run the leader or one shard until SIGTERM or SIGINT.

    Args:
        options: `leader`, or `join` (`HOST:PORT`) with `shard` and `url`; and `shards`, `secret_file`, `shared_state`.

    Raises:
        ConfigError: an option or a setting is invalid.
        SystemExit: status 3, if another leader has taken over.
    """
    shards = Shards(_count(options), LEASE, _secret(options), options.shared_state)
    _check(config, options)
    log.configure(config.log_level, config.log_format)
    try:
        raise_file_limit()
        sock = listen(config.host, config.port)
        host, port = sock.getsockname()[:2]
        if options.leader:
            log.show(f"leader of {shards.count} shards, listening {host}:{port}")
            run_leader(config, None, shards, None, sock, None)
            return
        with tempfile.TemporaryDirectory(prefix="miles-router-") as directory:
            url = options.url or f"http://{socket.gethostname()}:{port}"
            shard = Shard(shards, options.shard, Path(directory), url, options.join, shown=not config.public_url)
            serve_shard(config, None, shard, sock, started=lambda: log.show(banner(config, (host, port))))
    finally:
        log.flush()


def _count(options: Namespace) -> int:
    if options.shards is None or options.shards < 1:
        raise ConfigError("shards: missing; set the number of shards, the same for the leader and every shard")
    return int(options.shards)


def _secret(options: Namespace) -> str:
    if options.secret_file is None:
        raise ConfigError("secret-file: missing; name a file with a secret, the same for the leader and every shard")
    try:
        secret = Path(options.secret_file).read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"secret-file: {options.secret_file} cannot be read: {error}") from None
    if len(secret) < MIN_SECRET:
        raise ConfigError(f"secret-file: {options.secret_file} has fewer than {MIN_SECRET} characters")
    return secret


def _check(config: RouterConfig, options: Namespace) -> None:
    if options.leader and options.join:
        raise ConfigError("leader, join: a process is the leader or a shard; use only one of the two options")
    if options.join and options.shard not in range(options.shards):
        raise ConfigError(f"shard: set a number from 0 to {options.shards - 1} that no other shard has")
    if options.join and not options.join.rpartition(":")[2].isdigit():
        raise ConfigError(f"join: must be HOST:PORT of the leader, not {options.join!r}")
    if options.url is not None:
        try:
            parse_worker_url(options.url)
        except BadRequest as error:
            raise ConfigError(f"url: {error}") from None
    if config.processes > 1:
        raise ConfigError("processes: a shard is a single process; start more shards instead")
    if options.shared_state and config.state_dir is None:
        raise ConfigError("shared-state: state_dir is not set")
    if options.shared_state and config.state_sync != "machine":
        raise ConfigError(
            "state_sync: shared-state needs the value machine, so that one machine's writes reach the others"
        )
