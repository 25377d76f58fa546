"""The command itself under load: thousands of requests at once, big replies to slow clients, and its end."""

from __future__ import annotations

import asyncio
import hashlib
import resource
from collections.abc import AsyncIterator, Callable

import pytest

from tests.support.forks import fork_router
from tests.support.http import Client, CutReply, request
from tests.support.running_router import RouterProcess, refuses, router_process
from tests.support.scripted_worker import (
    HANG,
    LAST_CHUNK,
    ScriptedWorker,
    Visit,
    chunk,
    chunked_head,
    head,
    reply,
    script,
)
from tests.support.tiers import size
from tests.support.waiting import until

CONCURRENT = size(heavy=5000, otherwise=1500)
MEGABYTE = 2**20
BLOCK = hashlib.sha512(b"block").digest() * (MEGABYTE // 64)
BLOCKS = 200
#: What a router may take beyond its idle size for one reply of any length: its own marks, the parser's and the kernel's
#: buffers, and the allocator's slack. The reply is ten times as long.
BOUND = 20 * MEGABYTE


@pytest.fixture
async def worker() -> AsyncIterator[ScriptedWorker]:
    async with ScriptedWorker() as made:
        yield made


@pytest.fixture
async def router(worker: ScriptedWorker) -> AsyncIterator[RouterProcess]:
    async with router_process("--worker-urls", worker.url, "--shutdown-timeout", "1", start=fork_router) as running:
        yield running


@pytest.fixture
def many_files() -> None:
    """This process plays all clients and the worker."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    if hard < 3 * CONCURRENT:
        pytest.skip(f"this system allows only {hard} open files")


@pytest.mark.storm
@pytest.mark.usefixtures("many_files")
async def test_many_requests_at_once_are_all_in_flight_and_each_gets_its_own_answer(
    worker: ScriptedWorker, router: RouterProcess
) -> None:
    gate = asyncio.Event()

    async def echo(visit: Visit) -> None:
        body = await visit.read_body()
        await gate.wait()
        await visit.write(reply(b"echo " + body))

    worker.always(echo)
    clients = await asyncio.gather(*(Client.connect(router.url) for _ in range(CONCURRENT)))
    for number, client in enumerate(clients):
        await client.send(request("POST", "/generate", body=b"%d" % number))
    await until(lambda: worker.busy == CONCURRENT, "the worker has all requests")
    gate.set()
    answers = await asyncio.gather(*(client.read("POST") for client in clients))
    assert [answer.status for answer in answers] == [200] * CONCURRENT
    assert [answer.body for answer in answers] == [b"echo %d" % number for number in range(CONCURRENT)]
    async with await Client.connect(router.url) as client:
        assert (await client.ask("GET", "/health")).json()["in_flight"] == 0
    for client in clients:
        client.abort()


@pytest.mark.parametrize("framing", ["chunked", "content-length"])
async def test_a_slow_client_slows_the_worker_down_and_fills_no_memory(
    worker: ScriptedWorker, router: RouterProcess, framing: str
) -> None:
    sent = 0

    async def big(visit: Visit) -> None:
        nonlocal sent
        await visit.read_body()
        await visit.write(
            chunked_head() if framing == "chunked" else head(200, [("Content-Length", str(BLOCKS * MEGABYTE))])
        )
        while sent < BLOCKS:
            await visit.write(chunk(BLOCK) if framing == "chunked" else BLOCK)
            sent += 1
        await visit.write(LAST_CHUNK if framing == "chunked" else b"")

    worker.always(big)
    async with await Client.connect(router.url, receive_buffer=65536) as client:
        await client.ask("GET", "/health")
        idle = router.memory
        await client.send(request("POST", "/generate", body=b"{}"))
        await client.read_head()
        await _stands_still(lambda: sent)
        assert sent < BLOCKS / 4, "the worker was not held back"
        peak = router.memory
        got, digest = 0, hashlib.sha256()
        while part := await client.read_part():
            got += len(part)
            digest.update(part)
            peak = max(peak, router.memory)
    assert got == BLOCKS * MEGABYTE
    assert digest.digest() == _expected_digest()
    assert peak - idle < BOUND


def _expected_digest() -> bytes:
    digest = hashlib.sha256()
    for _ in range(BLOCKS):
        digest.update(BLOCK)
    return digest.digest()


async def _stands_still(progress: Callable[[], int]) -> None:
    last, still = -1, 0
    while still < 10:
        now = progress()
        still = still + 1 if now == last and now > 0 else 0
        last = now
        await asyncio.sleep(0.02)


async def test_a_request_in_flight_is_finished_after_sigterm(worker: ScriptedWorker) -> None:
    gate = asyncio.Event()
    worker.always(script(chunked_head(), chunk(b"one"), gate, chunk(b"two"), LAST_CHUNK))
    async with router_process("--worker-urls", worker.url) as router, await Client.connect(router.url) as client:
        await client.send(request("POST", "/generate", body=b"{}"))
        await client.read_head()
        assert await client.read_part() == b"one"
        stopping = asyncio.ensure_future(router.stop())
        await until(lambda: refuses(router.url), "new connections are refused")
        gate.set()
        assert [await client.read_part(), await client.read_part()] == [b"two", b""]
        assert await stopping == 0


async def test_a_request_that_does_not_finish_is_broken_off_after_the_shutdown_timeout(
    worker: ScriptedWorker, router: RouterProcess
) -> None:
    worker.always(script(chunked_head(), chunk(b"one"), HANG))
    async with await Client.connect(router.url) as client:
        await client.send(request("POST", "/generate", body=b"{}"))
        await client.read_head()
        assert await client.read_part() == b"one"
        assert await router.stop() == 0
        with pytest.raises(CutReply):
            await client.read_part()
        await until(lambda: not worker.busy, "the worker was told")
