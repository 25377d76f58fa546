"""Runs the app under uvicorn: the listening socket, the banner, signals."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import resource
import signal
import socket
from collections.abc import Callable, Iterator
from typing import cast

import uvicorn

from miles_router import log
from miles_router.asgi.keys import Keys
from miles_router.edge import RouterApp
from miles_router.errors import ConfigError
from miles_router.fleet.worker_url import parse_worker_url
from miles_router.serving.client_connection import UNSENT
from miles_router.serving.clients import ClientConnections
from miles_router.settings.config import RouterConfig
from miles_router.settings.keys import admin_keys, data_keys
from miles_router.slots import CONTROL
from miles_router.version import __version__

logger = logging.getLogger(__name__)

BACKLOG = 4096
#: The event loop takes one connection from a listening socket in each step, and a busy step takes tens of milliseconds:
#: of hundreds that connect at once, some would wait for seconds. So it listens on the same socket this many times, all
#: processes together: each looks in vain for most connections, which takes as long as a quarter of a short request.
ACCEPTS_PER_STEP = 16
GC_THRESHOLDS = (10_000, 10, 10)
#: Seconds an idle client connection is kept: longer than clients' own pools keep theirs, so that they close first.
KEEP_ALIVE = 75
#: Connections of clients at once, where the system has descriptors for that many.
MAX_CLIENTS = 65_536
#: Descriptors that are neither a client's nor for its request: the listening sockets, checks of workers, files.
OTHER_FILES = 128


class Server(uvicorn.Server):
    """uvicorn's server, which exits 0 after SIGTERM: a stop that was asked for is no failure."""

    def __init__(self, config: uvicorn.Config, started: Callable[[], None] | None = None) -> None:
        super().__init__(config)
        self._on_start = started

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """As uvicorn's; and it is said."""
        await super().startup(sockets)
        if self.started and self._on_start is not None:
            self._on_start()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        loop = asyncio.get_running_loop()
        signals = (signal.SIGTERM, signal.SIGINT)
        for each in signals:
            loop.add_signal_handler(each, self._stop)
        try:
            yield
        finally:
            for each in signals:
                loop.remove_signal_handler(each)

    def _stop(self) -> None:
        self.force_exit = self.should_exit  # the second signal does not wait
        self.should_exit = True


def serve(app: RouterApp) -> None:
    """Listen and serve until SIGTERM or SIGINT; requests in flight get `shutdown_timeout` seconds to finish.

    Raises:
        ConfigError: the address cannot be listened on, or what outlives the process not be opened.
    """
    config, store = app.router.config, app.router.store
    if store is not None and CONTROL in store.slots:
        store.check()
    raise_file_limit()
    sock = listen(config.host, config.port)
    log.show(banner(config, sock.getsockname()))
    serve_at(app, sock)


def serve_at(
    app: RouterApp,
    sock: socket.socket,
    started: Callable[[], None] | None = None,
    *,
    own: socket.socket | None = None,
) -> None:
    """Serve on a listening socket, which is closed in the end, until SIGTERM or SIGINT.

    Args:
        started: called as soon as it takes connections.
        own: a socket on which this process alone listens.
    """
    collect_garbage_less()
    server = Server(uvicorn_config(app), started)
    at_once = max(1, ACCEPTS_PER_STEP // app.router.config.processes)
    sockets = [sock, *(sock.dup() for _ in range(at_once - 1))]
    if own is not None:
        sockets.append(own)
    server.run(sockets=sockets)


def uvicorn_config(app: RouterApp) -> uvicorn.Config:
    """How uvicorn hosts our own protocol: its event loop, its lifespan, a bounded SIGTERM."""
    connections = ClientConnections(
        app,
        app.clients,
        limit=connection_limit(),
        idle_seconds=KEEP_ALIVE,
        head_seconds=app.router.config.head_timeout,
    )
    return uvicorn.Config(
        app,
        http=cast(type[asyncio.Protocol], connections),
        ws="none",
        loop="uvloop",
        lifespan="on",
        log_config=None,
        access_log=False,
        proxy_headers=False,
        backlog=BACKLOG,
        timeout_graceful_shutdown=max(1, round(app.router.config.shutdown_timeout)),
    )


def listen(host: str, port: int, *, shared: bool = False) -> socket.socket:
    """A bound socket; port 0 takes a free one. An IPv6 address may stand in brackets, as in a URL. A `shared` port
    takes further sockets of this user, among which the system spreads connections.

    Raises:
        ConfigError: the name does not resolve, or the port is taken.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host.strip("[]"), port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        sock = socket.socket(family, kind, protocol)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, int(shared))
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, UNSENT)  # of each connection that it takes
        sock.bind(address)
        sock.listen(BACKLOG)  # before anybody is told where: whoever reads the banner may come at once
    except OSError as error:
        raise ConfigError(f"host, port: cannot listen on {host}:{port}: {error.strerror or error}") from None
    sock.setblocking(False)
    return sock


def collect_garbage_less() -> None:
    """What was imported lives for ever and a request makes few cycles: looking through all of it every 700 objects, as
    CPython does, costs a tenth of a short request."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(*GC_THRESHOLDS)


def raise_file_limit() -> None:
    """Two descriptors for each request in flight: take as many as the system lets us."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def connection_limit() -> int:
    """How many clients may be connected, so that each can have a connection to a worker beside its own."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    files = MAX_CLIENTS if soft == resource.RLIM_INFINITY else (soft - OTHER_FILES) // 2
    return max(1, min(files, MAX_CLIENTS))


def banner(config: RouterConfig, address: tuple[str, int]) -> str:
    """What a person wants to see at the start: where, which layers in which order, which workers."""
    host = f"[{address[0]}]" if ":" in address[0] else address[0]
    workers = dict.fromkeys(parse_worker_url(url).url for url in config.worker_urls)
    layers = [f"{i}. {spec.path}" for i, spec in enumerate(config.chain, 1)]
    rows = [
        ("listening", f"http://{host}:{address[1]}"),
        ("middlewares", f"{' -> '.join([*layers, 'worker'])}  (first = outermost)" if layers else "none"),
        ("workers", ", ".join(workers) or "none yet: POST /add_worker?url=..."),
        ("health", _health_line(config)),
        ("keys", _keys_line(Keys(data_keys(config), admin_keys(config)))),
    ]
    if config.processes > 1:
        rows.insert(1, ("processes", f"{config.processes}, and one that decides"))
    return "\n".join([f"miles-router {__version__}", *(f"  {name:<12} {text}" for name, text in rows)])


def _health_line(config: RouterConfig) -> str:
    threshold = config.health_check_failure_threshold
    return f"every {config.health_check_interval:g} s, quarantine after {threshold} failures, readmit {config.readmit}"


def _keys_line(keys: Keys) -> str:
    data, admin = ("required" if key.required else "open" for key in (keys.data, keys.admin))
    return f"clients: {data}, administration: {admin}"
