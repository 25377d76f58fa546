"""A reply's body goes to the client's connection as it comes, at the client's pace."""

from __future__ import annotations

import asyncio
from typing import cast

import pytest

from miles_router.errors import UpstreamBroken
from miles_router.forwarding.connection import HIGH_WATER, Connection
from miles_router.forwarding.reply import Reply
from miles_router.metrics import Metrics
from miles_router.serving.client_request import ClientRequest
from tests.support.quiet_fleet import quiet_fleet
from tests.support.wire import WorkerEnd

HEAD = b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n"
BLOCK = b"x" * 2**19


class Client:
    """What a client's request does with a body: it keeps it, and is slow if it is told to be."""

    def __init__(self, *, slow: bool = False) -> None:
        self.got: list[bytes] = []
        self.source: Connection | None = None
        self._slow = slow

    def write(self, data: bytes) -> None:
        self.got.append(data)

    def set_source(self, source: Connection | None) -> None:
        self.source = source
        if source is not None and self._slow:
            source.pause()


async def pouring(worker: WorkerEnd, client: Client, length: int = 2**30) -> tuple[Reply, asyncio.Task[None]]:
    """A reply whose head has come, and the task that pours it."""
    reply = worker.connection.send(b"", b"", head_request=False)
    worker.says(HEAD % length)
    task = asyncio.ensure_future(reply.pipe_to(cast(ClientRequest, client), Metrics(quiet_fleet())))
    await asyncio.sleep(0)
    return reply, task


async def test_what_comes_with_the_end_is_left_to_be_read() -> None:
    worker, client = WorkerEnd(), Client()
    reply, task = await pouring(worker, client, 3)
    worker.says(b"a")
    worker.says(b"bc")
    await task
    assert (client.got, client.source) == ([b"a"], None)
    assert (await reply.read(), reply.exhausted) == (b"bc", True)


async def test_nobody_is_woken_for_a_piece() -> None:
    worker, client = WorkerEnd(), Client()
    _, task = await pouring(worker, client)
    for number in range(5):
        worker.says(b"%d" % number)
        assert client.got[-1] == b"%d" % number
    assert not task.done()
    task.cancel()
    await asyncio.wait({task})
    assert client.source is None


async def test_what_came_before_goes_first_and_frees_a_worker_that_was_held_back() -> None:
    worker, client = WorkerEnd(), Client()
    reply = worker.connection.send(b"", b"", head_request=False)
    worker.says(HEAD % 2**30)
    blocks = HIGH_WATER // len(BLOCK) + 1
    for _ in range(blocks):
        worker.says(BLOCK)
    assert not worker.wire.reading
    task = asyncio.ensure_future(reply.pipe_to(cast(ClientRequest, client), Metrics(quiet_fleet())))
    await asyncio.sleep(0)
    assert (b"".join(client.got), worker.wire.reading) == (BLOCK * blocks, True)
    task.cancel()
    await asyncio.wait({task})


async def test_a_client_that_is_slow_already_holds_the_worker_back_from_the_start() -> None:
    worker, client = WorkerEnd(), Client(slow=True)
    _, task = await pouring(worker, client)
    assert not worker.wire.reading
    worker.says(b"what was on its way")
    assert (client.got, worker.wire.reading) == ([b"what was on its way"], False)
    assert client.source is not None
    client.source.resume()
    assert worker.wire.reading
    task.cancel()
    await asyncio.wait({task})


async def test_what_came_before_a_cut_is_written_and_the_cut_told() -> None:
    worker, client = WorkerEnd(), Client()
    _, task = await pouring(worker, client)
    worker.says(b"some")
    worker.connection.connection_lost(None)
    with pytest.raises(UpstreamBroken):
        await task
    assert (client.got, client.source) == ([b"some"], None)
