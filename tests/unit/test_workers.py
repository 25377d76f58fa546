"""The pool as a state machine: leases, transitions, readmission, the fleet's weight version."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import pytest

from miles_router.errors import NotFound, NoWorkerAvailable
from miles_router.fleet.lease import Lease
from miles_router.fleet.placement.policies import LeastInFlight
from miles_router.fleet.pool import ReadmitPolicy, WorkerPool
from miles_router.fleet.worker_url import parse_worker_url
from miles_router.fleet.workers import Transition, Worker, WorkerState
from tests.support.quiet_fleet import quiet_fleet

READY, QUARANTINED, DRAINING = WorkerState.READY, WorkerState.QUARANTINED, WorkerState.DRAINING
POLICY = LeastInFlight()


@dataclass
class Scene:
    """A pool of workers `a`, `b`, ... on a clock of its own, and what it told."""

    pool: WorkerPool
    told: list[Transition] = field(default_factory=list)
    time: float = 1000.0

    @classmethod
    def of(cls, names: str = "", *, threshold: int = 2, readmit: ReadmitPolicy = "same-weights") -> Scene:
        scene = cls(WorkerPool())
        scene.pool = WorkerPool(failure_threshold=threshold, readmit=readmit, now=lambda: scene.time)
        scene.pool.listeners.append(scene.told.append)
        for name in names:
            scene.add(name)
        scene.told.clear()
        return scene

    def add(self, name: str) -> Worker:
        return self.pool.add(parse_worker_url(f"http://{name}"))

    def __getitem__(self, name: str) -> Worker:
        return self.pool.get(f"http://{name}")

    def quarantine(self, name: str) -> Worker:
        worker = self[name]
        while worker.state is not QUARANTINED:
            self.pool.record_failure(worker, "no answer")
        return worker

    @property
    def story(self) -> list[tuple[str, WorkerState | None, WorkerState | None]]:
        return [(each.worker.address.host, each.before, each.after) for each in self.told]


# Registration


def test_a_new_worker_is_routable_at_once() -> None:
    scene = Scene.of("a")
    assert (scene["a"].state, list(scene.pool.routable), len(scene.pool)) == (READY, [scene["a"]], 1)


def test_a_worker_is_found_by_url_and_by_id() -> None:
    scene = Scene.of("ab")
    assert scene.pool.get(scene["b"].address.id) is scene["b"]
    with pytest.raises(NotFound, match="http://c"):
        scene.pool.get("http://c")


def test_registering_again_gives_the_same_worker_and_tells_nobody() -> None:
    scene = Scene.of("a")
    worker, lease = scene["a"], scene.pool.lease(POLICY)
    assert scene.add("a") is worker
    assert (worker.in_flight, scene.told) == (1, [])
    lease.release()


def test_registering_again_changes_only_what_is_given() -> None:
    pool = WorkerPool()
    address = parse_worker_url("http://a")
    worker = pool.add(address, api_key="k", attributes={"labels": "x"})
    pool.add(address)
    assert (worker.api_key, worker.attributes) == ("k", {"labels": "x"})
    pool.add(address, api_key="l", attributes={"labels": "y"})
    assert (worker.api_key, worker.attributes) == ("l", {"labels": "y"})


def test_registering_again_does_not_lift_a_quarantine() -> None:
    scene = Scene.of("a")
    worker = scene.quarantine("a")
    assert scene.add("a").state is QUARANTINED
    assert worker not in scene.pool.routable


def test_what_is_shown_of_a_worker_is_complete_and_holds_no_key() -> None:
    pool = WorkerPool(now=lambda: 1000.0)
    worker = pool.add(parse_worker_url("http://a"), api_key="secret", attributes={"labels": "x"})
    assert worker.describe() == {
        "id": worker.address.id,
        "url": "http://a",
        "state": "ready",
        "reason": "registered",
        "since": 1000.0,
        "in_flight": 0,
        "sessions": 0,
        "tokens": 0,
        "weight_version": None,
        "failures": 0,
        "last_check": None,
        "labels": "x",
    }
    assert "secret" not in repr(worker) + repr(pool)


def test_the_repr_counts_states() -> None:
    scene = Scene.of("abc")
    scene.quarantine("a")
    assert (
        repr(scene.pool)
        == "<WorkerPool 2 ready, 1 quarantined, 0 outdated, 0 paused, 0 draining, 0 unreached; in flight: 0>"
    )
    assert repr(scene["a"]) == "<Worker http://a quarantined, in flight: 0, failures: 2>"


# Leases


def test_a_lease_counts_until_its_release_and_only_once() -> None:
    scene = Scene.of("a")
    one, two = scene.pool.lease(POLICY), scene.pool.lease(POLICY)
    assert (scene["a"].in_flight, scene.pool.in_flight) == (2, 2)
    for _ in range(3):
        one.release()
    assert (scene["a"].in_flight, scene.pool.in_flight) == (1, 1)
    two.release()
    assert scene.pool.in_flight == 0


def test_a_worker_that_was_tried_is_not_chosen_again() -> None:
    scene = Scene.of("ab")
    assert scene.pool.lease(POLICY, None, [scene["a"]]).worker is scene["b"]
    with pytest.raises(NoWorkerAvailable):
        scene.pool.lease(POLICY, None, list(scene.pool))


def test_a_preferred_worker_is_chosen_however_busy_it_is_while_it_takes_requests() -> None:
    scene = Scene.of("ab")
    leases = [scene.pool.lease(POLICY, None, (), scene["a"].url) for _ in range(3)]
    assert {lease.worker for lease in leases} == {scene["a"]}
    assert scene.pool.lease(POLICY, None, [scene["a"]], scene["a"].url).worker is scene["b"]
    scene.quarantine("a")
    assert scene.pool.lease(POLICY, None, (), scene["a"].url).worker is scene["b"]


@pytest.mark.parametrize(
    ("names", "quarantined", "drained", "says"),
    [
        ("", "", "", "no worker is registered.*/add_worker"),
        ("ab", "ab", "", "no routable worker: 2 quarantined"),
        ("abc", "a", "bc", "no routable worker: 2 draining, 1 quarantined"),
    ],
)
def test_without_a_routable_worker_the_reason_is_told(names: str, quarantined: str, drained: str, says: str) -> None:
    scene = Scene.of(names)
    leases = [scene.pool.lease(POLICY) for _ in names]
    for name in quarantined:
        scene.quarantine(name)
    for name in drained:
        scene.pool.drain(scene[name], lambda: None)
    with pytest.raises(NoWorkerAvailable, match=says):
        scene.pool.lease(POLICY)
    for lease in leases:
        lease.release()


def test_releasing_more_than_was_leased_is_a_defect() -> None:
    scene = Scene.of("a")
    lease = scene.pool.lease(POLICY)
    twin = Lease(scene.pool, lease.unit)
    lease.unit.in_flight -= 1  # as a defect would
    lease.release()
    with pytest.raises(AssertionError, match="released more often"):
        twin.release()


# What is published


def test_every_change_publishes_a_new_snapshot_and_keeps_the_old_one() -> None:
    scene = Scene.of("ab")
    seen = [scene.pool.snapshot]
    changes: list[Callable[[], None]] = [
        lambda: scene.pool.set_paused(scene["b"], "because"),
        lambda: scene.pool.set_unpaused(scene["b"]),
        lambda: scene.pool.remove(scene["a"]),
    ]
    for change in changes:
        change()
        seen.append(scene.pool.snapshot)
    assert [each.number for each in seen] == sorted({each.number for each in seen})
    hosts = [
        ["".join(unit.worker.address.host for unit in units) for units in (each.routable, each.paused)] for each in seen
    ]
    assert hosts == [["ab", ""], ["a", "b"], ["ab", ""], ["b", ""]]


def test_a_lease_is_on_a_unit_of_the_snapshot() -> None:
    scene = Scene.of("a")
    lease = scene.pool.lease(POLICY)
    assert (lease.unit, lease.worker) == (scene.pool.snapshot.routable[0], scene["a"])
    assert (lease.unit.in_flight, lease.worker.in_flight) == (1, 1)
    lease.release()


def test_a_snapshot_knows_who_is_among_its_units() -> None:
    scene = Scene.of("abc")
    before = scene.pool.snapshot
    gone = scene["b"]
    scene.pool.remove(gone)
    after = scene.pool.snapshot
    for units, members in (
        (before.routable, "abc"),
        (after.routable, "ac"),
        (after.generating, "ac"),
        (after.paused, ""),
    ):
        assert [unit.worker for unit in units] == [gone if name == "b" else scene[name] for name in members]
        assert all(unit in units for unit in units)
    assert gone.units[0] in before.routable
    assert gone.units[0] not in after.routable


# Removal and drain


def test_a_removed_worker_is_forgotten_but_its_requests_are_counted_until_they_end() -> None:
    scene = Scene.of("ab")
    lease = scene.pool.lease(POLICY)
    scene.pool.remove(lease.worker)
    assert (len(scene.pool), scene.pool.in_flight, lease.worker.in_flight) == (1, 1, 1)
    lease.release()
    assert scene.pool.in_flight == 0
    assert scene.story == [(lease.worker.address.host, READY, None)]


def test_removing_does_not_hit_a_worker_that_took_its_place() -> None:
    scene = Scene.of("a")
    old = scene["a"]
    scene.pool.remove(old)
    new = scene.add("a")
    assert new is not old
    scene.pool.remove(old)
    assert (scene["a"], scene.story) == (new, [("a", READY, None), ("a", None, READY)])


def test_a_worker_that_returns_while_old_requests_run_is_the_same_and_starts_clean() -> None:
    scene = Scene.of("ab")
    scene.pool.record_alive(scene["a"], "1")
    lease = scene.pool.lease(POLICY, None, [scene["b"]])
    scene.quarantine("a")
    scene.pool.remove(lease.worker)
    assert scene.add("a") is lease.worker
    assert (lease.worker.in_flight, scene.pool.in_flight) == (1, 1)
    assert (lease.worker.state, lease.worker.failures, lease.worker.weight_version) == (READY, 0, None)
    lease.release()
    assert scene.pool.in_flight == 0


def test_an_idle_worker_drains_at_once() -> None:
    scene = Scene.of("a")
    idle: list[str] = []
    scene.pool.drain(scene["a"], lambda: idle.append("a"))
    assert (idle, len(scene.pool)) == (["a"], 0)
    assert scene.story == [("a", READY, DRAINING), ("a", DRAINING, None)]


@pytest.mark.parametrize("state", [READY, QUARANTINED])
def test_a_busy_worker_drains_after_its_last_request(state: WorkerState) -> None:
    scene = Scene.of("a")
    leases = [scene.pool.lease(POLICY) for _ in range(2)]
    if state is QUARANTINED:
        scene.quarantine("a")
    idle: list[int] = []
    scene.pool.drain(scene["a"], lambda: idle.append(1))
    scene.pool.drain(scene["a"], lambda: idle.append(2))
    assert (scene["a"].state, list(scene.pool.routable)) == (DRAINING, [])
    leases[0].release()
    assert idle == []
    leases[1].release()
    assert (idle, len(scene.pool), scene.pool.in_flight) == ([1, 2], 0, 0)


def test_registering_a_draining_worker_ends_the_drain_and_tells_who_waits() -> None:
    scene = Scene.of("a")
    lease = scene.pool.lease(POLICY)
    idle: list[str] = []
    scene.pool.drain(scene["a"], lambda: idle.append("told"))
    scene.add("a")
    assert (scene["a"].state, idle) == (READY, ["told"])
    lease.release()
    assert (len(scene.pool), idle) == (1, ["told"])


def test_a_drain_that_is_removed_and_registered_again_tells_who_waits() -> None:
    scene = Scene.of("a")
    lease = scene.pool.lease(POLICY)
    idle: list[str] = []
    scene.pool.drain(scene["a"], lambda: idle.append("told"))
    scene.pool.remove(scene["a"])
    assert scene.add("a").state is READY
    assert idle == ["told"]
    lease.release()
    assert (len(scene.pool), scene.pool.in_flight) == (1, 0)


def test_a_draining_worker_that_is_removed_tells_who_waits_after_its_last_request() -> None:
    scene = Scene.of("a")
    lease = scene.pool.lease(POLICY)
    idle: list[str] = []
    scene.pool.drain(scene["a"], lambda: idle.append("told"))
    scene.pool.remove(scene["a"])
    assert (idle, scene.pool.in_flight) == ([], 1)
    lease.release()
    assert (idle, scene.pool.in_flight) == (["told"], 0)


# Quarantine and readmission


def test_failures_in_a_row_quarantine_once_with_the_last_reason() -> None:
    scene = Scene.of("a", threshold=3)
    for reason in ("first", "second", "third", "fourth"):
        scene.pool.record_failure(scene["a"], reason)
    assert (scene["a"].state, scene["a"].reason, scene["a"].failures) == (QUARANTINED, "third", 4)
    assert scene.story == [("a", READY, QUARANTINED)]


def test_a_sign_of_life_forgets_failures() -> None:
    scene = Scene.of("a", threshold=2)
    for _ in range(3):
        scene.pool.record_failure(scene["a"], "no answer")
        scene.pool.record_alive(scene["a"], None)
    assert (scene["a"].state, scene["a"].failures) == (READY, 0)


def test_checks_are_dated() -> None:
    scene = Scene.of("a")
    scene.time = 1001.0
    scene.pool.record_failure(scene["a"], "x")
    assert scene["a"].last_check == 1001.0
    scene.time = 1002.0
    scene.pool.record_alive(scene["a"], None)
    assert (scene["a"].last_check, scene["a"].since) == (1002.0, 1000.0)
    scene.time = 1003.0
    scene.quarantine("a")
    assert scene["a"].since == 1003.0


@pytest.mark.parametrize("gone", ["removed", "draining"])
def test_failures_of_a_worker_that_leaves_change_nothing(gone: str) -> None:
    scene = Scene.of("a")
    worker, lease = scene["a"], scene.pool.lease(POLICY)
    scene.pool.remove(worker) if gone == "removed" else scene.pool.drain(worker, lambda: None)
    before = (worker.state, len(scene.told))
    for _ in range(5):
        scene.pool.record_failure(worker, "no answer")
    assert (worker.state, len(scene.told)) == before
    assert not scene.pool.readmit(worker, "back")
    lease.release()


@pytest.mark.parametrize(
    ("readmit", "version", "returns"),
    [
        ("same-weights", "1", True),
        ("same-weights", "0", False),
        ("same-weights", None, False),
        ("healthy", "0", True),
        ("healthy", None, True),
        ("never", "1", False),
    ],
)
def test_readmission_is_by_policy(readmit: ReadmitPolicy, version: str | None, returns: bool) -> None:
    scene = Scene.of("abc", readmit=readmit)
    for name in "bc":
        scene.pool.record_alive(scene[name], "1")
    worker = scene.quarantine("a")
    scene.pool.record_alive(worker, version)
    assert (scene.pool.readmission_refused(worker) is None) is returns
    assert scene.pool.readmit(worker, "back") is returns
    assert worker.state is (READY if returns else QUARANTINED)
    assert (worker in scene.pool.routable) is returns


def test_the_reason_for_staying_out_is_told_when_it_changes_and_only_then() -> None:
    scene = Scene.of("ab")
    scene.pool.keep_out(scene["b"], "ready workers are not kept out")
    assert not scene.pool.readmit(scene["b"], "nor readmitted")
    worker = scene.quarantine("a")
    for reason in ("old weights", "old weights", "sick", "sick"):
        scene.pool.keep_out(worker, reason)
    assert [each.reason for each in scene.told] == ["no answer", "old weights", "sick"]
    assert scene.story[1:] == [("a", QUARANTINED, QUARANTINED)] * 2


# The fleet's weight version


def test_the_fleets_version_is_what_most_routable_workers_hold() -> None:
    scene = Scene.of("abc")
    assert scene.pool.weight_version is None
    versions: list[str | None] = []
    for name, version in (("a", "1"), ("b", "1"), ("c", "2"), ("a", "2"), ("b", "2")):
        scene.pool.record_alive(scene[name], version)
        versions.append(scene.pool.weight_version)
    assert versions == ["1", "1", "1", "2", "2"]


def test_a_tie_changes_nothing() -> None:
    scene = Scene.of("ab")
    scene.pool.record_alive(scene["a"], "1")
    scene.pool.record_alive(scene["b"], "2")
    assert scene.pool.weight_version == "1"


def test_an_answer_without_a_version_keeps_the_last_one() -> None:
    scene = Scene.of("a")
    scene.pool.record_alive(scene["a"], "1")
    scene.pool.record_alive(scene["a"], None)
    assert (scene["a"].weight_version, scene.pool.weight_version) == ("1", "1")


def test_quarantined_workers_have_no_say_while_others_are_routable() -> None:
    scene = Scene.of("abc")
    for name in "abc":
        scene.pool.record_alive(scene[name], "1")
    for name in "ab":
        scene.pool.record_alive(scene.quarantine(name), "0")
    assert scene.pool.weight_version == "1"


def test_one_restarted_worker_cannot_speak_for_a_fleet_that_is_down() -> None:
    scene = Scene.of("abc")
    for name in "abc":
        scene.pool.record_alive(scene[name], "1")
        scene.quarantine(name)
    scene.pool.record_alive(scene["a"], "0")
    assert scene.pool.weight_version == "1"
    assert not scene.pool.readmit(scene["a"], "back")


def test_a_fleet_that_is_down_and_restarts_together_brings_its_version() -> None:
    scene = Scene.of("ab")
    for name in "ab":
        scene.pool.record_alive(scene[name], "1")
        scene.quarantine(name)
    for name in "ab":
        scene.pool.record_alive(scene[name], "0")
    assert scene.pool.weight_version == "0"
    assert scene.pool.readmit(scene["a"], "back")


# Prefix caches


def test_workers_whose_weights_change_together_name_their_caches_alike() -> None:
    scene = Scene.of("ab")
    with scene.pool.changing_weights():
        pass
    cache = scene["a"].caches.choose(None)
    assert cache == scene["b"].caches.choose(None) != 0
    assert scene["b"].caches.choose(cache) == cache, "a session that moves finds there what is of the same weights"


def test_version_seen_to_change_begins_a_new_cache_and_a_first_one_does_not() -> None:
    scene = Scene.of("a")
    scene.pool.record_alive(scene["a"], "1")
    assert scene["a"].caches.number == 0
    scene.pool.record_alive(scene["a"], "2")
    assert scene["a"].caches.number != 0
    assert scene["a"].caches.versions(0, "2") == ["1", "2"]


def test_what_still_runs_at_a_worker_that_comes_back_knows_which_weights_it_had() -> None:
    scene = Scene.of("a")
    worker = scene["a"]
    scene.pool.record_alive(worker, "1")
    caches, _running = worker.caches, scene.pool.lease(POLICY)
    scene.pool.remove(worker)
    assert scene.add("a") is worker
    scene.pool.record_alive(worker, "2")
    assert caches.versions(0, worker.weight_version) == ["1", "2"]


@pytest.mark.parametrize("known_at_once", [True, False])
def test_worker_that_joins_with_other_weights_may_have_their_cache(known_at_once: bool) -> None:
    scene = Scene.of("a")
    scene.pool.record_alive(scene["a"], "1")
    scene.pool.remove(scene["a"])
    worker = scene.pool.add(parse_worker_url("http://a"), weight_version="2" if known_at_once else None)
    scene.pool.record_alive(worker, "2")
    assert worker.caches.choose(None) == worker.caches.number != 0


def test_of_a_worker_that_comes_after_an_update_no_older_cache_is_used() -> None:
    scene = Scene.of("ab")
    scene.pool.remove(scene["b"])
    with scene.pool.changing_weights():
        pass
    caches = scene.add("b").caches
    assert caches.choose(0) == caches.choose(None) == caches.number != 0, "nobody knows what it did meanwhile"


async def test_a_worker_with_a_new_key_has_to_report_its_adapters_again() -> None:
    fleet, address = quiet_fleet(), parse_worker_url("http://worker")
    worker = fleet.pool.add(address, api_key="old")
    fleet.note_applies(worker, True, frozenset({"adapter"}))
    assert fleet.heard
    fleet.pool.add(address, api_key="old")
    assert fleet.heard, "nothing has changed"
    fleet.pool.add(address, api_key="new")
    assert not fleet.heard
