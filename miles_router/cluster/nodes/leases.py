"""Who may act for a slot, over machines: leases with epochs, as the control plane gives them and as a process has them.
Pure: whoever calls says what time it is.

A process asks for its leases again and again. It has them for so many seconds since it *sent* the question; the control
plane gives the slots to nobody else for `SLACK` times as long since it *received* it. So clocks need not agree, if only
none runs more than a tenth faster than another, and a message, a stop or a lost process takes time from the process's
side alone. Whether a control plane is still the only one is for the caller to know: it asks `Authority.renew` first,
then makes sure that no younger one has begun, and only then answers.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from miles_router.slots import SLOTS

#: How much longer the control plane counts a lease than the process that has it.
SLACK = 1.1
#: Seconds for which a machine is waited for that was not there yet, before others have its part.
JOINING = 60.0
#: Epochs that one control plane may give; its term stands before them.
EPOCHS = 1 << 32
#: Seats of each process on each machine of which the last number is remembered: one for each time that a machine is
#: started again.
SEATS = 16


class Seat(NamedTuple):
    """A place for a process, of which there is one at a time: whoever starts the next one has seen the end of the one
    before it. `life` is of whoever starts them."""

    life: str
    node: int
    process: int


class Grant(NamedTuple):
    """What a process may act for, by epochs; for `seconds` since it asked. `surplus`: another machine, which is there,
    should have some of it."""

    slots: Mapping[int, int]
    seconds: float
    surplus: bool


@dataclass
class Member:
    """One life of a process, as the control plane knows it."""

    seat: Seat
    number: int
    until: float
    slots: dict[int, int] = field(default_factory=dict)
    revoked: bool = False


class Authority:
    """Gives leases.

    Args:
        nodes, processes: how many machines there are, and processes that take requests on each.
        seconds: of a lease.
        term: greater than that of any control plane before it.
        first: whether there was none before it: nobody can have a lease then.
        joining: seconds for which the first control plane waits for a machine that was not there yet.
    """

    def __init__(
        self,
        *,
        nodes: int,
        processes: int,
        seconds: float,
        term: int,
        now: float,
        first: bool,
        joining: float = JOINING,
    ) -> None:
        self._nodes = nodes
        self._processes = processes
        self._seconds = seconds
        self._epoch = term * EPOCHS
        #: Until then somebody may have leases of a control plane before this one, which are prolonged if he says so.
        self.opens = now if first else now + seconds * SLACK
        self._joined = self.opens + (joining if first else seconds * SLACK)  # behind another one, all are there
        #: Places of processes that were there.
        self._known: set[tuple[int, int]] = set()
        #: Until when those are kept for the next process that only gives back what another machine should have.
        self._kept: dict[tuple[int, int], float] = {}
        self.members: dict[int, Member] = {}
        #: The number of the last process in each seat.
        self._last: OrderedDict[Seat, int] = OrderedDict()
        #: Whose a slot is; he may be late.
        self._owner: dict[int, Member] = {}

    def renew(self, seat: Seat, number: int, claimed: Mapping[int, int], now: float) -> Grant | None:
        """Prolong the leases of a process and give it what is free. None: it has lost some of what it had, or was told
        to end; it must not go on.

        Args:
            number: of this life of the process; no other has, or had, it, and those before it in its seat have smaller
                ones: what one of them has asked may come late.
            claimed: what it has leases of now, by its own clock.
        """
        member = self.members.get(number)
        if member is None:
            if number < self._last.get(seat, number):
                return None
            member = self._join(seat, number, now)
        if member.revoked:
            return None
        if any(self._owner.get(slot, member) is not member for slot in claimed):
            return None
        if now < self.opens:
            for slot, epoch in claimed.items():
                self._give(member, slot, epoch)
        elif any(member.slots.get(slot) != epoch for slot, epoch in claimed.items()):
            return None
        member.until = now + self._seconds * SLACK
        if now >= self.opens:
            self._give_free(member, now)
        surplus = any(self._is_due(slot, member, now) for slot in member.slots)
        return Grant(dict(member.slots), self._seconds, surplus)

    def _join(self, seat: Seat, number: int, now: float) -> Member:
        """Its predecessors in its seat have ended: what they had is free."""
        past = [each for each in self.members.values() if each.seat == seat or not (each.slots or now < each.until)]
        for each in past:
            self.end(each.number)
        self._last[seat] = number
        self._last.move_to_end(seat)
        if len(self._last) > SEATS * self._nodes * self._processes:
            self._last.popitem(last=False)
        self._known.add((seat.node, seat.process))
        self._kept.pop((seat.node, seat.process), None)
        member = self.members[number] = Member(seat, number, now)
        return member

    def _give(self, member: Member, slot: int, epoch: int) -> None:
        before = self._owner.get(slot)
        if before is not None and before is not member:
            del before.slots[slot]
            before.revoked = True  # it was late, and must end: until then nobody makes room for it
        self._owner[slot] = member
        member.slots[slot] = epoch

    def _give_free(self, member: Member, now: float) -> None:
        seat = member.seat
        mine = range(seat.process, SLOTS, self._processes)
        alive = sum(each.seat.process == seat.process for each in self.alive(now))
        share = -(-len(mine) // alive)
        for slot in mine:
            owner = self._owner.get(slot)
            if owner is member or (owner is not None and now < owner.until):
                continue
            home = self.home(slot)
            place = home, seat.process
            due = (now >= self._joined or place in self._known) and now >= self._kept.get(place, now)
            if home == seat.node or (due and len(member.slots) < share and not self._is_there(home, seat.process, now)):
                self._epoch += 1
                self._give(member, slot, self._epoch)

    def home(self, slot: int) -> int:
        """The machine that has a slot while it is there."""
        return slot // self._processes % self._nodes

    def _is_due(self, slot: int, member: Member, now: float) -> bool:
        home = self.home(slot)
        return home != member.seat.node and self._is_there(home, member.seat.process, now)

    def _is_there(self, node: int, process: int, now: float) -> bool:
        return any(each.seat[1:] == (node, process) for each in self.alive(now))

    def alive(self, now: float) -> list[Member]:
        """Those whose leases have not run out."""
        return [each for each in self.members.values() if now < each.until]

    def until(self, number: int, now: float) -> float:
        """Until when a process has what it has; now, where it has nothing."""
        return self.members[number].until if number in self.members else now

    def withdraw(self, number: int, until: float, before: float) -> None:
        """An answer that prolonged the leases of a process `until` then was not sent, and so never will be: they end as
        they did `before`, unless it has been answered since."""
        member = self.members.get(number)
        if member is not None and member.until == until:
            member.until = before

    def revoke(self, number: int) -> None:
        """Prolong nothing of a process; what it has runs out."""
        if number in self.members:
            self.members[number].revoked = True

    def give_back(self, number: int, now: float) -> None:
        """A process has ended, and the next one comes at once; others are given only what they should have."""
        member = self.members.get(number)
        self.end(number)
        if member is not None:
            self._kept[member.seat.node, member.seat.process] = now + JOINING

    def end(self, number: int) -> None:
        """A process has ended, for certain: what it had is free at once."""
        member = self.members.pop(number, None)
        for slot in member.slots if member is not None else ():
            del self._owner[slot]

    def owners(self) -> dict[int, int]:
        """The machine of each slot that anybody was given."""
        return {slot: member.seat.node for slot, member in self._owner.items()}


class Term:
    """For how long a control plane knows that it alone decides, whatever stands still meanwhile: for the seconds of a
    lease since it began to make sure. Whoever succeeds it decides nothing for `SLACK` times as long.

    Args:
        seconds: of a lease.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._until = float("-inf")

    def confirmed(self, began: float) -> None:
        """It has made sure, and began to do so then."""
        self._until = max(self._until, began + self._seconds)

    def is_certain(self, now: float) -> bool:
        """Whether nobody else can decide anything yet."""
        return now < self._until


class Tenancy:
    """What one process has leases of."""

    def __init__(self) -> None:
        #: By epochs.
        self.slots: dict[int, int] = {}
        self._until = float("-inf")

    def is_fresh(self, now: float) -> bool:
        """Whether it may act."""
        return now < self._until

    def claimed(self, now: float) -> Mapping[int, int]:
        """What it may say that it has."""
        return dict(self.slots) if self.is_fresh(now) else {}

    def renewed(self, grant: Grant | None, sent: float) -> bool:
        """What was said to the question that was sent then. False: it has lost some of what it had, and must not go
        on."""
        if grant is None or any(grant.slots.get(slot) != epoch for slot, epoch in self.slots.items()):
            self._until = float("-inf")
            return False
        self.slots = dict(grant.slots)
        self._until = max(self._until, sent + grant.seconds)
        return True
