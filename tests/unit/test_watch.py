"""Who watches a request's client, and in whose name."""

from __future__ import annotations

import asyncio
import time
from contextvars import ContextVar

import pytest

from miles_router.asgi.exchange import Message, Receive
from miles_router.asgi.watch import Watch
from miles_router.errors import ClientDisconnected, UpstreamTimeout
from tests.support.waiting import soon

GONE: Message = {"type": "http.disconnect"}
request: ContextVar[str] = ContextVar("request")


async def test_each_request_is_watched_with_its_own_context_variables() -> None:
    """One timer serves all requests, and what a layer's `receive` looks up must not be another request's."""
    seen: dict[str, str] = {}

    async def answer(name: str) -> None:
        request.set(name)

        async def receive() -> Message:
            seen[name] = request.get("nobody's")
            return GONE

        with pytest.raises(ClientDisconnected), Watch(receive, 0):
            await asyncio.Event().wait()

    await asyncio.gather(*(asyncio.ensure_future(answer(name)) for name in ("a", "b", "c")))
    assert seen == {"a": "a", "b": "b", "c": "c"}


async def test_nobody_looks_after_a_request_that_is_over_soon() -> None:
    looked = []

    def receiving(name: str) -> Receive:
        async def receive() -> Message:
            looked.append(name)
            return GONE

        return receive

    with Watch(receiving("short"), 0):
        await asyncio.sleep(0)
    with pytest.raises(ClientDisconnected), Watch(receiving("long"), 0):
        await asyncio.Event().wait()
    assert looked == ["long"]


async def test_time_that_is_up_ends_the_wait() -> None:
    async def receive() -> Message:
        await asyncio.Event().wait()
        return GONE

    with pytest.raises(UpstreamTimeout), Watch(receive, 0.01):
        await asyncio.Event().wait()


async def test_a_stop_of_this_process_is_not_taken_for_a_worker_that_is_late() -> None:
    async def receive() -> Message:
        await asyncio.Event().wait()
        return GONE

    with Watch(receive, 0.1):
        time.sleep(0.2)  # noqa: ASYNC251
        for _ in range(5):
            await asyncio.sleep(0)


def test_event_loops_one_after_the_other_have_patience_of_their_own() -> None:
    async def leave() -> None:
        async def receive() -> Message:
            return GONE

        with pytest.raises(ClientDisconnected), Watch(receive, 0):
            await asyncio.Event().wait()

    for _ in range(2):
        asyncio.run(soon(leave()))
