"""`miles-router reach`: what it finds on the way to a router, directly and behind a real proxy with usual settings."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from miles_router.reach.route import MOST
from tests.e2e.test_tls_in_front import in_front, needs_nginx
from tests.support.http import ask, request
from tests.support.ports import free_ports
from tests.support.running_router import running_router
from tests.support.scripted_worker import reply, script
from tests.support.session_apis import case
from tests.support.stage import Stage
from tests.support.waiting import STEP, until

CLIENTS, ADMIN = "a-key-of-the-clients", "a-key-of-administration"
#: What nginx does unless told otherwise, with a time limit that a test can wait for.
USUAL = """\
pid {folder}/pid; daemon off; error_log {folder}/log;
events {{}}
http {{
  access_log off;
  client_body_temp_path {folder}/a; proxy_temp_path {folder}/b; fastcgi_temp_path {folder}/c;
  uwsgi_temp_path {folder}/d; scgi_temp_path {folder}/e;
  server {{
    listen 127.0.0.1:{port};
    location / {{ proxy_pass http://{router}; proxy_read_timeout {limit}; }}
  }}
}}
"""


async def found(
    url: str, *options: str, key: str | None = CLIENTS, **variables: str
) -> tuple[int, Mapping[str, tuple[str, str]]]:
    """The exit status of the command, and its findings by subject."""
    code = f"import sys; from miles_router.cli import main; main(['reach', {url!r}, *{options!r}])"
    environment = {**os.environ, **variables, **({} if key is None else {"MILES_ROUTER_API_KEY": key})}
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", code, stdout=asyncio.subprocess.PIPE, env=environment
    )
    shown, _ = await process.communicate()
    lines = [line.split(None, 2) for line in shown.decode().splitlines()]
    assert process.returncode is not None
    return process.returncode, {about: (level, text) for level, about, text in lines}


async def test_a_router_with_keys_has_all_that_an_agent_needs() -> None:
    async with running_router(api_key=CLIENTS, admin_api_key=ADMIN) as router:
        status, findings = await found(router.url, "--idle", "0.5", "--body", "2")
        assert {about: level for about, (level, _) in findings.items()} == dict.fromkeys(
            ("connection", "TLS", "keys", "stream", "base_url", "body", "silence"), "ok"
        )
        assert status == 0
        status, findings = await found(router.url, "--idle", "0.5", key="another")
        assert (status, findings["stream"][0]) == (1, "FAIL")
        for subject in ("stream", "silence"):
            assert "401" in findings[subject][1]
            assert "proxy" not in findings[subject][1], "a refusal is no fault of a proxy"


@pytest.mark.alone("its port is chosen before it starts")
async def test_an_address_has_many_spellings() -> None:
    (port,) = free_ports(1)
    async with running_router(port=port, public_url=f"http://LocalHost:{port}/") as router:
        _, findings = await found(router.url.replace("127.0.0.1", "LOCALHOST"), "--idle", "0.5", "--body", "0.1")
        assert findings["base_url"][0] == "ok"


async def test_an_address_of_a_trained_model_is_that_of_its_sessions() -> None:
    for public, level in ((None, "ok"), ("https://rollouts.example.com", "FAIL")):
        settings = {"model_id": "solver", "trained_models": ("coder=/c",), "public_url": public}
        async with running_router(**settings) as router:
            _, findings = await found(f"{router.url}/models/coder", "--idle", "0.5", "--body", "0.1")
        assert findings["base_url"][0] == level
    assert f"set --public-url {router.url} (" in findings["base_url"][1]


async def test_what_answers_without_a_key_and_a_wrong_address_are_named() -> None:
    async with running_router(public_url="https://rollouts.example.com", max_request_bytes=10_000) as router:
        status, findings = await found(router.url, "--idle", "0.5", "--body", "1", key=None)
        assert status == 1
        assert findings["keys"][0] == "warn"
        assert "/router/info" in findings["keys"][1]
        assert "https://rollouts.example.com" in findings["base_url"][1]
        assert findings["body"][0] == "FAIL"
        assert "--max-request-bytes" in findings["body"][1]
    status, findings = await found(router.url)
    assert (status, findings["connection"][0]) == (1, "FAIL")


HEALTH = reply(b'{"status": "ok", "workers_total": 0}')
#: Servers that are not the router, or answer only as if they were: the subjects that fail.
LIARS: list[tuple[bytes, bytes, set[str]]] = [
    (reply(b""), reply(b""), {"connection"}),
    (reply(b"<html>\x1b[31mWelcome"), reply(b""), {"connection"}),
    (HEALTH, reply(b"<html>Welcome"), {"stream", "base_url", "body", "silence"}),
    (HEALTH, reply(b'data: {"received":1,"base_url":"x"}\n\ndata: [DONE]\n\n'), {"stream", "base_url", "body"}),
    (HEALTH, reply(b"x" * 2_000_000), {"keys", "stream", "base_url", "body", "silence"}),
]


async def test_a_server_that_lies_is_found_out_and_breaks_nothing(stage: Stage) -> None:
    worker = await stage.worker()
    for health, other, failures in LIARS:
        with case(other[:80]):
            worker.health = script(health)
            worker.always(script(other))
            status, findings = await found(worker.url, "--idle", "0", "--body", "0.1")
            assert status == 1
            assert {about for about, (level, _) in findings.items() if level == "FAIL"} == failures
            assert not any("\x1b" in text for _, text in findings.values())


async def test_what_cannot_be_tried_is_one_line(stage: Stage) -> None:
    for options in (("--body", "inf"), ("--body", "-1"), ("--idle", "nan"), ("--key-file", "/nowhere")):
        with case(options):
            assert await found("http://127.0.0.1:1", *options) == (2, {})
    assert await found("http://127.0.0.1:1", key="two words") == (2, {})


@needs_nginx
async def test_behind_a_proxy_with_usual_settings_each_hindrance_is_named(tmp_path: Path) -> None:
    (port,) = free_ports(1)
    async with running_router(api_key=CLIENTS, admin_api_key=ADMIN) as router:
        place = {"folder": tmp_path, "port": port, "router": router.url.removeprefix("http://"), "limit": "3s"}
        (tmp_path / "nginx.conf").write_text(USUAL.format(**place))
        nginx = await asyncio.create_subprocess_exec(
            "nginx", "-p", str(tmp_path), "-c", str(tmp_path / "nginx.conf"), "-e", str(tmp_path / "log")
        )
        try:
            await until(lambda: (tmp_path / "pid").exists() and (tmp_path / "pid").read_text(), "nginx listens")
            status, findings = await found(f"http://127.0.0.1:{port}", "--idle", "5", "--body", "2")
        finally:
            nginx.terminate()
            await nginx.wait()
        assert status == 1
        failures = {about for about, (level, _) in findings.items() if level == "FAIL"}
        assert failures == {"stream", "base_url", "body", "silence"}
        assert "proxy_buffering" in findings["stream"][1]
        assert "--public-url" in findings["base_url"][1]
        assert "client_max_body_size" in findings["body"][1]
        assert "504" in findings["silence"][1]


@needs_nginx
async def test_behind_tls_by_the_example_nothing_hinders(tmp_path: Path) -> None:
    (port,) = free_ports(1)
    url = f"https://localhost:{port}"
    async with (
        running_router(api_key=CLIENTS, admin_api_key=ADMIN, public_url=url) as router,
        in_front(router, tmp_path, port),
    ):
        trusted = str(tmp_path / "fullchain.pem")
        status, findings = await found(url, "--idle", "1", "--body", "16", SSL_CERT_FILE=trusted)
        assert (status, {level for level, _ in findings.values()}) == (0, {"ok"}), findings
        status, findings = await found(url)
        assert (status, findings["connection"][0]) == (1, "FAIL")
        assert "certificate" in findings["connection"][1]


async def test_only_so_many_wait_at_once_and_who_leaves_makes_room(stage: Stage) -> None:
    router = await stage.router()
    waiting = [await stage.client(router) for _ in range(MOST)]
    for client in waiting:
        await client.send(request("POST", "/reach?delay=600", body=b""))
    await until(lambda: len(router.connections) == MOST, "they are connected")

    async def status() -> int:
        return (await ask(router.url, "POST", "/reach", body=b"12345")).status

    while await status() != 503:  # noqa: ASYNC110  # the router is asked
        await asyncio.sleep(STEP)
    waiting.pop().abort()
    while await status() != 200:  # noqa: ASYNC110
        await asyncio.sleep(STEP)
    for wrong in ("delay=601", "seconds=-1", "every=nan", "delay=long", "delay="):
        assert (await ask(router.url, "POST", f"/reach?{wrong}", body=b"")).status == 400
    for client in waiting:
        client.abort()
