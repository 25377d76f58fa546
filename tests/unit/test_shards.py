"""What several processes know of each other: loads, states of workers, names, slots."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from miles_router.engines.actions import Pause
from miles_router.fleet.caches import space_numbers
from miles_router.fleet.fleet import Fleet
from miles_router.fleet.gate import Gate
from miles_router.fleet.placement.policies import LeastInFlight
from miles_router.fleet.pool import WorkerPool
from miles_router.fleet.worker_table import Lease
from miles_router.fleet.worker_url import parse_worker_url
from miles_router.fleet.workers import Transition, WorkerState
from miles_router.settings.config import RouterConfig
from miles_router.shards.held_names import MappedHeldNames
from miles_router.shards.membership import Membership
from miles_router.shards.peer_loads import PoolLoad, subtract_load, sum_loads
from miles_router.shards.pools import release_idle_workers, retiring_workers
from miles_router.shards.shard import ShardRole
from miles_router.shards.state import apply_fleet, dump_fleet, own_cache_numbers
from miles_router.shards.topology import Shard, Shards
from miles_router.slots import slot_of
from tests.support.shared_pools import SharedPools, leader_pool, shard_pool

A, B = (parse_worker_url(url) for url in ("http://a", "http://b"))


@pytest.fixture
def pools() -> SharedPools:
    made = SharedPools(2)
    made.add(A, B)
    return made


def test_a_removed_worker_is_known_until_its_last_request_has_ended(pools: SharedPools) -> None:
    lease = pools.data[0].lease(LeastInFlight(), preferred="http://a")
    pools.control.remove(pools.control.get("http://a"))
    pools.follow(*pools.data)
    pools.shown()
    assert pools.control.find("http://a") is not None
    lease.release()
    pools.shown()
    assert pools.control.find("http://a") is None


def test_a_data_process_decides_nothing_and_says_what_it_saw(pools: SharedPools) -> None:
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
    now, pools = 0.0, SharedPools(3)
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
    pools = SharedPools(1)
    pools.add(A, B)
    (pool,) = pools.data
    for choices in (100_000, 100_001, 100_001):
        pools.loads[pool].update(PoolLoad(choices, {}, 7))
        for _ in range(10):
            pool.lease(LeastInFlight()).release()
    pools.loads[pool].update(PoolLoad(100_001, {}, 7))
    for _ in range(10):
        pool.lease(LeastInFlight())
    assert sum(worker.units[0].in_flight for worker in pool) <= 12


@given(st.lists(st.dictionaries(st.sampled_from("abc"), st.lists(st.integers(0, 3), min_size=4, max_size=4))))
def test_all_but_one_have_what_all_have_without_its_part(loads: list[dict[str, list[int]]]) -> None:
    rows = [PoolLoad(n, {url: _worker(each) for url, each in row.items()}) for n, row in enumerate(loads)]
    for index, row in enumerate(rows):
        assert _shown(subtract_load(sum_loads(rows), row)) == _shown(sum_loads(rows[:index] + rows[index + 1 :]))


def _worker(in_flight: list[int]) -> tuple[int, list[list[int]]]:
    return sum(in_flight), [[rank, count, 0, count] for rank, count in enumerate(in_flight)]


def _shown(row: PoolLoad) -> Any:
    workers = {}
    for url, (leases, units) in row.workers.items():
        loads = {rank: load for rank, *load in units if any(load)}
        if leases or loads:
            workers[url] = (leases, loads)
    return row.choices, row.processes, workers


def spread(processes: int, share_of_first: float) -> float:
    """How far 32 workers are apart in the mean, in which each tenth of a second 16 requests come and as many end."""
    rng = random.Random(1)
    random.seed(2)
    pools, policy = SharedPools(processes), LeastInFlight()
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


def test_a_drain_that_has_begun_anew_does_not_end_by_what_was_told_before(pools: SharedPools) -> None:
    drained: list[int] = []
    a = pools.control.get("http://a")
    pools.control.drain(a, lambda: drained.append(1))
    pools.follow(*pools.data)
    pools.tell()
    leaving = retiring_workers(pools.control)
    pools.add(a.address)
    pools.data[0].lease(LeastInFlight(), preferred=a.url)
    pools.control.drain(a, lambda: drained.append(2))
    release_idle_workers(pools.control, leaving)
    assert drained == [1], "the second one waits for a request that nobody has told of yet"
    assert pools.shown()["http://a"] == 1


NOBODY = cast(Any, None)


def fleet_of(pool: WorkerPool) -> Fleet:
    gate = Gate(pool.admission, max_held=10, timeout=0)
    return Fleet(pool=pool, gate=gate, policy=LeastInFlight(), probes=NOBODY, fan_out=NOBODY)


class Pair:
    """A fleet that is decided, and one that follows it."""

    def __init__(self) -> None:
        space_numbers()
        self.pool = leader_pool(failure_threshold=1)
        self.decided = fleet_of(self.pool)
        self.told: list[tuple[str, str, str | None]] = []
        self.followers = [shard_pool(lambda *_: None) for _ in range(2)]
        self.fleets = [fleet_of(each) for each in self.followers]
        self.numbers = [own_cache_numbers(row) for row in range(2)]
        self.followers[0].listeners.append(self._note)

    def _note(self, transition: Transition) -> None:
        before, after = transition.before, transition.after
        self.told.append((transition.worker.url, "none" if before is None else before.value, after and after.value))

    def follow(self) -> None:
        record = json.loads(json.dumps(dump_fleet(self.decided)))
        for fleet, numbers in zip(self.fleets, self.numbers, strict=True):
            apply_fleet(record, fleet, numbers.__next__)


@pytest.fixture
def pair() -> Pair:
    return Pair()


def test_workers_their_states_and_what_was_said_of_them_are_the_same(pair: Pair) -> None:
    a = pair.pool.add(parse_worker_url("http://a"), api_key="key", attributes={"labels": {"rack": "7"}})
    b = pair.pool.add(parse_worker_url("http://b"), attributes={"worker_type": "prefill", "bootstrap_port": 9})
    pair.pool.record_failure(b, "refused")
    pair.follow()
    follower = pair.followers[0]
    assert [each.url for each in follower] == ["http://a", "http://b"]
    for mine, theirs in zip(follower, (a, b), strict=True):
        for name in ("state", "reason", "since", "failures", "api_key", "attributes", "role", "bootstrap_port"):
            assert getattr(mine, name) == getattr(theirs, name), name
    assert [unit.worker.url for unit in follower.snapshot.generating] == ["http://a"]


def test_a_worker_that_was_registered_anew_is_another_for_what_was_chosen_before(pair: Pair) -> None:
    a = pair.pool.add(parse_worker_url("http://a"))
    pair.follow()
    lease = pair.followers[0].lease(LeastInFlight())
    caches = lease.worker.caches
    pair.pool.remove(a)
    pair.pool.add(parse_worker_url("http://a"))
    pair.follow()
    (now,) = pair.followers[0]
    assert now is lease.worker, "its requests are counted on"
    assert now.caches is not caches
    lease.release()
    assert pair.followers[0].in_flight == 0


def test_the_gate_is_as_closed_and_cuts_are_known(pair: Pair) -> None:
    pair.pool.add(parse_worker_url("http://a"))
    pair.decided.begin_pause(Pause("abort"))
    pair.follow()
    gate = pair.fleets[0].gate
    assert (gate.closed, gate.mode, gate.aborting_pauses) == (True, "abort", 1)
    assert gate.describe() == pair.decided.gate.describe()
    pair.decided.end_pause()
    pair.follow()
    assert not gate.closed
    pair.decided.begin_pause(Pause("retract"))
    pair.decided.end_pause()
    pair.follow()
    assert [each.mode for each in gate.times()] == ["abort", "retract"], "the second was over before anybody saw it"
    assert gate.times() == pair.decided.gate.times()


def test_while_weights_change_no_two_generations_of_any_process_share_a_cache(pair: Pair) -> None:
    pair.pool.add(parse_worker_url("http://a"), weight_version="1")
    pair.follow()
    (one,), (other,) = pair.followers
    with pair.pool.changing_weights():
        pair.follow()
        assert pair.followers[0].weights_epoch % 2 == 1
        numbers = [each.caches.choose(None) for _ in range(5) for each in (one, other)]
    pair.pool.record_update(list(pair.pool), "2")
    pair.follow()
    assert len(set(numbers)) == len(numbers)
    assert max(numbers) < one.caches.number, "what went on from them is of the past"
    assert one.caches.choose(numbers[0]) == numbers[0], "and keeps its cache"
    assert one.caches.versions(numbers[0], "2") == ["1", "2"]


def test_bounds_of_the_router_are_shared_out_and_nothing_moves() -> None:
    role = ShardRole(Membership(Shard(Shards(3), 0, Path("nowhere"), ""), 1, abort))
    config = role.config(RouterConfig(max_connections=100, gate_max_held=9))
    assert (config.max_connections, config.gate_max_held, config.move_after) == (34, 3, 0)
    assert role.config(RouterConfig()).max_connections == 0, "no bound is none"


def abort() -> None:
    raise AssertionError("nobody has its shard")


def test_there_is_always_room_for_what_is_held_and_the_oldest_lost_names_make_it(tmp_path: Path) -> None:
    first = MappedHeldNames(tmp_path / "names", 3)
    for name in ("a", "b", "c"):
        first.add(name)
    second = MappedHeldNames(tmp_path / "names", 3)
    for name in ("d", "e", "f"):
        second.add(name)
    third = MappedHeldNames(tmp_path / "names", 3)
    assert all(map(third.was_lost, "abcdef"))
    for name in ("g", "h"):
        third.add(name)
    assert [name for name in "abcdefgh" if third.was_lost(name)] == ["c", "d", "e", "f"]
    fourth = MappedHeldNames(tmp_path / "names", 3)
    assert {name for name in "abcdefgh" if fourth.was_lost(name)} == set("cdefgh")


def test_a_name_has_the_same_slot_in_every_process_and_release() -> None:
    assert [slot_of(name) for name in ("", "a", "session-1", "Ünïcode")] == [52, 47, 44, 40]
