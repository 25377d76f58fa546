"""The connection to the worker is lost after the first byte: the client's is broken off, never ended as if complete."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable, Callable

import pytest

from miles_router.settings.config import MiddlewareSpec
from tests.support.http import CutReply, request
from tests.support.scripted_worker import (
    CLOSE,
    HANG,
    RESET,
    chunk,
    chunked_head,
    head,
    reply,
    script,
)
from tests.support.session_apis import case
from tests.support.stage import Stage, both_ways

SSE = [("Content-Type", "text/event-stream")]
LENGTH = head(200, [("Content-Length", "100")])
#: Head and the bytes after it, body bytes that a client has when the cut comes.
BEGINNINGS: dict[str, tuple[bytes, bytes]] = {
    "content-length": (LENGTH + b"0123456789", b"0123456789"),
    "content-length, nothing of the body": (LENGTH, b""),
    "content-length, one byte missing": (LENGTH + b"x" * 99, b"x" * 99),
    "chunked": (chunked_head() + chunk(b"one") + chunk(b"two"), b"onetwo"),
    "chunked, nothing of the body": (chunked_head(), b""),
    "chunked, inside a size": (chunked_head() + chunk(b"one") + b"1", b"one"),
    "chunked, inside a chunk": (chunked_head() + chunk(b"one") + b"5\r\ntw", b"onetw"),
    "chunked, last chunk missing": (chunked_head() + chunk(b"all of it"), b"all of it"),
    "chunked, inside the last chunk": (chunked_head() + chunk(b"all of it") + b"0\r\n", b"all of it"),
    "sse": (chunked_head(SSE) + chunk(b'data: {"a": 1}\n\n'), b'data: {"a": 1}\n\n'),
    "sse, inside an event": (chunked_head(SSE) + chunk(b'data: {"a'), b'data: {"a'),
}


async def test_a_cut_reply_is_cut_for_the_client_too(stage: Stage) -> None:
    """Of two workers that end alike one is asked: the client sees the bytes that came, then a broken connection."""
    workers = [await stage.worker() for _ in range(2)]
    router = await stage.router(*workers, max_retries=3)
    for count, ((kind, (start, expected)), end) in enumerate(itertools.product(BEGINNINGS.items(), (CLOSE, RESET)), 1):
        with case(kind, end):
            for worker in workers:
                worker.always(script(start, end))
            client = await stage.client(router)
            with pytest.raises(CutReply) as cut:
                await client.ask("POST", "/generate", body=b"{}")
            assert cut.value.reply.status in (200, 0)  # 0: not even the head was passed on
            assert expected.startswith(cut.value.reply.body)
            assert sum(len(worker.requests) for worker in workers) == count, "what had begun was asked for again"
            await stage.nothing_under_way()
            assert router.app.router.metrics.broken_replies == count


@both_ways
async def test_what_came_before_the_cut_reaches_the_client_at_once(
    stage: Stage, layers: tuple[MiddlewareSpec, ...]
) -> None:
    worker = await stage.worker()
    router = await stage.router(worker, middlewares=layers)
    for kind, end in itertools.product(("content-length", "chunked", "sse"), (CLOSE, RESET)):
        with case(kind, end):
            gate = asyncio.Event()
            worker.always(script(BEGINNINGS[kind][0], gate, end))
            client = await stage.client(router)
            await client.send(request("POST", "/generate", body=b"{}"))
            assert (await client.read_head()).status == 200
            got = await _read_exactly(client.read_part, len(BEGINNINGS[kind][1]))
            assert got == BEGINNINGS[kind][1]
            gate.set()
            with pytest.raises(CutReply):
                await client.read_part()


async def _read_exactly(read_part: Callable[[], Awaitable[bytes]], size: int) -> bytes:
    got = b""
    while len(got) < size:
        got += await read_part()
    return got


async def test_a_reply_until_close_that_is_reset_is_cut(stage: Stage) -> None:
    """Without length and chunks only an orderly close says that the body is complete."""
    gate = asyncio.Event()
    worker = (await stage.worker()).always(script(head(200) + b"some", gate, RESET))
    router = await stage.router(worker)
    client = await stage.client(router)
    await client.send(request("GET", "/x"))
    await client.read_head()
    assert await client.read_part() == b"some"
    gate.set()
    with pytest.raises(CutReply):
        await client.read_part()


async def test_a_worker_killed_under_many_streams_breaks_each_off(stage: Stage) -> None:
    worker = (await stage.worker()).always(script(BEGINNINGS["sse"][0], HANG))
    router = await stage.router(worker)
    clients = [await stage.client(router) for _ in range(20)]
    for client in clients:
        await client.send(request("POST", "/generate", body=b"{}"))
    for client in clients:
        await client.read_head()
        assert await client.read_part() == BEGINNINGS["sse"][1]
    assert router.worker(worker).in_flight == 20
    worker.kill()
    cut = await asyncio.gather(*(client.read_part() for client in clients), return_exceptions=True)
    assert [type(each) for each in cut] == [CutReply] * 20
    await stage.nothing_under_way()


@pytest.mark.parametrize("framing", ["content-length", "until close"])
async def test_an_http_1_0_client_sees_the_cut_as_well(stage: Stage, framing: str) -> None:
    """Where nothing but the end of the connection ends the reply, a cut must not be an orderly end."""
    gate = asyncio.Event()
    start = BEGINNINGS["content-length"][0] if framing == "content-length" else chunked_head() + chunk(b"0123456789")
    worker = (await stage.worker()).always(script(start, gate, RESET))
    router = await stage.router(worker)
    client = await stage.client(router)
    await client.send(request("GET", "/x", version="1.0"))
    await client.read_head()
    assert await client.read_part() == b"0123456789"
    gate.set()
    with pytest.raises(CutReply):
        await client.read_part()


async def test_a_cut_reply_says_nothing_about_the_next_one(stage: Stage) -> None:
    worker = await stage.worker()
    router = await stage.router(worker)
    worker.next(script(LENGTH, RESET), script(reply(b"whole")))
    broken, other = await stage.client(router), await stage.client(router)
    with pytest.raises(CutReply):
        await broken.ask("GET", "/x")
    answer = await other.ask("GET", "/x")
    assert (answer.status, answer.body) == (200, b"whole")
