"""No generation is written behind an answered pause, wherever the request was when the pause came."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import orjson
import pytest

from miles_router.asgi.exchange import Routing
from miles_router.errors import FleetPaused
from miles_router.tasks import spawn
from tests.support.fleet import asked, gate, held, info, post, posting
from tests.support.http import request
from tests.support.running_router import RunningRouter
from tests.support.scripted_worker import CLOSE, RESET, ScriptedWorker, reply, script
from tests.support.stage import Stage
from tests.support.waiting import until

PAUSED, CONTINUED = "/pause_generation", "/continue_generation"


def numbers(worker: ScriptedWorker) -> list[int]:
    return [orjson.loads(each.body)["number"] for each in worker.requests if each.path == "/generate"]


# A slot


@pytest.mark.alone("max_connections is shared out among processes")
async def test_one_that_waited_for_a_connection_goes_before_those_who_came_later(stage: Stage) -> None:
    worker, done = await stage.worker(), asyncio.Event()
    router = await stage.router(worker, max_connections=1)
    worker.next(script(done, reply(b"first")))
    first = posting(router, number=0)
    await until(lambda: worker.requests, "the only connection is taken")
    waiting = []
    for number in (1, 2):
        waiting.append(posting(router, number=number))
        await until(lambda: router.pool.in_flight == number + 1, "it waits for the connection")  # noqa: B023
    assert (await post(router, PAUSED, mode="retract")).status == 200
    waiting.append(posting(router, number=3))
    await held(router, 1)
    done.set()
    assert (await first).body == b"first"
    await held(router, 3)
    assert (asked(worker)[1:], router.pool.in_flight) == ([PAUSED], 0)
    await post(router, CONTINUED)
    assert [(await each).status for each in waiting] == [200] * 3
    assert numbers(worker) == [0, 1, 2, 3]


# A connection


class SlowDial:
    """Connections that are made once a test lets them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.dialling = 0
        self.go_on = asyncio.Event()
        loop = asyncio.get_running_loop()
        self.create = loop.create_connection
        monkeypatch.setattr(loop, "create_connection", self.create_connection)

    async def create_connection(self, *arguments: Any, **named: Any) -> Any:
        made = await self.create(*arguments, **named)
        self.dialling += 1
        await self.go_on.wait()
        return made


async def idle_closed(worker: ScriptedWorker) -> None:
    def closed() -> bool:
        for link in tuple(worker.links):  # at each look: another process may have made one meanwhile
            link.close()
        return not worker.links

    await until(closed, "no kept connection is left")


@pytest.mark.alone("it slows connections that the test's process makes")
async def test_request_waits_at_the_gate_when_it_closed_during_connect(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker, router = await stage.worker_and_router()
    await idle_closed(worker)
    dial = SlowDial(monkeypatch)
    waiting = posting(router, number=1)
    await until(lambda: dial.dialling == 1, "it dials")
    pausing = posting(router, PAUSED, mode="retract")
    await until(lambda: dial.dialling == 2, "so does the pause, whose gate is closed by now")
    dial.go_on.set()
    assert (await pausing).status == 200
    await held(router, 1)
    assert (asked(worker), router.pool.in_flight, worker.connections - worker.busy) == ([PAUSED], 0, worker.connections)
    connections = worker.connections
    await post(router, CONTINUED)
    assert (await waiting).status == 200
    assert asked(worker) == [PAUSED, CONTINUED, "/generate"]
    assert worker.connections == connections + 1, "one more, for `continue`: no order goes over a kept connection"


# A retry


@pytest.mark.parametrize("kept", [True, False], ids=["on a kept connection", "on a new one"])
@pytest.mark.parametrize("end", [CLOSE, RESET])
async def test_one_that_is_lost_in_a_pause_is_not_sent_again_behind_it(stage: Stage, end: Any, kept: bool) -> None:
    workers, lost = [await stage.worker() for _ in range(2)], asyncio.Event()
    router = await stage.router(*workers)
    for worker in workers:
        worker.standing[PAUSED] = worker.standing[CONTINUED] = script(reply())
        worker.next(script(lost, end))
        if not kept:
            await idle_closed(worker)
    waiting = posting(router, number=1)
    await until(lambda: any(worker.requests for worker in workers), "one has it")
    for worker in workers:
        worker._next.clear()
    assert (await post(router, PAUSED, mode="in_place")).status == 200
    lost.set()
    await held(router, 1)
    assert (sum(len(worker.requests) for worker in workers), router.pool.in_flight) == (1, 0)
    await post(router, CONTINUED)
    assert (await waiting).status == 200
    times = sorted(len(worker.requests) for worker in workers)
    assert times in ([[1, 1], [0, 2]] if kept else [[1, 1]])


@pytest.mark.alone("each process keeps connections of its own")
async def test_workers_that_were_tried_before_a_pause_are_not_tried_after_it(stage: Stage) -> None:
    """A request that ends workers takes no more of them with it because a pause came between."""
    workers, lost = [await stage.worker() for _ in range(4)], asyncio.Event()
    router = await stage.router(*workers, max_retries=1)
    for worker in workers:
        worker.standing[PAUSED] = worker.standing[CONTINUED] = script(reply())
        worker.always(script(lost, CLOSE))
        await idle_closed(worker)
    waiting = posting(router, number=1)
    await until(lambda: any(worker.requests for worker in workers), "one has it")
    await post(router, PAUSED, mode="in_place")
    lost.set()
    await held(router, 1)
    await post(router, CONTINUED)
    answer = await waiting
    assert (answer.status, answer.error_type) == (502, "upstream_unreachable")
    assert sum(len(worker.requests) for worker in workers) <= 3, "a kept connection may have been replaced once"
    assert len([worker for worker in workers if worker.requests]) == 2


# What ends the wait


@asynccontextmanager
async def refused_at_the_write(stage: Stage, **body: Any) -> AsyncIterator[tuple[RunningRouter, ScriptedWorker, Any]]:
    """A generation that had a worker and was not written, because a pause came."""
    worker, done = await stage.worker(), asyncio.Event()
    worker.next(script(done, reply()))
    router = await stage.router(worker, max_connections=1, request_timeout=body.pop("request_timeout", 0.0))
    first = posting(router, number=0)
    await until(lambda: worker.requests, "the only connection is taken")
    client = await stage.client(router)
    await client.send(request("POST", "/generate", [("Content-Type", "application/json")], orjson.dumps(body)))
    await until(lambda: router.pool.in_flight == 2, "it waits for the connection")
    await post(router, PAUSED, mode="retract")
    done.set()
    assert (await first).status == 200
    await held(router, 1)
    yield router, worker, client


@pytest.mark.alone("max_connections is shared out among processes")
async def test_an_abort_ends_it_as_it_ends_one_that_no_worker_ever_had(stage: Stage) -> None:
    async with refused_at_the_write(stage, text="Hi", rid="me") as (router, worker, client):
        await post(router, "/abort_request", rid="me")
        answer = (await client.read("POST")).json()
        assert (answer["meta_info"]["id"], answer["meta_info"]["finish_reason"]["type"]) == ("me", "abort")
        await post(router, CONTINUED)
        assert asked(worker).count("/generate") == 1


@pytest.mark.alone("max_connections is shared out among processes")
async def test_a_client_that_leaves_ends_it(stage: Stage) -> None:
    async with refused_at_the_write(stage, text="Hi") as (router, worker, client):
        client.abort()
        await held(router, 0)
        await post(router, CONTINUED)
        assert asked(worker).count("/generate") == 1


@pytest.mark.alone("max_connections is shared out among processes")
async def test_the_time_that_a_worker_may_take_does_not_run_there(stage: Stage) -> None:
    async with refused_at_the_write(stage, text="Hi", request_timeout=0.3) as (router, _, client):
        started = asyncio.get_running_loop().time()
        await until(lambda: asyncio.get_running_loop().time() > started + 0.4, "more than the time is over")
        await post(router, CONTINUED)
        assert (await client.read("POST")).status == 200


# A layer's own requests


async def forwarded(router: RunningRouter, path: str, routing: Routing | None = None) -> int:
    async with router.app.router.forward("POST", path, body=b'{"number": 1}', routing=routing) as made:
        await made.reply.read_all(1 << 20)
        return made.reply.status


@pytest.mark.alone("max_connections is shared out among processes")
async def test_what_a_layer_has_generated_waits_too_and_what_does_not_generate_passes(stage: Stage) -> None:
    worker, done = await stage.worker(), asyncio.Event()
    router = await stage.router(worker, max_connections=1)
    worker.next(script(done, reply()))
    first = posting(router, number=0)
    await until(lambda: worker.requests, "the only connection is taken")
    before = spawn(forwarded(router, "/generate?own=1"), name="a layer's")
    await until(lambda: router.pool.in_flight == 2, "it waits for the connection")
    await post(router, PAUSED, mode="retract")
    done.set()
    assert (await first).status == 200
    await held(router, 1)
    after = spawn(forwarded(router, "/v1/%63ompletions"), name="a layer's")
    await held(router, 2)
    assert await forwarded(router, "/v1/tokenize") == 200
    assert asked(worker) == ["/generate", PAUSED, "/v1/tokenize"]
    await post(router, CONTINUED)
    assert (await before, await after) == (200, 200)


@pytest.mark.alone("max_connections is shared out among processes")
async def test_an_abort_of_the_request_that_a_layer_works_for_ends_its_wait(stage: Stage) -> None:
    worker, router = await stage.worker_and_router()
    await post(router, PAUSED)
    routing = Routing()
    waiting = asyncio.ensure_future(forwarded(router, "/generate", routing))
    await held(router, 1)
    routing.aborted = True
    gate(router).release(routing)
    with pytest.raises(FleetPaused, match="aborted while it waited"):
        await waiting
    assert (asked(worker), (await info(router))["in_flight"]) == ([PAUSED], 0)
