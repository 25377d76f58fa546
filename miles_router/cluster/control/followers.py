"""The data processes as the control plane sees them: each follows what is decided, in order, and says so.

Whoever sends requests and does not say in time that it has followed is ended: it must not act by what is no longer
true. Who sends is known beside the connections, so that nobody is forgotten whose connection is lost.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import suppress
from typing import Any, TypeVar

from miles_router import tasks
from miles_router.cluster.control.channel import Channel, ChannelLost, Message
from miles_router.cluster.control.peer_loads import Row, joined, less
from miles_router.control.call import GroupListener
from miles_router.control.requests import Aborted, GroupEnd
from miles_router.errors import RouterError, StateError

logger = logging.getLogger(__name__)

#: Seconds in which a data process must say that it has followed, and in which it must tell its numbers.
FOLLOW, TELL = 10.0, 2.0
#: Seconds between two looks whether one has ended.
LOOK = 0.02

Section = Any
Result = TypeVar("Result")


class Follower:
    """One data process that is connected."""

    def __init__(self, channel: Channel, process: int) -> None:
        self.channel = channel
        self.process = process
        #: The number of what it has followed, and what that was.
        self.at = 0
        self.sections: dict[str, Section] = {}
        self.behind = asyncio.Event()
        #: Asks it what it has in flight.
        self.counting: asyncio.Task[bool] | None = None


class Followers:
    """All of them.

    Args:
        senders: gives the process ids of those that send requests.
        write: gives what is decided now, by name.
        patience: seconds in which one must follow.
    """

    def __init__(
        self,
        senders: Callable[[], list[int]],
        write: Callable[[], dict[str, Section]],
        *,
        patience: float = FOLLOW,
    ) -> None:
        self._senders = senders
        self._write = write
        self._patience = patience
        #: Of what is decided now.
        self.number = 0
        self.sections: dict[str, Section] = {}
        self._followers: dict[int, Follower] = {}
        #: What each process has in flight, by pool.
        self._rows: dict[int, dict[str, Row]] = {}
        self._progress: asyncio.Future[None] | None = None

    # Following

    async def serve(self, follower: Follower) -> None:
        """Have one follow, until this is cancelled; whoever reads its channel knows when it is lost."""
        self.greet(follower)
        try:
            while not follower.channel.lost:
                if follower.at == self.number:
                    follower.behind.clear()
                    await follower.behind.wait()
                    continue
                await self._lead(follower)
        except (ChannelLost, RouterError):  # whoever fails over it ends its channel, and connects anew
            pass
        finally:
            if self._followers.get(follower.process) is follower:
                del self._followers[follower.process]
            self._moved()

    def greet(self, follower: Follower) -> None:
        """One is connected, and will be served. Where it was connected before, nothing is expected there any more: who
        has connected anew is not to be ended for what it has left."""
        before, self._followers[follower.process] = self._followers.get(follower.process), follower
        if before is not None and before is not follower:
            before.channel.close()
        self._moved()

    async def _lead(self, follower: Follower) -> None:
        number, sections = self.number, dict(self.sections)
        news = {name: each for name, each in sections.items() if follower.sections.get(name) is not each}
        work = follower.channel.ask("follow", at=number, sections=news)
        try:
            await tasks.within(self._patience, work, name="lead")
        except TimeoutError:
            if self._followers.get(follower.process) is follower:
                await self._end(follower.process)
            raise ChannelLost("it does not follow") from None
        follower.at, follower.sections = number, sections
        self._moved()

    def changed(self) -> None:
        """Something may have been decided."""
        written = self._write()
        news = {name: each for name, each in written.items() if self.sections.get(name) != each}
        if not news:
            return
        self.sections.update(news)
        self.number += 1
        for follower in self._followers.values():
            follower.behind.set()

    async def caught_up(self) -> None:
        """Return when everybody who sends requests, or is about to, acts by what is decided now. Who does not is
        ended."""
        self.changed()
        number = self.number
        await asyncio.gather(*(self._follows(each, number) for each in {*self.senders, *self._followers}))

    @property
    def senders(self) -> list[int]:
        """The process ids of those that send requests."""
        return self._senders()

    async def connected(self) -> None:
        """Return when everybody who sends requests has connected. Who does not is ended."""
        await asyncio.gather(*(self._follows(process, None) for process in self.senders))

    async def _follows(self, process: int, number: int | None) -> None:
        try:
            await tasks.within(self._patience, self._until_followed(process, number), name=f"follow {process}")
        except TimeoutError:
            await self._end(process)

    async def _until_followed(self, process: int, number: int | None) -> None:
        while self._may_send(process):
            follower = self._followers.get(process)
            if follower is not None and (number is None or follower.at >= number):
                return
            if self._progress is None or self._progress.done():
                self._progress = asyncio.get_running_loop().create_future()
            await asyncio.wait({self._progress}, timeout=LOOK)

    def _may_send(self, process: int) -> bool:
        """Whether it sends requests, or is connected: it may begin to at any time."""
        return process in self.senders or process in self._followers

    def _moved(self) -> None:
        if self._progress is not None and not self._progress.done():
            self._progress.set_result(None)

    async def _end(self, process: int) -> None:
        """End one, and return when it is gone: all it had is closed then."""
        with suppress(ProcessLookupError):
            descriptor = os.pidfd_open(process)
            try:
                if not self._may_send(process):
                    return
                logger.error("process_does_not_follow", extra={"fields": {"process": process}})
                signal.pidfd_send_signal(descriptor, signal.SIGKILL)
                loop, ended = asyncio.get_running_loop(), asyncio.Event()
                loop.add_reader(descriptor, ended.set)
                try:
                    await ended.wait()
                finally:
                    loop.remove_reader(descriptor)
            finally:
                os.close(descriptor)

    # Counting

    async def count(self) -> bool:
        """Have everybody tell what it has in flight; whether all that send requests have."""
        self._forget_the_dead()
        followers = tuple(self._followers.values())
        told = await asyncio.gather(*map(self._count, followers))
        return {each.process for each, has in zip(followers, told, strict=True) if has}.issuperset(self.senders)

    async def count_who_answers(self, patience: float) -> None:
        """Have everybody tell; wait so long. Who is late is not asked again before it has told."""
        self._forget_the_dead()
        asked = set[asyncio.Task[bool]]()
        for follower in self._followers.values():
            if follower.counting is None or follower.counting.done():
                follower.counting = tasks.spawn(self._count(follower), name=f"count {follower.process}")
            asked.add(follower.counting)
        if asked:
            await asyncio.wait(asked, timeout=patience)

    def _forget_the_dead(self) -> None:
        known = {*self.senders, *self._followers}
        self._rows = {process: rows for process, rows in self._rows.items() if process in known}

    async def _count(self, follower: Follower) -> bool:
        told = await _tell(follower, "counts")
        if told is not None:
            self._rows[follower.process] = {name: Row(*row) for name, row in told.fields["rows"].items()}
        return told is not None

    def in_flight(self, pool: str) -> Row:
        """What all processes have in flight in a pool."""
        return joined(rows[pool] for rows in self._rows.values() if pool in rows)

    def tell_counts(self, pools: Sequence[str]) -> None:
        """Tell each what all others have in flight."""
        whole = {name: self.in_flight(name) for name in pools}
        for follower in self._followers.values():
            own = self._rows.get(follower.process, {})
            others = {name: less(row, own[name]) if name in own else row for name, row in whole.items()}
            follower.channel.tell("counted", rows=others)

    # Asking

    async def ask_all(self, what: str, **fields: Any) -> list[Message]:
        """What all of them answer; who ends before it does has nothing more to say."""
        await self.caught_up()
        answers = await asyncio.gather(*(self._ask(each, what, fields) for each in tuple(self._followers.values())))
        return [each for each in answers if each is not None]

    async def _ask(self, follower: Follower, what: str, fields: dict[str, Any]) -> Message | None:
        """One's answer. It may take long, as long as the process is there for others meanwhile."""
        asking = tasks.spawn(follower.channel.ask(what, **fields), name=f"ask process {what}")
        try:
            while not asking.done():
                await asyncio.wait({asking}, timeout=self._patience)
                if not asking.done():
                    try:
                        await tasks.within(self._patience, follower.channel.ask("ping"), name="ping")
                    except TimeoutError:
                        if self._followers.get(follower.process) is follower:
                            await self._end(follower.process)
            answer: Message = asking.result()
            return answer
        except ChannelLost:
            return None
        finally:
            if not asking.done():
                asking.cancel()
            elif not asking.cancelled():
                asking.exception()

    async def tell(self, what: str) -> list[Message]:
        """What all of them answer within a moment. Who is late, or ends, says nothing."""
        answers = await asyncio.gather(*(_tell(each, what) for each in tuple(self._followers.values())))
        return [each for each in answers if each is not None]


async def _tell(follower: Follower, what: str) -> Message | None:
    """One's answer; None where it does not come in time."""
    with suppress(ChannelLost, TimeoutError, RouterError):  # who failed over it has logged it
        return await tasks.within(TELL, follower.channel.ask(what), name=what)
    return None


class AllRequests:
    """The requests of one pool in all processes. See `control.requests.Requests`."""

    def __init__(self, pool: str, followers: Followers) -> None:
        self.group_listeners: list[GroupListener] = []  # each process has its own
        self._pool = pool
        self._followers = followers

    async def abort(self, rid: str | None) -> list[Aborted]:
        """Mark those that an abort means. Where one has exactly this id, those of other processes that begin with it
        are meant too."""
        places = [] if rid is None else await self._ask("places", rid=rid)
        return _read(await self._ask("abort", rid=rid, elsewhere=places))

    async def end_group(self, group: str | int) -> GroupEnd:
        """End those of a group."""
        ended = await self._ask("end_group", group=group)
        aborted = [each for found, _ in ended for each in found]
        return GroupEnd(_read(aborted), [StateError.read(each) for _, failures in ended for each in failures])

    async def at(self, url: str) -> Collection[str]:
        """The ids of those that a worker has."""
        return set(await self._ask("at", url=url))

    async def _ask(self, what: str, **fields: Any) -> list[Any]:
        answers = await self._followers.ask_all(what, pool=self._pool, **fields)
        return [each for answer in answers for each in answer.fields["found"]]


def _read(found: Iterable[list[Any]]) -> list[Aborted]:
    return [Aborted(urls, names, renamed) for urls, names, renamed in found]
