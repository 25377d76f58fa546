"""Workers whose checks stay unanswered while generations run on them: bytes of generations are a sign of life."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, asynccontextmanager, contextmanager, suppress
from typing import Any

import pytest

from miles_router.fleet.workers import WorkerState
from miles_router.tasks import spawn
from tests.support.fleet import becomes, posting, shown, until_all_know
from tests.support.http import Client, CutReply, request
from tests.support.running_router import RunningRouter
from tests.support.scripted_worker import (
    BODY,
    CLOSE,
    HANG,
    RESET,
    ScriptedWorker,
    Visit,
    chunk,
    chunked_head,
    reply,
    script,
)
from tests.support.stage import Stage
from tests.support.waiting import until

QUARANTINED = WorkerState.QUARANTINED
#: Seconds from one event of a stream to the next: 25 a second.
PACE = 0.04
#: Each check takes several events.
CHECKS: dict[str, Any] = {
    "health_check_interval": 0.3,
    "health_check_timeout": 0.3,
    "health_check_failure_threshold": 2,
    "deep_health_check_interval": 0.0,
}
#: More checks than it takes to quarantine a worker.
MANY = 5
PATHS = ["/generate", "/v1/chat/completions", "/v1/completions"]


async def events(visit: Visit) -> None:
    """A stream that goes on until its client leaves."""
    await visit.run([BODY, chunked_head()])
    while not visit.link.gone.is_set():
        await visit.write(chunk(b"data: {}\n\n"))
        await asyncio.sleep(PACE)


@asynccontextmanager
async def streaming(stage: Stage, router: RunningRouter, path: str = "/generate") -> AsyncIterator[Client]:
    client = await stage.client(router)
    await client.send(request("POST", path, body=b'{"stream": true}'))
    await client.read_head()
    assert await client.read_part()

    async def read() -> None:
        with suppress(CutReply):
            while await client.read_part():
                pass

    reading = spawn(read(), name="a client that reads")
    try:
        yield client
    finally:
        reading.cancel()
        await asyncio.wait({reading})
        client.abort()


def checks(worker: ScriptedWorker) -> int:
    return sum(probe.path == "/model_info" for probe in worker.probes)


async def silent_for(worker: ScriptedWorker, count: int = MANY) -> None:
    worker.model_info = script(HANG)
    asked = checks(worker)
    await until(lambda: checks(worker) >= asked + count, f"{count} checks are asked")


async def state_of(router: RunningRouter, worker: ScriptedWorker) -> str:
    return (await shown(router, worker))[0]


@pytest.mark.parametrize("path", PATHS)
async def test_a_worker_that_streams_is_not_quarantined_for_silence(stage: Stage, path: str) -> None:
    worker, other = await stage.worker(), await stage.worker()
    router = await stage.router(worker, **CHECKS)
    worker.always(events)
    async with streaming(stage, router, path):
        await router.ask("POST", f"/add_worker?url={other.url}")
        await silent_for(worker)
        assert await state_of(router, worker) == "ready"


async def test_a_worker_that_streams_no_more_is_quarantined(stage: Stage) -> None:
    worker, other = await stage.worker(), await stage.worker()
    router = await stage.router(worker, **CHECKS)
    worker.always(events)
    async with streaming(stage, router):
        await router.ask("POST", f"/add_worker?url={other.url}")
        await silent_for(worker)
    await becomes(router, worker, QUARANTINED)


async def test_the_last_worker_stays_while_a_silent_request_runs_on_it(
    stage: Stage, caplog: pytest.LogCaptureFixture
) -> None:
    """A whole answer has no byte before its end, and a new turn is served meanwhile."""
    worker, gate = await stage.worker(), asyncio.Event()
    router = await stage.router(worker, **CHECKS)
    worker.next(script(BODY, gate, reply(b'{"late": 1}')))
    running = posting(router)
    await until(lambda: worker.busy, "it runs")
    await silent_for(worker)
    assert await state_of(router, worker) == "ready"
    assert (await router.ask("POST", "/generate", body=b"{}")).status == 200
    gate.set()
    assert (await running).body == b'{"late": 1}'
    await becomes(router, worker, QUARANTINED)
    if caplog.records:
        said = [each for each in caplog.records if each.getMessage() == "worker_silent"]
        assert [(each.levelno, each.fields["worker"]) for each in said] == [(logging.WARNING, worker.url)]  # type: ignore[attr-defined]


async def test_a_silent_worker_beside_another_is_quarantined_under_requests(stage: Stage) -> None:
    worker, other, gate = await stage.worker(), await stage.worker(), asyncio.Event()
    router = await stage.router(worker, **CHECKS)
    worker.next(script(BODY, gate, reply()))
    running = posting(router)
    await until(lambda: worker.busy, "it runs")
    await router.ask("POST", f"/add_worker?url={other.url}")
    worker.model_info = script(HANG)
    await becomes(router, worker, QUARANTINED)
    gate.set()
    assert (await running).status == 200


async def test_the_last_worker_without_requests_is_quarantined_for_silence(stage: Stage) -> None:
    worker, router = await stage.worker_and_router(**CHECKS)
    worker.model_info = script(HANG)
    await becomes(router, worker, QUARANTINED)


@pytest.mark.parametrize(
    ("answer", "listens"),
    [(reply(b"", 503), True), (RESET, True), (RESET, False)],
    ids=["503", "reset", "nobody listens"],
)
async def test_what_is_not_silence_counts_while_a_worker_streams(stage: Stage, answer: Any, listens: bool) -> None:
    worker, router = await stage.worker_and_router(**CHECKS)
    worker.always(events)
    async with streaming(stage, router):
        if not listens:
            worker.refuse()
        worker.model_info = script(answer)
        await becomes(router, worker, QUARANTINED)


@contextmanager
def full_backlog(port: int) -> Iterator[None]:
    """Listen on a port as a process does that accepts nothing: its queue is full, and the next connection waits."""
    with ExitStack() as opened:
        listener = opened.enter_context(socket.socket())
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(("127.0.0.1", port))
        listener.listen(0)
        for _ in range(3):
            waiting = opened.enter_context(socket.socket())
            waiting.setblocking(False)
            waiting.connect_ex(("127.0.0.1", port))
        yield


@pytest.mark.parametrize("streams", [True, False], ids=["streaming", "alone"])
async def test_connections_that_a_streaming_worker_takes_late_are_silence(stage: Stage, streams: bool) -> None:
    worker, other = await stage.worker(), await stage.worker()
    router = await stage.router(other, connect_timeout=0.3, health_check_failure_threshold=2)
    other.always(events)
    async with streaming(stage, router), streaming(stage, router):
        await until_all_know(router, 2)
        await router.ask("POST", f"/add_worker?url={worker.url}")
        worker.always(events)
        async with streaming(stage, router) as client:
            assert worker.busy, "the least busy one was chosen"
            if not streams:
                client.abort()
                await until(lambda: not worker.busy, "it streams no more")
            worker.always(script(CLOSE))
            other.always(script(reply()))
            worker.refuse()
            with full_backlog(worker.port):
                for _ in range(8):
                    assert (await posting(router)).status == 200, "the other one answers"
            assert await state_of(router, worker) == ("ready" if streams else "quarantined")
