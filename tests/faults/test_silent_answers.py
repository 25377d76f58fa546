"""Answers that are silent for longer than any timer of the router arrive whole, however the request was framed."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import socket
from collections.abc import AsyncIterator, Callable, Iterable
from pathlib import Path

import pytest

from miles_router.serving import clients as clients_module
from miles_router.serving import server
from tests.support import tiers
from tests.support.http import Client, chunked, request, whole_or_cut
from tests.support.ports import free_ports
from tests.support.running_router import RunningRouter
from tests.support.scripted_worker import LAST_CHUNK, Behaviour, ScriptedWorker, chunk, chunked_head, reply, script
from tests.support.stage import Stage
from tests.support.waiting import until

#: Long enough for a request of three parts on a busy machine, short enough for a test.
HEAD_TIMEOUT = 0.5
BODY = b'{"text": "a"}'
CLOSE = ("Connection", "close")
KEEP = ("Connection", "keep-alive")
CHUNKED = ("Transfer-Encoding", "chunked")
WHOLE = b'{"text": "late"}'

#: Each way to send one request: its parts, each written by itself.
REQUESTS = {
    "length": [request("POST", "/generate", body=BODY)],
    "length, close": [request("POST", "/generate", [CLOSE], BODY)],
    "length, keep-alive and close": [request("POST", "/generate", [("Connection", "keep-alive, close")], BODY)],
    "chunked": [request("POST", "/generate", [CHUNKED]) + chunked(BODY)],
    "chunked, close": [request("POST", "/generate", [CHUNKED, CLOSE]) + chunked(BODY)],
    "chunked in parts, close": [request("POST", "/generate", [CHUNKED, CLOSE]), chunked(BODY)[:-5], b"0\r\n\r\n"],
    "trailers, close": [request("POST", "/generate", [CHUNKED, CLOSE]) + chunked(BODY)[:-2] + b"a: b\r\n\r\n"],
    "expects, close": [request("POST", "/generate", [CLOSE, ("Expect", "100-continue")], BODY)],
    "upgrade offered": [request("POST", "/generate", [("Connection", "Upgrade"), ("Upgrade", "h2c")], BODY)],
    "upgrade offered, close": [
        request("POST", "/generate", [("Connection", "Upgrade, close"), ("Upgrade", "h2c")], BODY)
    ],
    "no body, close": [request("GET", "/v1/models", [CLOSE])],
    "head in parts, close": [b"POST /generate HTTP/1.1\r\nHost: a\r\n", b"Connection: close\r\n\r\n"],
    "empty body, close": [request("POST", "/generate", [CLOSE], b"")],
    "1.0": [request("POST", "/generate", body=BODY, version="1.0")],
    "1.0, keep-alive": [request("POST", "/generate", [KEEP], BODY, version="1.0")],
    "1.0, body in parts": [request("POST", "/generate", body=BODY, version="1.0")[:-3], BODY[-3:]],
    "1.0, no body": [request("GET", "/v1/models", version="1.0")],
    "close, a line end behind it": [request("POST", "/generate", [CLOSE], BODY) + b"\r\n"],
    "close, then a line end": [request("POST", "/generate", [CLOSE], BODY), b"\r\n"],
    "1.0, a line end behind it": [request("POST", "/generate", body=BODY, version="1.0") + b"\r\n"],
    "close, another request behind it": [request("POST", "/generate", [CLOSE], BODY) + request("GET", "/a")],
    "1.0, what is no request behind it": [request("POST", "/generate", body=BODY, version="1.0") + b"\0\0"],
    "no body, close, a line end behind it": [request("GET", "/v1/models", [CLOSE]) + b"\r\n"],
    "a line end before and behind it": [b"\r\n" + request("POST", "/generate", body=BODY) + b"\r\n"],
    "a line end behind it": [request("POST", "/generate", body=BODY), b"\r\n"],
    "half of a line end behind it": [request("POST", "/generate", body=BODY) + b"\r"],
    "chunked, close, a line end behind it": [request("POST", "/generate", [CHUNKED, CLOSE]) + chunked(BODY) + b"\r\n"],
    "close and te": [request("POST", "/generate", [("Connection", "close, te"), ("TE", "trailers")], BODY)],
    "two lines of connection": [request("POST", "/generate", [KEEP, CLOSE], BODY)],
    "close in capitals": [request("POST", "/generate", [("connection", "CLOSE")], BODY)],
    "1.0, proxy-connection": [request("POST", "/generate", [("Proxy-Connection", "close")], BODY, version="1.0")],
    "absolute, close": [request("POST", "http://a/generate", [CLOSE], BODY)],
    "1.0, expects": [request("POST", "/generate", [("Expect", "100-continue")], BODY, version="1.0")],
    "chunks with extensions, close": [
        request("POST", "/generate", [CHUNKED, CLOSE]) + b"%x;a=b\r\n%b\r\n0;c\r\n\r\n" % (len(BODY), BODY)
    ],
}


def whole(gate: asyncio.Event) -> Behaviour:
    return script(gate, reply(WHOLE))


def before_the_head(gate: asyncio.Event) -> Behaviour:
    return script(gate, chunked_head(), chunk(WHOLE), LAST_CHUNK)


def inside_the_stream(gate: asyncio.Event) -> Behaviour:
    return script(chunked_head(), chunk(WHOLE[:3]), gate, chunk(WHOLE[3:]), LAST_CHUNK)


Silence = Callable[[asyncio.Event], Behaviour]
SILENCES = pytest.mark.parametrize("silent", [whole, before_the_head, inside_the_stream])


async def every_timer_has_run_out(stage: Stage, router: RunningRouter, worker: ScriptedWorker, requests: int) -> None:
    """Wait until connections that came later are ended by the timers that those of the requests may be subject to."""
    await until(lambda: worker.busy == requests, "the worker has all requests")
    late = await stage.client(router)
    await late.send(b"POST /generate HTTP/1.1\r\n")
    assert (await late.read()).status == 408
    assert await (await stage.client(router)).closed() == b""


async def sent(stage: Stage, router: RunningRouter, names: Iterable[str]) -> dict[str, Client]:
    """Send each of these requests on a connection of its own."""
    clients = {name: await stage.client(router) for name in names}
    for name, client in clients.items():
        for part in REQUESTS[name]:
            await client.send(part)
    return clients


async def bodies(clients: dict[str, Client]) -> dict[str, bytes]:
    return {name: (await whole_or_cut(client.read("POST"))).body for name, client in clients.items()}


@SILENCES
async def test_a_silent_answer_outlives_the_head_timeout(stage: Stage, silent: Silence) -> None:
    gate = asyncio.Event()
    worker = (await stage.worker()).always(silent(gate))
    router = await stage.router(worker, head_timeout=HEAD_TIMEOUT)
    clients = await sent(stage, router, REQUESTS)
    await every_timer_has_run_out(stage, router, worker, len(clients))
    gate.set()
    assert await bodies(clients) == dict.fromkeys(REQUESTS, WHOLE)


@SILENCES
async def test_a_silent_answer_outlives_the_timers_between_requests(
    stage: Stage, monkeypatch: pytest.MonkeyPatch, silent: Silence
) -> None:
    monkeypatch.setattr(server, "KEEP_ALIVE", 0.05)
    monkeypatch.setattr(clients_module, "LINGER", 0.05)
    gate = asyncio.Event()
    worker, router = await stage.worker_and_router()
    idle = await stage.client(router)
    worker.next(*[silent(gate)] * len(REQUESTS))
    clients = await sent(stage, router, REQUESTS)
    await until(lambda: worker.busy == len(clients), "the worker has all requests")
    assert (await idle.ask("GET", "/x")).status == 200
    assert await idle.closed() == b"", "the idle timer has run out"
    gate.set()
    assert await bodies(clients) == dict.fromkeys(REQUESTS, WHOLE)


@pytest.mark.parametrize("silent", [whole, before_the_head])
async def test_a_half_closed_client_waits_longer_than_every_timer(stage: Stage, silent: Silence) -> None:
    """A client that closes its side before its answer begins waits; HTTP/1.0 has no way to tell it from one that left
    (tests/faults/test_half_closed_clients.py)."""
    gate = asyncio.Event()
    worker = (await stage.worker()).always(silent(gate))
    router = await stage.router(worker, head_timeout=HEAD_TIMEOUT)
    names = [name for name in REQUESTS if not name.startswith("1.0")]
    clients = await sent(stage, router, names)
    for client in clients.values():
        client.half_close()
    await every_timer_has_run_out(stage, router, worker, len(clients))
    gate.set()
    assert await bodies(clients) == dict.fromkeys(names, WHOLE)


async def test_part_of_a_next_request_does_not_cut_the_answer_before_it(stage: Stage) -> None:
    gate = asyncio.Event()
    worker = (await stage.worker()).always(whole(gate))
    router = await stage.router(worker, head_timeout=HEAD_TIMEOUT)
    client = await stage.client(router)
    await client.send(request("POST", "/generate", body=BODY) + b"POST /gen")
    await every_timer_has_run_out(stage, router, worker, 1)
    gate.set()
    assert (await client.read("POST")).body == WHOLE
    late = await client.read("POST")
    assert (late.status, late.error_type) == (408, "invalid_request")


# Clients as people use them


needs_nginx = pytest.mark.skipif(
    shutil.which("nginx") is None and not tiers.size(heavy=True, otherwise=False), reason="nginx is not installed"
)


#: What nginx takes and passes on; it reads requests whole, so their parts do not matter behind it.
THROUGH_NGINX = ("length", "length, close", "chunked", "chunked, close", "expects, close", "1.0", "no body, close")


@contextlib.asynccontextmanager
async def plain_nginx(router: RunningRouter, folder: Path) -> AsyncIterator[str]:
    """Run nginx with a bare `proxy_pass` and nothing else set, which speaks HTTP/1.0 to the router. Give its URL."""
    (port,) = free_ports(1)
    paths = "".join(
        f"{kind}_temp_path {folder}/{kind};" for kind in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
    )
    (folder / "nginx.conf").write_text(
        f"pid {folder}/pid; daemon off; error_log {folder}/log; events {{}}\n"
        f"http {{ access_log off; {paths}\n"
        f"server {{ listen 127.0.0.1:{port}; location / {{ proxy_pass {router.url}; }} }} }}"
    )
    command = ["nginx", "-p", str(folder), "-c", str(folder / "nginx.conf"), "-e", str(folder / "log")]
    process = await asyncio.create_subprocess_exec(*command)

    def listens() -> bool:
        assert process.returncode is None, (folder / "log").read_text()
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", port)) == 0

    try:
        await until(listens, "nginx serves")
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        await process.wait()


@needs_nginx
@SILENCES
async def test_a_silent_answer_passes_an_nginx_with_its_defaults(stage: Stage, tmp_path: Path, silent: Silence) -> None:
    gate = asyncio.Event()
    worker = (await stage.worker()).always(silent(gate))
    router = await stage.router(worker, head_timeout=HEAD_TIMEOUT)
    async with contextlib.AsyncExitStack() as stack:
        url = await stack.enter_async_context(plain_nginx(router, tmp_path))
        clients = {name: await stack.enter_async_context(await Client.connect(url)) for name in THROUGH_NGINX}
        for name, client in clients.items():
            for part in REQUESTS[name]:
                await client.send(part)
        await every_timer_has_run_out(stage, router, worker, len(clients))
        gate.set()
        assert await bodies(clients) == dict.fromkeys(THROUGH_NGINX, WHOLE)


# What the log says

LATE = {
    "head": ([b"POST /generate HTTP/1.1\r\nA: b\r\n"], "head"),
    "head, 1.0": ([b"POST /generate HTTP/1.0\r\nA: b\r\n"], "head"),
    "body": ([request("POST", "/generate", [("Content-Length", "9")])], "body"),
    "body, close": ([request("POST", "/generate", [CLOSE, CHUNKED]) + b"4\r\na"], "body"),
}


@pytest.mark.parametrize(("parts", "what"), LATE.values(), ids=LATE)
async def test_a_request_that_a_timer_cuts_off_is_logged(
    stage: Stage, caplog: pytest.LogCaptureFixture, parts: list[bytes], what: str
) -> None:
    router = await stage.router(await stage.worker(), head_timeout=0.1)
    client = await stage.client(router)
    for part in parts:
        await client.send(part)
    answer = await client.read("POST")
    assert (answer.status, answer.error_type) == (408, "invalid_request")
    (logged,) = [each for each in caplog.records if each.message == "request_timed_out"]
    fields = logged.__dict__["fields"]
    assert fields["request_id"].encode() == answer.value("x-request-id")
    assert fields["reason"] == f"the request's {what} took too long (--head-timeout)"
