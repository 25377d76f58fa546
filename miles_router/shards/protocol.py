"""What the leader of a router and its shards say to each other, and who may act. Pure: the caller says what time it is,
carries the messages in order, and asks the register which leader is the last one.

A seat is the number of a shard, a life is one process in it. A life acts under a lease: it counts that from when it
sent the stamp that the leader echoes, and the leader counts `SLACK` times as long from when it received the stamp. So
clocks need not agree, if only none runs a tenth faster than another. On one machine a lease has no end: whoever starts
a life has seen the one before it end.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Any, NamedTuple

#: How much longer the leader counts a lease than the life that has it.
SLACK = 1.1
#: Stamps of a life that wait to be echoed.
STAMPS = 8
#: Before any time.
NEVER = float("-inf")
#: Bits of an epoch below its leader's term.
EPOCHS = 32


class Join(NamedTuple):
    """A shard's first message on each connection.

    Attributes:
        life: made by chance, new with each process.
        fresh: it acts now, under a lease.
        at: term and number of the state by which it acts; zeros where it has none.
        state: that state.
    """

    seat: int
    life: str
    fresh: bool
    at: tuple[int, int]
    state: Any


class Welcome(NamedTuple):
    """The leader's answer: the life has its seat, and commits under this epoch; None: under the one that it has."""

    term: int
    epoch: int | None


class Decided(NamedTuple):
    """All that the leader has decided, as one state with a number."""

    term: int
    number: int
    state: Any


class Ack(NamedTuple):
    """A shard acts by this state: it begins to write nothing that this one does not let in. Sent at each state, and
    several times in a lease. `stamp` is the shard's clock; `number` is -1 where it has no state of this
    term."""

    term: int
    number: int
    stamp: float


class Beat(NamedTuple):
    """The leader has heard this stamp, and was the last leader behind that."""

    term: int
    stamp: float


class End(NamedTuple):
    """Another life has the seat: end."""

    term: int


Said = Welcome | Decided | Beat | End
#: What a leader says, each with the life that it is for.
Told = list[tuple[str, Said]]


@dataclass
class Seated:
    """The life that has a seat, as the leader knows it.

    Attributes:
        until: when its lease has surely run out.
        epoch: that it was given here; said again whenever it connects again, for a Welcome may be lost.
        acked: the last number that it acts by.
        stamps: (when it was received, stamp), to be echoed.
        revoked: its successor is here: nothing is prolonged.
    """

    life: str
    until: float
    epoch: int | None = None
    acked: int = -1
    stamps: deque[tuple[float, float]] = field(default_factory=lambda: deque(maxlen=STAMPS))
    revoked: bool = False


class Leader:
    """Decides once it is open: then nobody acts by anything that another leader has said and this one does not know.

    Args:
        seats: how many there are.
        lease: seconds; infinite on one machine.
        term: its own; each leader has a greater one than those before it.
        first: no other leader was there before it.
        stored: (term, number) and state of what was decided last, as far as the store knows.
        local: whoever starts a life has seen the one before it end.
        alone: whoever starts a leader has seen the one before it end. Else that one may still be certain that it
            decides, for a lease, whoever is here.
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
        #: Seats of which whoever starts lives says that none in them acts.
        self._empty: set[int] = set()
        self._epochs = 0
        #: When each was made, from the last one on by which everybody must act.
        self._decisions: deque[tuple[float, int]] = deque()
        self._certain = NEVER

    # Joining

    def join(self, join: Join, now: float) -> Told:
        """Hear the first message of a connection."""
        self._known = max(self._known, (join.at, join.state), key=lambda known: known[0])
        self._empty.discard(join.seat)
        seated = self._seated.get(join.seat)
        if seated is not None and seated.life == join.life:  # its connection was lost
            return [(join.life, End(self.term))] if seated.revoked else self._welcome(join.life, seated.epoch)
        if seated is None and join.fresh and not self.open:  # it has its seat from the leader before
            self._seated[join.seat] = Seated(join.life, now + self._lease * SLACK)
            return self._welcome(join.life, None)
        if join.fresh or join.at[0]:  # it had the seat before the one that has it now
            return [(join.life, End(self.term))]
        if seated is not None:
            seated.revoked = True
            if self._local:
                seated.until = now
        self._waiting[join.seat] = join
        return []

    def left(self, seat: int, life: str) -> None:
        """Hear that a connection is lost. A life that has its seat may act for its lease; and goes on in it where its
        successor leaves, which has done nothing."""
        if seat in self._waiting and self._waiting[seat].life == life:
            del self._waiting[seat]
            if seat in self._seated and not self._local:
                self._seated[seat].revoked = False

    def ended(self, seat: int, now: float) -> None:
        """Hear that no life in a seat acts, of whoever starts them."""
        self._empty.add(seat)
        if seat in self._seated:
            self._seated[seat].until = now

    # Time

    def heard(self, seat: int, life: str, ack: Ack, now: float) -> None:
        """Hear what a life acts by."""
        seated = self._seated.get(seat)
        if seated is not None and seated.life == life and ack.term == self.term:
            seated.acked = max(seated.acked, ack.number)
            seated.stamps.append((now, ack.stamp))

    def confirmed(self, began: float, now: float) -> Told:
        """Hear that the register, asked at `began`, knows no later leader: prolong leases, and give seats that are free
        to those who wait."""
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
        """Whether nobody who is not here can act by what another leader has said, and no other leader can act."""
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
        """The number by which everybody must act by now: whoever does not is prolonged no more."""
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
        """The newest state goes before any beat: a lease must never be fresher than what its life acts by."""
        return [(life, Welcome(self.term, epoch)), *self._news(life)]

    def _news(self, life: str) -> Told:
        return [(life, Decided(self.term, self.number, self.state))] if self.open else []

    # Deciding

    def decide(self, state: Any, now: float) -> Told:
        """Decide a state. What of it has to outlive all lives is in the store by now. Only an open leader may.

        Raises:
            ValueError: it is not open.
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
        """Return whether everybody acts by this number, or acts no more."""
        return self.open and not self.late(number, now)

    def is_certain(self, now: float) -> bool:
        """Return whether no later leader can have decided anything. Asked at each write of what engines are told."""
        return now < self._certain

    def late(self, number: int, now: float) -> dict[int, Seated]:
        """Return the lives that may act and do not act by this number yet, by their seats."""
        return {seat: each for seat, each in self.acting(now).items() if each.acked < number}

    def acting(self, now: float) -> dict[int, Seated]:
        """Return the lives that may act, by their seats."""
        return {seat: each for seat, each in self._seated.items() if now < each.until}


class Life:
    """One process in a seat."""

    def __init__(self, seat: int, life: str, lease: float) -> None:
        #: Term and number of the state that it acts by.
        self.at = (0, 0)
        self.state: Any = None
        #: Under which it commits; None before it has the seat.
        self.epoch: int | None = None
        #: Another life has its seat: what it has in memory may be untrue.
        self.over = False
        self._seat = seat
        self._life = life
        self._lease = lease
        self._term = 0
        self._until = NEVER

    def may_act(self, now: float) -> bool:
        """Return whether it may write a generation or commit now; asked at each."""
        return not self.over and self.epoch is not None and now < self._until

    def join(self, now: float) -> Join:
        """Return its first message on a connection."""
        return Join(self._seat, self._life, self.may_act(now), self.at, self.state)

    def hear(self, said: Said, now: float) -> Ack | None:
        """Follow the leader. What this returns is sent once the state is followed."""
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
        """Return what it acts by, with a stamp."""
        term, number = self.at
        return Ack(self._term, number if term == self._term else -1, now)
