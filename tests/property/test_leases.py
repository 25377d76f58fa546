"""No two processes ever act for one slot: under clocks that run apart, lost and late messages, stops, deaths, machines
that are started elsewhere while they go on, and control planes that are succeeded while they go on."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest

from miles_router.cluster.nodes.leases import JOINING, SEATS, SLACK, Authority, Grant, Seat, Tenancy
from miles_router.slots import SLOTS
from tests.support.tiers import examples

SECONDS = 10.0
#: How much a clock may run from another.
RATES = (1.0, SLACK**0.5)
NODES, PROCESSES = 3, 2


@dataclass
class Clock:
    rate: float
    offset: float

    def at(self, time: float) -> float:
        return self.offset + self.rate * time


@dataclass
class Plane:
    """A control plane, and when it is stopped."""

    authority: Authority
    term: int
    clock: Clock
    ended: bool = False


@dataclass
class Process:
    seat: Seat
    number: int
    clock: Clock
    plane: Plane
    tenancy: Tenancy = field(default_factory=Tenancy)
    #: It runs again then.
    stopped_until: float = 0.0
    #: What it waits for: when the answer comes, and what it is; None: it is lost.
    asked: tuple[float, float, Grant | None] | None = None
    dead: bool = False


class World:
    """Time, and whatever may go wrong in it."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.time = 0.0
        self.numbers = iter(range(1, 1 << 30))
        self.term = 0
        self.planes: list[Plane] = []
        self.processes: list[Process] = []
        self.epochs: dict[int, int] = {}
        self.acted = 0
        self.begin_plane()
        for node in range(NODES):
            self.begin_machine(node)

    def clock(self) -> Clock:
        return Clock(self.random.uniform(*RATES), self.random.uniform(0, 1e6))

    def begin_plane(self) -> None:
        """The one before it need not know."""
        self.term += 1
        clock = self.clock()
        made = Authority(
            nodes=NODES,
            processes=PROCESSES,
            seconds=SECONDS,
            term=self.term,
            now=clock.at(self.time),
            first=self.term == 1,
            joining=SECONDS,
        )
        self.planes.append(Plane(made, self.term, clock))

    def begin_machine(self, node: int) -> None:
        """The one before it need not know."""
        life = str(next(self.numbers))
        for process in range(PROCESSES):
            self.begin_process(Seat(life, node, process))

    def begin_process(self, seat: Seat) -> None:
        self.processes.append(Process(seat, next(self.numbers), self.clock(), self.planes[-1]))

    def living(self) -> list[Process]:
        return [each for each in self.processes if not each.dead]

    def replace(self, process: Process) -> None:
        """It ends, and whoever started it starts the next one."""
        process.dead = True
        self.begin_process(process.seat)

    def step(self) -> None:
        self.time += self.random.expovariate(2.0)
        for process in self.living():
            if self.time >= process.stopped_until:
                self.run(process)
        chance = self.random.random()
        living = self.living()
        if chance < 0.01:
            self.begin_plane()
        elif chance < 0.02:
            self.begin_machine(self.random.randrange(NODES))
        elif chance < 0.03 and living:
            self.replace(self.random.choice(living))
        elif chance < 0.04 and living:
            self.random.choice(living).dead = True  # with its machine
        elif chance < 0.05:  # what somebody has asked comes late, who may have ended since
            self.ask_late(self.random.choice(self.processes))
        elif chance < 0.08 and living:
            self.random.choice(living).stopped_until = self.time + self.random.uniform(0, 4 * SECONDS)
        self.look()

    def run(self, process: Process) -> None:
        if process.asked is not None:
            due, sent, grant = process.asked
            if self.time < due:
                return
            process.asked = None
            if grant is not None and not self.heard(process, grant, sent):
                return
        if self.random.random() < 0.3:
            self.ask(process)

    def heard(self, process: Process, grant: Grant, sent: float) -> bool:
        if process.tenancy.renewed(None if grant.seconds < 0 else grant, sent):
            return True
        self.replace(process)
        return False

    def ask(self, process: Process) -> None:
        if process.plane.ended or self.random.random() < 0.1:
            process.plane = self.random.choice(self.planes[-2:])
        plane, sent = process.plane, process.clock.at(self.time)
        claimed = process.tenancy.claimed(sent)
        arrives = self.random.choice((0.0, 0.1, 1.0, SECONDS))
        # Whatever happens on the way there happens now: the process's own clock alone may have run since it sent
        sent -= arrives * process.clock.rate
        answer: Grant | None = None
        if not plane.ended:
            authority, now = plane.authority, plane.clock.at(self.time)
            before = authority.until(process.number, now)
            granted = authority.renew(process.seat, process.number, claimed, now)
            if self.random.random() < 0.1:  # it has seen that nobody hears the answer, which it does not send
                authority.withdraw(process.number, authority.until(process.number, now), before)
                return
            if plane.term == self.term:
                answer = granted or Grant({}, -1.0, False)
            else:
                plane.ended = True  # it has seen that there is a younger one, and answers nothing
        lost = self.random.random() < 0.2
        process.asked = (self.time + self.random.choice((0.0, 0.5, 3.0)), sent, None if lost else answer)

    def ask_late(self, process: Process) -> None:
        """Nobody waits for the answer."""
        if not process.plane.ended and process.dead:
            claimed = process.tenancy.slots if self.random.random() < 0.5 else {}
            process.plane.authority.renew(process.seat, process.number, claimed, process.plane.clock.at(self.time))

    def look(self) -> None:
        owners: dict[int, Process] = {}
        for process in self.living():
            if not process.tenancy.is_fresh(process.clock.at(self.time)):
                continue
            for slot, epoch in process.tenancy.slots.items():
                assert slot not in owners, f"two act for slot {slot} at {self.time}"
                owners[slot] = process
                assert epoch >= self.epochs.get(slot, 0), "an older epoch acts behind a younger one"
                self.epochs[slot] = epoch
        self.acted += len(owners)


@pytest.mark.parametrize("seed", range(examples(200)))
def test_no_two_processes_ever_act_for_one_slot(seed: int) -> None:
    world = World(seed)
    for _ in range(1500):
        world.step()
    assert world.acted > 1500, "mostly somebody acts"


def _authority(*, first: bool = True, term: int = 1, now: float = 0.0, nodes: int = 2) -> Authority:
    return Authority(nodes=nodes, processes=1, seconds=SECONDS, term=term, now=now, first=first)


def _ask(authority: Authority, node: int, now: float, number: int | None = None, **claimed: int) -> Grant:
    held = {int(slot[1:]): epoch for slot, epoch in claimed.items()}
    grant = authority.renew(Seat(f"life {node}", node, 0), node if number is None else number, held, now)
    assert grant is not None
    return grant


def test_each_machine_has_its_share_and_a_lost_one_s_goes_to_the_others_once_its_lease_has_run_out() -> None:
    authority = _authority()
    first, second = _ask(authority, 0, 0.0), _ask(authority, 1, 0.0)
    assert sorted([*first.slots, *second.slots]) == [*range(SLOTS)]
    assert len(first.slots) == len(second.slots)
    for now in (4.0, 8.0, 10.9):
        assert _ask(authority, 0, now).slots == first.slots, "the other may still act"
    taken = _ask(authority, 0, 2 * SECONDS * SLACK).slots
    assert len(taken) == SLOTS
    assert min(taken[slot] for slot in second.slots) > max(*first.slots.values(), *second.slots.values())
    assert authority.renew(Seat("life 1", 1, 0), 1, {}, 22.0) is None, "it comes back late, and must end"
    assert not _ask(authority, 0, 22.0).surplus, "nobody makes room for it"
    back = authority.renew(Seat("life 1", 1, 0), 2, {}, 23.0)  # the next one in its seat
    assert back is not None
    assert not back.slots
    assert _ask(authority, 0, 24.0).surplus, "it is told to give them back"


def test_who_says_that_he_has_what_another_was_given_must_not_go_on() -> None:
    authority = _authority()
    slots = _ask(authority, 1, 0.0).slots
    for now in (0.0, 9.0, 18.0, 22.0, 24.0):
        _ask(authority, 0, now)
    assert authority.renew(Seat("life 1", 1, 0), 1, slots, 25.0) is None


def test_what_a_process_has_goes_on_under_the_next_control_plane_and_nobody_is_given_more_before_it_has_run_out() -> (
    None
):
    slots = _ask(_authority(), 1, 0.0).slots
    authority = _authority(first=False, term=2, now=5.0)
    kept = authority.renew(Seat("life 1", 1, 0), 1, slots, 6.0)
    assert kept is not None
    assert kept.slots == slots
    assert not _ask(authority, 0, 7.0).slots
    assert len(_ask(authority, 0, 5.0 + SECONDS * SLACK).slots) == SLOTS // 2


def test_the_next_process_in_a_seat_has_what_the_one_before_it_had_at_once_under_younger_epochs() -> None:
    authority = _authority()
    before = _ask(authority, 0, 0.0).slots
    after = _ask(authority, 0, 1.0, number=7).slots
    assert after.keys() == before.keys()
    assert min(after.values()) > max(before.values())


def test_who_is_told_to_end_is_given_nothing_and_what_he_has_runs_out() -> None:
    authority = _authority()
    _ask(authority, 0, 0.0)
    authority.revoke(0)
    assert authority.renew(Seat("life 0", 0, 0), 0, {}, 1.0) is None
    assert [each.number for each in authority.alive(10.9)] == [0]
    assert not authority.alive(SECONDS * SLACK)


def test_a_machine_that_was_never_there_is_waited_for() -> None:
    authority = _authority()
    for now in range(0, int(JOINING), 5):
        assert len(_ask(authority, 0, float(now)).slots) == SLOTS // 2
    assert len(_ask(authority, 0, JOINING).slots) == SLOTS


def test_a_process_that_hears_that_another_has_what_it_had_does_not_act_any_more() -> None:
    for grant in (None, Grant({1: 5}, SECONDS, False), Grant({1: 5, 2: 7}, SECONDS, False)):
        tenancy = Tenancy()
        assert tenancy.renewed(Grant({1: 5, 2: 6}, SECONDS, False), 0.0)
        assert tenancy.is_fresh(SECONDS - 0.1)
        assert not tenancy.is_fresh(SECONDS)
        assert not tenancy.renewed(grant, 1.0)
        assert not tenancy.is_fresh(1.0)


def test_a_machine_that_gives_back_what_another_should_have_keeps_its_own_part_while_it_is_started_again() -> None:
    authority = _authority()
    first, second = _ask(authority, 0, 0.0), _ask(authority, 1, 0.0)
    assert len(_ask(authority, 0, 2 * SECONDS).slots) == SLOTS, "the other was lost"
    assert not _ask(authority, 1, 21.0, number=11).slots
    assert _ask(authority, 0, 22.0).surplus
    authority.give_back(0, 23.0)
    back = _ask(authority, 1, 24.0, number=11)
    assert (back.slots.keys(), back.surplus) == (second.slots.keys(), False)
    again = _ask(authority, 0, 30.0, number=12)
    assert (again.slots.keys(), again.surplus) == (first.slots.keys(), False)


def test_what_a_process_that_has_ended_had_asked_takes_nothing_from_the_one_behind_it() -> None:
    authority = _authority()
    seat = Seat("life", 0, 0)
    before = authority.renew(seat, 1, {}, 0.0)
    after = authority.renew(seat, 2, {}, 1.0)
    assert before is not None
    assert after is not None
    assert authority.renew(seat, 1, before.slots, 2.0) is None, "it comes late, and nobody waits for the answer"
    assert [each.number for each in authority.alive(2.0)] == [2]
    again = authority.renew(seat, 2, after.slots, 3.0)
    assert again is not None
    assert again.slots == after.slots
    authority.end(2)
    assert authority.renew(seat, 1, {}, 4.0) is None, "nor once that one has ended, too"
    assert not authority.alive(4.0)


def test_an_answer_that_was_never_sent_prolongs_nothing() -> None:
    authority = _authority()
    _ask(authority, 0, 0.0)
    before = authority.until(0, 5.0)
    _ask(authority, 0, 5.0)
    authority.withdraw(0, authority.until(0, 5.0), before)
    assert not authority.alive(SECONDS * SLACK)
    _ask(authority, 0, 6.0)
    until = authority.until(0, 6.0)
    _ask(authority, 0, 7.0)
    authority.withdraw(0, until, before)
    assert authority.alive(7.0 + SECONDS), "it was answered since"


def test_seats_that_are_remembered_are_bounded() -> None:
    authority = _authority()
    for life in range(SEATS * 3):
        authority.renew(Seat(str(life), 0, 0), life, {}, float(life))
    assert len(authority._last) == SEATS * 2
