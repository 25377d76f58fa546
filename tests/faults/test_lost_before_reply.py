"""No worker, no connection, or it is lost before the reply begins: another worker is tried, within bounds, then 502."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from typing import Any

import pytest

from miles_router.fleet.workers import WorkerState
from tests.support.descriptors import no_descriptors
from tests.support.http import RawReply, request
from tests.support.running_router import RunningRouter
from tests.support.scripted_worker import CLOSE, HANG, RESET, Behaviour, ScriptedWorker, script, unread
from tests.support.stage import Stage
from tests.support.waiting import until

BODY = b'{"text": "' + b"x" * 5000 + b'"}'
LOSSES = {
    "closed after the request": script(CLOSE),
    "reset after the request": script(RESET),
    "closed before the body was read": unread(CLOSE),
    "reset before the body was read": unread(RESET),
    "cut in the status line": script(b"HTTP/1.1 200", CLOSE),
    "cut in a header": script(b"HTTP/1.1 200 OK\r\nContent-Le", CLOSE),
    "reset in a header": script(b"HTTP/1.1 200 OK\r\nContent-Le", RESET),
    "cut after an informational reply": script(b"HTTP/1.1 103 Early Hints\r\nLink: </a>\r\n\r\n", CLOSE),
}
losses = pytest.mark.parametrize("loss", [*LOSSES.values()], ids=[*LOSSES])


@pytest.fixture
def refused_url() -> Iterator[str]:
    """An address where nobody listens; held, so that nobody begins to."""
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        yield f"http://127.0.0.1:{held.getsockname()[1]}"


@pytest.fixture
def silent_url() -> Iterator[str]:
    """An address that takes no connection and refuses none: its queue of one is full and nobody accepts."""
    with socket.socket() as held, socket.socket() as first, socket.socket() as second:
        held.bind(("127.0.0.1", 0))
        held.listen(0)
        for filler in (first, second):
            filler.setblocking(False)
            filler.connect_ex(held.getsockname())
        yield f"http://127.0.0.1:{held.getsockname()[1]}"


async def registered(stage: Stage, url: str, **settings: Any) -> RunningRouter:
    """A router at which a worker has registered itself: it takes requests at once, though nobody answers there."""
    router = await stage.router(**settings)
    assert (await router.ask("POST", f"/add_worker?url={url}")).status == 200
    return router


def assert_unreachable(answer: RawReply) -> None:
    assert (answer.status, answer.error_type) == (502, "upstream_unreachable")


def asked(*workers: ScriptedWorker) -> int:
    """How many of `workers` saw a request."""
    return sum(bool(worker.requests) for worker in workers)


async def test_a_refused_connection_goes_to_another_worker(stage: Stage, refused_url: str) -> None:
    worker = await stage.worker()
    router = await stage.router(refused_url, worker)
    for _ in range(3):
        answer = await router.ask("POST", "/generate", body=BODY)
        assert (answer.status, answer.body) == (200, b"{}")
    assert [received.body for received in worker.requests] == [BODY] * 3


async def test_a_refused_connection_with_nobody_else_is_502(stage: Stage, refused_url: str) -> None:
    router = await registered(stage, refused_url)
    answer = await router.ask("POST", "/generate", body=BODY)
    assert_unreachable(answer)
    assert refused_url in answer.json()["error"]["message"]


async def test_a_connection_that_is_never_taken_ends_at_the_connect_timeout(stage: Stage, silent_url: str) -> None:
    worker = await stage.worker()
    router = await registered(stage, silent_url, connect_timeout=0.1)
    assert_unreachable(await router.ask("POST", "/generate", body=BODY))
    await router.ask("POST", f"/add_worker?url={worker.url}")
    for _ in range(2):
        assert (await router.ask("POST", "/generate", body=BODY)).status == 200
    assert router.pool.get(silent_url).failures >= 1


async def test_a_client_that_leaves_while_the_router_connects_ends_the_attempt(stage: Stage, silent_url: str) -> None:
    router = await registered(stage, silent_url, connect_timeout=30.0, health_check_timeout=0.05)
    client = await stage.client(router)
    await client.send(request("POST", "/generate", body=BODY))
    await until(lambda: router.pool.in_flight == 1, "the request is leased")
    client.abort()
    await stage.nothing_under_way()


@losses
async def test_a_lost_connection_goes_to_another_worker_with_the_same_bytes(stage: Stage, loss: Behaviour) -> None:
    bad, good = (await stage.worker()).always(loss), await stage.worker()
    router = await stage.router(bad)
    assert_unreachable(await router.ask("POST", "/generate?a=%2F", [("X-Kept", "1")], BODY))
    await router.ask("POST", f"/add_worker?url={good.url}")
    answers = [await router.ask("POST", "/generate?a=%2F", [("X-Kept", "1")], BODY) for _ in range(4)]
    assert [(answer.status, answer.body) for answer in answers] == [(200, b"{}")] * 4
    assert [received.body for received in good.requests] == [BODY] * 4
    assert {received.target for received in good.requests + bad.requests} == {b"/generate?a=%2F"}
    assert {received.values("x-kept")[0] for received in good.requests + bad.requests} == {b"1"}


@pytest.mark.alone("idle workers take turns in each process")
@pytest.mark.parametrize("headers", [[], [("X-Session-Id", "mine")]], ids=["least loaded", "with affinity"])
async def test_the_worker_that_failed_is_not_asked_again_however_idle_or_wanted_it_is(
    stage: Stage, headers: list[tuple[str, str]]
) -> None:
    bad, good = await stage.worker(), await stage.worker()
    router = await stage.router(bad)
    assert (await router.ask("POST", "/generate", headers, b"{}")).status == 200  # the key is at home here
    await router.ask("POST", f"/add_worker?url={good.url}")
    good.next(script(HANG))
    holding = await stage.client(router)
    await holding.send(request("GET", "/hold"))
    await until(lambda: good.busy, "the other one is busier")
    bad.always(script(CLOSE))
    assert (await router.ask("POST", "/generate", headers, b"{}")).status == 200
    assert len(good.requests) == 2
    holding.abort()


@pytest.mark.parametrize("max_retries", [0, 2, 10])
async def test_no_more_than_max_retries_other_workers_are_tried_and_none_twice(stage: Stage, max_retries: int) -> None:
    workers = [(await stage.worker()).always(script(CLOSE)) for _ in range(4)]
    router = await stage.router(*workers, max_retries=max_retries)
    assert_unreachable(await router.ask("POST", "/generate", body=BODY))
    assert asked(*workers) == min(1 + max_retries, 4)
    assert max(len(worker.requests) for worker in workers) <= 2  # on a kept connection, then on a new one


async def test_two_kills_in_a_row_still_end_with_an_answer(stage: Stage) -> None:
    doomed = [(await stage.worker()).always(script(HANG)) for _ in range(2)]
    survivor = await stage.worker()
    router = await stage.router(*doomed)
    client = await stage.client(router)
    await client.send(request("POST", "/generate", body=BODY))
    first = await _busy_one(doomed)
    first.kill()
    second = await _busy_one([worker for worker in doomed if worker is not first])
    assert [router.worker(worker).in_flight for worker in (first, second)] == [0, 1]
    await router.ask("POST", f"/add_worker?url={survivor.url}")
    second.kill()
    answer = await client.read("POST")
    assert (answer.status, answer.body) == (200, b"{}")
    assert survivor.requests[0].body == BODY


async def _busy_one(workers: list[ScriptedWorker]) -> ScriptedWorker:
    await until(lambda: sum(worker.busy for worker in workers) == 1, "one worker is busy")
    return next(worker for worker in workers if worker.busy)


@pytest.mark.alone("it takes descriptors from the test's process")
async def test_a_router_without_descriptors_left_does_not_blame_its_workers(stage: Stage) -> None:
    workers = [await stage.worker() for _ in range(2)]
    router = await stage.router(*workers, health_check_failure_threshold=1)
    client = await stage.client(router)
    assert (await client.ask("GET", "/health")).status == 200
    for link in [link for worker in workers for link in worker.links]:
        link.close()
    await until(lambda: not any(worker.links for worker in workers), "no connection is left that could be used")
    with no_descriptors():
        assert_unreachable(await client.ask("POST", "/generate", body=BODY))
    assert [router.worker(worker).state for worker in workers] == [WorkerState.READY] * 2
    assert (await client.ask("POST", "/generate", body=BODY)).status == 200


# No worker is registered, or none is routable


def assert_no_worker(reply: RawReply, message: str) -> None:
    assert reply.status == 503
    assert reply.error_type == "no_worker_available"
    assert message in reply.json()["error"]["message"]
    assert int(reply.value("retry-after") or 0) >= 1


async def test_every_method_is_told_that_no_worker_is_there(stage: Stage) -> None:
    router = await stage.router()
    for method in ("GET", "PUT", "DELETE", "OPTIONS"):
        assert_no_worker(await router.ask(method, "/any/path"), "/add_worker")
    reply = await router.ask("HEAD", "/any/path")
    assert (reply.status, reply.body) == (503, b"")


async def test_with_every_worker_quarantined_the_answer_is_503_and_names_their_state(stage: Stage) -> None:
    worker, router = await stage.worker_and_router(health_check_failure_threshold=1)
    router.pool.record_failure(router.worker(worker), "test")
    assert_no_worker(await router.ask("POST", "/generate", body=b"{}"), "1 quarantined")
    assert worker.requests == []


async def test_connection_survives_a_503_and_serves_the_next_request(
    stage: Stage,
) -> None:
    worker = await stage.worker()
    router = await stage.router()
    client = await stage.client(router)
    assert_no_worker(await client.ask("POST", "/generate", body=b"{}"), "no worker")
    assert (await client.ask("POST", f"/add_worker?url={worker.url}")).status == 200
    assert (await client.ask("POST", "/generate", body=b"{}")).status == 200
