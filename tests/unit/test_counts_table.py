"""The table of what all processes have in flight: each writes its own row and sees the whole."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from miles_router.cluster.control.pools import Columns, DecidingPool, FollowingPool
from miles_router.cluster.control.state import own_numbers, written_workers
from miles_router.cluster.control.table import Counts, make_table
from miles_router.fleet.placement.policies import LeastInFlight
from miles_router.fleet.worker_url import parse_worker_url
from miles_router.fleet.workers import Worker, WorkerState

URLS = ("http://a", "http://b")


class Machine:
    """A control plane and two data processes, as far as their pools go."""

    def __init__(self, table: int) -> None:
        self.counts = Counts(table, 2)
        serials = iter(range(1, 100))
        self.columns = Columns(self.counts, now=lambda: self.now)
        self.now = 0.0
        self.control = DecidingPool(self.counts, self.columns, lambda: next(serials))
        self.reports: list[tuple[str, str, str]] = []
        self.data = [FollowingPool(Counts(table, 2, row), self._report) for row in range(2)]
        self.numbers = [own_numbers(row) for row in range(2)]

    def _report(self, kind: str, worker: Worker, reason: str) -> None:
        self.reports.append((kind, worker.url, reason))

    def add(self, *urls: str) -> None:
        for url in urls:
            self.control.add(parse_worker_url(url))
        self.follow()

    def follow(self) -> None:
        for pool, numbers in zip(self.data, self.numbers, strict=True):
            pool.follow(written_workers(self.control), lambda: next(numbers))  # noqa: B023

    def shown(self) -> dict[str, int]:
        """Requests in flight as the control plane shows them."""
        self.control.settle(self.control.ending)
        return {worker.url: worker.in_flight for worker in self.control}


@pytest.fixture
def machine() -> Iterator[Machine]:
    table = make_table(2)
    yield Machine(table)
    os.close(table)


def test_the_least_loaded_worker_is_that_of_all_processes(machine: Machine) -> None:
    machine.add(*URLS)
    first, second = machine.data
    busy = [first.lease(LeastInFlight(), preferred="http://a") for _ in range(3)]
    assert [second.lease(LeastInFlight()).worker.url for _ in range(3)] == ["http://b"] * 3
    assert machine.shown() == {"http://a": 3, "http://b": 3}
    for lease in busy:
        lease.release()
    assert [second.lease(LeastInFlight()).worker.url for _ in range(3)] == ["http://a"] * 3


def test_what_is_given_back_is_given_back_once_and_everywhere(machine: Machine) -> None:
    machine.add(*URLS)
    leases = [pool.lease(LeastInFlight(), tokens=100) for pool in machine.data for _ in range(4)]
    assert sum(machine.shown().values()) == 8
    for lease in leases:
        lease.release()
        lease.release()
    assert machine.shown() == {"http://a": 0, "http://b": 0}
    for pool in machine.data:
        pool.counts.refresh()
        assert [(unit.in_flight, unit.tokens) for worker in pool for unit in worker.units] == [(0, 0), (0, 0)]


def test_the_row_of_a_process_that_died_counts_no_more(machine: Machine) -> None:
    machine.add(*URLS)
    for _ in range(4):
        machine.data[0].lease(LeastInFlight())
    machine.counts.clear(0)
    assert machine.shown() == {"http://a": 0, "http://b": 0}
    machine.data[1].counts.refresh()
    assert [unit.in_flight for worker in machine.data[1] for unit in worker.units] == [0, 0]


def test_a_worker_is_drained_when_nobody_has_anything_there(machine: Machine) -> None:
    machine.add(*URLS)
    leases = [pool.lease(LeastInFlight(), preferred="http://a") for pool in machine.data]
    drained: list[bool] = []
    machine.control.drain(machine.control.get("http://a"), lambda: drained.append(True))
    machine.follow()
    leases[0].release()
    assert (machine.shown(), drained) == ({"http://a": 1, "http://b": 0}, [])
    leases[1].release()
    assert (machine.shown(), drained) == ({"http://b": 0}, [True])


def test_what_sessions_hold_is_seen_everywhere(machine: Machine) -> None:
    machine.add(*URLS)
    first, second = machine.data
    first.lease(LeastInFlight(), "key", preferred="http://a", tokens=700).release()
    second.counts.refresh()
    (unit,) = second.get("http://a").units
    assert (unit.in_flight, unit.tokens, unit.sessions) == (0, 700, 1)
    first.homes.forget("key")
    second.counts.refresh()
    assert (unit.in_flight, unit.tokens, unit.sessions) == (0, 0, 0)


def test_ranks_are_counted_each_as_soon_as_everybody_knows_them(machine: Machine) -> None:
    machine.add(*URLS)
    whole = machine.data[0].lease(LeastInFlight(), preferred="http://a")
    machine.control.set_ranks(machine.control.get("http://a"), 2)
    machine.follow()
    for pool in machine.data:
        pool.set_ranks(pool.get("http://a"), 2)
    leases = [pool.lease(LeastInFlight(), preferred="http://a") for pool in machine.data for _ in range(2)]
    machine.control.settle(machine.control.ending)
    a = machine.control.get("http://a")
    assert ([unit.in_flight for unit in a.units], a.in_flight) == ([2, 2], 5)
    for lease in (whole, *leases):
        lease.release()
    machine.control.settle(machine.control.ending)
    assert ([unit.in_flight for unit in a.units], a.in_flight) == ([0, 0], 0)


def test_cells_are_given_to_another_when_everybody_has_heard_and_nobody_has_anything_there(machine: Machine) -> None:
    machine.add(*URLS)
    machine.columns.taken((0, 65_536))  # so that no fresh ones are left
    lease = machine.data[0].lease(LeastInFlight(), preferred="http://a")
    machine.control.remove(machine.control.get("http://a"))
    machine.follow()
    machine.control.settle(machine.control.ending)
    assert machine.control.find("http://a") is not None, "it still has a request"
    lease.release()
    machine.control.settle(machine.control.ending)
    assert machine.columns.take(1) is None, "some process may not have heard yet"
    machine.now = 100.0
    assert machine.columns.take(1) == (0, 1)


def test_a_data_process_decides_nothing_and_says_what_it_saw(machine: Machine) -> None:
    machine.add(*URLS)
    pool = machine.data[0]
    a, b = pool
    for _ in range(5):
        pool.record_failure(a, "refused")
    assert a.state is WorkerState.READY
    pool.record_stall(b, "stalled")
    assert b.state is WorkerState.QUARANTINED, "a retry must not go there meanwhile"
    assert machine.reports == [("failure", "http://a", "refused")] * 5 + [("stall", "http://b", "stalled")]
    machine.follow()
    assert (a.failures, b.state) == (0, WorkerState.READY), "what was decided counts"


def test_a_key_is_at_home_where_any_process_has_sent_it(machine: Machine) -> None:
    machine.add(*URLS)
    first, second = machine.data
    for number in range(8):
        key = f"key {number}"
        at = first.lease(LeastInFlight(), key, tokens=10)
        again = second.lease(LeastInFlight(), key, tokens=10)
        assert again.worker.url == at.worker.url
        assert key in second.homes
        at.release()
        again.release()
    second.homes.forget("key 0")
    assert second.counts.home("key 0") is None
    machine.control.remove(machine.control.get("http://a"))
    machine.follow()
    assert {second.lease(LeastInFlight(), f"key {number}").worker.url for number in range(8)} == {"http://b"}
    assert {first.lease(LeastInFlight(), f"key {number}").worker.url for number in range(8)} == {"http://b"}
