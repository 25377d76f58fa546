"""What may go wrong when another process answers: it is not there, has no room, is lost, or the client leaves."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from miles_router.fleet.placement.sessions import Affinity
from miles_router.serving import server
from miles_router.shards import forwarding
from tests.support.http import Client, RawReply, request
from tests.support.owned import OWNED, name_of, several
from tests.support.ports import free_ports
from tests.support.running_router import RunningRouter
from tests.support.scripted_worker import reply
from tests.support.shard_owners import owners_at
from tests.support.stage import Stage
from tests.support.under_way import under_way
from tests.support.waiting import until

#: A turn of a session that the other of two processes has.
TURN = f"/sessions/{name_of(1, 2)}/v1/chat/completions"
ID = [("X-Turn-Id", "1")]


def times(answer: RawReply) -> int:
    assert answer.status == 200, answer.body
    return int(json.loads(answer.value("x-told") or b"")["times"])


def named(name: str) -> bytes:
    return json.dumps({"name": name}).encode()


async def first_of_two(stage: Stage, directory: Path, other: str) -> RunningRouter:
    """The first of two processes, whose other one is reached at this URL."""
    owners = owners_at(0, 2, directory, ["", other], Affinity())
    return await stage.router(owners=owners, middlewares=(OWNED,))


async def quiet(*routers: RunningRouter) -> None:
    await until(lambda: not any(router.leftovers() for router in routers), "nothing is under way")


@pytest.mark.parametrize("method", ["GET", "POST"])
@pytest.mark.parametrize("by", ["head", "body"])
async def test_a_request_whose_owner_is_not_there_is_refused_by_name(
    stage: Stage, tmp_path: Path, method: str, by: str
) -> None:
    first = await first_of_two(stage, tmp_path, f"http://127.0.0.1:{free_ports(1)[0]}")
    name = name_of(1, 2)
    target, body = (f"/owned/{name}", b"x" * 300_000) if by == "head" else ("/owned", named(name))
    refused = await first.ask(method, target, [("X-Request-Id", "me")], body)
    assert (refused.status, refused.error_type, refused.value("retry-after")) == (503, "unavailable", b"1")
    assert refused.value("x-request-id") == b"me"
    assert times(await first.ask("GET", f"/owned/{name_of(0, 2)}")) == 1
    await quiet(first)


class Fickle:
    """Another process. It answers so many requests, and is lost over the one behind them: that connection alone, or
    all of it."""

    def __init__(self, answers: int, *, ends: bool = False) -> None:
        self.taken = 0
        self._answers = answers
        self._ends = ends
        self._serving: asyncio.Server

    async def _take(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while await reader.readline():
            await reader.readuntil(b"\r\n\r\n")
            self.taken += 1
            if self.taken == self._answers + 1:
                if self._ends:
                    self._serving.close()
                break
            writer.write(reply())
        writer.close()

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[str]:
        """While it is there; its URL."""
        self._serving = await asyncio.start_server(self._take, "127.0.0.1", 0)
        async with self._serving:
            yield f"http://127.0.0.1:{self._serving.sockets[0].getsockname()[1]}"


@pytest.mark.parametrize(
    ("method", "path", "status", "error"),
    [
        ("GET", "", 503, "unavailable"),
        ("POST", TURN, 503, "unavailable"),
        ("POST", "", 502, "upstream_error"),
    ],
    ids=["reading", "turn", "writing"],
)
@pytest.mark.parametrize("answers", [0, 1], ids=["new connection", "kept connection"])
async def test_what_an_owner_may_have_done_that_was_lost_is_said(
    stage: Stage, tmp_path: Path, method: str, path: str, status: int, error: str, answers: int
) -> None:
    other = Fickle(answers, ends=True)
    async with other.serving() as url:
        first = await first_of_two(stage, tmp_path, url)
        for _ in range(answers):
            assert (await first.ask("GET", f"/owned/{name_of(1, 2)}")).status == 200
        lost = await first.ask(method, path or f"/owned/{name_of(1, 2)}", ID)
        assert (lost.status, lost.error_type, other.taken) == (status, error, answers + 1)
        await quiet(first)


@pytest.mark.parametrize(
    ("method", "path", "status", "taken"),
    [("GET", "", 200, 3), ("POST", TURN, 200, 3), ("POST", "", 502, 2)],
    ids=["reading", "turn", "writing"],
)
async def test_a_request_is_sent_again_where_that_does_nothing_twice(
    stage: Stage, tmp_path: Path, method: str, path: str, status: int, taken: int
) -> None:
    other = Fickle(1)
    async with other.serving() as url:
        first = await first_of_two(stage, tmp_path, url)
        assert (await first.ask("GET", f"/owned/{name_of(1, 2)}")).status == 200
        again = await first.ask(method, path or f"/owned/{name_of(1, 2)}", ID)
        assert (again.status, other.taken) == (status, taken)
        await quiet(first)


async def test_few_requests_are_under_way_at_an_owner_and_more_are_refused_at_once(
    stage: Stage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(forwarding, "MAX_FORWARDED", 3)
    first, second = await several(stage, tmp_path, 2)
    name = name_of(1, 2)
    layer: Any = second.app.layers[0]

    async def held() -> list[RawReply]:
        return await asyncio.gather(*(first.ask("GET", f"/owned/{name}?hold") for _ in range(3)))

    async with under_way(held()) as asked:
        await until(lambda: len(second.connections) == 3, "all have arrived")
        assert (await first.ask("GET", f"/owned/{name}")).error_type == "unavailable"
        await until(lambda: name in layer.gates, "they are held")
        layer.gates[name].set()
        assert sorted(map(times, await asked)) == [1, 2, 3]
    assert times(await first.ask("GET", f"/owned/{name}")) == 4
    await quiet(first, second)


@pytest.mark.parametrize("purpose", ["forward", "ask"])
async def test_a_client_that_claims_to_be_a_process_gains_nothing(stage: Stage, tmp_path: Path, purpose: str) -> None:
    first, second = await several(stage, tmp_path, 2, api_key="theirs")
    key, hop = ("Authorization", "Bearer theirs"), ("X-Miles-Router-Hop", purpose)
    ours, theirs = name_of(0, 2), name_of(1, 2)
    for target, body in ((f"/owned/{theirs}", b""), ("/owned", named(theirs))):
        refused = await first.ask("POST", target, [key, hop], body)
        assert refused.error_type == ("not_found" if purpose == "ask" else "unavailable")
    assert (await first.ask("POST", f"/owned/{ours}", [hop])).status == 401
    assert times(await first.ask("POST", f"/owned/{ours}", [key, hop])) == 1
    for wrong in ([hop, hop], [("X-Miles-Router-Hop", "3")], [("X-Miles-Router-Hop", f"{purpose}-machines")]):
        assert (await first.ask("POST", f"/owned/{ours}", [key, *wrong])).error_type == "invalid_request"
    layer: Any = second.app.layers[0]
    assert layer.times == {}
    assert sum(first.app.router.metrics.requests.values()) == 7, "all of them are counted"
    await quiet(first, second)


async def test_a_client_that_leaves_while_its_owner_answers_is_noticed_there(stage: Stage, tmp_path: Path) -> None:
    first, second = await several(stage, tmp_path, 2)
    name = name_of(1, 2)
    layer: Any = second.app.layers[0]
    for body in (None, b"x" * 1_000_000):
        async with await Client.connect(first.url) as client:
            await client.send(request("POST", f"/owned/{name}?hold", body=body))
            await until(lambda: name in layer.gates, "the owner has it")
        await until(lambda: (first.app.clients.open, second.app.clients.open) == (0, 0), "both have let go of it")
        await quiet(first, second)
        assert (await second.ask("GET", f"/owned/{name}?release")).status == 200
        layer.gates.clear()
    assert layer.times == {name: 2}, "what nobody waited for was not done"
    left = [router.app.router.metrics.client_disconnects for router in (first, second)]
    assert left == [0, 2], "each is counted once, where it was answered"


async def test_a_body_that_is_too_large_is_refused_where_it_lands(stage: Stage, tmp_path: Path) -> None:
    first, second = await several(stage, tmp_path, 2, max_request_bytes=1000)
    name = name_of(1, 2)
    for target in (f"/owned/{name}", "/owned"):
        refused = await first.ask("POST", target, body=b"x" * 1001)
        assert refused.error_type == "invalid_request"
        async with await Client.connect(first.url) as client:
            await client.send(request("POST", target, [("Transfer-Encoding", "chunked")]))
            with contextlib.suppress(ConnectionError):
                for _ in range(20):
                    await client.send(b"64\r\n" + b"x" * 100 + b"\r\n")
            assert (await client.read("POST")).error_type == "invalid_request"
    assert second.app.clients.open == 0
    await quiet(first, second)


async def test_an_owner_without_room_says_so(stage: Stage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "connection_limit", lambda: 1)
    first, second = await several(stage, tmp_path, 2)
    name = name_of(1, 2)
    layer: Any = second.app.layers[0]
    async with under_way(second.ask("GET", f"/owned/{name}?hold")) as held:
        await until(lambda: name in layer.gates, "the owner is busy")
        assert (await first.ask("GET", f"/owned/{name}")).status == 503
        layer.gates[name].set()
        assert times(await held) == 1
    await quiet(first, second)


async def test_a_crowd_that_leaves_wherever_it_is_leaves_nothing_behind(stage: Stage, tmp_path: Path) -> None:
    routers = await several(stage, tmp_path, 3)
    names = [name_of(index, 3, prefix) for index in range(3) for prefix in ("a", "b")]

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
    for router in routers:
        owners: Any = router.app.router.owners
        assert not +owners.forwarding._forwarded, "nothing is counted as under way"
        assert (await router.ask("GET", f"/owned/{names[0]}")).status == 200
