"""Requests that are too large or whose worker takes too long."""

from __future__ import annotations

import asyncio
import contextlib

import pytest

from tests.support.http import CutReply, chunked, request
from tests.support.scripted_worker import BODY, HANG, chunk, chunked_head, head, reply, script, unread
from tests.support.session_apis import case
from tests.support.stage import Stage

LIMIT = 1000
CHUNKED = [("Transfer-Encoding", "chunked")]
PADDING = b"x" * 1000
#: More than the router reads at once outside of a body.
WITHOUT_END = (b"5;" + PADDING * 400, b"5\r\nhello\r\n0\r\n" + (b"X-Late: " + PADDING + b"\r\n") * 400)


async def test_an_announced_body_over_the_limit_is_refused_before_a_byte_of_it_is_read(stage: Stage) -> None:
    worker, router = await stage.worker_and_router(max_request_bytes=LIMIT)
    client = await stage.client(router)
    await client.send(request("POST", "/generate", [("Content-Length", str(LIMIT + 1))]))  # and nothing after it
    answer = await client.read("POST")
    assert (answer.status, answer.error_type) == (413, "invalid_request")
    assert "--max-request-bytes" in answer.json()["error"]["message"]
    assert worker.requests == []


async def test_a_client_that_was_told_no_before_its_body_cannot_mistake_what_comes_next(stage: Stage) -> None:
    """RFC 9110 section 10.1.1: a final status instead of 100 goes with a close, or with reading the body all the same.
    A client that does not send it after all and uses the connection again must not have its request read as a body."""
    worker, router = await stage.worker_and_router(max_request_bytes=LIMIT)
    client = await stage.client(router)
    headers = [("Content-Length", str(LIMIT + 1)), ("Expect", "100-continue")]
    answer = await client.ask("POST", "/generate", headers)
    assert (answer.status, answer.informational, answer.value("connection")) == (413, [], b"close")
    assert await client.closed() == b""
    assert worker.requests == []


async def test_a_chunked_body_without_end_is_refused_as_soon_as_it_is_over_the_limit(stage: Stage) -> None:
    router = await stage.router(await stage.worker(), max_request_bytes=LIMIT)
    client = await stage.client(router)
    await client.send(request("POST", "/generate", CHUNKED) + chunk(b"x" * LIMIT))
    await client.send(chunk(b"one more"))
    assert (await client.read("POST")).status == 413


async def test_what_is_no_request_to_be_forwarded_is_told_so(stage: Stage) -> None:
    """The bytes of a body in an unknown encoding would reach the worker with nothing that says what they are."""
    worker, router = await stage.worker_and_router()
    for kind, sent in {
        "a body that breaks": request("POST", "/generate", CHUNKED) + b"5\r\nhello\r\nno size\r\n",
        "an encoding": request("POST", "/generate", [("Transfer-Encoding", "gzip, chunked")]) + chunked(b"packed"),
        "a long head": request("GET", "/x", [(f"X-{number}", "x" * 1000) for number in range(70)]),
    }.items():
        with case(kind):
            client = await stage.client(router)
            await client.send(sent)
            answer = await client.read("POST")
            assert (answer.status, answer.error_type) == (400, "invalid_request")
    assert worker.requests == []


async def test_administration_takes_no_big_bodies_whatever_the_limit(stage: Stage) -> None:
    router = await stage.router()
    answer = await router.ask("POST", "/add_worker", body=b" " * 70_000)
    assert (answer.status, answer.error_type) == (413, "invalid_request")


async def test_a_worker_that_does_not_begin_its_reply_in_time_is_504(stage: Stage) -> None:
    workers = [(await stage.worker()).always(script(HANG)) for _ in range(2)]
    router = await stage.router(*workers, request_timeout=0.2)
    answer = await router.ask("POST", "/generate", body=b"{}")
    assert (answer.status, answer.error_type) == (504, "upstream_error")
    await stage.nothing_under_way()
    assert sum(len(worker.requests) for worker in workers) == 1, "a timeout is not tried again"


@pytest.mark.parametrize(
    "start",
    [chunked_head() + chunk(b"some"), head(200, [("Content-Length", "100")]) + b"some"],
    ids=["chunked", "content-length"],
)
async def test_a_reply_that_is_not_complete_in_time_is_broken_off(stage: Stage, start: bytes) -> None:
    worker = (await stage.worker()).always(script(start, HANG))
    router = await stage.router(worker, request_timeout=0.2)
    client = await stage.client(router)
    with pytest.raises(CutReply) as cut:
        await client.ask("POST", "/generate", body=b"{}")
    assert (cut.value.reply.status, cut.value.reply.body) == (200, b"some")
    await stage.nothing_under_way()


async def test_a_worker_that_reads_slowly_gets_the_whole_body(stage: Stage) -> None:
    gate = asyncio.Event()
    worker = (await stage.worker()).always(unread(gate, BODY, reply(b"read")))
    router = await stage.router(worker)
    client = await stage.client(router)
    body = bytes(range(256)) * 2**16
    sending = asyncio.ensure_future(client.send(request("POST", "/generate", body=body)))
    asyncio.get_running_loop().call_later(0.05, gate.set)
    await sending
    assert (await client.read("POST")).body == b"read"
    assert worker.requests[0].body == body


async def test_early_reply_arrives_and_its_connection_is_not_reused(
    stage: Stage,
) -> None:
    gate = asyncio.Event()
    worker = await stage.worker()
    worker.next(unread(reply(b"too long", 400), gate, BODY))
    router = await stage.router(worker, request_timeout=5.0)
    answer = await router.ask("POST", "/generate", body=b"x" * 2**25)
    assert (answer.status, answer.body) == (400, b"too long")
    assert (await router.ask("GET", "/next")).status == 200
    gate.set()


async def test_a_head_over_the_limit_is_refused_also_where_it_comes_whole(stage: Stage) -> None:
    worker, router = await stage.worker_and_router()
    client = await stage.client(router)
    await client.send(request("GET", "/x", [(f"X-{number}", "x" * 1000) for number in range(70)]))
    answer = await client.read()
    assert (answer.status, answer.error_type) == (400, "invalid_request")
    assert worker.requests == []


@pytest.mark.parametrize("endless", WITHOUT_END, ids=("chunk extensions", "trailers"))
async def test_what_a_client_sends_around_a_chunked_body_has_a_bound(stage: Stage, endless: bytes) -> None:
    worker, router = await stage.worker_and_router()
    client = await stage.client(router)
    await client.send(request("POST", "/generate", CHUNKED))
    with contextlib.suppress(ConnectionError):  # the refusal comes while it still sends
        await client.send(endless)
    answer = await client.read("POST")
    assert (answer.status, answer.error_type) == (400, "invalid_request")
    assert worker.requests == []
