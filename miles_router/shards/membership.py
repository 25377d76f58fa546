"""One shard's connection to the leader: its seat, its lease, and the state that it follows."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager, closing, suppress
from pathlib import Path
from typing import Any

from miles_router import tasks
from miles_router.errors import StateError, StateOutdated, Unavailable
from miles_router.shards.channel import Channel, ChannelLost, Handler, Message
from miles_router.shards.leader import URLS
from miles_router.shards.places import SOCKET, Seat, clock
from miles_router.shards.proof import ACCEPTS, CONNECTS, prove
from miles_router.shards.protocol import Beat, Decided, End, Life, Said, Welcome
from miles_router.shards.seats import life_of
from miles_router.state.locks import ByteLocks
from miles_router.state.store import StateStore
from miles_router.version import __version__

logger = logging.getLogger(__name__)

#: Seconds between two attempts to reach the leader, on this machine and on another; and seconds for which requests
#: wait for the leader.
AGAIN, FURTHER, PATIENCE = 0.05, 0.5, 30.0
#: Seconds between two attempts to claim a slot of the state directory.
UNCLAIMED = 1.0
#: How often a shard sends an ack within one lease; and the part of a lease after which a silent leader's connection is
#: closed. A lost machine or network may leave a connection open.
STAMPS, SILENT = 5, 0.5
#: The leader's messages that are handled in order.
ORDERED = frozenset({"welcome", "decided", "beat", "end", "refused", "ping", "counts", "counted"})


class Membership:
    """A shard's membership in its router.

    Args:
        process: the id of this process.
        fenced: called when another life has this seat, or this process cannot follow. What it holds in memory may then
            be untrue.
    """

    def __init__(self, seat: Seat, process: int, fenced: Callable[[], None]) -> None:
        self.seat = seat
        #: The handlers of the leader's requests, and the function that applies a state to this router.
        self.handlers: Mapping[str, Handler] = {}
        self.follow: Callable[[dict[str, Any]], Awaitable[None]]
        #: Fields about this router that are sent to the leader on each connection.
        self.introduction: Mapping[str, Any] = {}
        #: Called before this shard may act for the first time.
        self.begins: Callable[[], None] = lambda: None
        #: Called when this shard may act again.
        self.when_fresh: Callable[[], None] = lambda: None
        #: Called with the URL of a seat that has become empty or has moved.
        self.lost: Callable[[str], None] = lambda url: None
        self.store: StateStore | None = None
        self._fenced = fenced
        self._life = Life(seat.index, life_of(process), seat.shards.lease)
        self._urls: Mapping[int, str] = dict(enumerate(seat.urls))
        self._following = False
        self._channel: Channel | None = None
        self._connected, self._followed, self._seated = asyncio.Event(), asyncio.Event(), asyncio.Event()
        self._heard_at = 0.0

    # The right to act

    @property
    def is_fresh(self) -> bool:
        """Whether this shard may send generations and act for the sessions it owns."""
        return self._life.may_act(clock())

    def check(self) -> None:
        """Check that this shard may act now.

        Raises:
            Unavailable: it may not.
        """
        if not self.is_fresh:
            raise Unavailable("this shard has not heard from the leader for too long to act; ask again")

    def url_of(self, seat: int) -> str | None:
        """Return the URL of another shard, or None if its seat is empty."""
        return self._urls.get(seat)

    # Following

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Follow the leader while entered. Enter once this shard has a state and a seat."""
        self.begins()
        connecting = [tasks.spawn(self._stay_connected(), name="leader")]
        if not self.seat.shards.local:
            connecting.append(tasks.spawn(self._stay_fresh(), name="lease"))
        try:
            await self._followed.wait()
            await self._seated.wait()
            if self.seat.shards.shared_state:
                try:
                    await self._check_locks()
                except StateError as error:
                    self._end_it(str(error))
                await asyncio.gather(*map(self._claim, self.seat.slots))
            yield
        finally:
            for task in connecting:
                await tasks.cancelled(task)

    async def _stay_connected(self) -> None:
        local, reason = self.seat.shards.local, ""
        while True:
            try:
                reader, writer = await self._connect()
            except (OSError, ValueError) as error:  # ValueError: the file does not name the leader yet
                if not local and str(error) != reason:
                    reason = str(error)
                    logger.warning("leader_not_reached", extra={"fields": {"reason": reason}})
                await asyncio.sleep(AGAIN if local else FURTHER)
                continue
            reason = ""
            own = {"welcome": self._welcome, "decided": self._decided, "beat": self._beat, "end": self._end}
            own |= {"refused": self._refused, "ping": self._ping}
            self._channel = channel = Channel(reader, writer, {**self.handlers, **own}, ORDERED)
            reading = tasks.spawn(channel.run(), name="leader's channel")
            try:
                self._heard_at = clock()
                join = self._life.join(self._heard_at)
                channel.order(
                    "join",
                    b"" if join.state is None else json.dumps(join.state).encode(),
                    version=__version__,
                    shards=self.seat.shards.count,
                    seat=join.seat,
                    life=join.life,
                    fresh=join.fresh,
                    at=join.at,
                    url=self.seat.url,
                    **self.introduction,
                )
                await asyncio.wait({reading})
            finally:
                self._connected.clear()
                await tasks.cancelled(reading)
            logger.warning("leader_lost")
            await asyncio.sleep(AGAIN)  # a process that accepts connections may still be unable to lead

    async def _hear(self, said: Said) -> None:
        """Apply a message of the leader and acknowledge it."""
        was_fresh, self._heard_at = self.is_fresh, clock()
        before = self._life.at
        ack = self._life.hear(said, self._heard_at)
        if self._life.over:
            self._end_it("another process has its seat")
        if self._life.at != before and self._life.state is not None:
            self._following = True
            try:
                await self._follow(self._life.state)
            except Exception as error:  # the leader would not learn that this shard failed to follow
                self._end_it(f"state {self._life.at[1]} cannot be followed: {error!r}")
                raise
            self._following = False
        if ack is not None and self._channel is not None:
            self._channel.order("ack", term=ack.term, at=ack.number, stamp=ack.stamp)
        if self.is_fresh:
            self._seated.set()
            if not was_fresh:
                self.when_fresh()

    async def _follow(self, state: dict[str, Any]) -> None:
        told = {int(seat): url for seat, url in state[URLS].items()}
        before, self._urls = self._urls, dict(enumerate(self.seat.urls)) | told
        for seat, url in before.items():
            if self._urls.get(seat) != url and seat != self.seat.index:
                self.lost(url)
        await self.follow(state)
        self._followed.set()

    async def _welcome(self, message: Message) -> None:
        await self._hear(Welcome(message.fields["term"], message.fields["epoch"]))

    async def _decided(self, message: Message) -> None:
        state: Any = json.loads(message.blob)
        await self._hear(Decided(message.fields["term"], message.fields["at"], state))
        if self._followed.is_set():
            self._connected.set()  # only now: a leader that is ending may still accept connections

    async def _beat(self, message: Message) -> None:
        await self._hear(Beat(message.fields["term"], message.fields["stamp"]))

    async def _end(self, message: Message) -> None:
        await self._hear(End(message.fields["term"]))

    async def _refused(self, message: Message) -> None:
        self._end_it(message.fields["reason"])

    async def _ping(self, message: Message) -> None:
        """Note that the leader is alive. The empty reply is the answer."""
        self._heard_at = clock()

    def _end_it(self, reason: str) -> None:
        """End this process: what it holds in memory may be untrue."""
        logger.error("shard_fenced", extra={"fields": {"seat": self.seat.index, "reason": reason}})
        self._fenced()

    # Staying fresh

    async def _stay_fresh(self) -> None:
        seconds = self.seat.shards.lease
        while True:
            await asyncio.sleep(seconds / STAMPS)
            channel = self._channel
            if channel is None or channel.lost:
                continue
            if clock() - self._heard_at > SILENT * seconds:
                logger.error("leader_silent")
                channel.close()
                continue
            if self._following:  # otherwise this ack would claim a state that is not applied yet
                continue
            ack = self._life.ack(clock())
            channel.tell("ack", term=ack.term, at=ack.number, stamp=ack.stamp)

    async def _check_locks(self) -> None:
        """End this process if it can lock the byte that the leader has locked.

        Without working locks two owners of a slot could both commit.
        """
        assert self.store is not None
        directory = self.store.directory
        with closing(ByteLocks(directory)) as locks:  # shared lock: shards of one machine test at the same time
            while await asyncio.to_thread(locks.take, term := self._life.at[0], beside_others=True):
                with suppress(Unavailable):  # a lost leader has released its lock
                    if (await self.ask("term")).fields["term"] == term:
                        self._end_it(
                            f"state_dir: {directory}: the leader's lock is not seen here. It must be the leader's "
                            "directory, on a file system that keeps POSIX locks between machines"
                        )
                await asyncio.sleep(UNCLAIMED)

    async def _claim(self, slot: int) -> None:
        """Claim a slot of the shared state directory, which the previous life in this seat may have used."""
        assert self.store is not None
        assert self._life.epoch is not None
        while True:
            try:
                await self.store.claim(slot, self._life.epoch)
                return
            except StateOutdated as error:
                self._end_it(str(error))
            except StateError as error:
                logger.warning("slot_not_claimed", extra={"fields": {"slot": slot, "reason": str(error)}})
            await asyncio.sleep(UNCLAIMED)

    # Asking

    async def ask(self, what: str, blob: bytes = b"", **fields: Any) -> Message:
        """Send a request to the leader and return its reply.

        Raises:
            Unavailable: the leader is away, or was lost during the request and may have carried it out.
        """
        try:
            await tasks.within(PATIENCE, self._connected.wait(), name="wait for the leader")
        except TimeoutError:
            raise Unavailable("the router's leader cannot be reached; ask again") from None
        channel = self._channel
        assert channel is not None
        try:
            return await channel.ask(what, blob, **fields)
        except ChannelLost:
            if self._channel is channel:
                self._connected.clear()
            raise Unavailable("the router's leader was lost during the request, and may have carried it out") from None

    def tell(self, what: str, **fields: Any) -> None:
        """Send a message without a reply. It is dropped while the leader is away."""
        if self._channel is not None:
            self._channel.tell(what, **fields)

    # The connection

    async def _connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """Connect to the named leader. Give up as soon as a different leader is named.

        Raises:
            OSError: the leader cannot be reached or does not know the secret.
        """
        if self.seat.shards.local:
            return await asyncio.open_unix_connection(self.seat.directory / SOCKET)
        named, patience = self._named(), SILENT * self.seat.shards.lease
        reaching = asyncio.get_running_loop().create_task(self._reach(named), name="reach the leader")
        try:
            for _ in range(round(patience / AGAIN)):
                await asyncio.wait({reaching}, timeout=AGAIN)
                if reaching.done():
                    return reaching.result()
                if self._named() != named:
                    break
            raise ConnectionAbortedError(f"{named} has not answered")
        finally:
            if not reaching.done():
                await tasks.cancelled(reaching)

    def _named(self) -> str:
        leader = self.seat.leader
        return leader.read_text(encoding="ascii") if isinstance(leader, Path) else leader

    async def _reach(self, named: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        host, _, port = named.rpartition(":")
        reader, writer = await asyncio.open_connection(host.strip("[]"), int(port))
        try:
            await prove(reader, writer, self.seat.shards.secret, side=CONNECTS, other=ACCEPTS)
        except BaseException:
            writer.close()
            raise
        return reader, writer
