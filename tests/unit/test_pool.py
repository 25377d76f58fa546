"""Workers: leases, states, readmission, the fleet's weight version, and the prefix caches of each version."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest

from miles_router.errors import NotFound, NoWorkerAvailable
from miles_router.fleet.caches import MAX_VERSIONS, PrefixCaches, new_number
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


def test_a_worker_is_found_by_url_and_by_id() -> None:
    scene = Scene.of("ab")
    assert scene.pool.get(scene["b"].address.id) is scene["b"]
    with pytest.raises(NotFound, match="http://c"):
        scene.pool.get("http://c")


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
    scene.pool.set_quarantine_reason(scene["b"], "ready workers are not kept out")
    assert not scene.pool.readmit(scene["b"], "nor readmitted")
    worker = scene.quarantine("a")
    for reason in ("old weights", "old weights", "sick", "sick"):
        scene.pool.set_quarantine_reason(worker, reason)
    assert [each.reason for each in scene.told] == ["no answer", "old weights", "sick"]
    assert scene.story[1:] == [("a", QUARANTINED, QUARANTINED)] * 2


def test_the_fleets_version_is_what_most_routable_workers_hold() -> None:
    scene = Scene.of("abc")
    assert scene.pool.weight_version is None
    versions: list[str | None] = []
    for name, version in (("a", "1"), ("b", "1"), ("c", "2"), ("a", "2"), ("b", "2")):
        scene.pool.record_alive(scene[name], version)
        versions.append(scene.pool.weight_version)
    assert versions == ["1", "1", "1", "2", "2"]


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


async def test_a_worker_with_a_new_key_has_to_report_its_adapters_again() -> None:
    fleet, address = quiet_fleet(), parse_worker_url("http://worker")
    worker = fleet.pool.add(address, api_key="old")
    fleet.note_applies(worker, True, frozenset({"adapter"}))
    assert fleet.all_reported
    fleet.pool.add(address, api_key="old")
    assert fleet.all_reported, "nothing has changed"
    fleet.pool.add(address, api_key="new")
    assert not fleet.all_reported


def test_a_new_generation_has_a_cache_of_the_new_weights_alone() -> None:
    caches = PrefixCaches()
    caches.change("1", new_number())
    first = caches.choose(None)
    assert first == caches.choose(None) == caches.number != 0
    caches.change("2", new_number())
    second = caches.choose(None)
    assert second not in (0, first)
    assert [caches.versions(cache, "3") for cache in (0, first, second)] == [["1", "2", "3"], ["2", "3"], ["3"]]


def test_a_flush_leaves_nothing_to_keep_apart() -> None:
    caches = PrefixCaches()
    caches.change("1", new_number())
    older = caches.choose(None)
    caches.record_flush()
    assert (caches.choose(None), caches.choose(older)) == (0, 0)
    assert caches.versions(0, "2") == ["2"]
    caches.change("2", new_number())
    assert caches.choose(None) > older


def test_while_weights_change_no_two_generations_share_a_cache() -> None:
    caches = PrefixCaches()
    caches.change("1", new_number(), under_way=True)
    begun = [caches.choose(None), caches.choose(None)]
    caches.change("1", new_number())
    assert len({*begun, caches.choose(None)}) == 3
    assert caches.choose(None) == caches.choose(None)
    assert caches.versions(begun[0], "2") == ["1", "2"], "it may have run before or behind the change"


def test_so_many_versions_are_known_and_no_more() -> None:
    caches = PrefixCaches()
    for version in range(MAX_VERSIONS + 1):
        caches.change(str(version), new_number(), under_way=True)
        caches.change(str(version), new_number())
    assert caches.choose(0) == caches.number, "whose weights filled that one is forgotten"
    assert caches.versions(0, "now") == [*map(str, range(1, MAX_VERSIONS + 1)), "now"]
