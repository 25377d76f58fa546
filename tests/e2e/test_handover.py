"""A connection goes to the process that has what its request is about, and nothing of it is lost on the way."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.http import Client, RawReply, chunked, request
from tests.support.owned import name_of, names_of, several
from tests.support.running_router import RunningRouter
from tests.support.stage import Stage
from tests.support.waiting import until


def told(reply: RawReply) -> dict[str, Any]:
    assert reply.status == 200, reply.body
    found: dict[str, Any] = json.loads(reply.value("x-told") or b"")
    return found


async def owners(routers: list[RunningRouter]) -> list[int]:
    """What each says of itself."""
    count = len(routers)
    return [told(await each.ask("GET", f"/owned/{name_of(i, count, 'own')}"))["owner"] for i, each in enumerate(routers)]


async def test_a_request_is_answered_by_its_owner_wherever_it_lands(stage: Stage, tmp_path: Path) -> None:
    routers = await several(stage, tmp_path, 3)
    known = await owners(routers)
    for index in range(3):
        name = name_of(index, 3)
        replies = [told(await router.ask("POST", f"/owned/{name}", body=b"12345")) for router in routers]
        assert [(each["owner"], each["times"], each["length"]) for each in replies] == [
            (known[index], times, 5) for times in (1, 2, 3)
        ]
    await until(lambda: not any(router.app.clients.open for router in routers), "all connections are closed")


@pytest.mark.parametrize("size", [10, 20_000, 1_000_000])
@pytest.mark.parametrize("framing", ["length", "chunked"])
@pytest.mark.parametrize("by", ["head", "body"])
async def test_a_body_arrives_whole_however_it_is_framed(
    stage: Stage, tmp_path: Path, by: str, framing: str, size: int
) -> None:
    first, second = await several(stage, tmp_path, 2)
    name = name_of(1, 2)
    body = json.dumps({"name": name, "pad": "x" * size}).encode()
    target = f"/owned/{name}" if by == "head" else "/owned"
    async with await Client.connect(first.url) as client:
        for times in (1, 2):
            if framing == "length":
                reply = await client.ask("POST", target, body=body)
            else:
                parts = [body[i : i + 70_000] for i in range(0, len(body), 70_000)]
                reply = await client.ask("POST", target, [("Transfer-Encoding", "chunked")], chunked(*parts))
            assert (told(reply)["length"], told(reply)["times"]) == (len(body), times)
            assert told(reply)["head"] == body[:40].decode()


async def test_pipelined_requests_of_several_owners_are_answered_in_order_and_once(
    stage: Stage, tmp_path: Path
) -> None:
    routers = await several(stage, tmp_path, 3)
    known = await owners(routers)
    wanted = [names for index in range(3) for names in [name_of(index, 3)]]
    order = [0, 0, 1, 2, 2, 1, 0, 2, 1, 1, 1, 0] * 4
    sent = bytearray()
    for place, index in enumerate(order):
        body = json.dumps({"name": wanted[index], "place": place, "pad": "x" * (place * 97 % 3000)}).encode()
        if place % 3 == 0:
            sent += request("POST", f"/owned/{wanted[index]}", body=body)
        elif place % 3 == 1:
            sent += request("POST", "/owned", [("Transfer-Encoding", "chunked")], chunked(body[:5], body[5:]))
        else:
            sent += request("POST", "/owned", body=body)
    async with await Client.connect(routers[1].url) as client:
        await client.send(bytes(sent))
        replies = [told(await client.read("POST")) for _ in order]
    assert [each["owner"] for each in replies] == [known[index] for index in order]
    assert [each["times"] for each in replies] == [order[: at + 1].count(index) for at, index in enumerate(order)]
