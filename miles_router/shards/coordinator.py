"""The leader's view of its shards: which of them may act, by which state, their requests in flight, and their replies.

The protocol determines which shards may act. On one machine a shard that does not follow in time is killed, since its
lease never ends. On several machines the leader waits until the lease has run out.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

from miles_router import tasks
from miles_router.errors import RouterError
from miles_router.shards.channel import Channel, Message
from miles_router.shards.peer_loads import PoolLoad, subtract_load, sum_loads
from miles_router.shards.protocol import Ack, ActiveInstance, Join, Leader, Outbox
from miles_router.shards.topology import Shards, clock

logger = logging.getLogger(__name__)

#: Seconds in which a shard on the same machine must follow; and seconds in which a shard must report its numbers.
FOLLOW_TIMEOUT, REPLY_TIMEOUT = 10.0, 2.0
#: Seconds between two checks whether all shards follow; and between two rounds until a leader on one machine is open.
POLL_INTERVAL, OPENING_ROUND = 0.005, 0.02
#: How often within one lease the leader confirms that it is the last one; and the seconds between two rounds on one
#: machine, where it always is.
ROUNDS_PER_LEASE, LOCAL_ROUND = 10, 1.0


class ShardConnection(NamedTuple):
    """One connection of an instance."""

    channel: Channel
    join: Join
    url: str


class ShardCoordinator:
    """The leader's end of all shards: their connections, leases, states and loads.

    Args:
        shards: the shards of the router.
        dump_state: returns the state that is decided now, by section name.
        confirm: returns whether this is the last leader.
        process_id_at: returns the id of a shard's process, or 0 if there is none. None on several machines, where the
            ids are unknown.
    """

    def __init__(
        self,
        shards: Shards,
        dump_state: Callable[[], dict[str, Any]],
        confirm: Callable[[], Awaitable[bool]],
        process_id_at: Callable[[int], int] | None,
    ) -> None:
        self.shards = shards
        self._dump_state = dump_state
        self._confirm = confirm
        self._process_id_at = process_id_at
        self.leader: Leader
        #: Set once `dump_state` returns a complete state.
        self.restored = asyncio.Event()
        self._connections: dict[str, ShardConnection] = {}
        #: The last known URL of each shard.
        self._urls: dict[int, str] = {}
        #: The loads of each instance, by pool.
        self._loads: dict[str, dict[str, PoolLoad]] = {}
        self._wakeup = asyncio.Event()

    # Leading

    def start_term(self, term: int, *, first: bool) -> None:
        """Become the leader of this term."""
        shards = self.shards
        self.leader = Leader(
            shards.count,
            shards.lease,
            term,
            clock(),
            first=first,
            one_leader_at_a_time=not shards.shared_state,
        )

    async def lead(self) -> None:
        """Activate instances and renew their leases, until cancelled."""
        shards = self.shards
        every = LOCAL_ROUND if shards.local else shards.lease / ROUNDS_PER_LEASE
        opening = OPENING_ROUND if shards.local else every
        while True:
            self._record_ended_processes()
            began = clock()
            if await self._confirm():
                self._send(self.leader.renew(began, clock()))
                for connection in tuple(self._connections.values()):
                    connection.channel.try_send("ping")  # a waiting instance would take silence for a lost leader
                    if clock() - connection.channel.heard_at > shards.lease:  # its machine or network is lost
                        connection.channel.close()
            with suppress(TimeoutError):
                await tasks.within(every if self.leader.open else opening, self._wakeup.wait(), name="wait for a shard")
            self._wakeup.clear()

    def add_connection(self, connection: ShardConnection) -> None:
        """Register a connection, and close an older one of the same instance."""
        instance = connection.join.instance
        before, self._connections[instance] = self._connections.get(instance), connection
        if before is not None:
            before.channel.close()
        self._send(self.leader.join(connection.join, clock()))
        self._wakeup.set()

    def remove_connection(self, connection: ShardConnection) -> None:
        """Handle a lost connection. The shard may still act."""
        join = connection.join
        if self._connections.get(join.instance) is connection:
            del self._connections[join.instance]
            self.leader.disconnect(join.shard, join.instance)
            self._wakeup.set()

    def record_ack(self, connection: ShardConnection, ack: Ack) -> None:
        if self.leader.record_ack(connection.join.shard, connection.join.instance, ack, clock()):
            self._wakeup.set()

    def acting(self) -> dict[int, ActiveInstance]:
        """Return the instances that may act, by shard."""
        self._record_ended_processes()
        return self.leader.acting(clock())

    def processes(self) -> list[int]:
        """Return the process ids of the acting instances."""
        return [process_id_of(each.instance) for each in self.acting().values()]

    def urls(self) -> dict[str, str]:
        """Return the URL of each shard that has an acting instance."""
        acting = self.acting()
        for shard, each in acting.items():
            if each.instance in self._connections:
                self._urls[shard] = self._connections[each.instance].url
        return {str(shard): url for shard, url in self._urls.items() if shard in acting}

    def _record_ended_processes(self) -> None:
        if self._process_id_at is None:
            return
        acting = self.leader.acting(clock())
        for shard in range(self.shards.count):
            process = self._process_id_at(shard)
            if not process or (shard in acting and process != process_id_of(acting[shard].instance)):
                self.leader.record_end(shard, clock())

    def _send(self, outbox: Outbox) -> None:
        """Send the protocol's messages. An instance without a connection gets them when it connects."""
        for instance, message in outbox:
            if (connection := self._connections.get(instance)) is not None:
                fields = message._asdict()
                state = fields.pop("state", None)
                connection.channel.send("protocol", state or b"", kind=type(message).__name__, **fields)

    # Deciding

    def publish(self) -> None:
        """Decide and publish the current state if it has changed."""
        if self.restored.is_set() and (state := json.dumps(self._dump_state()).encode()) != self.leader.state:
            self._send(self.leader.decide(state, clock()))

    async def wait_for_shards(self) -> None:
        """Return when every shard that may act is connected and acts by the current state.

        On one machine, kill a shard that does not follow within `FOLLOW_TIMEOUT` seconds.
        """
        self.publish()
        number, since = self.leader.number, dict[str, float]()
        while lagging := self._lagging(number):
            now = clock()
            since = {each.instance: since.get(each.instance, now) for each in lagging.values()}
            for instance, began in since.items():
                if self.shards.local and now - began > FOLLOW_TIMEOUT:
                    _kill(process_id_of(instance))  # it counts as acting until its parent has seen its end
                    since[instance] = now
            await asyncio.sleep(POLL_INTERVAL)

    def _lagging(self, number: int) -> dict[int, ActiveInstance]:
        disconnected = {shard: each for shard, each in self.acting().items() if each.instance not in self._connections}
        return {**self.leader.lagging(number, clock()), **disconnected}

    # Loads

    def record_loads(self, connection: ShardConnection, message: Message) -> None:
        """Record the loads that a shard reports, by pool."""
        loads = {name: PoolLoad(*load) for name, load in message.fields["loads"].items()}
        self._loads[connection.join.instance] = loads

    async def refresh_loads(self) -> bool:
        """Ask all shards for their loads. Return whether every acting shard has answered."""
        answered = await asyncio.gather(*map(self._refresh_load, tuple(self._connections.values())))
        self._forget_ended_instances()
        return {each.instance for each in self.acting().values()}.issubset(answered)

    async def _refresh_load(self, connection: ShardConnection) -> str | None:
        """Ask a shard for its loads. Return its instance if it has answered."""
        reply = await _ask_in_time(connection, "loads")
        if reply is None:
            return None
        self.record_loads(connection, reply)
        return connection.join.instance

    def _forget_ended_instances(self) -> None:
        known = {*self._connections, *(each.instance for each in self.acting().values())}
        self._loads = {instance: loads for instance, loads in self._loads.items() if instance in known}

    def load_of(self, pool: str) -> PoolLoad:
        """Return the load of all shards in a pool."""
        return sum_loads(loads[pool] for loads in self._loads.values() if pool in loads)

    def send_peer_loads(self, pools: Sequence[str]) -> None:
        """Send each shard the load of all others."""
        self._forget_ended_instances()
        whole = {name: self.load_of(name) for name in pools}
        for instance, connection in self._connections.items():
            own = self._loads.get(instance, {})
            others = {name: subtract_load(load, own[name]) if name in own else load for name, load in whole.items()}
            connection.channel.try_send("peer_loads", loads=others)

    # Asking

    async def ask_all(self, message_type: str, **fields: Any) -> list[Message]:
        """Return the replies of all acting shards. A shard whose connection is lost before its reply is left out.

        A shard that hangs is waited for until its parent kills it, or until `lead` closes its connection.
        """
        await self.wait_for_shards()
        acting = [each.instance for each in self.acting().values() if each.instance in self._connections]
        asking = [self._connections[instance].channel.ask(message_type, **fields) for instance in acting]
        answers = await asyncio.gather(*asking)
        return [each for each in answers if each is not None]

    async def ask_responsive(self, message_type: str) -> list[Message]:
        """Return the replies of the shards that answer within `REPLY_TIMEOUT` seconds."""
        answers = await asyncio.gather(
            *(_ask_in_time(each, message_type) for each in tuple(self._connections.values()))
        )
        return [each for each in answers if each is not None]


def _kill(process: int) -> None:
    logger.error("process_does_not_follow", extra={"fields": {"process": process}})
    with suppress(ProcessLookupError):
        os.kill(process, signal.SIGKILL)


def process_id_of(instance: str) -> int:
    """Return the process id of an instance, with which its name begins."""
    return int(instance.partition("-")[0])


async def _ask_in_time(connection: ShardConnection, message_type: str) -> Message | None:
    """Return one shard's reply, or None if there is none in time."""
    with suppress(TimeoutError, RouterError):  # RouterError: the shard has logged its failure
        return await tasks.within(REPLY_TIMEOUT, connection.channel.ask(message_type), name=message_type)
    return None
