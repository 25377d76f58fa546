"""Which worker is chosen."""

from __future__ import annotations

import base64
import random
from collections.abc import Callable, Sequence
from typing import Any

import orjson
import pytest

from miles_router.app import create_app
from miles_router.engines.facts import Facts
from miles_router.engines.json_bytes import prompt_tokens
from miles_router.errors import ConfigError, PolicyFault
from miles_router.fleet.placement.contract import PlacementRequest, Policy
from miles_router.fleet.placement.policies import Checked, LeastInFlight
from miles_router.fleet.placement.sessions import Homes
from miles_router.fleet.pool import WorkerPool
from miles_router.fleet.worker_table import SILENT, Lease, PaceEstimates
from miles_router.fleet.worker_url import parse_worker_url
from miles_router.fleet.workers import Unit, Worker
from miles_router.settings.config import RouterConfig
from tests.support.waiting import Clock


def pool_of(count: int, homes: Homes | None = None) -> WorkerPool:
    pool = WorkerPool(homes=homes)
    for number in range(count):
        pool.add(parse_worker_url(f"http://worker-{number}"))
    return pool


def released(lease: Lease) -> Worker:
    lease.release()
    return lease.worker


def test_a_session_leaves_a_worker_with_far_more_in_flight_between_its_turns() -> None:
    pool, policy = pool_of(2), LeastInFlight()
    first = turn(pool, policy, "a", 16_000)
    busy = [pool.lease(policy, preferred=first.worker.url) for _ in range(4)]
    other = pool.lease(policy)
    assert other.worker is not first.worker
    assert turn(pool, policy, "a", 16_000) is first, "4 < 1.5 * 1 + 2 + 1"
    busy += [pool.lease(policy, preferred=first.worker.url) for _ in range(2)]
    assert released(pool.lease(policy, "a")) is first.worker, "it generates nothing"
    running = pool.lease(policy, "a", tokens=16_000, preferred=first.worker.url)
    assert turn(pool, policy, "a", 16_000) is first, "a turn of it runs there"
    running.release()
    moved = turn(pool, policy, "a", 16_000)
    assert moved is not first
    for lease in busy:
        lease.release()
    assert turn(pool, policy, "a", 16_000) is moved


def test_sessions_that_come_back_in_a_wave_stay_at_home() -> None:
    pool, policy = pool_of(2), LeastInFlight()
    homes = {name: turn(pool, policy, name, 100) for name in map(str, range(40))}
    there = next(iter(pool)).units[0]
    wave = [pool.lease(policy, name, tokens=100) for name, home in homes.items() if home is there]
    assert [lease.unit for lease in wave] == [there] * 20, "the other has none in flight, and as many sessions"
    for lease in wave:
        lease.release()


def test_sessions_leave_in_a_wave_for_a_worker_that_has_far_fewer_sessions() -> None:
    pool, policy = pool_of(1), LeastInFlight()
    for name in map(str, range(20)):
        turn(pool, policy, name, 100)
    newcomer = pool.add(parse_worker_url("http://new"))
    wave = [pool.lease(policy, name, tokens=100) for name in map(str, range(20))]
    moved = sum(lease.worker is newcomer for lease in wave)
    assert 5 <= moved <= 10


def test_sessions_leave_a_worker_that_has_far_more_requests_of_no_session() -> None:
    pool, policy = pool_of(2), LeastInFlight()
    homes = {name: turn(pool, policy, name, 100) for name in "abcdef"}
    there = homes["a"]
    _texts = [pool.lease(policy, tokens=100, preferred=there.worker.url) for _ in range(4)]
    assert turn(pool, policy, "a", 100) is not there


def timed(pool: WorkerPool, policy: Policy, clock: Clock, key: str | None, seconds: float, answer: int = 100) -> Unit:
    """A request whose answer takes so long, and on the first worker twice that."""
    lease = pool.lease(policy, key, tokens=100)
    clock.now += seconds * (2 if lease.worker.address.host == "worker-0" else 1)
    lease.release(sampled=answer)
    return lease.unit


def paced(count: int) -> tuple[WorkerPool, Clock]:
    clock = Clock()
    pool = pool_of(count, Homes(now=clock))
    pool.paces = PaceEstimates(now=clock)
    return pool, clock


def test_sessions_leave_a_worker_that_takes_twice_as_long_for_a_token_and_stay_away() -> None:
    (pool, clock), policy, source = paced(3), LeastInFlight(), random.Random(0)
    slow = next(iter(pool)).units[0]

    def turns() -> list[Unit]:
        answers = [round(source.lognormvariate(5, 0.8)) + 16 for _ in range(12)]
        return [
            timed(pool, policy, clock, f"session {number}", answer * source.lognormvariate(-5, 0.2), answer)
            for number, answer in enumerate(answers)
        ]

    assert turns().count(slow) == 4
    for _ in range(4):
        turns()
    assert slow.pace > 1.35
    assert [turns().count(slow) for _ in range(20)] == [0] * 20
    assert {unit.pace for worker in pool for unit in worker.units if unit is not slow} == {1.0}


def test_where_there_is_much_to_do_a_slower_worker_keeps_its_share() -> None:
    (pool, clock), policy = paced(2), LeastInFlight()
    slow = next(iter(pool)).units[0]
    for _ in range(10):
        homes = [timed(pool, policy, clock, f"session {number}", 1.0) for number in range(120)]
    assert slow.pace > 1.4
    assert 40 <= homes.count(slow) <= 50, "of 60"


def test_fewer_requests_go_to_a_slower_worker() -> None:
    (pool, clock), policy = paced(2), LeastInFlight()
    slow = next(iter(pool)).units[0]
    while slow.pace == 1:
        timed(pool, policy, clock, None, 1.0)
    leases = [pool.lease(policy, tokens=100) for _ in range(30)]
    assert 9 <= sum(lease.unit is slow for lease in leases) <= 13


def test_long_answers_and_few_tokens_make_no_worker_slow() -> None:
    (pool, clock), policy, source = paced(4), LeastInFlight(), random.Random(1)
    units, marked = [worker.units[0] for worker in list(pool)[1:]], 0
    for _ in range(4_000):
        answer = round(source.lognormvariate(5, 1))
        lease = pool.lease(policy, f"session {source.randrange(24)}", tokens=100)
        clock.now += (answer + source.expovariate(1 / 20)) / 100
        lease.release(sampled=answer)
        marked += sum(unit.pace > 1 for unit in units)
    assert not marked


def test_a_worker_that_was_slower_is_so_no_more() -> None:
    (pool, clock), policy = paced(2), LeastInFlight()
    slow = next(iter(pool)).units[0]
    while slow.pace == 1:
        timed(pool, policy, clock, None, 1.0)
    for _ in range(100):
        leases = [pool.lease(policy, tokens=100) for _ in range(4)]
        clock.now += 1.0
        for lease in leases:
            lease.release(sampled=100)
    assert slow.pace == 1
    assert slow.measurements is not None
    assert abs(slow.measurements.lag) < 0.1


def slow_for(pool: WorkerPool, policy: Policy, clock: Clock) -> Unit:
    """The first worker, which takes twice as long, once that is known."""
    slow = next(iter(pool)).units[0]
    while slow.pace == 1:
        timed(pool, policy, clock, None, 1.0)
    return slow


def test_silent_slow_worker_is_doubted_and_then_believed_twice_as_long() -> None:
    (pool, clock), policy = paced(2), LeastInFlight()
    slow = slow_for(pool, policy, clock)
    other = next(unit for worker in pool for unit in worker.units if unit is not slow)

    def silence() -> float:
        """Until it is doubted, while the other one answers."""
        began = clock.now
        while slow.pace > 1:
            lease = pool.lease(policy, tokens=100, preferred=other.worker.url)
            clock.now += 1.0
            lease.release(sampled=100)
        return clock.now - began

    first = silence()
    assert first >= SILENT
    while slow.pace == 1:
        lease = pool.lease(policy, tokens=100, preferred=slow.worker.url)
        clock.now += 2.0
        lease.release(sampled=100)
    assert silence() > 1.5 * first


def test_a_session_that_has_moved_stays_for_longer_each_time() -> None:
    pool, policy = pool_of(2), LeastInFlight()
    home = turn(pool, policy, "a", 100)
    stays = list[int]()
    for _ in range(4):
        home.pace, stayed = 3.0, 1
        while turn(pool, policy, "a", 100) is home:
            stayed += 1
        stays.append(stayed)
        home.pace = 1.0
        home = next(unit for worker in pool for unit in worker.units if unit is not home)
    assert stays == [1, 2, 4, 8]


def test_a_session_does_not_leave_a_slower_worker_for_one_that_is_full() -> None:
    pool, policy = pool_of(2), LeastInFlight()
    home = turn(pool, policy, "a", 5_000)
    other = next(unit for worker in pool for unit in worker.units if unit is not home)
    other.worker.facts = Facts(token_capacity=6_000)
    home.pace = 3.0
    _held = pool.lease(policy, tokens=1_000, preferred=other.worker.url)
    assert [turn(pool, policy, "a", 5_000) for _ in range(4)] == [home] * 4
    other.worker.facts = Facts(token_capacity=60_000)
    assert turn(pool, policy, "a", 5_000) is other


def test_what_is_known_of_an_engine_s_pace_is_forgotten_with_it() -> None:
    (pool, clock), policy = paced(2), LeastInFlight()
    slow = slow_for(pool, policy, clock)
    pool.record_failure(slow.worker, "it is silent")
    assert (slow.pace, slow.measurements) == (1.0, None)


def test_large_fleet_is_compared_in_turns() -> None:
    pool, policy = pool_of(100), LeastInFlight()
    first = turn(pool, policy, "a", 100)
    _busy = [pool.lease(policy, preferred=worker.url) for worker in pool for _ in range(9)]
    idle = pool.add(parse_worker_url("http://idle"))
    turns = [turn(pool, policy, "a", 100) for _ in range(200)]
    assert {*turns} == {first, *idle.units}
    assert turns[-1].worker is idle


def test_the_least_recently_used_keys_are_forgotten() -> None:
    pool, policy = pool_of(2, Homes(max_keys=2)), LeastInFlight()
    home = released(pool.lease(policy, "a"))
    released(pool.lease(policy, "b"))
    assert released(pool.lease(policy, "a")) is home  # used again: now "b" is the oldest
    released(pool.lease(policy, "c"))
    assert len(pool.homes) == 2
    assert released(pool.lease(policy, "a")) is home
    assert [key in pool.homes for key in "abc"] == [True, False, True]


def turn(pool: WorkerPool, policy: Policy, key: str, tokens: int) -> Unit:
    """One request of a session, from its lease to its release."""
    lease = pool.lease(policy, key, tokens=tokens)
    lease.release()
    return lease.unit


def held(pool: WorkerPool) -> list[tuple[int, int]]:
    return [(unit.sessions, unit.tokens) for worker in pool for unit in worker.units]


def test_what_a_session_holds_counts_on_its_unit_until_it_is_over() -> None:
    pool, policy = pool_of(1), LeastInFlight()
    lease = pool.lease(policy, "a", tokens=500)
    assert held(pool) == [(1, 500)]
    lease.release()
    assert held(pool) == [(1, 500)], "its tools work"
    both = [pool.lease(policy, "a", tokens=700), pool.lease(policy, "a", tokens=100)]
    assert held(pool) == [(1, 800)]
    both[0].release()
    assert held(pool) == [(1, 100)]
    both[1].release()
    assert held(pool) == [(1, 100)]
    pool.homes.forget("a")
    pool.homes.forget("a")
    assert held(pool) == [(0, 0)]


def test_sessions_that_are_away_for_much_longer_than_sessions_are_count_no_more() -> None:
    clock = Clock()
    pool, policy = pool_of(1, Homes(now=clock)), LeastInFlight()
    for key in "ab":
        turn(pool, policy, key, 100)
    for _ in range(4):  # back after 3 s each time
        clock.now += 3.0
        turn(pool, policy, "a", 100)
    clock.now += 27.0
    turn(pool, policy, "c", 10)
    assert held(pool) == [(2, 110)], "b has been away for 39 s, a for 27"
    assert turn(pool, policy, "b", 100) is next(iter(pool)).units[0]
    assert held(pool) == [(3, 210)]


class Stubborn:
    """A policy that always has the same idea."""

    def __init__(self, idea: Callable[[], Any]) -> None:
        self._idea = idea

    def choose(self, candidates: Sequence[Unit], request: PlacementRequest) -> Any:
        return self._idea()


def test_what_a_policy_of_ones_own_chooses_is_looked_at() -> None:
    pool, elsewhere = pool_of(2), pool_of(1)
    stranger = next(iter(elsewhere)).units[0]
    home, before = turn(pool, LeastInFlight(), "a", 100), held(pool)
    ideas: list[tuple[Callable[[], Any], str]] = [
        (lambda: stranger, "not one of the 2 candidates"),
        (lambda: [home], "not one of the 2 candidates"),
        (lambda: 1 // 0, "ZeroDivisionError"),
    ]
    for idea, says in ideas:
        for key in (None, "a", "new"):
            with pytest.raises(PolicyFault, match=f"the policy Stubborn .*{says}"):
                pool.lease(Checked(Stubborn(idea)), key, tokens=100)
            assert (pool.in_flight, held(pool)) == (0, before)
    assert turn(pool, LeastInFlight(), "a", 100) is home
    own = next(iter(pool)).units[0]
    assert pool.lease(Checked(Stubborn(lambda: own))).unit is own


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("session", "no policy is called 'session'; use least-inflight or pkg.module.Class"),
        ("no.such.module.Policy", "there is no module 'no'"),
        ("collections.OrderedDict", "has no method choose"),
        ("tests.unit.test_policies.Stubborn", "its constructor must take no arguments"),
        ("tests.unit.test_policies.turn", "is not a class"),
    ],
)
def test_a_policy_that_cannot_be_is_refused_at_the_start(name: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        create_app(RouterConfig(policy=name))


@pytest.mark.parametrize(
    ("body", "tokens"),
    [
        (b"", 0),
        (orjson.dumps({"input_ids": list(range(100, 5_100))}), 5_000),
        (orjson.dumps({"input_ids": [151_643] * 3_000}), 3_000),
        (orjson.dumps({"text": "The quick brown fox, of all, jumps over the lazy dog. " * 100}), 1_250),
        (orjson.dumps({"sampling_params": {"max_new_tokens": 5}}), 12),
        (orjson.dumps({"image_data": base64.b64encode(random.Random(0).randbytes(450_000)).decode()}), 1_200),
    ],
)
def test_tokens_are_guessed_from_bytes(body: bytes, tokens: int) -> None:
    assert prompt_tokens(body) == pytest.approx(tokens, rel=0.2)
