"""The client goes away: within a second the worker's connection is closed, so that its engine stops generating."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from miles_router.settings.config import MiddlewareSpec
from tests.support.http import Client, request
from tests.support.running_router import RunningRouter, processes_used
from tests.support.scripted_worker import HANG, RESET, Visit, chunk, chunked_head, head, reply, script
from tests.support.stage import Stage, both_ways
from tests.support.waiting import until

Leave = Callable[[Client], None]
leaves = pytest.mark.parametrize("leave", [Client.abort, Client.reset], ids=["closes", "resets"])
EVENT = b'data: {"text": "a"}\n\n'
BIG = b"x" * 2**20


async def asked(stage: Stage, *, retries: int = 3) -> tuple[RunningRouter, Client]:
    """A router with two workers that never answer, and a client whose request one of them holds."""
    workers = [(await stage.worker()).always(script(HANG)) for _ in range(2)]
    router = await stage.router(*workers, max_retries=retries)
    client = await stage.client(router)
    await client.send(request("POST", "/generate", body=b"{}"))
    await until(lambda: sum(worker.busy for worker in workers) == 1, "a worker has the request")
    return router, client


async def assert_given_up(stage: Stage, router: RunningRouter, *, leavers: int = 1) -> None:
    """No lease, no task, no busy worker; nobody was asked again."""
    await stage.nothing_under_way()
    assert sum(len(worker.requests) for worker in stage.workers) == leavers
    await until(lambda: router.app.router.metrics.client_disconnects == leavers, "the leaving is counted")


def watched() -> bool:
    return any(task.get_name() == "watch client" for task in asyncio.all_tasks())


@pytest.mark.parametrize(
    "later",
    [
        pytest.param(False, id="at once"),
        pytest.param(True, id="later", marks=pytest.mark.alone("it looks at the tasks of the test's process")),
    ],
)
@leaves
async def test_while_the_head_is_awaited(stage: Stage, leave: Leave, later: bool) -> None:
    router, client = await asked(stage)
    if later:
        await until(watched, "the client is watched")
    leave(client)
    await assert_given_up(stage, router)


@both_ways
@leaves
async def test_in_the_middle_of_a_stream(stage: Stage, leave: Leave, layers: tuple[MiddlewareSpec, ...]) -> None:
    worker = (await stage.worker()).always(script(chunked_head(), chunk(EVENT), HANG))
    router = await stage.router(worker, middlewares=layers)
    client = await stage.client(router)
    await client.send(request("POST", "/generate", body=b"{}"))
    await client.read_head()
    assert await client.read_part() == EVENT
    leave(client)
    await assert_given_up(stage, router)


@both_ways
async def test_in_the_middle_of_a_stream_that_never_pauses(stage: Stage, layers: tuple[MiddlewareSpec, ...]) -> None:
    async def endless(visit: Visit) -> None:
        await visit.read_body()
        await visit.write(chunked_head())
        while True:
            await visit.write(chunk(EVENT * 100))

    worker = (await stage.worker()).always(endless)
    router = await stage.router(worker, middlewares=layers)
    client = await stage.client(router)
    await client.send(request("POST", "/generate", body=b"{}"))
    await client.read_head()
    for _ in range(10):
        await client.read_part()
    client.reset()
    await assert_given_up(stage, router)


@both_ways
@leaves
@pytest.mark.parametrize("framing", ["chunked", "content-length"])
async def test_while_it_reads_nothing_of_a_big_reply(
    stage: Stage, leave: Leave, framing: str, layers: tuple[MiddlewareSpec, ...]
) -> None:
    """All buffers on the way are full and everybody waits for the client, which leaves."""
    written = 0

    async def flood(visit: Visit) -> None:
        nonlocal written
        await visit.read_body()
        await visit.write(chunked_head() if framing == "chunked" else head(200, [("Content-Length", str(2**40))]))
        while True:
            await visit.write(chunk(BIG) if framing == "chunked" else BIG)
            written += 1

    worker = (await stage.worker()).always(flood)
    router = await stage.router(worker, middlewares=layers)
    client = await stage.client(router, receive_buffer=4096)
    await client.send(request("POST", "/generate", body=b"{}"))
    await _stalled(lambda: written)
    leave(client)
    await assert_given_up(stage, router)


async def _stalled(progress: Callable[[], int]) -> None:
    """Wait until the worker can write no more."""
    last = -1
    still = 0
    while still < 10:
        still, last = (still + 1, last) if progress() == last and last > 0 else (0, progress())
        await asyncio.sleep(0.01)


async def test_while_a_worker_is_cut_that_a_slow_client_was_still_to_read(stage: Stage) -> None:
    gate = asyncio.Event()
    start = head(200, [("Content-Length", str(2**24))]) + b"x" * 2**20
    worker = (await stage.worker()).always(script(start, gate, RESET))
    router = await stage.router(worker)
    client = await stage.client(router, receive_buffer=4096)
    await client.send(request("POST", "/generate", body=b"{}"))
    await client.read_head()
    gate.set()
    await until(lambda: not worker.busy, "the worker is gone")
    client.abort()
    await stage.nothing_under_way()


@pytest.mark.alone("it looks at the tasks of the test's process")
async def test_before_its_request_is_complete_nothing_is_leased_or_sent(stage: Stage) -> None:
    worker, router = await stage.worker_and_router()
    client = await stage.client(router)
    await client.send(request("POST", "/generate", [("Content-Length", "100")]) + b"half")
    await until(lambda: len(router.leftovers()) == 1, "the router reads the request")
    assert router.pool.in_flight == 0
    client.abort()
    await stage.nothing_under_way()
    assert worker.requests == []


async def test_a_hundred_clients_leave_at_once(stage: Stage) -> None:
    workers = [(await stage.worker()).always(script(HANG)) for _ in range(2)]
    router = await stage.router(*workers)
    clients = [await stage.client(router) for _ in range(100)]
    for client in clients:
        await client.send(request("POST", "/generate", body=b"{}"))
    await until(lambda: sum(worker.busy for worker in workers) == 100, "the workers have all requests")
    one, other = (router.worker(worker).in_flight for worker in workers)
    assert abs(one - other) <= 6 * (processes_used() - 1), "each process hears of another's choices a moment later"
    for client in clients:
        client.abort()
    await assert_given_up(stage, router, leavers=100)


@pytest.mark.alone("connections are bounded in each process")
async def test_while_it_waits_for_one_of_the_connections_that_are_allowed(stage: Stage) -> None:
    """The place in the queue is given up, and not the connection of another request."""
    worker = (await stage.worker()).always(script(HANG))
    router = await stage.router(worker, max_connections=1)
    holding, waiting, last = [await stage.client(router) for _ in range(3)]
    await holding.send(request("POST", "/generate", body=b"{}"))
    await until(lambda: worker.busy == 1, "the worker has the first request")
    for client in (waiting, last):
        await client.send(request("POST", "/generate", body=b"{}"))
    await until(lambda: router.pool.in_flight == 3, "two requests wait")
    waiting.abort()
    await until(lambda: router.pool.in_flight == 2, "one of them is gone")
    assert worker.busy == 1
    worker.always(script(reply(b"mine")))
    holding.abort()
    assert (await last.read("POST")).body == b"mine"
    for _ in range(3):
        assert (await router.ask("GET", "/x")).body == b"mine"


async def test_a_client_that_pipelines_and_leaves_is_noticed_too(stage: Stage) -> None:
    """The server reads nothing while a second request waits; the leaving must not go unseen for that."""
    _, client = await asked(stage)
    await client.send(request("GET", "/second"))
    client.abort()
    await stage.nothing_under_way()
