"""One shard's connection to the leader: its lease, and the state that it follows."""

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
from miles_router.shards.coordinator import new_instance_id
from miles_router.shards.leader import URLS
from miles_router.shards.proof import ACCEPTS, CONNECTS, prove
from miles_router.shards.protocol import End, Follower, LeaderMessage, LeaseRenewal, StateUpdate, Welcome
from miles_router.shards.topology import SOCKET, Shard, clock
from miles_router.state.locks import ByteLocks
from miles_router.state.store import StateStore
from miles_router.version import __version__

logger = logging.getLogger(__name__)

#: Seconds between two attempts to reach the leader, on this machine and on another; and seconds for which requests
#: wait for the leader.
LOCAL_RETRY, REMOTE_RETRY, PATIENCE = 0.05, 0.5, 30.0
#: Seconds between two attempts to claim a slot of the state directory.
CLAIM_RETRY = 1.0
#: How often a shard sends an ack within one lease; and the part of a lease after which a silent leader's connection is
#: closed. A lost machine or network may leave a connection open.
ACKS_PER_LEASE, MAX_SILENCE = 5, 0.5
#: The leader's messages that are handled in order.
ORDERED = frozenset({"welcome", "state", "renewal", "end", "refused", "ping", "loads", "peer_loads"})


class Membership:
    """A shard's membership in its router.

    Args:
        process: the id of this process.
        on_fenced: called when another instance serves as this shard, or this process cannot follow. Its memory may then
            be outdated.
    """

    def __init__(self, shard: Shard, process: int, on_fenced: Callable[[], None]) -> None:
        self.shard = shard
        #: The handlers of the leader's requests, and the function that applies a state to this router.
        self.handlers: Mapping[str, Handler] = {}
        self.follow: Callable[[dict[str, Any]], Awaitable[None]]
        #: Fields about this router that are sent to the leader on each connection.
        self.join_fields: Mapping[str, Any] = {}
        #: Called before this shard may act for the first time.
        self.before_start: Callable[[], None] = lambda: None
        #: Called when this shard may act from now on, for the first time or again.
        self.on_lease_gained: Callable[[], None] = lambda: None
        #: Called with the old URL of a shard that has no process any more, or has moved.
        self.on_shard_lost: Callable[[str], None] = lambda url: None
        self.store: StateStore | None = None
        self._on_fenced = on_fenced
        self._follower = Follower(shard.index, new_instance_id(process), shard.shards.lease)
        self._urls: Mapping[int, str] = dict(enumerate(shard.urls))
        self._following = False
        self._channel: Channel | None = None
        self._connected, self._followed, self._activated = asyncio.Event(), asyncio.Event(), asyncio.Event()
        self._last_message_at = 0.0

    # The right to act

    @property
    def may_act(self) -> bool:
        """Whether this shard may send generations and act for the sessions it owns."""
        return self._follower.may_act(clock())

    def check(self) -> None:
        """Check that this shard may act now.

        Raises:
            Unavailable: this shard has no valid lease.
        """
        if not self.may_act:
            raise Unavailable("this process has lost contact with the leader and may not act; send the request again")

    def url_of(self, shard: int) -> str | None:
        """Return the URL of another shard, or None while it has no process."""
        return self._urls.get(shard)

    # Following

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Follow the leader while entered. Enter once this instance has a state and is active."""
        self.before_start()
        connecting = [tasks.spawn(self._stay_connected(), name="leader")]
        if not self.shard.shards.local:
            connecting.append(tasks.spawn(self._renew_lease(), name="lease"))
        try:
            await self._followed.wait()
            await self._activated.wait()
            if self.shard.shards.shared_state:
                try:
                    await self._check_locks()
                except StateError as error:
                    self._fence(str(error))
                await asyncio.gather(*map(self._claim, self.shard.slots))
            yield
        finally:
            for task in connecting:
                await tasks.cancelled(task)

    async def _stay_connected(self) -> None:
        local, reason = self.shard.shards.local, ""
        while True:
            try:
                reader, writer = await self._connect()
            except (OSError, ValueError) as error:  # ValueError: the file does not name the leader yet
                if not local and str(error) != reason:
                    reason = str(error)
                    logger.warning("leader_not_reached", extra={"fields": {"reason": reason}})
                await asyncio.sleep(LOCAL_RETRY if local else REMOTE_RETRY)
                continue
            reason = ""
            own = {"welcome": self._accept, "state": self._update_state, "renewal": self._renew, "end": self._shut_down}
            own |= {"refused": self._refused, "ping": self._ping}
            self._channel = channel = Channel(reader, writer, {**self.handlers, **own}, ORDERED)
            reading = tasks.spawn(channel.run(), name="leader's channel")
            try:
                self._last_message_at = clock()
                join = self._follower.join_message(self._last_message_at)
                channel.send(
                    "join",
                    b"" if join.state is None else json.dumps(join.state).encode(),
                    version=__version__,
                    shards=self.shard.shards.count,
                    shard=join.shard,
                    instance=join.instance,
                    has_lease=join.has_lease,
                    at=join.at,
                    url=self.shard.url,
                    **self.join_fields,
                )
                await asyncio.wait({reading})
            finally:
                self._connected.clear()
                await tasks.cancelled(reading)
            logger.warning("leader_lost")
            await asyncio.sleep(LOCAL_RETRY)  # a process that accepts connections may still be unable to lead

    async def _handle(self, message: LeaderMessage) -> None:
        """Apply a message of the leader and acknowledge it."""
        could_act, self._last_message_at = self.may_act, clock()
        before = self._follower.at
        ack = self._follower.handle(message, self._last_message_at)
        if self._follower.replaced:
            self._fence("another process serves as this shard")
        if self._follower.at != before and self._follower.state is not None:
            self._following = True
            try:
                await self._follow(self._follower.state)
            except Exception as error:  # the leader would not learn that this shard failed to follow
                self._fence(f"state {self._follower.at[1]} cannot be followed: {error!r}")
                raise
            self._following = False
        if ack is not None and self._channel is not None:
            self._channel.send("ack", term=ack.term, at=ack.number, stamp=ack.stamp)
        if self.may_act:
            self._activated.set()
            if not could_act:
                self.on_lease_gained()

    async def _follow(self, state: dict[str, Any]) -> None:
        decided = {int(shard): url for shard, url in state[URLS].items()}
        before, self._urls = self._urls, dict(enumerate(self.shard.urls)) | decided
        for shard, url in before.items():
            if self._urls.get(shard) != url and shard != self.shard.index:
                self.on_shard_lost(url)
        await self.follow(state)
        self._followed.set()

    async def _accept(self, message: Message) -> None:
        await self._handle(Welcome(message.fields["term"], message.fields["epoch"]))

    async def _update_state(self, message: Message) -> None:
        state: Any = json.loads(message.blob)
        await self._handle(StateUpdate(message.fields["term"], message.fields["at"], state))
        if self._followed.is_set():
            self._connected.set()  # only now: a leader that is ending may still accept connections

    async def _renew(self, message: Message) -> None:
        await self._handle(LeaseRenewal(message.fields["term"], message.fields["stamp"]))

    async def _shut_down(self, message: Message) -> None:
        await self._handle(End(message.fields["term"]))

    async def _refused(self, message: Message) -> None:
        self._fence(message.fields["reason"])

    async def _ping(self, message: Message) -> None:
        """Note that the leader is alive. The empty reply is the answer."""
        self._last_message_at = clock()

    def _fence(self, reason: str) -> None:
        """End this process: its memory may be outdated."""
        logger.error("shard_fenced", extra={"fields": {"shard": self.shard.index, "reason": reason}})
        self._on_fenced()

    # Renewing the lease

    async def _renew_lease(self) -> None:
        seconds = self.shard.shards.lease
        while True:
            await asyncio.sleep(seconds / ACKS_PER_LEASE)
            channel = self._channel
            if channel is None or channel.lost:
                continue
            if clock() - self._last_message_at > MAX_SILENCE * seconds:
                logger.error("leader_silent")
                channel.close()
                continue
            if self._following:  # otherwise this ack would claim a state that is not applied yet
                continue
            ack = self._follower.make_ack(clock())
            channel.try_send("ack", term=ack.term, at=ack.number, stamp=ack.stamp)

    async def _check_locks(self) -> None:
        """End this process if it can lock the byte that the leader has locked.

        Without working locks two owners of a slot could both commit.
        """
        assert self.store is not None
        directory = self.store.directory
        with closing(ByteLocks(directory)) as locks:  # shared lock: shards of one machine test at the same time
            while await asyncio.to_thread(locks.lock, term := self._follower.at[0], shared=True):
                with suppress(Unavailable):  # a lost leader has released its lock
                    if (await self.ask("term")).fields["term"] == term:
                        self._fence(
                            f"state_dir: {directory}: the leader's lock is not seen here. It must be the leader's "
                            "directory, on a file system that keeps POSIX locks between machines"
                        )
                await asyncio.sleep(CLAIM_RETRY)

    async def _claim(self, slot: int) -> None:
        """Claim a slot of the shared state directory, which the previous instance of this shard may have used."""
        assert self.store is not None
        assert self._follower.epoch is not None
        while True:
            try:
                await self.store.claim(slot, self._follower.epoch)
                return
            except StateOutdated as error:
                self._fence(str(error))
            except StateError as error:
                logger.warning("slot_not_claimed", extra={"fields": {"slot": slot, "reason": str(error)}})
            await asyncio.sleep(CLAIM_RETRY)

    # Asking

    async def ask(self, message_type: str, blob: bytes = b"", **fields: Any) -> Message:
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
            return await channel.ask(message_type, blob, **fields)
        except ChannelLost:
            if self._channel is channel:
                self._connected.clear()
            raise Unavailable("the router's leader was lost during the request, and may have carried it out") from None

    def try_send(self, message_type: str, **fields: Any) -> None:
        """Send a message without a reply. It is dropped while the leader is away."""
        if self._channel is not None:
            self._channel.try_send(message_type, **fields)

    # The connection

    async def _connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """Connect to the leader. Give up as soon as the leader has another address.

        Raises:
            OSError: the leader cannot be reached or does not know the secret.
        """
        if self.shard.shards.local:
            return await asyncio.open_unix_connection(self.shard.directory / SOCKET)
        address, patience = self._leader_address(), MAX_SILENCE * self.shard.shards.lease
        reaching = asyncio.get_running_loop().create_task(self._connect_to(address), name="reach the leader")
        try:
            for _ in range(round(patience / LOCAL_RETRY)):
                await asyncio.wait({reaching}, timeout=LOCAL_RETRY)
                if reaching.done():
                    return reaching.result()
                if self._leader_address() != address:
                    break
            raise ConnectionAbortedError(f"{address} has not answered")
        finally:
            if not reaching.done():
                await tasks.cancelled(reaching)

    def _leader_address(self) -> str:
        leader = self.shard.leader
        return leader.read_text(encoding="ascii") if isinstance(leader, Path) else leader

    async def _connect_to(self, address: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        host, _, port = address.rpartition(":")
        reader, writer = await asyncio.open_connection(host.strip("[]"), int(port))
        try:
            await prove(reader, writer, self.shard.shards.secret, side=CONNECTS, other=ACCEPTS)
        except BaseException:
            writer.close()
            raise
        return reader, writer
