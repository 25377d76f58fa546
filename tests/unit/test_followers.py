"""The barrier: what is decided counts when everybody who sends requests has said so, and whoever does not is ended."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import subprocess
import sys
from collections.abc import AsyncIterator
from typing import Any

import pytest

from miles_router.cluster.control.channel import Channel, ChannelLost, Message
from miles_router.cluster.control.followers import AllRequests, Follower, Followers
from miles_router.errors import RouterError
from miles_router.tasks import cancelled, spawn
from tests.support.waiting import PATIENCE, soon, until


class Data:
    """A data process's end of a channel: it follows when it may."""

    def __init__(self) -> None:
        self.may = asyncio.Event()
        self.heard: list[dict[str, Any]] = []
        self.answers: dict[str, Any] = {}

    async def follow(self, message: Message) -> None:
        self.heard.append(message.fields)
        await self.may.wait()

    async def abort(self, message: Message) -> Message:
        return Message({"found": [[["http://a"], [message.fields["rid"]], False]]})

    async def places(self, message: Message) -> Message:
        return Message({"found": ["http://a"]})


class Scene:
    """A control plane's followers, and what is decided."""

    def __init__(self, patience: float = PATIENCE) -> None:
        self.decided: dict[str, Any] = {"pool a": 0}
        #: Who sends requests.
        self.senders: list[int] = []
        self.followers = Followers(lambda: self.senders, lambda: dict(self.decided), patience=patience)
        self.leading: list[asyncio.Task[None]] = []

    @contextlib.asynccontextmanager
    async def connected(self, process: int, data: Data) -> AsyncIterator[Channel]:
        """One is connected."""
        ends = socket.socketpair()
        ours, theirs = [await asyncio.open_connection(sock=each) for each in ends]
        handlers = {"follow": data.follow, "abort": data.abort, "places": data.places}
        channels = [Channel(*ours, {}), Channel(*theirs, handlers, frozenset({"follow"}))]
        running = [spawn(each.run(), name="a channel") for each in channels]
        leading = spawn(self.followers.serve(Follower(channels[0], process)), name="lead")
        self.leading.append(leading)
        try:
            yield channels[1]
        finally:
            data.may.set()
            for channel in channels:
                channel.close()
            await asyncio.gather(*running)
            await cancelled(leading)
            for _, writer in (ours, theirs):
                writer.close()


async def test_it_is_known_everywhere_when_the_last_has_followed() -> None:
    scene, one, other = Scene(), Data(), Data()
    async with scene.connected(11, one), scene.connected(22, other):
        scene.senders.append(11)
        scene.senders.append(22)
        known = asyncio.ensure_future(scene.followers.caught_up())
        await until(lambda: one.heard and other.heard, "both have heard")
        one.may.set()
        await asyncio.sleep(0)
        assert not known.done()
        other.may.set()
        await soon(known)
        assert [each["sections"] for each in other.heard] == [{"pool a": 0}]


async def test_who_follows_is_told_what_changed_and_in_order() -> None:
    scene, one = Scene(), Data()
    one.may.set()
    scene.decided["pool b"] = 1
    async with scene.connected(11, one):
        scene.senders.append(11)
        await soon(scene.followers.caught_up())
        for number in range(1, 4):
            scene.decided["pool a"] = number
            await soon(scene.followers.caught_up())
        await soon(scene.followers.caught_up())  # nothing is new
    assert [each["sections"] for each in one.heard] == [
        {"pool a": 0, "pool b": 1},
        *({"pool a": number} for number in range(1, 4)),
    ]
    assert [each["at"] for each in one.heard] == [1, 2, 3, 4]


async def test_who_sends_and_is_not_connected_is_waited_for() -> None:
    scene, one = Scene(), Data()
    one.may.set()
    scene.senders.append(11)
    known = asyncio.ensure_future(scene.followers.caught_up())
    await asyncio.sleep(0)
    assert not known.done()
    async with scene.connected(11, one):
        await soon(known)
        assert one.heard


async def test_who_is_connected_and_about_to_send_is_waited_for() -> None:
    """It may have followed what was decided before, and begins to send by that."""
    scene, one = Scene(), Data()
    async with scene.connected(11, one):
        known = asyncio.ensure_future(scene.followers.caught_up())
        await until(lambda: one.heard, "it has heard")
        assert not known.done()
        one.may.set()
        await soon(known)


async def test_who_was_about_to_send_and_is_lost_is_waited_for_no_longer() -> None:
    scene, one = Scene(), Data()
    async with scene.connected(11, one) as channel:
        known = asyncio.ensure_future(scene.followers.caught_up())
        await until(lambda: one.heard, "it has heard")
        channel.close()
        await soon(known)


async def test_who_has_ended_is_waited_for_no_longer() -> None:
    scene = Scene()
    scene.senders.append(11)
    known = asyncio.ensure_future(scene.followers.caught_up())
    await asyncio.sleep(0)
    scene.senders.clear()
    await soon(known)


async def test_who_has_connected_anew_is_not_ended_for_what_it_does_not_say_where_it_was_before() -> None:
    scene, deaf, one = Scene(patience=0.5), Data(), Data()
    one.may.set()
    sender = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"])  # noqa: ASYNC220
    try:
        async with scene.connected(sender.pid, deaf):
            scene.senders.append(sender.pid)
            known = asyncio.ensure_future(scene.followers.caught_up())
            await until(lambda: deaf.heard, "it is asked to follow")
            async with scene.connected(sender.pid, one):
                await soon(known)
                await soon(asyncio.wait({scene.leading[0]}))
                assert sender.poll() is None
                scene.decided["pool a"] = 1
                await soon(scene.followers.caught_up())
                assert one.heard[-1]["sections"] == {"pool a": 1}
    finally:
        sender.kill()
        sender.wait()


@pytest.mark.parametrize("connected", [True, False])
async def test_who_does_not_follow_in_time_is_ended_before_anything_goes_on(connected: bool) -> None:
    scene, one = Scene(patience=0.1), Data()
    sender = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"])  # noqa: ASYNC220
    async with contextlib.AsyncExitStack() as stack:
        if connected:
            await stack.enter_async_context(scene.connected(sender.pid, one))
        scene.senders.append(sender.pid)
        await soon(scene.followers.caught_up())
        assert sender.poll() == -9


async def test_an_abort_is_everybody_s_and_a_process_that_is_lost_has_nothing_to_say() -> None:
    scene, one, other = Scene(), Data(), Data()
    one.may.set()
    other.may.set()
    async with scene.connected(11, one), scene.connected(22, other) as channel:
        requests = AllRequests("a", scene.followers)
        assert [each.urls for each in await soon(requests.abort("r"))] == [["http://a"]] * 2
        channel.close()
        assert len(await soon(requests.abort("r"))) == 1


async def test_who_asks_one_that_fails_over_it_is_told_and_the_others_go_on() -> None:
    """A layer of one's own may fail while its process is asked."""
    scene, one = Scene(), Data()
    one.may.set()
    async with scene.connected(11, one):
        requests = AllRequests("a", scene.followers)
        with pytest.raises(RouterError):
            await soon(requests.end_group("g"))  # which this one does not know
        assert len(await soon(requests.abort("r"))) == 1


async def test_who_waits_for_an_answer_hears_that_none_will_come() -> None:
    ends = socket.socketpair()
    ours, theirs = [await asyncio.open_connection(sock=each) for each in ends]
    channel = Channel(*ours, {})
    reading = spawn(channel.run(), name="a channel")
    asking = asyncio.ensure_future(channel.ask("anything"))
    await asyncio.sleep(0)
    theirs[1].close()
    with pytest.raises(ChannelLost):
        await soon(asking)
    await reading
    with pytest.raises(ChannelLost):
        await channel.ask("anything")
    ours[1].close()


async def test_who_is_given_an_answer_that_cannot_be_written_is_told_so() -> None:
    async def told(message: Message) -> Message:
        return Message({"found": {1, 2}})

    ends = socket.socketpair()
    ours, theirs = [await asyncio.open_connection(sock=each) for each in ends]
    asking, answering = Channel(*ours, {}), Channel(*theirs, {"at": told})
    running = [spawn(each.run(), name="a channel") for each in (asking, answering)]
    with pytest.raises(RouterError):
        await soon(asking.ask("at"))
    for channel, task in zip((asking, answering), running, strict=True):
        channel.close()
        await task


async def test_who_asks_over_a_transport_that_has_failed_is_told_so_before_anybody_has_read_it() -> None:
    ours, theirs = socket.socketpair()
    reader, writer = await asyncio.open_connection(sock=ours)
    channel = Channel(reader, writer, {})
    writer.transport.abort()
    await asyncio.sleep(0.01)
    channel.tell("anything")
    with pytest.raises(ChannelLost):
        await channel.ask("anything")
    theirs.close()
