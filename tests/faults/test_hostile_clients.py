"""What a client can make the router keep, and for how long: on real connections, with the router's memory measured."""

from __future__ import annotations

import asyncio
import contextlib
import re
import socket
import time
from collections.abc import AsyncIterator
from functools import partial
from urllib.parse import urlsplit

import psutil
import pytest

from miles_router.serving.clients import REFUSALS_LOGGED_EVERY
from miles_router.settings.config import MiddlewareSpec
from tests.support.http import Client, request
from tests.support.running_router import RouterProcess, router_process
from tests.support.scripted_worker import HANG, ScriptedWorker, reply, script
from tests.support.stage import Stage
from tests.support.waiting import PATIENCE, until

MEGABYTE = 2**20
#: What a router may take for any client: buffers of its own, of the parser and of the allocator.
SLACK = 6 * MEGABYTE
CHUNKED = [("Transfer-Encoding", "chunked")]
OPENED = request("POST", "/generate", CHUNKED) + b"5\r\nhello\r\n"
#: What is sent first, then without end; why the router ends it.
WITHOUT_END = {
    "a target": (b"GET /", b"x" * 4096, "head_too_long"),
    "a header": (b"GET / HTTP/1.1\r\nHost: a\r\nX-A: ", b"x" * 4096, "head_too_long"),
    "headers": (b"GET / HTTP/1.1\r\nHost: a\r\n", b"a: b\r\n" * 700, "head_too_long"),
    "a trailer": (OPENED + b"0\r\nX-A: ", b"x" * 4096, "too_much_around_body"),
    "trailers": (OPENED + b"0\r\n", b"a: b\r\n" * 700, "too_much_around_body"),
    "a chunk extension": (OPENED + b"5;", b"x" * 4096, "too_much_around_body"),
    "chunk extensions": (OPENED, (b"1;" + b"x" * 1000 + b"\r\nx\r\n") * 4, "too_much_around_body"),
    "a header, in little pieces": (b"GET / HTTP/1.1\r\nHost: a\r\nX-A: ", b"x" * 8, "head_too_long"),
    "trailers, in little pieces": (OPENED + b"0\r\n", b"a: b\r\n", "too_much_around_body"),
}
HEAD_TIMEOUT = 0.5
HALF_HEAD = b"POST /generate HTTP/1.1\r\nHost: a\r\nX-A: "


@pytest.fixture
async def worker() -> AsyncIterator[ScriptedWorker]:
    async with ScriptedWorker() as made:
        yield made


@pytest.fixture
async def locked(worker: ScriptedWorker) -> AsyncIterator[RouterProcess]:
    """A router to which these clients have no key."""
    async with router_process("--worker-urls", worker.url, "--api-key", "a-key", "--shutdown-timeout", "0") as running:
        yield running


async def ended(router: RouterProcess, reason: str) -> int:
    """How many connections the router says that it ended for `reason`."""
    return await number(router, rf'miles_router_ended_connections_total{{reason="{reason}"}}')


async def number(router: RouterProcess, metric: str) -> int:
    async with await Client.connect(router.url) as client:
        shown = await client.ask("GET", "/metrics", [("Authorization", "Bearer a-key")])
    found = re.search(rf"^{re.escape(metric)} (\S+)$", shown.body.decode(), re.MULTILINE)
    return int(float(found[1])) if found else 0


def sent_before_refused(url: str, start: bytes, more: bytes, most: int) -> int:
    """Send `start`, then `more` until the router closes the connection; the bytes that went out, `most` at most."""
    parts = urlsplit(url)
    with socket.create_connection((parts.hostname, parts.port or 80)) as sock:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sent = 0
        with contextlib.suppress(ConnectionError):
            sock.sendall(start)
            while sent < most:
                sock.sendall(more)
                sent += len(more)
    return sent


async def test_what_never_becomes_a_request_takes_no_memory_and_ends_the_connection(locked: RouterProcess) -> None:
    """Before any key is looked at. A client of which no more is read can still fill the buffers of two systems."""
    before = locked.memory
    for kind, (start, more, reason) in WITHOUT_END.items():
        already = await ended(locked, reason)
        size = 24 * MEGABYTE if len(more) > 100 else MEGABYTE
        await asyncio.to_thread(sent_before_refused, locked.url, start, more, size)
        assert await ended(locked, reason) == already + 1, kind
        assert locked.memory - before < SLACK, kind


async def test_a_body_in_tiny_chunks_that_nobody_reads_takes_little(worker: ScriptedWorker) -> None:
    layer = ("--middleware-paths", "tests.support.plugins.working.Unread", "--shutdown-timeout", "0")
    async with router_process("--worker-urls", worker.url, *layer) as router:
        before = router.memory
        clients = [await Client.connect(router.url) for _ in range(20)]
        tiny = b"2\r\nab\r\n" * 60_000
        sending = [
            asyncio.ensure_future(client.send(request("POST", "/generate", CHUNKED) + tiny)) for client in clients
        ]
        try:
            await asyncio.wait(sending, timeout=0.2)
            await rest(router)
            assert router.memory - before < 2 * SLACK
        finally:
            for each in sending:
                each.cancel()
            for client in clients:
                client.abort()


async def rest(router: RouterProcess) -> None:
    process, before, deadline = psutil.Process(router.process.pid), -1.0, time.monotonic() + PATIENCE
    while (now := sum(process.cpu_times()[:2])) - before > 0.01:
        assert time.monotonic() < deadline, "it spins"
        before = now
        await asyncio.sleep(0.1)


async def test_requests_that_wait_behind_another_take_little(worker: ScriptedWorker) -> None:
    worker.always(script(HANG))
    async with router_process("--worker-urls", worker.url, "--shutdown-timeout", "0") as router:
        before = router.memory
        clients = [await Client.connect(router.url) for _ in range(20)]
        for client in clients:
            await client.send(b"GET /x HTTP/1.1\r\nHost: a\r\n\r\n" * 8_000)
        await until(lambda: worker.busy == 20, "the first of each is answered")
        await rest(router)
        assert router.memory - before < 4 * SLACK
        for client in clients:
            client.abort()


async def test_many_requests_at_once_that_offer_an_upgrade_are_all_answered(stage: Stage) -> None:
    client = await stage.client(await stage.router(await stage.worker()))
    offer = request("GET", "/x", [("Connection", "Upgrade"), ("Upgrade", "h2c")])
    await client.send(offer * 1000)
    for _ in range(1000):
        assert (await client.read()).status == 200


# Time


def half_heads(url: str, how_many: int) -> list[tuple[bytes, bytes]]:
    """Send as many parts of a head, each on a connection of its own: each part, and what was said before the
    connection ended. Those are left out whose bytes this machine sent so late that the connection may have ended."""
    parts = urlsplit(url)
    with contextlib.ExitStack() as stack:
        sent = []
        for number in range(how_many):
            part, began = HALF_HEAD[: number % len(HALF_HEAD)], time.monotonic()
            sock = stack.enter_context(socket.create_connection((parts.hostname, parts.port or 80)))
            with contextlib.suppress(ConnectionError):
                sock.sendall(part)
            sent.append((part, sock, time.monotonic() - began < HEAD_TIMEOUT / 2))
        ends = [(part, b"".join(iter(partial(_received, sock), b"")), in_time) for part, sock, in_time in sent]
        return [(part, said) for part, said, in_time in ends if in_time]


def _received(sock: socket.socket) -> bytes:
    try:
        return sock.recv(4096)
    except ConnectionResetError:
        return b""


async def test_thousands_of_half_heads_vanish(worker: ScriptedWorker) -> None:
    timeout = ("--head-timeout", str(HEAD_TIMEOUT))
    async with router_process("--worker-urls", worker.url, *timeout, "--api-key", "a-key") as router:
        ends = await asyncio.to_thread(half_heads, router.url, 3000)
        assert await number(router, "miles_router_client_connections") == 1
        assert await ended(router, "late_head") == 3000
        assert all(said.startswith(b"HTTP/1.1 408 ") for part, said in ends if part)
        assert not any(said for part, said in ends if not part), "who said nothing is told nothing"


async def test_a_body_that_stands_still_is_refused_and_costs_no_worker_anything(stage: Stage) -> None:
    worker, router = await stage.worker_and_router(head_timeout=0.1)
    for headers, part in (([("Content-Length", "100")], b"half"), (CHUNKED, b"4\r\nhalf\r\n")):
        client = await stage.client(router)
        await client.send(request("POST", "/generate", headers) + part)
        answer = await client.read("POST")
        assert (answer.status, answer.error_type) == (408, "invalid_request")
        assert await client.closed() == b""
    assert router.app.clients.ended == {"late_body": 2}
    assert worker.requests == []


async def test_a_body_that_drips_is_refused_and_one_that_gets_on_is_not(stage: Stage) -> None:
    worker, router = await stage.worker_and_router(head_timeout=0.2)
    steady, dripping = await stage.client(router), await stage.client(router)
    await steady.send(request("POST", "/generate", [("Content-Length", str(40 * 5000))]))
    await dripping.send(request("POST", "/generate", [("Content-Length", "100000")]))
    refused = asyncio.ensure_future(dripping.read_raw())
    for _ in range(40):
        await steady.send(b"x" * 5000)
        with contextlib.suppress(ConnectionError):
            await dripping.send(b"x" * (not refused.done()))
        await asyncio.sleep(0.02)  # four times as long as a body may stand still
    assert (await refused).startswith(b"HTTP/1.1 408 ")
    assert (await steady.read("POST")).status == 200
    assert [len(received.body) for received in worker.requests] == [40 * 5000]


LATE = [("Content-Length", "100"), ("Expect", "100-continue")]


@pytest.mark.parametrize(
    "sent", [request("POST", "/generate", body=b"x" * MEGABYTE), request("POST", "/generate", LATE)]
)
async def test_whose_body_nobody_reads_is_not_late(stage: Stage, sent: bytes) -> None:
    """Neither is one that waits for `100 Continue`."""
    layer = MiddlewareSpec("tests.support.plugins.working.Unread")
    router = await stage.router(head_timeout=0.05, middlewares=(layer,))
    client = await stage.client(router)
    sending = asyncio.ensure_future(client.send(sent))
    await asyncio.sleep(0.2)  # four times what a client may take
    router.app.router.state.answer.set()
    assert (await client.read("POST")).status == 200
    await sending
    assert not router.app.clients.ended


async def test_who_waits_behind_another_request_is_not_late(stage: Stage) -> None:
    worker, router = await stage.worker_and_router(head_timeout=0.05)
    gate = asyncio.Event()
    worker.next(script(gate, reply()))
    behind = await stage.client(router)
    await behind.send(request("GET", "/first") + request("GET", "/x") * 20)
    await until(lambda: worker.busy, "the worker has the first request")
    await asyncio.sleep(0.2)  # four times what a client may take
    gate.set()
    for _ in range(21):
        assert (await behind.read()).status == 200


# How many


async def test_clients_beyond_the_descriptors_are_told_so_and_the_others_served(
    worker: ScriptedWorker,
) -> None:
    gate = asyncio.Event()
    worker.always(script(gate, reply(b"done")))
    arguments = ("--worker-urls", worker.url, "--api-key", "a-key")
    async with router_process(*arguments, open_files=256) as router:
        limit, began = (256 - 128) // 2, time.monotonic()
        idle = [await Client.connect(router.url) for _ in range(limit // 2)]
        for client in idle:
            assert (await client.ask("GET", "/health")).status == 200
        busy = [await Client.connect(router.url) for _ in range(limit)]
        for client in busy:
            await client.send(request("POST", "/generate", [("Authorization", "Bearer a-key")], b"{}"))
        await until(lambda: worker.busy == limit, "connections that were idle have made room")
        assert [await client.closed() for client in idle] == [b""] * len(idle)
        for _ in range(3):
            more = await asyncio.gather(*(Client.connect(router.url) for _ in range(200)))
            answers = await asyncio.gather(*(client.closed() for client in more))
            assert {answer[:13] for answer in answers} <= {b"HTTP/1.1 503 ", b""}
            assert any(answers)
            for client in more:
                client.abort()
        await rest(router)
        gate.set()
        for client in busy:
            assert (await client.read("POST")).body == b"done"
        assert await ended(router, "too_many") == 600
        said = router.stderr().count("too_many_connections")
        assert 1 <= said <= 1 + (time.monotonic() - began) // REFUSALS_LOGGED_EVERY
        for client in [*idle, *busy]:
            client.abort()
