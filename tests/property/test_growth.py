"""What a peer sends without end is ended at a bound, and a part of it costs the same wherever it stands."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import cast

import pytest

from miles_router.asgi.backlog import Backlog
from miles_router.asgi.exchange import Receive, Scope, Send
from miles_router.asgi.wire import MAX_EXCESS, MAX_REPLY_HEAD, MAX_REQUEST_HEAD
from miles_router.metrics import ClientStatistics
from miles_router.serving.clients import ClientConnections
from tests.support.wire import Wire, WorkerEnd

REPLY = b"HTTP/1.1 200 OK\r\n"
CHUNKED_REPLY = REPLY + b"Transfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n"
REQUEST = b"POST /x HTTP/1.1\r\nHost: a\r\n"
CHUNKED_REQUEST = REQUEST + b"Transfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n"
#: What comes first, what comes without end, and how many bytes of it are taken.
FROM_WORKERS = {
    "a header": (REPLY + b"X-A: ", b"x" * 64, MAX_REPLY_HEAD),
    "headers": (REPLY, b"a: b\r\n" * 10, MAX_REPLY_HEAD),
    "informational replies": (b"", b"HTTP/1.1 103 Early Hints\r\nX-A: b\r\n\r\n", MAX_REPLY_HEAD),
    "a trailer": (CHUNKED_REPLY + b"0\r\nX-A: ", b"x" * 64, MAX_EXCESS),
    "trailers": (CHUNKED_REPLY + b"0\r\n", b"a: b\r\n" * 10, MAX_EXCESS),
    "a chunk extension": (CHUNKED_REPLY + b"5;", b"x" * 64, MAX_EXCESS),
}
FROM_CLIENTS = {
    "a target": (b"GET /", b"x" * 64, MAX_REQUEST_HEAD),
    "a header": (REQUEST + b"X-A: ", b"x" * 64, MAX_REQUEST_HEAD),
    "headers": (REQUEST, b"a: b\r\n" * 10, MAX_REQUEST_HEAD),
    "a trailer": (CHUNKED_REQUEST + b"0\r\nX-A: ", b"x" * 64, MAX_EXCESS),
    "trailers": (CHUNKED_REQUEST + b"0\r\n", b"a: b\r\n" * 10, MAX_EXCESS),
    "a chunk extension": (CHUNKED_REQUEST + b"5;", b"x" * 64, MAX_EXCESS),
}


def taken(feed: Callable[[bytes], None], wire: Wire, start: bytes, more: bytes, bound: int) -> int:
    """How many bytes are taken before the connection ends. The second half must not cost much more than the first."""
    feed(start)
    seconds: list[float] = []
    count = 0
    for _ in range(2):
        began = time.thread_time()
        while count < (len(seconds) + 1) * bound // 2 and not wire.closed:
            feed(more)
            count += len(more)
        seconds.append(time.thread_time() - began)
    assert seconds[1] < 0.1 + 8 * seconds[0], "it grows with what came before"
    while not wire.closed and count < 4 * bound:
        feed(more)
        count += len(more)
    return count


@pytest.mark.parametrize("endless", [*FROM_WORKERS.values()], ids=[*FROM_WORKERS])
@pytest.mark.parametrize("times", [1, 1000])
def test_a_worker_without_end_is_ended_at_a_bound(endless: tuple[bytes, bytes, int], times: int) -> None:
    start, more, bound = endless

    async def feed_it() -> int:
        worker = WorkerEnd()
        worker.connection.send(b"the request", b"", head_request=False)
        return taken(worker.says, worker.wire, start, more * times, bound)

    assert asyncio.run(feed_it()) <= bound + 2 * len(more) * times


@pytest.mark.parametrize("endless", [*FROM_CLIENTS.values()], ids=[*FROM_CLIENTS])
@pytest.mark.parametrize("times", [1, 1000])
def test_a_client_without_end_is_ended_at_a_bound(endless: tuple[bytes, bytes, int], times: int) -> None:
    start, more, bound = endless

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        while (await receive())["type"] == "http.request":
            pass

    async def feed_it() -> int:
        state, wire = SimpleNamespace(connections=set(), tasks=set()), Wire()
        connections = ClientConnections(app, ClientStatistics(Backlog()), limit=10, idle_seconds=60, head_seconds=60)
        connection = connections(server_state=state, app_state={})
        connection.connection_made(cast(asyncio.BaseTransport, wire))
        try:
            return taken(connection.data_received, wire, start, more * times, bound)
        finally:
            connection.connection_lost(None)

    assert asyncio.run(feed_it()) <= bound + 2 * len(more) * times
