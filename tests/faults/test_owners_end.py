"""Processes of a router that are killed and started again, or stopped and continued, in the midst of their work."""

from __future__ import annotations

import asyncio
import itertools
import json
import signal
from typing import Any

import pytest

from tests.support.cluster import cluster
from tests.support.http import Client, CutReply, RawReply, request
from tests.support.owned import name_of, names_of
from tests.support.waiting import until

OWNED = ["tests.support.owned.Owned"]


def told(reply: RawReply) -> dict[str, Any]:
    assert reply.status == 200, reply.body
    found: dict[str, Any] = json.loads(reply.value("x-told") or b"")
    return found


async def test_requests_that_land_while_their_owner_is_started_again_wait_for_it() -> None:
    async with cluster(2, middlewares=OWNED) as made:
        first, second = made.members
        name = name_of(1, 2)
        assert told(await first.ask("GET", f"/owned/{name}"))["pid"] == second.process.pid
        second.kill()
        asked = [asyncio.ensure_future(first.ask("POST", f"/owned/{name}", body=b"x" * 50_000)) for _ in range(20)]
        again = await made.start(1)
        replies = [told(each) for each in await asyncio.gather(*asked)]
        assert {each["pid"] for each in replies} == {again.process.pid}
        assert sorted(each["times"] for each in replies) == list(range(1, 21))


async def test_what_an_owner_was_answering_breaks_with_it_and_never_looks_complete() -> None:
    async with cluster(2, middlewares=OWNED) as made:
        first, second = made.members
        name = name_of(1, 2)
        async with await Client.connect(first.url) as client, await Client.connect(first.url) as reader:
            await client.send(request("GET", f"/owned/{name}?hold"))
            await reader.send(request("GET", f"/owned/{name}?bytes={1 << 28}"))
            await reader.read_head()
            second.kill()
            assert (await client.read()).error_type == "unavailable"
            with pytest.raises((CutReply, ConnectionError)):
                await reader.read_body()
            await until(
                lambda: "broken_off=True" in first.log(), "the owner's loss is logged by the process that forwarded"
            )
        assert told(await first.ask("GET", f"/owned/{name_of(0, 2)}"))["times"] == 1


async def test_an_owner_that_is_stopped_answers_all_once_when_it_goes_on() -> None:
    async with cluster(2, middlewares=OWNED) as made:
        first, second = made.members
        mine, theirs = name_of(0, 2), name_of(1, 2)
        second.kill(signal.SIGSTOP)
        names = [theirs] * 40
        asked = [asyncio.ensure_future(first.ask("POST", f"/owned/{name}", body=b"y" * 30_000)) for name in names]
        for times in range(1, 6):  # all others are answered meanwhile
            assert told(await first.ask("GET", f"/owned/{mine}"))["times"] == times
        second.kill(signal.SIGCONT)
        replies = [told(each) for each in await asyncio.gather(*asked)]
        assert sorted(each["times"] for each in replies) == list(range(1, 41))


async def test_owner_killed_while_stopped_acts_once_or_reports_the_loss() -> None:
    async with cluster(2, middlewares=OWNED) as made:
        first, second = made.members
        name = name_of(1, 2)
        assert told(await first.ask("GET", f"/owned/{name}"))["pid"] == second.process.pid
        second.kill(signal.SIGSTOP)
        asked = [asyncio.ensure_future(first.ask("POST", f"/owned/{name}", body=b"z" * 30_000)) for _ in range(20)]
        assert told(await first.ask("GET", f"/owned/{name_of(0, 2)}"))["times"] == 1
        second.kill()
        again = await made.start(1)
        replies = await asyncio.gather(*asked)
        lost = [each for each in replies if each.status != 200]
        assert {each.error_type for each in lost} <= {"upstream_error"}
        assert len(lost) <= 1, "on the connection that was kept"
        done = [told(each) for each in replies if each.status == 200]
        assert {each["pid"] for each in done} == {again.process.pid}
        assert sorted(each["times"] for each in done) == list(range(1, len(done) + 1))


async def test_many_connections_and_owners_leave_no_descriptor_behind() -> None:
    async with cluster(3, middlewares=OWNED) as made:
        names = [name for index in range(3) for name, _ in zip(names_of(index, 3), range(4), strict=False)]
        for member, name in itertools.product(made.members, names[::4]):  # then all links are accepted
            assert told(await member.ask("GET", f"/owned/{name}"))
        before = [len(member.open_files()) for member in made.members]

        async def agent(place: int) -> None:
            async with await Client.connect(made.members[place % 3].url) as client:
                for turn in range(8):
                    body = json.dumps({"name": names[(place + turn) % len(names)], "pad": "p" * 9000 * (turn % 3)})
                    reply = await client.ask("POST", "/owned", body=body.encode())
                    assert told(reply)["length"] == len(body)

        await asyncio.gather(*map(agent, range(30)))

        def left() -> list[list[str]]:
            now = [member.open_files() for member in made.members]
            return [files for files, then in zip(now, before, strict=True) if len(files) > then]

        await until(lambda: not left(), lambda: f"no descriptor is left: {before} before, and now {left()}")
