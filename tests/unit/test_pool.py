"""Workers: leases, states, readmission, the fleet's weight version, and the prefix caches of each version."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from miles_router.errors import NoWorkerAvailable
from miles_router.fleet.caches import MAX_VERSIONS, PrefixCaches, new_number
from miles_router.fleet.placement.policies import LeastInFlight
from miles_router.fleet.pool import WorkerPool
from miles_router.fleet.worker_url import parse_worker_url
from miles_router.fleet.workers import Worker, WorkerState
from tests.support.quiet_fleet import quiet_fleet

READY, QUARANTINED, DRAINING = WorkerState.READY, WorkerState.QUARANTINED, WorkerState.DRAINING
POLICY = LeastInFlight()


@dataclass
class Scene:
    """A pool of workers `a`, `b`, ..."""

    pool: WorkerPool

    @classmethod
    def of(cls, names: str) -> Scene:
        scene = cls(WorkerPool(failure_threshold=2, readmit="same-weights"))
        for name in names:
            scene.pool.add(parse_worker_url(f"http://{name}"))
        return scene

    def __getitem__(self, name: str) -> Worker:
        return self.pool.get(f"http://{name}")

    def quarantine(self, name: str) -> Worker:
        worker = self[name]
        while worker.state is not QUARANTINED:
            self.pool.record_failure(worker, "no answer")
        return worker


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


def test_without_a_routable_worker_all_their_states_are_told() -> None:
    scene = Scene.of("abc")
    leases = [scene.pool.lease(LeastInFlight()) for _ in "abc"]
    scene.quarantine("a")
    for name in "bc":
        scene.pool.drain(scene[name], lambda: None)
    with pytest.raises(NoWorkerAvailable, match="no routable worker: 2 draining, 1 quarantined"):
        scene.pool.lease(LeastInFlight())
    for lease in leases:
        lease.release()


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
