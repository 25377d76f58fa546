"""What is compared: how each peer is started in front of one worker."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.benchmarks.backend import nginx_head
from tests.benchmarks.process import HOST, free_port, started

REPO = Path(__file__).resolve().parents[2]
NOOP = "tests.benchmarks.noop.NoOp"
NOOP_LAYERS = 10
#: Names the interpreter of the environment that has the gateways; without it, the one that `make` builds beside ours.
PEERS_PYTHON = "BENCH_PEERS_PYTHON"

NGINX_PROXY = """
    upstream workers {{
        least_conn;
        server {host}:{worker_port};
        keepalive 1024;
        keepalive_requests 1000000000;
    }}
    server {{
        listen {host}:{port} backlog=4096;
        location = /nginx_ready {{ return 200 'ok'; }}
        location / {{
            proxy_pass http://workers;
            proxy_http_version 1.1;
            proxy_set_header Connection "";
            # The fastest of the settings tried: with 64 KB at a time a large reply costs twice the CPU, with the
            # default 4 KB four times. Buffered or not, a chunk goes out at once, so streams are not held back.
            proxy_buffer_size 64k;
            proxy_buffers 32 64k;
            proxy_busy_buffers_size 1m;
            proxy_max_temp_file_size 0;
            proxy_read_timeout 3600s;
        }}
    }}
}}
"""


@dataclass(frozen=True)
class Peer:
    """A proxy, or none (`command` is None): `command(port, worker_port, root)` gives the command line.

    `source` is the checkout whose packages it imports. `package` must be in the environment of `peers_python`.
    """

    name: str
    command: Callable[[int, int, Path], list[str]] | None
    ready_path: str = "/"
    source: Path = REPO
    package: str | None = None


@dataclass(frozen=True)
class Running:
    """A started peer; `pid` is None where nothing stands before the worker."""

    port: int
    pid: int | None


def _nginx(port: int, worker_port: int, root: Path) -> list[str]:
    config = root / "proxy.conf"
    config.write_text(nginx_head(root) + NGINX_PROXY.format(host=HOST, port=port, worker_port=worker_port))
    return ["nginx", "-p", str(root), "-c", str(config)]


def peers_python() -> str:
    beside = Path(f"{Path(sys.prefix).resolve()}-peers/bin/python")
    return os.environ.get(PEERS_PYTHON) or str(beside if beside.exists() else sys.executable)


def peer_version(package: str) -> str | None:
    """Return the version of a package in the environment that the peers run in, or None if it is absent."""
    code = f"from importlib.metadata import version; print(version({package!r}))"
    done = subprocess.run([peers_python(), "-c", code], capture_output=True, text=True, cwd=REPO)
    return done.stdout.strip() or None


def _gateway(*module: str, warnings: str = "warn") -> Callable[[int, int, Path], list[str]]:
    """Return the command of a gateway in Rust. All of them descend from `sglang-router`, so their options are alike.

    Args:
        module: the Python module that launches it, with arguments that precede its options.
        warnings: the value of `--log-level` for warnings and errors alone.
    """

    def command(port: int, worker_port: int, root: Path) -> list[str]:
        return [
            peers_python(), "-m", *module,
            "--host", HOST, "--port", str(port), "--worker-urls", f"http://{HOST}:{worker_port}",
            "--policy", "round_robin", "--log-level", warnings, "--worker-startup-check-interval", "1",
            "--prometheus-host", HOST, "--prometheus-port", str(free_port()),
        ]  # fmt: skip

    return command


def _miles_router(port: int, worker_port: int, root: Path) -> list[str]:
    script = Path(sys.executable).with_name("miles-router")
    worker = f"http://{HOST}:{worker_port}"
    return [str(script), "--port", str(port), "--worker-urls", worker, "--log-level", "warning"]


def _miles_router_noop(port: int, worker_port: int, root: Path) -> list[str]:
    return [*_miles_router(port, worker_port, root), "--middleware-paths", *[NOOP] * NOOP_LAYERS]


#: What `passthrough.py --against DIRECTORY` measures beside this checkout.
BEFORE = "miles-router-before"
PEERS = {
    peer.name: peer
    for peer in (
        Peer("direct", None),
        Peer("nginx", _nginx, "/nginx_ready"),
        *(
            Peer(name, command, "/readiness", package=name)
            for name, command in (
                ("sglang-router", _gateway("sglang_router.launch_router")),
                ("smg", _gateway("smg", "launch")),
                ("vllm-router", _gateway("vllm_router.launch_router", warnings="warning")),
            )
        ),
        Peer("miles-router", _miles_router, "/readiness"),
        Peer("miles-router+10", _miles_router_noop, "/readiness"),
    )
}


def other_checkout(source: Path) -> Peer:
    """The router as it is in another checkout, run with the packages of this environment."""
    return Peer(BEFORE, _miles_router, "/readiness", source.resolve())


@contextlib.contextmanager
def running_router(worker_port: int, log: Path, *arguments: str, **environment: str) -> Iterator[tuple[int, int]]:
    """The router of this checkout in front of a worker: its port and its process id."""
    port = free_port()
    command = [*_miles_router(port, worker_port, log.parent), *arguments]
    env = {**os.environ, "PYTHONPATH": str(REPO), **environment}
    with started(command, port, "/readiness", log, env, REPO) as pid:
        yield port, pid


@contextlib.contextmanager
def running_peer(peer: Peer, worker_port: int, root: Path) -> Iterator[Running]:
    """A fresh process in front of the worker, so that its peak memory is that of one load alone."""
    if peer.command is None:
        yield Running(worker_port, None)
        return
    port = free_port()
    root.mkdir(exist_ok=True)
    env = {**os.environ, "PYTHONPATH": str(peer.source)}
    log = root / f"{peer.name}.log"
    with started(peer.command(port, worker_port, root), port, peer.ready_path, log, env, peer.source) as pid:
        yield Running(port, pid)
