"""The protocol between a router's leader and its shards: messages, leases and decisions.

It does no I/O. The caller passes the time in, carries messages in order, and asks the register which leader is the
last.

A seat is the number of a shard; a life is one process in it. A life acts under a lease, counted from when it sent the
stamp that the leader echoes. The leader counts `SLACK` times as long, from when it received the stamp. So clocks need
not agree, as long as none runs a tenth faster than another. On one machine a lease never ends, because the parent sees
a life end before it starts the next.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Any, NamedTuple

#: How much longer the leader counts a lease than the life that holds it.
SLACK = 1.1
#: Stamps kept for each life until they are echoed.
STAMPS = 8
#: A time before all others.
NEVER = float("-inf")
#: The low bits of an epoch, below its leader's term.
EPOCHS = 32


class Join(NamedTuple):
    """A shard's first message on each connection.

    Attributes:
        life: a random name, new for each process.
        fresh: the life may act now, under a lease.
        at: term and number of the state that it acts by; (0, 0) if it has none.
        state: that state.
    """

    seat: int
    life: str
    fresh: bool
    at: tuple[int, int]
    state: Any


class Welcome(NamedTuple):
    """The leader's reply: the life has its seat and commits under this epoch. None: it keeps its epoch."""

    term: int
    epoch: int | None


class Decided(NamedTuple):
    """Everything that the leader has decided, as one numbered state."""

    term: int
    number: int
    state: Any


class Ack(NamedTuple):
    """A shard's report that it acts by a state: it starts no write that this state forbids.

    Sent for each state, and several times within a lease. `stamp` is the shard's clock. `number` is -1 if the shard
    has no state of this term.
    """

    term: int
    number: int
    stamp: float


class Beat(NamedTuple):
    """The leader's echo of a stamp. After receiving the stamp, the leader has confirmed that it is the last leader."""

    term: int
    stamp: float


class End(NamedTuple):
    """The order to end, because another life has the seat."""

    term: int


Said = Welcome | Decided | Beat | End
#: The leader's messages, each with the life that receives it.
Told = list[tuple[str, Said]]


@dataclass
class Seated:
    """The life that has a seat, as the leader knows it.

    Attributes:
        until: when its lease has certainly run out.
        epoch: the epoch given to it. It is sent again on each connection, because a Welcome may be lost.
        acked: the number of the last state that it acts by.
        stamps: (time received, stamp), to be echoed.
        revoked: its successor has connected, so its lease is not prolonged.
    """

    life: str
    until: float
    epoch: int | None = None
    acked: int = -1
    stamps: deque[tuple[float, float]] = field(default_factory=lambda: deque(maxlen=STAMPS))
    revoked: bool = False


class Leader:
    """The leader's side of the protocol.

    It may decide once it is open. Then no shard acts by a state of another leader that this one does not know.

    Args:
        seats: the number of seats.
        lease: seconds; infinite on one machine.
        term: greater than that of every earlier leader.
        first: there was no leader before.
        stored: ((term, number), state) of the last decision that the store knows.
        local: on one machine, where the parent sees a life end before it starts the next.
        alone: the platform sees a leader end before it starts the next. Otherwise the previous leader may be certain
            for one more lease that it decides, even if all shards are here.
    """

    def __init__(
        self,
        seats: int,
        lease: float,
        term: int,
        now: float,
        *,
        first: bool,
        stored: tuple[tuple[int, int], Any],
        local: bool = False,
        alone: bool = False,
    ) -> None:
        self.term = term
        self.number, self.state = 0, None
        self.open = False
        self._seats = seats
        self._lease = lease
        self._opens = now if first else now + lease * SLACK
        self._known = stored
        self._local = local
        self._alone = alone
        self._seated: dict[int, Seated] = {}
        self._waiting: dict[int, Join] = {}
        #: Seats in which no life acts, as reported by the process that starts lives.
        self._empty: set[int] = set()
        self._epochs = 0
        #: (time, number) of decisions, starting with the newest one that every shard must act by now.
        self._decisions: deque[tuple[float, int]] = deque()
        self._certain = NEVER

    # Joining

    def join(self, join: Join, now: float) -> Told:
        """Handle the first message of a connection."""
        self._known = max(self._known, (join.at, join.state), key=lambda known: known[0])
        self._empty.discard(join.seat)
        seated = self._seated.get(join.seat)
        if seated is not None and seated.life == join.life:  # the same life has reconnected
            return [(join.life, End(self.term))] if seated.revoked else self._welcome(join.life, seated.epoch)
        if seated is None and join.fresh and not self.open:  # it got its seat from the previous leader
            self._seated[join.seat] = Seated(join.life, now + self._lease * SLACK)
            return self._welcome(join.life, None)
        if join.fresh or join.at[0]:  # it had the seat before the life that has it now
            return [(join.life, End(self.term))]
        if seated is not None:
            seated.revoked = True
            if self._local:
                seated.until = now
        self._waiting[join.seat] = join
        return []

    def left(self, seat: int, life: str) -> None:
        """Handle a lost connection.

        A seated life may still act for the rest of its lease. If its waiting successor leaves, which has done nothing
        yet, the seated life keeps the seat.
        """
        if seat in self._waiting and self._waiting[seat].life == life:
            del self._waiting[seat]
            if seat in self._seated and not self._local:
                self._seated[seat].revoked = False

    def ended(self, seat: int, now: float) -> None:
        """Record that no life in a seat acts, as the process that starts lives reports."""
        self._empty.add(seat)
        if seat in self._seated:
            self._seated[seat].until = now

    # Time

    def heard(self, seat: int, life: str, ack: Ack, now: float) -> None:
        """Record the ack of a life."""
        seated = self._seated.get(seat)
        if seated is not None and seated.life == life and ack.term == self.term:
            seated.acked = max(seated.acked, ack.number)
            seated.stamps.append((now, ack.stamp))

    def confirmed(self, began: float, now: float) -> Told:
        """Prolong leases and give free seats to waiting lives. Return the messages to send.

        The register, asked at `began`, has confirmed that there is no later leader.
        """
        self._certain = max(self._certain, began + self._lease)
        told: Told = []
        if not self.open and self._knows_all(now):
            self.open = True
            (_, self.number), self.state = self._known
            self.number += 1
            for seated in self._seated.values():
                told += self._news(seated.life)
        told += [(life, Beat(self.term, stamp)) for life, stamp in self._prolonged(began, now)]
        for seat, join in list(self._waiting.items()):
            told += self._seat(seat, join, now)
        return told

    def _knows_all(self, now: float) -> bool:
        """Return whether no absent shard can act by another leader's state, and no other leader can act."""
        here = {*self._seated, *(self._waiting if self._local else ()), *self._empty}
        return now >= self._opens or (self._alone and len(here) == self._seats)

    def _prolonged(self, began: float, now: float) -> list[tuple[str, float]]:
        found = []
        for seated in self._seated.values():
            stamps = [each for each in seated.stamps if each[0] <= began]
            if not stamps or seated.revoked or (self.open and seated.acked < self._due(now)):
                continue
            received, stamp = stamps[-1]
            seated.until = max(seated.until, received + self._lease * SLACK)
            found.append((seated.life, stamp))
        return found

    def _due(self, now: float) -> int:
        """Return the number of the state that every shard must act by now. A life behind it is not prolonged."""
        return max((number for at, number in self._decisions if now - at > self._lease / 2), default=-1)

    def _seat(self, seat: int, join: Join, now: float) -> Told:
        before = self._seated.get(seat)
        if not self.open or (now < self._opens and not self._local) or (before is not None and now < before.until):
            return []
        del self._waiting[seat]
        self._epochs += 1
        seated = self._seated[seat] = Seated(join.life, now, self.term << EPOCHS | self._epochs)
        ended: Told = [] if before is None else [(before.life, End(self.term))]
        return ended + self._welcome(join.life, seated.epoch)

    def _welcome(self, life: str, epoch: int | None) -> Told:
        """Send the newest state before any beat: a lease must never be newer than the state its life acts by."""
        return [(life, Welcome(self.term, epoch)), *self._news(life)]

    def _news(self, life: str) -> Told:
        return [(life, Decided(self.term, self.number, self.state))] if self.open else []

    # Deciding

    def decide(self, state: Any, now: float) -> Told:
        """Decide a state and return the messages to send. Store first what must outlive all lives.

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
        return [told for seated in self._seated.values() for told in self._news(seated.life)]

    def is_settled(self, number: int, now: float) -> bool:
        """Return whether every life that may still act acts by this number."""
        return self.open and not self.late(number, now)

    def is_certain(self, now: float) -> bool:
        """Return whether no later leader can have decided anything. Asked before each control request to engines."""
        return now < self._certain

    def late(self, number: int, now: float) -> dict[int, Seated]:
        """Return, by seat, the lives that may act but do not act by this number yet."""
        return {seat: each for seat, each in self.acting(now).items() if each.acked < number}

    def acting(self, now: float) -> dict[int, Seated]:
        """Return the lives that may act, by seat."""
        return {seat: each for seat, each in self._seated.items() if now < each.until}


class Life:
    """A process in a seat: the shard's side of the protocol."""

    def __init__(self, seat: int, life: str, lease: float) -> None:
        #: Term and number of the state that this life acts by.
        self.at = (0, 0)
        self.state: Any = None
        #: The epoch of its commits; None until it has the seat.
        self.epoch: int | None = None
        #: Whether another life has the seat. What this one holds in memory may then be untrue.
        self.over = False
        self._seat = seat
        self._life = life
        self._lease = lease
        self._term = 0
        self._until = NEVER

    def may_act(self, now: float) -> bool:
        """Return whether this life may write a generation or commit now. Asked before each."""
        return not self.over and self.epoch is not None and now < self._until

    def join(self, now: float) -> Join:
        """Return the first message of a connection."""
        return Join(self._seat, self._life, self.may_act(now), self.at, self.state)

    def hear(self, said: Said, now: float) -> Ack | None:
        """Handle a message of the leader. Return the ack to send once the state is applied, or None."""
        if said.term < self._term or self.over:
            return None
        self._term = said.term
        if isinstance(said, End):
            self.over = True
        elif isinstance(said, Welcome):
            self.epoch = self.epoch if said.epoch is None else said.epoch
            return self.ack(now)
        elif isinstance(said, Beat):
            self._until = max(self._until, said.stamp + self._lease)
        elif (said.term, said.number) > self.at:
            self.at, self.state = (said.term, said.number), said.state
            return self.ack(now)
        return None

    def ack(self, now: float) -> Ack:
        """Return an ack of the current state, with a stamp."""
        term, number = self.at
        return Ack(self._term, number if term == self._term else -1, now)
