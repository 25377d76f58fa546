"""TLS in front of the router: `configs/nginx-tls.conf`, held against what the router relies on, and run."""

from __future__ import annotations

import asyncio
import contextlib
import re
import shutil
import socket
import ssl
import subprocess
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import pytest
import yarl

from miles_router.settings.config import MiddlewareSpec, load
from tests.support import tiers
from tests.support.cache_trial import checkpoint
from tests.support.ports import free_ports
from tests.support.running_router import RunningRouter
from tests.support.scripted_worker import LAST_CHUNK, chunk, chunked_head, script
from tests.support.session_trial import SESSIONS
from tests.support.stage import Stage
from tests.support.waiting import until

CONFIGS = Path(__file__).resolve().parents[2] / "configs"
CONFIG = (CONFIGS / "nginx-tls.conf").read_text(encoding="utf-8")
NAME = "rollouts.example.com"
KINDS_OF_FILES = ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")


def directives() -> dict[str, str]:
    """Every directive that is no block; each stands once."""
    code = "\n".join(line.partition("#")[0] for line in CONFIG.splitlines())
    found = re.findall(r"([a-z_]+)\s+([^;{}]+);", code)
    names = [name for name, _ in found if name != "proxy_set_header"]
    assert len(names) == len(set(names))
    return {name if name != "proxy_set_header" else value.split()[0]: value for name, value in found}


def test_the_example_passes_on_what_the_router_relies_on() -> None:
    given = directives()
    production = load({}, {}, (), str(CONFIGS / "production.yaml")).config
    assert given["server"] == f"127.0.0.1:{production.port}"
    assert given["proxy_pass"] == "http://router", "with a path behind it nginx would decode and merge the client's"
    assert "merge_slashes" not in given
    assert "rewrite" not in given
    assert (given["Host"], given["Connection"]) == ("Host $http_host", 'Connection ""')
    assert (given["proxy_buffering"], given["proxy_request_buffering"]) == ("off", "off")
    assert (given["proxy_http_version"], given["proxy_next_upstream"]) == ("1.1", "off")
    assert given["client_max_body_size"] == "0"
    assert given["listen"].endswith("ssl")
    assert "TLSv1.1" not in given["ssl_protocols"].split()


needs_nginx = pytest.mark.skipif(
    shutil.which("nginx") is None and not tiers.size(heavy=True, otherwise=False), reason="nginx is not installed"
)


@contextlib.asynccontextmanager
async def in_front(
    router: RunningRouter, folder: Path, port: int | None = None
) -> AsyncIterator[tuple[aiohttp.ClientSession, str]]:
    """nginx by the example before this router, and a client that trusts its certificate and finds it by its name."""
    (port,) = (port,) if port else free_ports(1)
    certificate, key = folder / "fullchain.pem", folder / "privkey.pem"
    made = f"req -x509 -newkey rsa:2048 -nodes -days 1 -subj /CN={NAME} -addext subjectAltName=DNS:{NAME},DNS:localhost"
    command = ["openssl", *made.split(), "-keyout", str(key), "-out", str(certificate)]
    await asyncio.to_thread(subprocess.run, command, check=True, capture_output=True)
    paths = "".join(f"    {kind}_temp_path {folder}/{kind};\n" for kind in KINDS_OF_FILES)
    text = CONFIG.replace("http {\n", f"http {{\n{paths}").replace("listen 443", f"listen 127.0.0.1:{port}")
    text = text.replace("/etc/ssl/rollouts", str(folder)).replace("127.0.0.1:31000", router.url.removeprefix("http://"))
    (folder / "nginx.conf").write_text(f"pid {folder}/pid;\ndaemon off;\nerror_log {folder}/log;\n{text}")
    nginx = ["nginx", "-p", str(folder), "-c", str(folder / "nginx.conf"), "-e", str(folder / "log")]
    checked = await asyncio.to_thread(subprocess.run, [*nginx, "-t"], capture_output=True, text=True)
    assert checked.returncode == 0, checked.stderr
    process = await asyncio.create_subprocess_exec(*nginx)
    try:
        await until(lambda: _listens(port) or process.returncode is not None, "nginx serves")
        trust = ssl.create_default_context(cafile=str(certificate))
        connector = aiohttp.TCPConnector(ssl=trust, resolver=_Here())
        async with aiohttp.ClientSession(connector=connector) as client:
            yield client, f"https://{NAME}:{port}"
    finally:
        process.terminate()
        await process.wait()


def _listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


class _Here(aiohttp.abc.AbstractResolver):
    """Every name is this machine's."""

    async def resolve(self, host: str, port: int = 0, family: int = 0) -> list[aiohttp.abc.ResolveResult]:
        return [{"hostname": host, "host": "127.0.0.1", "port": port, "family": 2, "proto": 0, "flags": 0}]

    async def close(self) -> None:
        pass


@needs_nginx
async def test_paths_bodies_and_streams_pass_nginx_as_they_are(stage: Stage, tmp_path: Path) -> None:
    worker, router = await stage.worker_and_router(api_key="data", admin_api_key="admin", max_request_bytes=1 << 19)
    seen = asyncio.Event()
    stream = script(chunked_head(), chunk(b"data: 1\n\n"), seen, chunk(b"data: 2\n\n"), LAST_CHUNK)
    async with in_front(router, tmp_path) as (client, url):
        client.headers["Authorization"] = "Bearer data"
        for target in ("/%67enerate", "/v1/models/org%2Fname", "/generate?a=%2F%2f"):
            async with client.post(yarl.URL(url + target, encoded=True), data=b"x" * 100_000) as answer:
                assert answer.status == 200
            assert (worker.requests[-1].target, len(worker.requests[-1].body)) == (target.encode(), 100_000)
        for target in ("/generate%0a", "//generate", "/x/%2e%2e/generate", "/x%2fgenerate"):
            async with client.post(yarl.URL(url + target, encoded=True)) as answer:
                assert answer.status == 400, target
        async with client.post(f"{url}/generate", data=b"x" * (1 << 19) + b"x") as answer:
            assert (answer.status, (await answer.json())["error"]["type"]) == (413, "invalid_request")
        async with client.post(f"{url}/flush_cache") as answer:
            assert answer.status == 401
        worker.always(stream)
        async with client.post(f"{url}/generate", data=b"{}") as answer:
            assert await answer.content.readline() == b"data: 1\n"
            seen.set()
            assert await answer.content.read() == b"\ndata: 2\n\n"


@needs_nginx
@pytest.mark.parametrize("public", [f"https://{NAME}:7", None])
async def test_a_session_made_behind_tls_is_at_its_public_address(
    stage: Stage, tmp_path: Path, public: str | None
) -> None:
    router = await stage.router(
        await stage.worker(), public_url=public, middlewares=(MiddlewareSpec(SESSIONS),), hf_checkpoint=checkpoint()
    )
    async with in_front(router, tmp_path) as (client, url):
        async with client.post(f"{url}/sessions", headers={"Origin": f"https://{NAME}:7"} if public else {}) as answer:
            made = await answer.json()
        expected = public or f"http://{NAME}"  # without one nobody tells the router of TLS
        assert made["base_url"].startswith(expected)
