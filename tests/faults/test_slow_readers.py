"""Clients that never read: the worker waits for them, and many of them take little of the router's memory."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import AsyncExitStack

import pytest

from miles_router.asgi.backlog import MAX_BACKLOG
from tests.faults.test_hostile_clients import number
from tests.support.http import Client, request
from tests.support.running_router import router_process
from tests.support.scripted_worker import ScriptedWorker, Visit, chunk, chunked_head, head
from tests.support.waiting import STEP, until

CLIENTS = 200
BLOCK = b"x" * 2**16
BLOCKS = 256  # 16 MiB: more than all systems between worker and client take in
#: Bytes that one of many clients may take: its objects, what waits for it, its share of what all may take.
EACH = 400_000
WAITING = "miles_router_waiting_reply_bytes"


async def many(visit: Visit) -> None:
    """16 MiB with a length, or as a chunked body."""
    await visit.read_body()
    chunked = visit.request.target == b"/chunked"
    await visit.write(chunked_head() if chunked else head(200, [("Content-Length", str(len(BLOCK) * BLOCKS))]))
    for _ in range(BLOCKS):
        await visit.write(chunk(BLOCK) if chunked else BLOCK)
    await visit.write(b"0\r\n\r\n" if chunked else b"")


@pytest.mark.parametrize(
    ("path", "layers"),
    [("/chunked", ()), ("/generate", ("tests.support.plugins.working.Tagging",))],
    ids=["past layers", "through one"],
)
async def test_many_clients_that_never_read_take_little_each(path: str, layers: tuple[str, ...]) -> None:
    paths = ("--middleware-paths", *layers) if layers else ()
    async with ScriptedWorker() as worker, router_process("--worker-urls", worker.url, *paths) as router:
        worker.always(many)
        async with AsyncExitStack() as stack:
            for client in [await stack.enter_async_context(await Client.connect(router.url)) for _ in range(3)]:
                assert len((await client.ask("POST", path, body=b"{}")).body) == len(BLOCK) * BLOCKS
            before = router.memory
            clients = [
                await stack.enter_async_context(await Client.connect(router.url, receive_buffer=4096))
                for _ in range(CLIENTS)
            ]
            for client in clients:
                await client.send(request("POST", path, body=b"{}"))
            await until(lambda: len(worker.requests) == 3 + CLIENTS, "the worker answers all")
            while await number(router, WAITING) < MAX_BACKLOG:
                pass  # as much waits as may for all of them
            await stands_still(lambda: router.memory)
            assert (router.memory - before) / CLIENTS < EACH
            assert worker.busy > 0.9 * CLIENTS, "they wait in the worker"
            assert await number(router, WAITING) < EACH * CLIENTS
            late = await clients[0].read("POST")
            assert len(late.body) == len(BLOCK) * BLOCKS, "who reads at last gets all of it"
        await until(lambda: not worker.busy, "the worker is told")
        assert await number(router, WAITING) == 0


async def stands_still(measure: Callable[[], int]) -> None:
    """Until it has not changed for a while."""
    last, still = -1, 0
    while still < 20:
        now = measure()
        still = still + 1 if abs(now - last) < 2**16 else 0
        last = now
        await asyncio.sleep(STEP)
