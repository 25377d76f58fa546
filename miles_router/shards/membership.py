"""One shard's connection to the leader: its lease, and the state that it follows."""

from __future__ import annotations

import asyncio
import json
import logging
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager, closing, suppress
from pathlib import Path
from typing import Any

from miles_router import tasks
from miles_router.errors import StateError, StateOutdated, Unavailable
from miles_router.shards.channel import Channel, Handler, Message
from miles_router.shards.proof import prove
from miles_router.shards.protocol import LEADER_MESSAGES, Follower, LeaderMessage, StateUpdate
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
#: The part of a lease after which a silent leader's connection is closed: a lost machine or network may leave a
#: connection open. And how often within this time that is checked.
MAX_SILENCE, CHECKS = 0.5, 4


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
        self._follower = Follower(shard.index, f"{process}-{secrets.token_hex(8)}", shard.shards.lease)
        self._urls: Mapping[int, str] = dict(enumerate(shard.urls))
        self._channel: Channel | None = None
        #: Set while the leader answers requests; and once this shard follows a state and may act.
        self._connected, self._started = asyncio.Event(), asyncio.Event()
        #: When the leader last showed that it leads. It may live, and not be able to.
        self._led_at = 0.0

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
        connecting = tasks.spawn(self._stay_connected(), name="leader")
        try:
            await self._started.wait()
            if self.shard.shards.shared_state:
                try:
                    await self._check_locks()
                except StateError as error:
                    self._fence(str(error))
                await asyncio.gather(*map(self._claim, self.shard.slots))
            yield
        finally:
            await tasks.cancelled(connecting)

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
            own = {"protocol": self._receive, "refused": self._refused, "ping": self._acknowledge}
            self._channel = channel = Channel(reader, writer, {**self.handlers, **own})
            join = self._follower.join_message(clock())
            channel.send(
                "join",
                join.state or b"",
                version=__version__,
                shards=self.shard.shards.count,
                join=join[:-1],
                url=self.shard.url,
                **self.join_fields,
            )
            try:
                await self._read(channel)
            finally:
                self._connected.clear()
            logger.warning("leader_lost")
            await asyncio.sleep(LOCAL_RETRY)  # a process that accepts connections may still be unable to lead

    async def _read(self, channel: Channel) -> None:
        """Handle the leader's messages until the connection is lost, or the leader is silent for too long."""
        silence = None if self.shard.shards.local else MAX_SILENCE * self.shard.shards.lease
        self._led_at = clock()
        reading = tasks.spawn(channel.run(), name="leader's channel")
        try:
            while not reading.done():
                await asyncio.wait({reading}, timeout=silence and silence / CHECKS)
                if silence is not None and not channel.lost and clock() - self._led_at > silence:
                    logger.error("leader_silent")
                    channel.close()  # `run` then ends, but not in the middle of a state that is being applied
        finally:
            await tasks.cancelled(reading)

    async def _receive(self, message: Message) -> None:
        """Apply a message of the leader's protocol and acknowledge it."""
        self._led_at = clock()
        fields, could_act, before = message.fields, self.may_act, self._follower.at
        kind = LEADER_MESSAGES[fields.pop("kind")]
        told: LeaderMessage = kind(**fields, state=message.blob) if kind is StateUpdate else kind(**fields)
        ack = self._follower.handle(told, clock())
        if self._follower.replaced:
            self._fence("another process serves as this shard")
        if self._follower.at != before and message.blob:
            try:
                await self._follow(json.loads(message.blob))
            except Exception as error:  # the leader would not learn that this shard failed to follow
                self._fence(f"state {self._follower.at[1]} cannot be followed: {error!r}")
                raise
        if ack is not None:
            await self._acknowledge(message)
        if message.blob:
            self._connected.set()  # only now: a leader that is ending may still accept connections
        if self.may_act:
            if self._follower.state:
                self._started.set()
            if not could_act:
                self.on_lease_gained()

    async def _follow(self, state: dict[str, Any]) -> None:
        decided = {int(shard): url for shard, url in state["urls"].items()}
        before, self._urls = self._urls, dict(enumerate(self.shard.urls)) | decided
        for shard, url in before.items():
            if self._urls.get(shard) != url and shard != self.shard.index:
                self.on_shard_lost(url)
        await self.follow(state)

    async def _acknowledge(self, message: Message) -> None:
        """Send an ack with a new stamp, after all states that came before this message are applied."""
        self._led_at = clock()
        self.try_send("ack", **self._follower.make_ack(clock())._asdict())

    async def _refused(self, message: Message) -> None:
        self._fence(message.fields["reason"])

    def _fence(self, reason: str) -> None:
        """End this process: its memory may be outdated."""
        logger.error("shard_fenced", extra={"fields": {"shard": self.shard.index, "reason": reason}})
        self._on_fenced()

    # The shared state directory

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
        reply = await channel.ask(message_type, blob, **fields)
        if reply is None:
            if self._channel is channel:
                self._connected.clear()
            raise Unavailable("the router's leader was lost during the request, and may have carried it out")
        return reply

    def try_send(self, message_type: str, **fields: Any) -> None:
        """Send a message without a reply. It is dropped while the leader is away."""
        if self._channel is not None:
            self._channel.try_send(message_type, **fields)

    # The connection

    async def _connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """Connect to the leader.

        Raises:
            OSError: the leader cannot be reached or does not know the secret.
        """
        if self.shard.shards.local:
            return await asyncio.open_unix_connection(self.shard.directory / SOCKET)
        leader, patience = self.shard.leader, MAX_SILENCE * self.shard.shards.lease
        address = leader.read_text(encoding="ascii") if isinstance(leader, Path) else leader
        return await tasks.within(patience, self._connect_to(address), name="reach the leader")

    async def _connect_to(self, address: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        host, _, port = address.rpartition(":")
        reader, writer = await asyncio.open_connection(host.strip("[]"), int(port))
        try:
            await prove(reader, writer, self.shard.shards.secret, accepts=False)
        except BaseException:
            writer.close()
            raise
        return reader, writer
