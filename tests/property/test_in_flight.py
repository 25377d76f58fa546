"""Counts return to zero after any mix of what can happen to requests, over real sockets."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from miles_router.tasks import spawn
from tests.support.http import Client, CutReply, RawReply, request
from tests.support.running_router import RunningRouter
from tests.support.scripted_worker import (
    CLOSE,
    HANG,
    LAST_CHUNK,
    RESET,
    ScriptedWorker,
    Step,
    Visit,
    chunk,
    chunked_head,
    head,
    reply,
)
from tests.support.stage import Stage, staged
from tests.support.tiers import examples
from tests.support.waiting import soon, until

BODY = b'{"text": "whole"}'
LENGTH = head(200, [("Content-Length", str(len(BODY)))])
#: What the worker does with a request; it is told in a header, so that a second worker does the same.
DEEDS: dict[str, tuple[Step, ...]] = {
    "answer": (reply(BODY),),
    "answer in chunks": (chunked_head(), chunk(BODY), LAST_CHUNK),
    "answer 500": (reply(BODY, 500),),
    "answer until close": (head() + BODY, CLOSE),
    "garbage": (b"garbage\r\n\r\n", CLOSE),
    "close": (CLOSE,),
    "reset": (RESET,),
    "cut": (LENGTH + BODY[:5], CLOSE),
    "reset in the body": (LENGTH + BODY[:5], RESET),
    "hang": (HANG,),
    "hang in the body": (chunked_head(), chunk(BODY[:5]), HANG),
}
WHOLE = {"answer": 200, "answer in chunks": 200, "answer 500": 500, "answer until close": 200}
Conduct = Callable[[Client, str], Awaitable[None]]
Event = Callable[[RunningRouter, ScriptedWorker], Coroutine[Any, Any, None]]


async def deed(visit: Visit) -> None:
    await visit.read_body()
    await visit.run(DEEDS[visit.request.values("x-deed")[0].decode()])


# What clients do


def asking(name: str) -> bytes:
    return request("POST", "/generate", [("X-Deed", name)], b"x" * 1000)


async def read(client: Client, name: str) -> None:
    await client.send(asking(name))
    check(await client.read("POST"), name)


async def read_twice(client: Client, name: str) -> None:
    for _ in range(2):
        await read(client, name)


async def leave(client: Client, name: str) -> None:
    await client.send(asking(name))
    client.abort()


async def leave_after_the_head(client: Client, name: str) -> None:
    await client.send(asking(name))
    await client.read_head("POST")
    client.reset()


async def leave_inside_the_request(client: Client, name: str) -> None:
    await client.send(asking(name)[:-500])
    client.abort()


def check(answer: RawReply, name: str) -> None:
    """A reply that looks complete is the worker's, or says whose fault it is."""
    if answer.status in (502, 503):
        assert answer.error_type in ("upstream_unreachable", "upstream_error", "no_worker_available")
    else:
        assert (answer.status, answer.body) == (WHOLE[name], BODY)


# What happens to the fleet


async def remove(router: RunningRouter, worker: ScriptedWorker) -> None:
    assert (await router.ask("POST", f"/remove_worker?url={worker.url}")).status in (200, 404)


async def drain(router: RunningRouter, worker: ScriptedWorker) -> None:
    assert (await router.ask("POST", f"/remove_worker?url={worker.url}&drain=true")).status in (200, 404)


async def register(router: RunningRouter, worker: ScriptedWorker) -> None:
    assert (await router.ask("POST", f"/add_worker?url={worker.url}")).status == 200


async def restart(router: RunningRouter, worker: ScriptedWorker) -> None:
    worker.kill()
    await asyncio.sleep(0.005)
    await worker.listen()


async def quarantine(router: RunningRouter, worker: ScriptedWorker) -> None:
    for record in router.pool:
        if record.url == worker.url:
            router.pool.record_failure(record, "test")


CONDUCTS: list[Conduct] = [read, read_twice, leave, leave_after_the_head, leave_inside_the_request]
EVENTS: list[Event] = [remove, drain, register, restart, quarantine]


async def conducted(conduct: Conduct, client: Client, name: str) -> None:
    with contextlib.suppress(CutReply, ConnectionError):  # a broken connection is an answer too
        await conduct(client, name)


async def play(stage: Stage, plans: list[tuple[Conduct, str]], events: list[tuple[Event, int]]) -> None:
    workers = [(await stage.worker()).always(deed) for _ in range(3)]
    router = await stage.router(*workers, health_check_failure_threshold=1, max_retries=2)
    clients = [await stage.client(router) for _ in plans]
    tasks = [
        spawn(conducted(conduct, client, name), name="client under test")
        for (conduct, name), client in zip(plans, clients, strict=True)
    ]
    await asyncio.sleep(0.005)
    for event, number in events:
        tasks.append(spawn(event(router, workers[number]), name="event under test"))
        await asyncio.sleep(0)
    await asyncio.wait(tasks, timeout=0.05)
    for client in clients:
        client.abort()
    await soon(asyncio.gather(*tasks))
    await stage.nothing_under_way()
    assert [worker.in_flight for worker in router.ever] == [0] * len(router.ever)
    assert router.pool.in_flight == 0
    await until(lambda: not any(worker.busy for worker in workers), "every worker was told")


PLANS = st.lists(st.tuples(st.sampled_from(CONDUCTS), st.sampled_from(sorted(DEEDS))), min_size=1, max_size=12)
HAPPENINGS = st.lists(st.tuples(st.sampled_from(EVENTS), st.integers(0, 2)), max_size=5)


@pytest.mark.alone("it takes workers out of rotation from inside")
@settings(max_examples=examples(40))
@given(plans=PLANS, events=HAPPENINGS)
async def test_counts_return_to_zero_after_any_mix(
    plans: list[tuple[Conduct, str]], events: list[tuple[Event, int]]
) -> None:
    async with staged() as stage:
        await play(stage, plans, events)
