"""Running of the app under uvicorn: the listening socket, the start banner, signals, process limits."""

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
from miles_router.asgi.access import Keys
from miles_router.edge import RouterApp
from miles_router.errors import ConfigError
from miles_router.fleet.worker_url import parse_worker_url
from miles_router.pools.registrations import check_state
from miles_router.serving.client_connection import UNSENT
from miles_router.serving.clients import ClientConnections
from miles_router.settings.config import RouterConfig
from miles_router.settings.keys import admin_keys, data_keys
from miles_router.slots import CONTROL
from miles_router.version import __version__

logger = logging.getLogger(__name__)

BACKLOG = 4096
#: The event loop accepts one connection per listening socket and step, and a busy step takes tens of milliseconds. If
#: hundreds of clients connect at once, some would wait for seconds. So processes listen on duplicates of the socket,
#: this many in total. The price: most accept attempts fail, which costs a quarter of a short request per connection.
ACCEPTS_PER_STEP = 16
GC_THRESHOLDS = (10_000, 10, 10)
#: Seconds an idle client connection is kept: longer than in clients' own pools, so that clients close first.
KEEP_ALIVE = 75
#: Maximum number of client connections, if the system allows that many descriptors.
MAX_CLIENTS = 65_536
#: Descriptors for other purposes than clients and their requests: listening sockets, health checks, files.
OTHER_FILES = 128


class Server(uvicorn.Server):
    """uvicorn's server with exit status 0 after SIGTERM, because a requested stop is no failure."""

    def __init__(self, config: uvicorn.Config, started: Callable[[], None] | None = None) -> None:
        super().__init__(config)
        self._on_start = started

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start like uvicorn, then call `started`."""
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
        self.force_exit = self.should_exit  # the second signal stops without waiting
        self.should_exit = True


def serve(app: RouterApp) -> None:
    """Listen and serve until SIGTERM or SIGINT; requests in flight get `shutdown_timeout` seconds to finish.

    Raises:
        ConfigError: the router cannot listen on the address, or cannot open its state directory.
    """
    config, store = app.router.config, app.router.store
    if store is not None and CONTROL in store.slots:
        check_state(store, config.model_id)
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
    """Serve on a listening socket until SIGTERM or SIGINT, then close it.

    Args:
        started: called when the server accepts connections.
        own: a second listening socket that no other process uses.
    """
    collect_garbage_less()
    keep_freed_memory()
    server = Server(uvicorn_config(app), started)
    at_once = max(1, ACCEPTS_PER_STEP // app.router.config.processes)
    sockets = [sock, *(sock.dup() for _ in range(at_once - 1))]
    if own is not None:
        sockets.append(own)
    server.run(sockets=sockets)


def uvicorn_config(app: RouterApp) -> uvicorn.Config:
    """Return uvicorn's configuration: the router's own HTTP protocol, uvloop, and a time limit for graceful stops."""
    connections = ClientConnections(
        app,
        app.clients,
        limit=connection_limit(),
        idle_seconds=KEEP_ALIVE,
        head_seconds=app.router.config.head_timeout,
    )
    return uvicorn.Config(
        app,
        http=cast("type[asyncio.Protocol]", connections),
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
    """Return a listening socket.

    Args:
        host: a name or an address; an IPv6 address may have brackets, as in a URL.
        port: 0: a free port.
        shared: set SO_REUSEPORT: further sockets of this user may bind the port, and the kernel distributes the
            connections among them.

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
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, UNSENT)  # accepted connections inherit it
        sock.bind(address)
        sock.listen(BACKLOG)  # before the banner is shown, because clients may connect right after it
    except OSError as error:
        raise ConfigError(f"host, port: cannot listen on {host}:{port}: {error.strerror or error}") from None
    sock.setblocking(False)
    return sock


def collect_garbage_less() -> None:
    """Freeze the imported objects and run the cyclic garbage collector less often.

    Imported objects live forever and requests create few cycles. CPython's default, a run every 700 objects, costs a
    tenth of a short request.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(*GC_THRESHOLDS)


def keep_freed_memory() -> None:
    """Let the C library keep up to 32 MB of freed memory for the next burst of replies.

    Above twice the largest block that was ever freed, glibc returns the end of its heap to the kernel (mallopt(3),
    `M_TRIM_THRESHOLD`), and takes it back page by page. With 64 clients and replies of 25 kB that costs 5 % of the CPU.
    """
    bytes(16 * 1024 * 1024)  # zeros, which take no memory before they are touched; freed at once


def raise_file_limit() -> None:
    """Raise the soft limit of open files to the hard limit, because each request in flight needs two descriptors."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def connection_limit() -> int:
    """Return the maximum number of client connections that leaves one descriptor per client for a worker."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    files = MAX_CLIENTS if soft == resource.RLIM_INFINITY else (soft - OTHER_FILES) // 2
    return max(1, min(files, MAX_CLIENTS))


def banner(config: RouterConfig, address: tuple[str, int]) -> str:
    """Return the text shown at the start: the address, the middlewares in their order, the workers, and the keys."""
    host = f"[{address[0]}]" if ":" in address[0] else address[0]
    workers = dict.fromkeys(parse_worker_url(url).url for url in config.worker_urls)
    layers = [f"{i}. {spec.path}" for i, spec in enumerate(config.chain, 1)]
    rows = [
        ("listening", f"http://{host}:{address[1]}"),
        ("middlewares", f"{' -> '.join([*layers, 'worker'])}  (first = outermost)" if layers else "none"),
        ("workers", ", ".join((*workers, *config.discover)) or "none yet: POST /add_worker?url=..."),
        ("health", _health_line(config)),
        ("keys", _keys_line(Keys(data_keys(config), admin_keys(config)))),
    ]
    if config.processes > 1:
        rows.insert(1, ("processes", f"{config.processes}, and a leader"))
    return "\n".join([f"miles-router {__version__}", *(f"  {name:<12} {text}" for name, text in rows)])


def _health_line(config: RouterConfig) -> str:
    threshold = config.health_check_failure_threshold
    return f"every {config.health_check_interval:g} s, quarantine after {threshold} failures, readmit {config.readmit}"


def _keys_line(keys: Keys) -> str:
    data, admin = ("required" if key.required else "open" for key in (keys.data, keys.admin))
    return f"clients: {data}, administration: {admin}"
