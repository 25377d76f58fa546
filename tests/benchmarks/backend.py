"""The fast workers that every peer stands in front of: nginx with fixed replies, and the SSE backend.

Each reply has a port of its own, so that all peers are asked the same `POST /generate` and none needs to know which
reply is wanted. Health and information paths answer a small JSON, so that routers accept it as a worker.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from tests.benchmarks.process import HOST, free_port, started

STATUS_PATHS = (
    "/health", "/health_generate", "/ready", "/readiness", "/liveness", "/model_info", "/get_model_info",
    "/server_info", "/get_server_info", "/v1/models", "/get_load", "/v1/loads",
)  # fmt: skip
STATUS = (
    '{"status": "ok", "model_path": "benchmark", "model_id": "benchmark", "tokenizer_path": "benchmark", '
    '"served_model_name": "benchmark", "is_generation": true, "weight_version": "default", "data": []}'
)


def reply(size: int) -> bytes:
    """A `/generate` answer of exactly `size` bytes whose bulk is what it is in a rollout: text or expert ids."""
    meta: dict[str, object] = {"id": "0", "finish_reason": {"type": "stop"}, "completion_tokens": 8}
    document = {"text": "", "output_ids": [1, 2, 3], "meta_info": meta}
    if size > 1_000_000:
        meta["routed_experts"] = ""
    padding = "A" * (size - len(json.dumps(document)))
    if size > 1_000_000:
        meta["routed_experts"] = padding
    else:
        document["text"] = padding
    return json.dumps(document).encode()


REPLIES = {"small": reply(133), "medium": reply(25_000), "large": reply(16 * 1024 * 1024)}

NGINX_HEAD = """
{user}
worker_processes 1;
worker_rlimit_nofile 8192;
daemon off;
pid {root}/nginx.pid;
error_log stderr warn;
events {{ worker_connections 4096; }}
http {{
    access_log off;
    default_type application/json;
    client_body_buffer_size 64k;
    client_max_body_size 64m;
    keepalive_requests 1000000000;
    tcp_nodelay on;
    client_body_temp_path {root}/body;
    proxy_temp_path {root}/proxy;
    fastcgi_temp_path {root}/fastcgi;
    uwsgi_temp_path {root}/uwsgi;
    scgi_temp_path {root}/scgi;
"""


def nginx_head(root: Path) -> str:
    # Started by root, nginx would serve as `nobody`, which may not read a private temporary folder.
    return NGINX_HEAD.format(root=root, user="user root;" if os.geteuid() == 0 else "")


def _server(port: int, kind: str, root: Path) -> str:
    status = "\n".join(f"        location = {path} {{ return 200 '{STATUS}'; }}" for path in STATUS_PATHS)
    if kind == "small":
        generate = f"return 200 '{REPLIES[kind].decode()}';"
    else:  # nginx answers POST to a file with 405; an error page turns the method into GET and the status into 200
        generate = f"error_page 405 =200 /{kind}.json; return 405;"
    return f"""
    server {{
        listen {HOST}:{port} backlog=4096;
        root {root};
        sendfile on;
        open_file_cache max=10;
{status}
        location = /generate {{ {generate} }}
    }}
"""


def _nginx_config(ports: dict[str, int], root: Path) -> Path:
    for kind in ports:
        (root / f"{kind}.json").write_bytes(REPLIES[kind])
    path = root / "backend.conf"
    path.write_text(nginx_head(root) + "".join(_server(port, kind, root) for kind, port in ports.items()) + "}\n")
    return path


@contextlib.contextmanager
def answering(root: Path, answers: Mapping[str, bytes]) -> Iterator[int]:
    """nginx that answers these paths, whatever it is asked; its port."""
    port = free_port()
    locations = [f"location = {path} {{ return 200 '{STATUS}'; }}" for path in STATUS_PATHS]
    for number, (path, body) in enumerate(answers.items()):
        (root / f"{number}.json").write_bytes(body)
        locations.append(f"location = {path} {{ error_page 405 =200 /{number}.json; return 405; }}")
    server = f"server {{ listen {HOST}:{port} backlog=4096; root {root}; sendfile on; open_file_cache max=10;\n"
    (root / "worker.conf").write_text("\n".join([nginx_head(root), server, *locations, "}}"]))
    command = ["nginx", "-p", str(root), "-c", str(root / "worker.conf")]
    with started(command, port, "/health", root / "worker.log"):
        yield port


@dataclass(frozen=True)
class Backend:
    """Where the workers listen: one port for each reply, `sse` among them."""

    ports: dict[str, int]


@contextlib.contextmanager
def running_backend(root: Path) -> Iterator[Backend]:
    ports = {kind: free_port() for kind in REPLIES}
    sse_port = free_port()
    root.mkdir()
    nginx = ["nginx", "-p", str(root), "-c", str(_nginx_config(ports, root))]
    sse = [sys.executable, str(Path(__file__).with_name("sse_backend.py")), "--port", str(sse_port)]
    with (
        started(nginx, ports["small"], "/health", root / "nginx.log"),
        started(sse, sse_port, "/health", root / "sse.log"),
    ):
        yield Backend({**ports, "sse": sse_port})
