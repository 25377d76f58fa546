"""Workers leave while they are busy: what is in flight finishes, nothing new comes, counts stay exact."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from miles_router.fleet.workers import WorkerState
from tests.support.http import Client, CutReply, RawReply, request
from tests.support.running_router import RunningRouter
from tests.support.scripted_worker import CLOSE, LAST_CHUNK, RESET, ScriptedWorker, chunk, chunked_head, script
from tests.support.stage import Stage
from tests.support.waiting import soon, until


class Streaming:
    """A client in the middle of a stream whose worker waits for `gate`."""

    def __init__(self, worker: ScriptedWorker, router: RunningRouter, client: Client, gate: asyncio.Event) -> None:
        self.worker, self.router, self.client, self.gate = worker, router, client, gate

    @classmethod
    async def start(cls, stage: Stage, **settings: object) -> Streaming:
        gate = asyncio.Event()
        worker = (await stage.worker()).always(script(chunked_head(), chunk(b"one"), gate, chunk(b"two"), LAST_CHUNK))
        router = await stage.router(worker, **settings)
        client = await stage.client(router)
        await client.send(request("POST", "/generate", body=b"{}"))
        await client.read_head()
        assert await client.read_part() == b"one"
        return cls(worker, router, client, gate)

    async def assert_finishes(self) -> None:
        self.gate.set()
        assert await self.client.read_part() == b"two"
        assert await self.client.read_part() == b""


async def remove(router: RunningRouter, worker: ScriptedWorker, *, drain: bool = False) -> RawReply:
    return await router.ask("POST", f"/remove_worker?url={worker.url}" + ("&drain=true" if drain else ""))


async def test_a_stream_on_a_quarantined_worker_finishes(stage: Stage) -> None:
    streaming = await Streaming.start(
        stage, health_check_interval=0.02, health_check_timeout=0.5, health_check_failure_threshold=2
    )
    streaming.worker.model_info = script(RESET)
    record = streaming.router.worker(streaming.worker)
    await until(lambda: record.state is WorkerState.QUARANTINED, "the worker is quarantined")
    assert record.in_flight == 1
    assert (await streaming.router.ask("GET", "/new")).status == 503
    await streaming.assert_finishes()
    streaming.router.pool.remove(record)  # else the next probe is always under way


async def test_a_stream_on_a_removed_worker_finishes_and_stays_counted_until_then(stage: Stage) -> None:
    streaming = await Streaming.start(stage)
    router = streaming.router
    record = router.worker(streaming.worker)
    answer = await remove(router, streaming.worker)
    assert (answer.status, answer.json()["worker_urls"]) == (200, {})
    assert (record.in_flight, router.pool.in_flight) == (1, 1)
    assert (await router.ask("GET", "/new")).error_type == "no_worker_available"
    await streaming.assert_finishes()
    await until(lambda: router.pool.in_flight == 0, "the removed worker has nothing in flight")


async def test_a_client_that_leaves_a_removed_worker_gives_the_slot_back(stage: Stage) -> None:
    streaming = await Streaming.start(stage)
    await remove(streaming.router, streaming.worker)
    streaming.client.abort()
    await stage.nothing_under_way()


async def test_a_worker_that_returns_while_its_old_stream_runs_still_counts_it(stage: Stage) -> None:
    streaming = await Streaming.start(stage)
    router = streaming.router
    await remove(router, streaming.worker)
    answer = await router.ask("POST", f"/add_worker?url={streaming.worker.url}")
    assert answer.json()["worker_urls"] == {streaming.worker.url: 1}
    await streaming.assert_finishes()
    await until(lambda: router.pool.in_flight == 0, "the old stream is not counted any more")
    assert (await router.ask("GET", "/new")).status == 200


async def test_draining_waits_for_the_stream_and_takes_nothing_new(stage: Stage) -> None:
    streaming = await Streaming.start(stage)
    router = streaming.router
    drained = asyncio.ensure_future(remove(router, streaming.worker, drain=True))
    record = router.worker(streaming.worker)
    await until(lambda: record.state is WorkerState.DRAINING, "the worker is draining")
    assert (await router.ask("GET", "/new")).status == 503
    assert not drained.done()
    await streaming.assert_finishes()
    answer = await soon(drained)
    assert (answer.status, answer.json()["worker_urls"], len(router.pool)) == (200, {}, 0)


async def leaves(streaming: Streaming) -> None:
    streaming.client.abort()


async def dies(streaming: Streaming) -> None:
    streaming.worker.kill()
    with pytest.raises(CutReply):
        await streaming.client.read_part()


async def is_removed(streaming: Streaming) -> None:
    assert (await remove(streaming.router, streaming.worker)).status == 200
    await streaming.assert_finishes()


async def registers_again(streaming: Streaming) -> None:
    await streaming.router.ask("POST", f"/add_worker?url={streaming.worker.url}")
    assert streaming.router.worker(streaming.worker).state is WorkerState.READY
    await streaming.assert_finishes()


async def is_removed_and_registers_again(streaming: Streaming) -> None:
    await remove(streaming.router, streaming.worker)
    await registers_again(streaming)


@pytest.mark.parametrize("ends", [leaves, dies, is_removed, registers_again, is_removed_and_registers_again])
async def test_a_drain_is_answered_however_it_ends(stage: Stage, ends: Callable[[Streaming], Awaitable[None]]) -> None:
    streaming = await Streaming.start(stage)
    drained = asyncio.ensure_future(remove(streaming.router, streaming.worker, drain=True))
    record = streaming.router.worker(streaming.worker)
    await until(lambda: record.state is WorkerState.DRAINING, "the worker is draining")
    await ends(streaming)
    answer = await soon(drained)
    back = ends in (registers_again, is_removed_and_registers_again)
    assert (answer.status, [*answer.json()["worker_urls"]]) == (200, [streaming.worker.url] if back else [])
    await stage.nothing_under_way()


async def test_a_request_that_loses_its_worker_while_that_is_removed_goes_to_another(stage: Stage) -> None:
    gate = asyncio.Event()
    leaving, staying = (await stage.worker()).always(script(gate, CLOSE)), await stage.worker()
    router = await stage.router(leaving)
    client = await stage.client(router)
    await client.send(request("POST", "/generate", body=b"{}"))
    await until(lambda: leaving.busy, "the worker has the request")
    await router.ask("POST", f"/add_worker?url={staying.url}")
    await remove(router, leaving)
    gate.set()
    assert (await client.read("POST")).status == 200
    assert len(staying.requests) == 1
