"""A client's connection, beside the requests on it: how long it stays, what it may carry, and how it ends."""

from __future__ import annotations

import asyncio

import pytest

from miles_router.serving import client_connection, clients, server
from miles_router.settings.config import MiddlewareSpec
from tests.support.http import Client, chunked, request
from tests.support.scripted_worker import reply, script
from tests.support.stage import Stage
from tests.support.waiting import PATIENCE, until

CHUNKED = [("Transfer-Encoding", "chunked")]


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "KEEP_ALIVE", 0.05)


@pytest.mark.usefixtures("impatient")
async def test_an_idle_connection_is_closed_and_one_with_a_request_is_not(stage: Stage) -> None:
    worker, router = await stage.worker_and_router()
    gate = asyncio.Event()
    worker.next(script(reply()), script(gate, reply(b"late")))
    idle, busy = await stage.client(router), await stage.client(router)
    assert (await idle.ask("GET", "/x")).status == 200
    await busy.send(request("GET", "/y"))
    assert await idle.closed() == b""
    gate.set()
    assert (await busy.read()).body == b"late"
    assert await busy.closed() == b""


async def test_a_request_behind_a_chunked_one_is_not_counted_as_something_around_its_body(stage: Stage) -> None:
    worker = await stage.worker()
    client = await stage.client(await stage.router(worker))
    big = b"x" * 150_000
    await client.send(request("POST", "/first", CHUNKED) + chunked(b"a")[:-5])
    await client.send(chunked() + request("POST", "/second", body=big))
    for _ in range(2):
        assert (await client.read("POST")).status == 200
    assert [received.body for received in worker.requests] == [b"a", big]


async def test_a_client_may_pipeline_more_than_the_router_takes_in_at_once(stage: Stage) -> None:
    worker = await stage.worker()
    client = await stage.client(await stage.router(worker))
    count = 3 * client_connection.MAX_PIPELINED
    for number in range(count):
        await client.send(request("POST", f"/{number}", body=b"x" * 5000))
    for _ in range(count):
        assert (await client.read("POST")).status == 200
    assert [received.path for received in worker.requests] == [f"/{number}" for number in range(count)]


async def test_an_answer_outlives_what_the_client_still_sends(stage: Stage) -> None:
    """A connection that is closed with bytes unread is reset, and the client's sending fails before it reads."""
    worker, router = await stage.worker_and_router(max_request_bytes=1000)
    client = await stage.client(router)
    await client.send(request("POST", "/generate", [("Content-Length", str(2**24)), ("Expect", "100-continue")]))
    await until(lambda: router.app.router.metrics.requests["generate", 413, ""], "it is told no")
    for _ in range(2**24 // 2**16):
        await client.send(b"x" * 2**16)
    answer = await client.read("POST")
    assert (answer.status, answer.error_type, answer.value("connection")) == (413, "invalid_request", b"close")
    assert await client.closed() == b""
    assert worker.requests == []


async def test_a_body_that_nobody_wanted_is_read_away_and_the_next_request_served(stage: Stage) -> None:
    router = await stage.router(middlewares=(MiddlewareSpec("tests.support.plugins.working.Unread"),))
    client = await stage.client(router)
    sending = asyncio.ensure_future(client.send(request("POST", "/generate", body=b"x" * 2**24)))
    await until(lambda: router.connections, "the client is there")
    (connection,) = router.connections
    await until(lambda: not connection.transport.is_reading(), "it is held back")
    router.app.router.state.answer.set()
    assert (await client.read("POST")).status == 200
    await sending
    assert (await client.ask("POST", "/next", body=b"{}")).status == 200


async def test_one_that_never_stops_sending_is_left_after_a_while(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(clients, "LINGER", 0.05)
    client = await stage.client(await stage.router())
    await client.send(b"garbage\r\n\r\n")
    assert (await client.read()).status == 400
    with pytest.raises(ConnectionError):
        await _send_for_ever(client)


async def _send_for_ever(client: Client) -> None:
    while True:
        await client.send(b"x" * 1000)
        await asyncio.sleep(0)


async def test_a_stop_closes_idle_connections_and_lets_a_request_finish(stage: Stage) -> None:
    worker, router = await stage.worker_and_router()
    gate = asyncio.Event()
    worker.next(script(reply()), script(gate, reply(b"last")))
    idle, fresh, busy = [await stage.client(router) for _ in range(3)]
    assert (await idle.ask("GET", "/x")).status == 200
    await busy.send(request("GET", "/y") + request("GET", "/behind"))
    await until(lambda: worker.busy, "the worker has the request")
    for connection in router.connections:
        connection.shutdown()
    assert await idle.closed() == await fresh.closed() == b""
    gate.set()
    answer = await busy.read()
    assert (answer.body, answer.value("connection")) == (b"last", b"close")
    assert await busy.closed() == b""
    assert [received.path for received in worker.requests] == ["/x", "/y"]


async def test_a_request_that_was_answered_before_its_body_gets_no_second_reply(stage: Stage) -> None:
    client = await stage.client(await stage.router(api_key="k"))
    await client.send(request("POST", "/generate", CHUNKED))
    assert (await client.read("POST")).status == 401
    await client.send(b"no chunk\r\n")
    assert await client.closed() == b""


async def test_a_stop_does_not_wait_behind_a_body_whose_request_was_answered(stage: Stage) -> None:
    router = await stage.router(api_key="k")
    client = await stage.client(router)
    await client.send(request("POST", "/generate", [("Content-Length", "2")]))
    assert (await client.read("POST")).status == 401
    (connection,) = router.connections
    connection.shutdown()
    await client.send(b"{}")
    assert await asyncio.wait_for(client.closed(), timeout=PATIENCE / 2) == b""
