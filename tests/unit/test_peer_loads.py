"""What other processes have in flight: told, counted, and chosen by."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from miles_router.fleet.lease import Lease
from miles_router.fleet.placement.policies import LeastInFlight
from miles_router.fleet.worker_url import parse_worker_url
from miles_router.fleet.workers import WorkerState
from miles_router.shards.peer_loads import Row, joined, less
from miles_router.shards.pools import ending, settle
from tests.support.told_pools import ToldPools

A, B = (parse_worker_url(url) for url in ("http://a", "http://b"))


@pytest.fixture
def pools() -> ToldPools:
    made = ToldPools(2)
    made.add(A, B)
    return made


def test_the_least_loaded_worker_is_that_of_all_processes(pools: ToldPools) -> None:
    first, second = pools.data
    busy = [first.lease(LeastInFlight(), preferred="http://a") for _ in range(9)]
    pools.tell()
    assert [second.lease(LeastInFlight()).worker.url for _ in range(3)] == ["http://b"] * 3
    assert pools.shown() == {"http://a": 9, "http://b": 3}
    for lease in busy:
        lease.release()
    pools.tell()
    assert [second.lease(LeastInFlight()).worker.url for _ in range(3)] == ["http://a"] * 3


def test_what_is_given_back_is_given_back_once_and_everywhere(pools: ToldPools) -> None:
    leases = [pool.lease(LeastInFlight(), tokens=100) for pool in pools.data for _ in range(4)]
    assert sum(pools.shown().values()) == 8
    for lease in leases:
        lease.release()
        lease.release()
    assert pools.shown() == {"http://a": 0, "http://b": 0}
    for pool in pools.data:
        assert [(unit.in_flight, unit.tokens) for worker in pool for unit in worker.units] == [(0, 0), (0, 0)]


def test_a_worker_is_drained_when_nobody_has_anything_there(pools: ToldPools) -> None:
    leases = [pool.lease(LeastInFlight(), preferred="http://a") for pool in pools.data]
    drained: list[bool] = []
    pools.tell()
    pools.control.drain(pools.control.get("http://a"), lambda: drained.append(True))
    pools.follow(*pools.data)
    leases[0].release()
    assert (pools.shown(), drained) == ({"http://a": 1, "http://b": 0}, [])
    leases[1].release()
    assert (pools.shown(), drained) == ({"http://b": 0}, [True])


def test_what_sessions_hold_is_seen_everywhere(pools: ToldPools) -> None:
    first, second = pools.data
    first.lease(LeastInFlight(), "key", preferred="http://a", tokens=700).release()
    pools.tell()
    (unit,) = second.get("http://a").units
    assert (unit.in_flight, unit.tokens, unit.sessions) == (0, 700, 1)
    first.homes.forget("key")
    pools.tell()
    assert (unit.in_flight, unit.tokens, unit.sessions) == (0, 0, 0)


def test_ranks_are_counted_each_as_soon_as_everybody_knows_them(pools: ToldPools) -> None:
    whole = pools.data[0].lease(LeastInFlight(), preferred="http://a")
    pools.tell()
    for pool in (pools.control, *pools.data):
        pool.set_ranks(pool.get("http://a"), 2)
    leases = [pool.lease(LeastInFlight(), preferred="http://a", rank=rank) for pool in pools.data for rank in (0, 1)]
    pools.tell()
    a = pools.control.get("http://a")
    assert ([unit.in_flight for unit in a.units], a.in_flight) == ([2, 2], 5)
    for lease in (whole, *leases):
        lease.release()
    pools.tell()
    assert ([unit.in_flight for unit in a.units], a.in_flight) == ([0, 0], 0)


def test_a_removed_worker_is_known_until_its_last_request_has_ended(pools: ToldPools) -> None:
    lease = pools.data[0].lease(LeastInFlight(), preferred="http://a")
    pools.control.remove(pools.control.get("http://a"))
    pools.follow(*pools.data)
    pools.shown()
    assert pools.control.find("http://a") is not None
    lease.release()
    pools.shown()
    assert pools.control.find("http://a") is None


def test_a_data_process_decides_nothing_and_says_what_it_saw(pools: ToldPools) -> None:
    pool = pools.data[0]
    a, b = pool
    for _ in range(5):
        pool.record_failure(a, "refused")
    assert a.state is WorkerState.READY
    pool.record_stall(b, "stalled")
    assert b.state is WorkerState.QUARANTINED, "a retry must not go there meanwhile"
    assert pools.reports == [("failure", "http://a", "refused")] * 5 + [("stall", "http://b", "stalled")]
    pools.follow(*pools.data)
    assert (a.failures, b.state) == (0, WorkerState.READY), "what was decided counts"


def test_nothing_is_supposed_where_nobody_has_told_anything_for_long(monkeypatch: pytest.MonkeyPatch) -> None:
    now, pools = 0.0, ToldPools(3)
    pools.add(A, B)
    pool = pools.data[0]
    monkeypatch.setattr(pools.loads[pool], "_now", lambda: now)
    pools.tell()
    leases = [pool.lease(LeastInFlight()) for _ in range(10)]
    assert sum(worker.units[0].in_flight for worker in pool) > 10, "others are supposed to have chosen"
    assert sum(worker.in_flight for worker in pool) == 10
    now = 2.0
    leases.append(pool.lease(LeastInFlight()))
    assert sum(worker.units[0].in_flight for worker in pool) == 11
    for lease in leases:
        lease.release()
    assert [worker.units[0].in_flight for worker in pool] == [0, 0]


def test_what_others_chose_long_ago_is_no_pace() -> None:
    """The first that a process is told of others says what they have chosen since they were started."""
    pools = ToldPools(1)
    pools.add(A, B)
    (pool,) = pools.data
    for choices in (100_000, 100_001, 100_001):
        pools.loads[pool].told(Row(choices, {}, 7))
        for _ in range(10):
            pool.lease(LeastInFlight()).release()
    pools.loads[pool].told(Row(100_001, {}, 7))
    for _ in range(10):
        pool.lease(LeastInFlight())
    assert sum(worker.units[0].in_flight for worker in pool) <= 12


@given(st.lists(st.dictionaries(st.sampled_from("abc"), st.lists(st.integers(0, 3), min_size=4, max_size=4))))
def test_all_but_one_have_what_all_have_without_its_part(loads: list[dict[str, list[int]]]) -> None:
    rows = [Row(n, {url: _worker(each) for url, each in row.items()}) for n, row in enumerate(loads)]
    for index, row in enumerate(rows):
        assert _shown(less(joined(rows), row)) == _shown(joined(rows[:index] + rows[index + 1 :]))


def _worker(in_flight: list[int]) -> tuple[int, list[list[int]]]:
    return sum(in_flight), [[rank, count, 0, count] for rank, count in enumerate(in_flight)]


def _shown(row: Row) -> Any:
    workers = {}
    for url, (leases, units) in row.workers.items():
        loads = {rank: load for rank, *load in units if any(load)}
        if leases or loads:
            workers[url] = (leases, loads)
    return row.choices, row.processes, workers


# Choosing between two tellings


def spread(processes: int, share_of_first: float) -> float:
    """How far 32 workers are apart in the mean, in which each tenth of a second 16 requests come and as many end."""
    rng = random.Random(1)
    random.seed(2)
    pools, policy = ToldPools(processes), LeastInFlight()
    pools.add(*(parse_worker_url(f"http://worker-{number}") for number in range(32)))
    running: list[Lease] = []
    apart: list[int] = []
    for beat in range(120):
        for _ in range(16):
            alone = rng.random() < share_of_first
            running.append(pools.data[0 if alone else rng.randrange(processes)].lease(policy))
            if len(running) > 160:
                running.pop(rng.randrange(len(running))).release()
            if beat > 40:
                at = {worker.url: 0 for worker in pools.control}
                for lease in running:
                    at[lease.worker.url] += 1
                apart.append(max(at.values()) - min(at.values()))
        pools.tell()
    return sum(apart) / len(apart)


def test_processes_that_choose_at_once_do_not_all_choose_the_same() -> None:
    one = spread(1, 1.0)
    assert spread(8, 0.0) < one + 2.5


def test_a_process_that_has_all_requests_chooses_as_if_it_were_alone() -> None:
    assert spread(8, 1.0) < spread(1, 1.0) + 0.5


def test_a_drain_that_has_begun_anew_does_not_end_by_what_was_told_before(pools: ToldPools) -> None:
    drained: list[int] = []
    a = pools.control.get("http://a")
    pools.control.drain(a, lambda: drained.append(1))
    pools.follow(*pools.data)
    pools.tell()
    leaving = ending(pools.control)
    pools.add(a.address)
    pools.data[0].lease(LeastInFlight(), preferred=a.url)
    pools.control.drain(a, lambda: drained.append(2))
    settle(pools.control, leaving)
    assert drained == [1], "the second one waits for a request that nobody has told of yet"
    assert pools.shown()["http://a"] == 1
