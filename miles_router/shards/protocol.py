"""The protocol between a router's leader and its shards: messages, leases and decisions.

It does no I/O. The caller passes the time in, carries messages in order, and asks which leader is the last.

A shard has a fixed number; an instance is one process that serves as this shard. An instance acts under a lease,
counted from when it sent the stamp that the leader echoes. The leader counts `SLACK` times as long, from when it
received the stamp. So clocks need not agree, as long as none runs a tenth faster than another. On one machine a lease
never ends, because the parent sees an instance end before it starts the next.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field
from typing import Any, NamedTuple

#: How much longer the leader counts a lease than the instance that holds it.
SLACK = 1.1
#: Stamps kept for each instance until they are echoed.
STAMPS = 8
#: A time before all others.
NEVER = float("-inf")
#: The low bits of an epoch, below its leader's term.
EPOCHS = 32


class Join(NamedTuple):
    """A shard's first message on each connection.

    Attributes:
        instance: a random name, new for each process.
        has_lease: the instance may act now, under a lease.
        at: term and number of the state that it acts by; (0, 0) if it has none.
        state: that state.
    """

    shard: int
    instance: str
    has_lease: bool
    at: tuple[int, int]
    state: Any


class Welcome(NamedTuple):
    """The leader's reply: the instance is active and commits under this epoch. None: it keeps its epoch."""

    term: int
    epoch: int | None


class StateUpdate(NamedTuple):
    """Everything that the leader has decided, as one numbered state."""

    term: int
    number: int
    state: Any


class Ack(NamedTuple):
    """A shard's report that it acts by a state: it starts no write that this state forbids.

    Sent for each state, and for each of the leader's pings. `stamp` is the shard's clock. `number` is -1 if the shard
    has no state of this term.
    """

    term: int
    number: int
    stamp: float


class LeaseRenewal(NamedTuple):
    """The leader's echo of a stamp. After receiving the stamp, the leader has confirmed that it is the last one."""

    term: int
    stamp: float


class End(NamedTuple):
    """The order to end, because another instance serves as the shard."""

    term: int


LeaderMessage = Welcome | StateUpdate | LeaseRenewal | End
LEADER_MESSAGES: dict[str, Any] = {kind.__name__: kind for kind in (Welcome, StateUpdate, LeaseRenewal, End)}
#: The leader's messages, each with the instance that receives it.
Outbox = list[tuple[str, LeaderMessage]]


@dataclass
class ActiveInstance:
    """The instance that serves as a shard, as the leader knows it.

    Attributes:
        lease_ends_at: when its lease has certainly run out.
        epoch: the epoch given to it. It is sent again on each connection, because a Welcome may be lost.
        acked: the number of the last state that it acts by.
        stamps: (time received, stamp), to be echoed.
        revoked: its successor has connected, so its lease is not renewed.
    """

    instance: str
    lease_ends_at: float
    epoch: int | None = None
    acked: int = -1
    stamps: deque[tuple[float, float]] = field(default_factory=lambda: deque(maxlen=STAMPS))
    revoked: bool = False


class Leader:
    """The leader's side of the protocol.

    It may decide once it is open. Then no shard acts by a state of another leader that this one does not know.

    Args:
        shards: how many there are.
        lease: seconds; infinite on one machine, where the parent sees an instance end before it starts the next.
        term: greater than every earlier leader's term.
        first: there was no leader before.
        stored: ((term, number), state) of the last decision that the store knows.
        one_leader_at_a_time: the platform sees a leader end before it starts the next. Otherwise the previous leader
            may act for one more lease, even if all shards are connected to this one.
    """

    def __init__(
        self,
        shards: int,
        lease: float,
        term: int,
        now: float,
        *,
        first: bool,
        stored: tuple[tuple[int, int], Any] = ((0, 0), None),
        one_leader_at_a_time: bool = False,
    ) -> None:
        self.term = term
        self.number, self.state = 0, None
        self.open = False
        self._shards = shards
        self._lease = lease
        self._opens_at = now if first else now + lease * SLACK
        self._known = stored
        self._local = math.isinf(lease)
        self._one_leader_at_a_time = one_leader_at_a_time
        self._active: dict[int, ActiveInstance] = {}
        self._waiting: dict[int, Join] = {}
        #: Shards without an acting instance, as reported by the process that starts instances.
        self._ended: set[int] = set()
        self._epochs = 0
        #: (time, number) of decisions, starting with the newest one that every shard must act by now.
        self._decisions: deque[tuple[float, int]] = deque()
        self._sole_until = NEVER

    # Joining

    def join(self, join: Join, now: float) -> Outbox:
        """Handle the first message of a connection."""
        self._known = max(self._known, (join.at, join.state), key=lambda known: known[0])
        self._ended.discard(join.shard)
        active = self._active.get(join.shard)
        if active is not None and active.instance == join.instance:  # the same instance has reconnected
            return [(join.instance, End(self.term))] if active.revoked else self._welcome(join.instance, active.epoch)
        if active is None and join.has_lease and not self.open:  # the previous leader activated it
            self._active[join.shard] = ActiveInstance(join.instance, now + self._lease * SLACK)
            return self._welcome(join.instance, None)
        if join.has_lease or join.at[0]:  # it served before the active instance
            return [(join.instance, End(self.term))]
        if active is not None:
            active.revoked = True
            if self._local:
                active.lease_ends_at = now
        self._waiting[join.shard] = join
        return []

    def disconnect(self, shard: int, instance: str) -> None:
        """Handle a lost connection.

        An active instance may still act for the rest of its lease. If its waiting successor disconnects, which has done
        nothing yet, the active instance stays active.
        """
        if shard in self._waiting and self._waiting[shard].instance == instance:
            del self._waiting[shard]
            if shard in self._active and not self._local:
                self._active[shard].revoked = False

    def record_end(self, shard: int, now: float) -> None:
        """Record a report of the supervisor: no instance of this shard acts any more."""
        self._ended.add(shard)
        if shard in self._active:
            self._active[shard].lease_ends_at = now

    # Time

    def record_ack(self, shard: int, instance: str, ack: Ack, now: float) -> bool:
        """Record an ack. Return whether `renew` is due: the ack says something new, and the instance may not act."""
        active = self._active.get(shard)
        if active is None or active.instance != instance or ack.term != self.term:
            return False
        is_new = ack.number > active.acked or not active.stamps
        active.acked = max(active.acked, ack.number)
        active.stamps.append((now, ack.stamp))
        return is_new and now >= active.lease_ends_at

    def renew(self, began: float, now: float) -> Outbox:
        """Renew leases and activate waiting instances. Return the messages to send.

        At `began` or later it was confirmed that there is no later leader.
        """
        self._sole_until = max(self._sole_until, began + self._lease)
        outbox: Outbox = []
        if not self.open and self._knows_all_shards(now):
            self.open = True
            (_, self.number), self.state = self._known
            self.number += 1
            for active in self._active.values():
                outbox += self._latest_state(active.instance)
        outbox += [(instance, LeaseRenewal(self.term, stamp)) for instance, stamp in self._renewals(began, now)]
        for shard, join in list(self._waiting.items()):
            outbox += self._activate(shard, join, now)
        return outbox

    def _knows_all_shards(self, now: float) -> bool:
        """Return whether no absent shard can act by another leader's state, and no other leader can act."""
        here = {*self._active, *(self._waiting if self._local else ()), *self._ended}
        return now >= self._opens_at or (self._one_leader_at_a_time and len(here) == self._shards)

    def _renewals(self, began: float, now: float) -> list[tuple[str, float]]:
        found = []
        for active in self._active.values():
            stamps = [each for each in active.stamps if each[0] <= began]
            if not stamps or active.revoked or (self.open and active.acked < self._required_number(now)):
                continue
            received, stamp = stamps[-1]
            active.lease_ends_at = max(active.lease_ends_at, received + self._lease * SLACK)
            found.append((active.instance, stamp))
        return found

    def _required_number(self, now: float) -> int:
        """Return the number of the state that every shard must act by now; leases behind it are not renewed."""
        return max((number for at, number in self._decisions if now - at > self._lease / 2), default=-1)

    def _activate(self, shard: int, join: Join, now: float) -> Outbox:
        before = self._active.get(shard)
        if (
            not self.open
            or (now < self._opens_at and not self._local)
            or (before is not None and now < before.lease_ends_at)
        ):
            return []
        del self._waiting[shard]
        self._epochs += 1
        active = self._active[shard] = ActiveInstance(join.instance, now, self.term << EPOCHS | self._epochs)
        ended: Outbox = [] if before is None else [(before.instance, End(self.term))]
        return ended + self._welcome(join.instance, active.epoch)

    def _welcome(self, instance: str, epoch: int | None) -> Outbox:
        """Send the newest state before any renewal: a lease must never be newer than the state its instance acts by."""
        return [(instance, Welcome(self.term, epoch)), *self._latest_state(instance)]

    def _latest_state(self, instance: str) -> Outbox:
        return [(instance, StateUpdate(self.term, self.number, self.state))] if self.open else []

    # Deciding

    def decide(self, state: Any, now: float) -> Outbox:
        """Decide a state and return the messages to send. Store first what must outlive all instances.

        Raises:
            ValueError: the leader is not open.
        """
        if not self.open:
            raise ValueError("a leader that is not open decides nothing")
        self.number, self.state = self.number + 1, state
        if not self._local:
            self._decisions.append((now, self.number))
            while len(self._decisions) > 1 and now - self._decisions[1][0] > self._lease / 2:
                self._decisions.popleft()
        return [message for active in self._active.values() for message in self._latest_state(active.instance)]

    def is_sole_leader(self, now: float) -> bool:
        """Return whether no later leader can have decided anything. Checked before each control request to engines."""
        return now < self._sole_until

    def lagging(self, number: int, now: float) -> dict[int, ActiveInstance]:
        """Return, by shard, the instances that may act but do not act by this number yet."""
        return {shard: each for shard, each in self.acting(now).items() if each.acked < number}

    def acting(self, now: float) -> dict[int, ActiveInstance]:
        """Return the instances that may act, by shard."""
        return {shard: each for shard, each in self._active.items() if now < each.lease_ends_at}


class Follower:
    """The shard's side of the protocol, for one instance."""

    def __init__(self, shard: int, instance: str, lease: float) -> None:
        #: Term and number of the state that this instance acts by.
        self.at = (0, 0)
        self.state: Any = None
        #: The epoch of its commits; None until it is active.
        self.epoch: int | None = None
        #: Whether another instance serves as the shard. This one's memory may then be outdated.
        self.replaced = False
        self._shard = shard
        self._instance = instance
        self._lease = lease
        self._term = 0
        self._lease_ends_at = NEVER

    def may_act(self, now: float) -> bool:
        """Return whether this instance may write a generation or commit now. Asked before each."""
        return not self.replaced and self.epoch is not None and now < self._lease_ends_at

    def join_message(self, now: float) -> Join:
        """Return the first message of a connection."""
        return Join(self._shard, self._instance, self.may_act(now), self.at, self.state)

    def handle(self, message: LeaderMessage, now: float) -> Ack | None:
        """Handle a message of the leader. Return the ack to send once the state is applied, or None."""
        if message.term < self._term or self.replaced:
            return None
        self._term = message.term
        if isinstance(message, End):
            self.replaced = True
        elif isinstance(message, Welcome):
            self.epoch = self.epoch if message.epoch is None else message.epoch
            return self.make_ack(now)
        elif isinstance(message, LeaseRenewal):
            self._lease_ends_at = max(self._lease_ends_at, message.stamp + self._lease)
        elif (message.term, message.number) > self.at:
            self.at, self.state = (message.term, message.number), message.state
            return self.make_ack(now)
        return None

    def make_ack(self, now: float) -> Ack:
        """Return an ack of the current state, with a stamp."""
        term, number = self.at
        return Ack(self._term, number if term == self._term else -1, now)
