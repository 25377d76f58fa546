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
    script,
)
from tests.support.session_apis import case
from tests.support.stage import Stage, both_ways

SSE = [("Content-Type", "text/event-stream")]
LENGTH = head(200, [("Content-Length", "100")])
TEN = b"0123456789"
#: Head and the bytes after it, body bytes that a client has when the cut comes.
BEGINNINGS: dict[str, tuple[bytes, bytes]] = {
    "content-length": (LENGTH + TEN, TEN),
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
    worker, router = await stage.worker_and_router(middlewares=layers)
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


@pytest.mark.parametrize(
    ("version", "start"),
    [("1.0", BEGINNINGS["content-length"][0]), ("1.0", chunked_head() + chunk(TEN)), ("1.1", head(200) + TEN)],
    ids=["content-length", "until close for the client", "until close"],
)
async def test_a_reply_that_only_a_close_ends_is_seen_to_be_cut(stage: Stage, version: str, start: bytes) -> None:
    """Where nothing but the end of the connection ends the reply, a cut must not be an orderly end."""
    gate = asyncio.Event()
    worker = (await stage.worker()).always(script(start, gate, RESET))
    router = await stage.router(worker)
    client = await stage.client(router)
    await client.send(request("GET", "/x", version=version))
    await client.read_head()
    assert await client.read_part() == TEN
    gate.set()
    with pytest.raises(CutReply):
        await client.read_part()
