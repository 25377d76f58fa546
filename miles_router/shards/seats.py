"""The leader's view of its shards: which of them may act, by which state, their requests in flight, and their replies.

The protocol determines which shards may act. On one machine a shard that does not follow in time is killed, since its
lease never ends. On several machines the leader waits until the lease has run out.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import secrets
import signal
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from typing import Any

from miles_router import tasks
from miles_router.errors import RouterError
from miles_router.shards.channel import Channel, ChannelLost, Message
from miles_router.shards.peer_loads import Row, joined, less
from miles_router.shards.places import Shards, clock
from miles_router.shards.protocol import Ack, Beat, Decided, Join, Leader, Seated, Told, Welcome

logger = logging.getLogger(__name__)

#: Seconds in which a shard on the same machine must follow; and seconds in which a shard must report its numbers.
FOLLOW, TELL = 10.0, 2.0
#: Seconds between two checks whether a process has ended or a lease has run out.
LOOK = 0.02
#: How often within one lease the leader confirms that it is the last one; and the seconds between two rounds on one
#: machine, where it always is.
ROUNDS, SECONDS = 10, 1.0


class Connected:
    """A connected shard: one life on one connection."""

    def __init__(self, channel: Channel, join: Join, url: str) -> None:
        self.channel = channel
        self.join = join
        self.url = url
        self.heard_at = clock()
        #: The task that asks for its requests in flight.
        self.counting: asyncio.Task[bool] | None = None


class Seats:
    """All seats of a router.

    Args:
        shards: the shards of the router.
        write: returns the state that is decided now, by section name.
        confirmed: returns whether this is the last leader.
        process_in: returns the id of the process in a seat, or 0 if there is none. None on several machines, where that
            is unknown.
    """

    def __init__(
        self,
        shards: Shards,
        write: Callable[[], dict[str, Any]],
        confirmed: Callable[[], Awaitable[bool]],
        process_in: Callable[[int], int] | None,
    ) -> None:
        self.shards = shards
        self._write = write
        self._confirmed = confirmed
        self._process_in = process_in
        self.leader: Leader
        #: Whether `write` returns a complete state yet.
        self.decides = False
        self._lives: dict[str, Connected] = {}
        #: The last known URL of each seat.
        self._urls: dict[int, str] = {}
        #: Requests in flight of each life, by pool.
        self._rows: dict[str, dict[str, Row]] = {}
        self._written: tuple[int, bytes] = (-1, b"")
        self._stirred = asyncio.Event()
        self._progress: asyncio.Future[None] | None = None

    # Leading

    def begin(self, term: int, *, first: bool) -> None:
        """Become the leader of this term."""
        shards = self.shards
        self.leader = Leader(
            shards.count,
            shards.lease,
            term,
            clock(),
            first=first,
            stored=((0, 0), None),
            local=shards.local,
            alone=not shards.shared_state,
        )

    async def lead(self) -> None:
        """Seat lives and prolong their leases, until cancelled."""
        shards = self.shards
        every = SECONDS if shards.local else shards.lease / ROUNDS
        opening = LOOK if shards.local else every
        while True:
            self._note_who_ended()
            began = clock()
            if await self._confirmed():
                self._post(self.leader.confirmed(began, clock()))
                for connected in tuple(self._lives.values()):
                    connected.channel.tell("ping")  # a life without a seat would take silence for a lost leader
                    if clock() - connected.heard_at > shards.lease:  # its machine or network is lost
                        connected.channel.close()
                self._moved()
            with suppress(TimeoutError):
                await tasks.within(
                    every if self.leader.open else opening, self._stirred.wait(), name="wait for a shard"
                )
            self._stirred.clear()

    def joins(self, connected: Connected) -> None:
        """Register a connected shard, and close an older connection of the same life."""
        life = connected.join.life
        before, self._lives[life] = self._lives.get(life), connected
        if before is not None:
            before.channel.close()
        self._post(self.leader.join(connected.join, clock()))
        self._stir()

    def leaves(self, connected: Connected) -> None:
        """Handle a lost connection. The shard may still act."""
        join = connected.join
        if self._lives.get(join.life) is connected:
            del self._lives[join.life]
            self.leader.left(join.seat, join.life)
            self._stir()

    def hears(self, connected: Connected, ack: Ack) -> None:
        """Record a shard's ack."""
        join, connected.heard_at = connected.join, clock()
        self.leader.heard(join.seat, join.life, ack, clock())
        if join.seat not in self.leader.acting(clock()):
            self._stir()
        self._moved()

    @property
    def open(self) -> bool:
        """Whether the leader may decide."""
        return self.leader.open

    def acting(self) -> dict[int, Seated]:
        """Return the lives that may act, by seat."""
        self._note_who_ended()
        return self.leader.acting(clock())

    def processes(self) -> list[int]:
        """Return the process ids of the acting lives."""
        return [process_of(each.life) for each in self.acting().values()]

    def urls(self) -> dict[str, str]:
        """Return the URL of each seat in which a life may act."""
        acting = self.acting()
        for seat, each in acting.items():
            if each.life in self._lives:
                self._urls[seat] = self._lives[each.life].url
        return {str(seat): url for seat, url in self._urls.items() if seat in acting}

    def _stir(self) -> None:
        self._stirred.set()
        self._moved()

    def _note_who_ended(self) -> None:
        if self._process_in is None:
            return
        acting = self.leader.acting(clock())
        for seat in range(self.shards.count):
            process = self._process_in(seat)
            if not process or (seat in acting and process != process_of(acting[seat].life)):
                self.leader.ended(seat, clock())

    def _post(self, told: Told) -> None:
        """Send the protocol's messages. A life that is not connected gets them on its next connection."""
        for life, said in told:
            connected = self._lives.get(life)
            if connected is None:
                continue
            if isinstance(said, Welcome):
                connected.channel.order("welcome", term=said.term, epoch=said.epoch)
            elif isinstance(said, Decided):
                connected.channel.order("decided", self._state(said), term=said.term, at=said.number)
            elif isinstance(said, Beat):
                connected.channel.order("beat", term=said.term, stamp=said.stamp)
            else:
                connected.channel.order("end", term=said.term)

    def _state(self, said: Decided) -> bytes:
        if self._written[0] != said.number:
            self._written = said.number, json.dumps(said.state).encode()
        return self._written[1]

    # Deciding

    def changed(self) -> None:
        """Decide and publish the current state if it has changed."""
        if self.decides and (written := self._write()) != self.leader.state:
            self._post(self.leader.decide(written, clock()))

    async def caught_up(self) -> None:
        """Return when every shard that may act is connected and acts by the current state.

        On one machine, kill a shard that does not follow within `FOLLOW` seconds.
        """
        self.changed()
        number, since = self.leader.number, dict[str, float]()
        while late := self._late(number):
            await self._until_moved()
            now = clock()
            since = {each.life: since.get(each.life, now) for each in late.values()}
            if self.shards.local:
                ended = [(seat, each) for seat, each in late.items() if now - since[each.life] > FOLLOW]
                await asyncio.gather(*(self._end(*each) for each in ended))

    def _late(self, number: int) -> dict[int, Seated]:
        unheard = {seat: each for seat, each in self.acting().items() if each.life not in self._lives}
        return {**self.leader.late(number, clock()), **unheard}

    async def _until_moved(self) -> None:
        if self._progress is None or self._progress.done():
            self._progress = asyncio.get_running_loop().create_future()
        await asyncio.wait({self._progress}, timeout=LOOK)

    def _moved(self) -> None:
        if self._progress is not None and not self._progress.done():
            self._progress.set_result(None)

    async def _end(self, seat: int, late: Seated) -> None:
        """Kill the process in a seat. Return when it has ended, with all its connections closed."""
        process = process_of(late.life)
        with suppress(ProcessLookupError):
            descriptor = os.pidfd_open(process)
            try:
                if self.acting().get(seat) is not late:
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
        if self.leader.acting(clock()).get(seat) is late:
            self.leader.ended(seat, clock())

    # Counting

    async def count(self) -> bool:
        """Ask all shards for their requests in flight. Return whether every acting shard has answered."""
        self._forget_the_dead()
        asked = tuple(self._lives.values())
        told = await asyncio.gather(*map(self._count, asked))
        known = {each.join.life for each, has in zip(asked, told, strict=True) if has}
        return all(each.life in known for each in self.acting().values())

    async def count_who_answers(self, patience: float) -> None:
        """Ask all shards for their requests in flight, for at most `patience` seconds.

        A shard that is late is not asked again before it has answered.
        """
        self._forget_the_dead()
        asked = set[asyncio.Task[bool]]()
        for each in self._lives.values():
            if each.counting is None or each.counting.done():
                each.counting = tasks.spawn(self._count(each), name=f"count {each.join.seat}")
            asked.add(each.counting)
        if asked:
            await asyncio.wait(asked, timeout=patience)

    def _forget_the_dead(self) -> None:
        known = {*self._lives, *(each.life for each in self.acting().values())}
        self._rows = {life: rows for life, rows in self._rows.items() if life in known}

    async def _count(self, connected: Connected) -> bool:
        told = await _tell(connected, "counts")
        if told is not None:
            self._rows[connected.join.life] = {name: Row(*row) for name, row in told.fields["rows"].items()}
        return told is not None

    def in_flight(self, pool: str) -> Row:
        """Return the load of all shards in a pool."""
        return joined(rows[pool] for rows in self._rows.values() if pool in rows)

    def tell_counts(self, pools: Sequence[str]) -> None:
        """Send each shard the load of all others."""
        whole = {name: self.in_flight(name) for name in pools}
        for life, connected in self._lives.items():
            own = self._rows.get(life, {})
            others = {name: less(row, own[name]) if name in own else row for name, row in whole.items()}
            connected.channel.tell("counted", rows=others)

    # Asking

    async def ask_all(self, what: str, **fields: Any) -> list[Message]:
        """Return the replies of all acting shards. A shard that ends before its reply is left out."""
        await self.caught_up()
        acting = self.acting()
        asked = [(seat, each) for seat, each in acting.items() if each.life in self._lives]
        answers = await asyncio.gather(*(self._ask(seat, each, what, fields) for seat, each in asked))
        return [each for each in answers if each is not None]

    async def _ask(self, seat: int, seated: Seated, what: str, fields: dict[str, Any]) -> Message | None:
        """Return one shard's reply, or None if it ends first.

        A reply may take long, as long as the process answers pings meanwhile.
        """
        channel = self._lives[seated.life].channel
        asking = tasks.spawn(channel.ask(what, **fields), name=f"ask shard {what}")
        try:
            while not asking.done():
                await asyncio.wait({asking}, timeout=FOLLOW)
                if not asking.done():
                    try:
                        await tasks.within(FOLLOW, channel.ask("ping"), name="ping")
                    except TimeoutError:
                        if self.shards.local:
                            await self._end(seat, seated)
                        channel.close()
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
        """Return the replies of the shards that answer within `TELL` seconds."""
        answers = await asyncio.gather(*(_tell(each, what) for each in tuple(self._lives.values())))
        return [each for each in answers if each is not None]


def life_of(process: int) -> str:
    """Return the name of a new life: its process id and a random part."""
    return f"{process}-{secrets.token_hex(8)}"


def process_of(life: str) -> int:
    """Return the process id of a life."""
    return int(life.partition("-")[0])


async def _tell(connected: Connected, what: str) -> Message | None:
    """Return one shard's reply, or None if there is none in time."""
    with suppress(ChannelLost, TimeoutError, RouterError):  # RouterError: the shard has logged its failure
        return await tasks.within(TELL, connected.channel.ask(what), name=what)
    return None
