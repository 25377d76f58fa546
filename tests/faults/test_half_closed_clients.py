"""Clients that close their own side and wait for their replies, beside those that have left: TCP says the same."""

from __future__ import annotations

import asyncio
import http.client
import json
from collections.abc import Awaitable, Callable

import aiohttp
import pytest

from miles_router.serving import client_connection
from tests.support.http import request
from tests.support.running_router import RunningRouter
from tests.support.scripted_worker import HANG, ScriptedWorker, chunk, chunked_head, reply, script
from tests.support.stage import Stage
from tests.support.waiting import until

Leave = Callable[[RunningRouter, ScriptedWorker], Awaitable[None]]
OWN_END = {
    "at once": reply(b"at once"),
    "as a stream": chunked_head() + chunk(b"data: 1\n\n") + chunk(b"data: 2\n\n") + b"0\r\n\r\n",
}


@pytest.mark.parametrize("answer", [*OWN_END.values()], ids=[*OWN_END])
@pytest.mark.parametrize("late", [False, True], ids=["soon", "late"])
async def test_a_client_that_closes_its_own_side_gets_its_reply(stage: Stage, answer: bytes, late: bool) -> None:
    gate = asyncio.Event()
    worker = (await stage.worker()).always(script(gate, answer))
    client = await stage.client(await stage.router(worker))
    await client.send(request("POST", "/generate", body=b"{}"))
    client.half_close()
    await until(lambda: worker.busy, "the worker has the request")
    if late:
        assert (await client.read_raw()).startswith(b"HTTP/1.1 100 "), "it is asked whether it is still there"
    gate.set()
    reply = await client.read("POST")
    assert reply.status == 200
    assert late or not reply.informational
    assert await client.closed() == b""


async def test_one_that_closes_its_own_side_behind_several_requests_gets_all_replies(stage: Stage) -> None:
    worker = (await stage.worker()).always(script(reply(b"one")))
    client = await stage.client(await stage.router(worker))
    await client.send(request("GET", "/x") * 40)
    client.half_close()
    assert [(await client.read()).body for _ in range(40)] == [b"one"] * 40
    assert await client.closed() == b""


async def test_one_that_waits_with_its_side_closed_and_then_leaves_ends_its_request(stage: Stage) -> None:
    worker = (await stage.worker()).always(script(HANG))
    router = await stage.router(worker)
    client = await stage.client(router)
    await client.send(request("POST", "/generate", body=b"{}"))
    client.half_close()
    assert (await client.read_raw()).startswith(b"HTTP/1.1 100 ")
    client.abort()
    await stage.nothing_under_way()
    assert router.app.router.metrics.client_disconnects == 1


async def test_an_old_client_that_closes_its_side_has_left(stage: Stage) -> None:
    """HTTP/1.0 has no `100 Continue`, so it cannot be asked."""
    worker = (await stage.worker()).always(script(HANG))
    client = await stage.client(await stage.router(worker))
    await client.send(request("POST", "/generate", body=b"{}", version="1.0"))
    await until(lambda: worker.busy, "the worker has the request")
    client.half_close()
    assert await client.closed() == b""
    await stage.nothing_under_way()


async def test_an_old_request_behind_another_is_not_asked_whether_it_is_there(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client_connection, "CHECKS_PER_PROBE", 1)
    one, two = asyncio.Event(), asyncio.Event()
    worker = (await stage.worker()).next(script(one, reply(b"one")), script(two, reply(b"two")))
    router = await stage.router(worker)
    client = await stage.client(router)
    await client.send(request("GET", "/one") + request("GET", "/two", version="1.0"))
    client.half_close()
    await until(lambda: worker.busy and router.connections[0]._checks, "its end has arrived")
    one.set()
    assert (await client.read()).body == b"one"
    checks = router.connections[0]._checks
    await until(lambda: router.connections[0]._checks > checks + 1, "it is checked")
    two.set()
    answer = await client.read()
    assert (answer.body, answer.informational) == (b"two", [])


async def _aiohttp(router: RunningRouter, worker: ScriptedWorker) -> None:
    async with aiohttp.ClientSession() as session:
        asking = asyncio.ensure_future(session.post(f"{router.url}/generate", json={}))
        await until(lambda: worker.busy, "the worker has the request")
        asking.cancel()


async def _standard_library(router: RunningRouter, worker: ScriptedWorker) -> None:
    connection = http.client.HTTPConnection(router.url.removeprefix("http://"))
    await asyncio.to_thread(connection.request, "POST", "/generate", json.dumps({}))
    await until(lambda: worker.busy, "the worker has the request")
    connection.close()


async def _process(router: RunningRouter, worker: ScriptedWorker) -> None:
    curl = await asyncio.create_subprocess_exec("curl", "-s", "-d", "{}", f"{router.url}/generate")
    await until(lambda: worker.busy, "the worker has the request")
    curl.kill()
    await curl.wait()


@pytest.mark.parametrize("leave", [_aiohttp, _standard_library, _process])
async def test_clients_as_people_use_them_leave_and_their_generation_ends_at_once(stage: Stage, leave: Leave) -> None:
    worker = (await stage.worker()).always(script(HANG))
    router = await stage.router(worker)
    await leave(router, worker)
    await stage.nothing_under_way()
    assert router.app.router.metrics.client_disconnects == 1
