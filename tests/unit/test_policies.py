"""Which worker is chosen."""

from __future__ import annotations

from miles_router.fleet.lease import Lease
from miles_router.fleet.placement.homes import Homes
from miles_router.fleet.placement.policies import LeastInFlight
from miles_router.fleet.pool import WorkerPool
from miles_router.fleet.worker_url import parse_worker_url
from miles_router.fleet.workers import Worker


def pool_of(count: int, homes: Homes | None = None) -> WorkerPool:
    pool = WorkerPool(homes=homes)
    for number in range(count):
        pool.add(parse_worker_url(f"http://worker-{number}"))
    return pool


def released(lease: Lease) -> Worker:
    lease.release()
    return lease.worker


def test_the_least_loaded_worker_is_chosen() -> None:
    pool, policy = pool_of(3), LeastInFlight()
    first, second = pool.lease(policy), pool.lease(policy)
    (idle,) = [worker for worker in pool if worker.in_flight == 0]
    assert pool.lease(policy).worker is idle
    second.release()
    assert pool.lease(policy).worker is second.worker
    first.release()
    assert pool.lease(policy).worker is first.worker


def test_ties_go_to_whom_was_chosen_longest_ago() -> None:
    pool, policy = pool_of(4), LeastInFlight()
    turns = [released(pool.lease(policy)) for _ in range(12)]
    assert len({*turns[:4]}) == 4
    assert turns[:4] == turns[4:8] == turns[8:]


def test_a_newcomer_is_chosen_first() -> None:
    pool, policy = pool_of(2), LeastInFlight()
    for _ in range(5):
        released(pool.lease(policy))
    newcomer = pool.add(parse_worker_url("http://new"))
    assert released(pool.lease(policy)) is newcomer


def test_a_key_stays_where_it_was_first_sent() -> None:
    pool, policy = pool_of(3), LeastInFlight()
    homes = {key: released(pool.lease(policy, key)) for key in "abc"}
    assert len({*homes.values()}) == 3
    for key in "cabbac":
        assert released(pool.lease(policy, key)) is homes[key]


def test_without_a_key_the_inner_policy_decides() -> None:
    pool, policy = pool_of(2), LeastInFlight()
    assert released(pool.lease(policy)) is not released(pool.lease(policy))


def test_new_keys_are_spread_by_load() -> None:
    pool, policy = pool_of(2), LeastInFlight()
    leases = [pool.lease(policy, str(number)) for number in range(10)]
    assert [worker.in_flight for worker in pool] == [5, 5]
    for lease in leases:
        lease.release()


def test_a_key_stays_when_a_worker_joins() -> None:
    pool, policy = pool_of(2), LeastInFlight()
    homes = {key: released(pool.lease(policy, key)) for key in "abcdef"}
    pool.add(parse_worker_url("http://new"))
    assert {key: released(pool.lease(policy, key)) for key in "abcdef"} == homes


def test_a_key_moves_when_its_worker_leaves_and_stays_where_it_went() -> None:
    pool, policy = pool_of(3), LeastInFlight()
    home = released(pool.lease(policy, "a"))
    pool.remove(home)
    away = released(pool.lease(policy, "a"))
    assert away is not home
    pool.add(home.address)
    assert released(pool.lease(policy, "a")) is away


def test_the_least_recently_used_keys_are_forgotten() -> None:
    pool, policy = pool_of(2, Homes(max_keys=2)), LeastInFlight()
    home = released(pool.lease(policy, "a"))
    released(pool.lease(policy, "b"))
    assert released(pool.lease(policy, "a")) is home  # used again: now "b" is the oldest
    released(pool.lease(policy, "c"))
    assert len(pool.homes) == 2
    assert released(pool.lease(policy, "a")) is home
    assert [key in pool.homes for key in "abc"] == [True, False, True]
