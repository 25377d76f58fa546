"""What the leader decides, written and followed: a shard chooses as the leader would."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, cast

import pytest

from miles_router.engines.actions import Order, Pause
from miles_router.fleet.caches import APART, set_apart
from miles_router.fleet.fleet import Fleet
from miles_router.fleet.gate import Gate
from miles_router.fleet.placement.policies import LeastInFlight
from miles_router.fleet.pool import WorkerPool
from miles_router.fleet.standstill import stand_still
from miles_router.fleet.worker_url import parse_worker_url
from miles_router.fleet.workers import Transition, WorkerState
from miles_router.settings.config import RouterConfig
from miles_router.shards.membership import Membership
from miles_router.shards.places import Seat, Shards, chance_generation
from miles_router.shards.pools import deciding_pool, following_pool
from miles_router.shards.shard import ShardDuty
from miles_router.shards.state import followed, own_numbers, written
from tests.support.quiet_fleet import quiet_fleet

NOBODY = cast(Any, None)


def fleet_of(pool: WorkerPool) -> Fleet:
    gate = Gate(pool.admission, max_held=10, timeout=0)
    return Fleet(pool=pool, gate=gate, policy=LeastInFlight(), questions=NOBODY, orders=NOBODY)


class Pair:
    """A fleet that is decided, and one that follows it."""

    def __init__(self) -> None:
        set_apart()
        self.pool = deciding_pool(failure_threshold=1)
        self.decided = fleet_of(self.pool)
        self.told: list[tuple[str, str, str | None]] = []
        self.followers = [following_pool(lambda *_: None) for _ in range(2)]
        self.fleets = [fleet_of(each) for each in self.followers]
        self.numbers = [own_numbers(row) for row in range(2)]
        self.followers[0].listeners.append(self._note)

    def _note(self, transition: Transition) -> None:
        before, after = transition.before, transition.after
        self.told.append((transition.worker.url, "none" if before is None else before.value, after and after.value))

    def follow(self) -> None:
        record = json.loads(json.dumps(written(self.decided)))
        for fleet, numbers in zip(self.fleets, self.numbers, strict=True):
            followed(record, fleet, numbers.__next__)


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


def test_each_change_is_told_once(pair: Pair) -> None:
    a = pair.pool.add(parse_worker_url("http://a"))
    pair.follow()
    pair.follow()
    pair.pool.record_failure(a, "refused")
    pair.follow()
    pair.pool.remove(a)
    pair.follow()
    assert pair.told == [
        ("http://a", "none", "ready"),
        ("http://a", "ready", "quarantined"),
        ("http://a", "quarantined", None),
    ]


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
    assert (gate.closed, gate.mode, gate.cuts, gate.describe()) == (True, "abort", 1, pair.decided.gate.describe())
    pair.decided.end_pause()
    pair.follow()
    assert not gate.closed
    pair.decided.begin_pause(Pause("retract"))
    pair.decided.end_pause()
    pair.follow()
    assert [each.mode for each in gate.times()] == ["abort", "retract"], "the second was over before anybody saw it"
    assert gate.times() == pair.decided.gate.times()


def test_what_the_fleet_has_released_can_be_read_again(pair: Pair) -> None:
    order = Order("POST", b"/release_memory_occupation", b'{"tags": ["weights"]}')
    pair.decided.begin_sleep()
    pair.decided.memory_released(["weights"], order, [])
    record = json.loads(json.dumps(written(pair.decided)))
    other = quiet_fleet()
    stand_still(other, record)
    assert (other.pause, other.released, other.memory_orders) == (None, {"weights"}, [order])


def test_generations_of_the_same_weights_share_a_cache_whichever_process_sends_them(pair: Pair) -> None:
    pair.pool.add(parse_worker_url("http://a"))
    pair.follow()
    with pair.pool.changing_weights():
        pass
    pair.follow()
    (one,), (other,) = pair.followers
    assert one.caches.choose(None) == other.caches.choose(None) > 0
    assert one.caches.key(one.caches.choose(None)) == other.caches.key(other.caches.choose(None))


def test_while_weights_change_no_two_generations_of_any_process_share_a_cache(pair: Pair) -> None:
    pair.pool.add(parse_worker_url("http://a"), weight_version="1")
    pair.follow()
    (one,), (other,) = pair.followers
    with pair.pool.changing_weights():
        pair.follow()
        assert pair.followers[0].weights_epoch % 2 == 1
        numbers = [each.caches.choose(None) for _ in range(5) for each in (one, other)]
    pair.pool.updated(list(pair.pool), "2")
    pair.follow()
    assert len(set(numbers)) == len(numbers)
    assert max(numbers) < one.caches.number, "what went on from them is of the past"
    assert one.caches.choose(numbers[0]) == numbers[0], "and keeps its cache"
    assert one.caches.versions(numbers[0], "2") == ["1", "2"]


def test_a_shard_settles_no_weights(pair: Pair) -> None:
    pair.pool.add(parse_worker_url("http://a"), weight_version="1")
    pair.follow()
    (worker,) = pair.followers[0]
    pair.followers[0].record_alive(worker, "2")
    assert (worker.state, pair.followers[0].weight_version) == (WorkerState.READY, "1")


def test_bounds_of_the_router_are_shared_out_and_nothing_moves() -> None:
    duty = ShardDuty(Membership(Seat(Shards(3), 0, Path("nowhere"), ""), 1, abort))
    config = duty.config(RouterConfig(max_connections=100, gate_max_held=9))
    assert (config.max_connections, config.gate_max_held, config.move_after) == (34, 3, 0)
    assert duty.config(RouterConfig()).max_connections == 0, "no bound is none"


def test_processes_that_nobody_counts_give_no_number_twice() -> None:
    numbers = {next(own_numbers(chance_generation())) for _ in range(100)}
    assert len(numbers) == 100
    assert max(numbers) < APART, "between two numbers of the leader's"


def abort() -> None:
    raise AssertionError("nobody has its seat")
