"""What may go wrong when a connection goes to another process: that is not there, has no room, or the client leaves."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest

from miles_router.cluster.owners import links
from miles_router.cluster.owners.ownership import ClusterOwners
from miles_router.cluster.peers import Peers
from miles_router.serving import server
from miles_router.serving.movable_connection import MAX_UNREAD
from tests.support.http import Client, RawReply, request, whole_or_cut
from tests.support.owned import OWNED, name_of, several
from tests.support.running_router import RunningRouter, running_router
from tests.support.stage import Stage
from tests.support.under_way import under_way
from tests.support.waiting import PATIENCE, until

#: Bytes that uvloop reads at once.
ONE_READ = 256 * 1024


def times(reply: RawReply) -> int:
    assert reply.status == 200, reply.body
    return int(json.loads(reply.value("x-told") or b"")["times"])


async def alone(stage: Stage, directory: Path, index: int, count: int = 2) -> RunningRouter:
    return await stage.router(owners=ClusterOwners(Peers(index, count, directory)), middlewares=(OWNED,))


async def many(count: int, ask: Callable[[], Coroutine[Any, Any, RawReply]]) -> list[RawReply]:
    return await asyncio.gather(*(ask() for _ in range(count)))


def waiting(router: RunningRouter) -> list[Any]:
    """The connections of clients that wait for their owner."""
    return [each for each in router.connections if each.leaving]


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(links, "PATIENCE", PATIENCE)


async def quiet(*routers: RunningRouter) -> None:
    await until(lambda: not any(router.app.clients.open for router in routers), "no connection is left")


async def test_requests_wait_for_an_owner_that_is_not_there_yet(stage: Stage, tmp_path: Path) -> None:
    first = await alone(stage, tmp_path, 0)
    name = name_of(1, 2)
    async with under_way(many(5, lambda: first.ask("POST", f"/owned/{name}", body=b"x" * 100_000))) as asked:
        await until(lambda: len(waiting(first)) == 5, "all have arrived")
        second = await alone(stage, tmp_path, 1)
        assert sorted(map(times, await asked)) == [1, 2, 3, 4, 5]
    await quiet(first, second)


async def test_requests_whose_owner_does_not_come_are_refused_by_name(
    stage: Stage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(links, "PATIENCE", 0.2)
    first = await alone(stage, tmp_path, 0)
    for target, body in ((f"/owned/{name_of(1, 2)}", b"x" * 300_000), ("/owned", _named(name_of(1, 2)))):
        reply = await first.ask("POST", target, [("X-Request-Id", "me")], body)
        assert (reply.status, reply.error_type, reply.value("retry-after")) == (503, "owner_unavailable", b"1")
    assert times(await first.ask("GET", f"/owned/{name_of(0, 2)}")) == 1
    await quiet(first)


async def test_few_requests_wait_for_an_owner_and_more_are_refused_at_once(
    stage: Stage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(links, "MAX_WAITING", 3)
    first = await alone(stage, tmp_path, 0)
    name = name_of(1, 2)
    async with under_way(many(3, lambda: first.ask("GET", f"/owned/{name}"))) as asked:
        await until(lambda: len(waiting(first)) == 3, "all have arrived")
        assert (await first.ask("GET", f"/owned/{name}")).error_type == "owner_unavailable"
        second = await alone(stage, tmp_path, 1)
        assert sorted(map(times, await asked)) == [1, 2, 3]
    await quiet(first, second)


def _named(name: str) -> bytes:
    return json.dumps({"name": name}).encode()


async def test_an_owner_that_comes_back_takes_what_waits_and_nothing_twice(stage: Stage, tmp_path: Path) -> None:
    first = await alone(stage, tmp_path, 0)
    name = name_of(1, 2)
    owners = [ClusterOwners(Peers(1, 2, tmp_path)) for _ in range(3)]
    async with await Client.connect(first.url) as waiting:
        for each in owners:
            async with running_router(owners=each, middlewares=(OWNED,)) as second:
                assert times(await first.ask("GET", f"/owned/{name}")) == 1
                await until(lambda: second.app.clients.open == 0, "nothing is left there")
        await waiting.send(request("GET", f"/owned/{name}"))
        last = await alone(stage, tmp_path, 1)
        assert times(await waiting.read()) == 1
    await quiet(first, last)


async def test_a_client_that_leaves_while_its_owner_answers_is_noticed_there(stage: Stage, tmp_path: Path) -> None:
    first, second = await several(stage, tmp_path, 2)
    name = name_of(1, 2)
    layer: Any = second.app.layers[0]
    for body in (None, b"x" * 1_000_000):
        async with await Client.connect(first.url) as client:
            await client.send(request("POST", f"/owned/{name}?hold", body=body))
            await until(lambda: (first.app.clients.open, second.app.clients.open) == (0, 1), "it was handed over")
            await until(lambda: name in layer.gates, "the owner has it")
        await quiet(first, second)
        assert (await second.ask("GET", f"/owned/{name}?release")).status == 200
        layer.gates.clear()


async def test_a_client_that_leaves_while_it_waits_for_its_owner_costs_nothing(stage: Stage, tmp_path: Path) -> None:
    first = await alone(stage, tmp_path, 0)
    name = name_of(1, 2)
    async with await Client.connect(first.url) as client:
        await client.send(request("POST", f"/owned/{name}", body=b"abc"))
        await until(lambda: waiting(first), "it has arrived")
    second = await alone(stage, tmp_path, 1)
    await until(lambda: (first.app.clients.open, second.app.clients.open) == (0, 0), "nothing is left")
    assert (await first.ask("GET", f"/owned/{name}")).status == 200


async def test_a_body_that_is_still_coming_is_read_by_the_owner_with_its_bounds(stage: Stage, tmp_path: Path) -> None:
    first, second = await several(stage, tmp_path, 2, max_request_bytes=1000)
    name = name_of(1, 2)
    for target in (f"/owned/{name}", "/owned"):
        reply = await first.ask("POST", target, body=b"x" * 1001)
        assert reply.error_type == "request_too_large"
        async with await Client.connect(first.url) as client:
            await client.send(request("POST", target, [("Transfer-Encoding", "chunked")]))
            with contextlib.suppress(ConnectionError):
                for _ in range(20):
                    await client.send(b"64\r\n" + b"x" * 100 + b"\r\n")
            assert (await client.read("POST")).error_type == "request_too_large"
    await quiet(first, second)


async def test_an_owner_without_room_says_so(stage: Stage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "connection_limit", lambda: 1)
    first, second = await several(stage, tmp_path, 2)
    name = name_of(1, 2)
    layer: Any = second.app.layers[0]
    async with under_way(second.ask("GET", f"/owned/{name}?hold")) as held:
        await until(lambda: name in layer.gates, "the owner is busy")
        assert (await first.ask("GET", f"/owned/{name}")).error_type == "too_many_connections"
        layer.gates[name].set()
        assert times(await held) == 1
    await quiet(first, second)


async def test_no_descriptor_is_left_behind(stage: Stage, tmp_path: Path) -> None:
    first, second = await several(stage, tmp_path, 2)
    name = name_of(1, 2)
    assert times(await first.ask("POST", f"/owned/{name}", body=b"x" * 50_000)) == 1
    await quiet(first, second)
    before = sorted(os.listdir("/proc/self/fd"))
    for _ in range(20):
        assert (await first.ask("POST", f"/owned/{name}", body=b"x" * 50_000)).status == 200
        assert (await first.ask("POST", "/owned", body=_named(name))).status == 200
        await whole_or_cut(first.ask("GET", f"/owned/{name}?bytes=500000"))
    await quiet(first, second)
    await until(lambda: len(os.listdir("/proc/self/fd")) == len(before), "no descriptor more than before")


async def test_a_client_that_sends_without_end_behind_a_request_is_held_back(stage: Stage, tmp_path: Path) -> None:
    first, second = await several(stage, tmp_path, 2)
    held, theirs = name_of(0, 2), name_of(1, 2)
    layer: Any = first.app.layers[0]
    flood = request("GET", f"/owned/{theirs}") * 40_000
    client = await stage.client(first)
    await client.send(request("GET", f"/owned/{held}?hold"))
    await until(lambda: held in layer.gates, "it is held")
    sending = asyncio.ensure_future(client.send(flood))
    (connection,) = first.connections
    await until(lambda: connection._reading_paused, "the client is held back")
    assert len(connection._reader.unread) <= MAX_UNREAD + ONE_READ
    client.abort()
    with contextlib.suppress(ConnectionError):
        await sending
    layer.gates[held].set()
    await quiet(first, second)


async def test_a_crowd_that_leaves_wherever_it_is_leaves_nothing_behind(stage: Stage, tmp_path: Path) -> None:
    routers = await several(stage, tmp_path, 3)
    names = [name_of(index, 3, prefix) for index in range(3) for prefix in ("a", "b")]
    await asyncio.gather(*(router.ask("GET", f"/owned/{name}") for router in routers for name in names))
    await quiet(*routers)
    before = len(os.listdir("/proc/self/fd"))

    async def one(place: int) -> None:
        dice = random.Random(place)
        async with await Client.connect(routers[place % 3].url) as client:
            asked = [dice.choice(names) for _ in range(12)]
            for name in asked:
                body = json.dumps({"name": name, "pad": "x" * dice.choice((0, 20_000))}).encode()
                by_head = dice.random() < 0.5
                await client.send(request("POST", f"/owned/{name}" if by_head else "/owned", body=body))
            for _ in range(dice.choice((0, 1, 5, len(asked)))):
                assert times(await client.read("POST")) > 0
            if dice.random() < 0.5:
                client.reset()

    await asyncio.gather(*map(one, range(150)))
    await quiet(*routers)
    await until(lambda: len(os.listdir("/proc/self/fd")) <= before, "no descriptor is left")
    for router in routers:
        assert (await router.ask("GET", f"/owned/{names[0]}")).status == 200
