"""Workers with other weights than the fleet's, and workers that somebody paused."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from miles_router.fleet.placement.contract import PlacementRequest
from miles_router.fleet.pool import ReadmitPolicy, WorkerPool
from miles_router.fleet.worker_url import parse_worker_url
from miles_router.fleet.workers import Transition, Unit, Worker, WorkerState

READY, OUTDATED, PAUSED = WorkerState.READY, WorkerState.OUTDATED, WorkerState.PAUSED
QUARANTINED, DRAINING = WorkerState.QUARANTINED, WorkerState.DRAINING


class Scene:
    """A pool of workers named by letters, each with version "1", and the transitions it told."""

    def __init__(self, names: str, readmit: ReadmitPolicy = "same-weights") -> None:
        self.pool = WorkerPool(failure_threshold=1, readmit=readmit)
        self.told: list[Transition] = []
        for name in names:
            self.pool.record_alive(self.pool.add(parse_worker_url(f"http://{name}")), "1")
        self.pool.listeners.append(self.told.append)

    def __getitem__(self, name: str) -> Worker:
        return self.pool.get(f"http://{name}")

    def states(self) -> dict[str, str]:
        return {worker.address.host: worker.state.value for worker in self.pool}

    def routable(self) -> str:
        return "".join(worker.address.host for worker in self.pool.routable)


def test_who_was_left_out_of_an_update_is_outdated_and_says_why() -> None:
    scene = Scene("abc")
    scene.pool.updated([scene["a"], scene["b"]], "2")
    assert (scene.pool.weight_version, scene.routable(), scene["c"].state) == ("2", "ab", OUTDATED)
    assert scene["c"].reason == "its weight version '1' differs from the fleet's '2'"
    assert [(each.worker, each.before, each.after) for each in scene.told] == [(scene["c"], READY, OUTDATED)]


@pytest.mark.parametrize("how", ["update", "probe"])
def test_an_outdated_worker_returns_once_it_has_the_fleets_version(how: str) -> None:
    scene = Scene("ab")
    scene.pool.updated([scene["a"]], "2")
    assert scene.routable() == "a"
    if how == "update":
        scene.pool.updated([scene["b"]], "2")
    else:
        scene.pool.record_alive(scene["b"], "2")
    assert (scene.routable(), scene["b"].reason) == ("ab", "has weight version '2'")


def test_a_worker_whose_version_nobody_knows_is_not_outdated() -> None:
    scene = Scene("ab")
    scene.pool.add(parse_worker_url("http://c"))
    scene.pool.updated([scene["a"], scene["b"]], "2")
    assert scene.routable() == "abc"
    scene.pool.record_alive(scene["c"], "1")
    assert scene.routable() == "ab"


def test_a_newcomer_with_other_weights_is_never_routable() -> None:
    scene = Scene("a")
    scene.pool.add(parse_worker_url("http://b"), weight_version="0")
    assert (scene.routable(), scene["b"].state) == ("a", OUTDATED)


def test_when_most_have_moved_on_the_rest_is_outdated() -> None:
    scene = Scene("abc")
    scene.pool.record_alive(scene["a"], "2")
    assert (scene.pool.weight_version, scene.routable()) == ("1", "bc")
    scene.pool.record_alive(scene["b"], "2")
    assert (scene.pool.weight_version, scene.routable()) == ("2", "ab")


def test_an_outdated_worker_takes_traffic_when_those_with_other_weights_have_left() -> None:
    scene = Scene("abc")
    scene.pool.record_alive(scene["c"], "2")
    assert (scene.pool.weight_version, scene.routable()) == ("1", "ab")
    scene.pool.remove(scene["a"])
    assert (scene.pool.weight_version, scene.routable()) == ("1", "b"), "one of each is a tie"
    scene.pool.remove(scene["b"])
    assert (scene.pool.weight_version, scene.routable()) == ("2", "c")
    assert scene.told[-1].reason == "has weight version '2'"


@pytest.mark.parametrize("readmit", ["healthy", "never"])
def test_under_other_policies_a_mixed_fleet_takes_traffic(readmit: ReadmitPolicy) -> None:
    scene = Scene("ab", readmit)
    scene.pool.updated([scene["a"]], "2")
    assert (scene.pool.weight_version, scene.routable()) == ("2", "ab")


def test_an_update_that_reached_nobody_changes_nothing() -> None:
    scene = Scene("ab")
    scene.pool.updated([], "2")
    assert (scene.pool.weight_version, scene.routable(), scene.told) == ("1", "ab", [])


def test_outdated_worker_that_fails_returns_only_with_the_right_weights() -> None:
    scene = Scene("ab")
    scene.pool.updated([scene["a"]], "2")
    scene.pool.record_failure(scene["b"], "sick")
    assert scene["b"].state is QUARANTINED
    assert not scene.pool.readmit(scene["b"], "well")
    scene.pool.record_alive(scene["b"], "2")
    assert scene.pool.readmit(scene["b"], "well")
    assert scene.routable() == "ab"


def test_a_quarantined_worker_that_was_updated_still_has_to_pass_its_checks() -> None:
    scene = Scene("ab")
    scene.pool.record_failure(scene["b"], "sick")
    scene.pool.updated([scene["a"], scene["b"]], "2")
    assert (scene["b"].state, scene["b"].weight_version) == (QUARANTINED, "2")
    assert scene.pool.readmit(scene["b"], "well")


def test_a_paused_worker_takes_no_traffic_until_it_goes_on() -> None:
    scene = Scene("ab")
    scene.pool.set_paused(scene["b"], "because")
    assert (scene.routable(), scene["b"].state, scene["b"].reason) == ("a", PAUSED, "because")
    scene.pool.set_paused(scene["b"], "again")
    assert scene["b"].reason == "because"
    scene.pool.set_unpaused(scene["b"])
    assert (scene.routable(), [each.after for each in scene.told]) == ("ab", [PAUSED, READY])


def test_a_paused_worker_that_goes_on_with_old_weights_is_outdated() -> None:
    scene = Scene("ab")
    scene.pool.set_paused(scene["b"], "because")
    scene.pool.updated([scene["a"]], "2")
    assert scene["b"].state is PAUSED
    scene.pool.set_unpaused(scene["b"])
    assert (scene.routable(), scene["b"].state) == ("a", OUTDATED)


def test_a_paused_worker_that_fails_is_quarantined() -> None:
    scene = Scene("ab")
    scene.pool.set_paused(scene["b"], "because")
    scene.pool.record_failure(scene["b"], "sick")
    assert scene["b"].state is QUARANTINED


@pytest.mark.parametrize("state", [QUARANTINED, DRAINING])
def test_pauses_do_not_concern_who_takes_no_traffic_anyway(state: WorkerState) -> None:
    scene = Scene("ab")
    if state is QUARANTINED:
        scene.pool.record_failure(scene["b"], "sick")
    else:
        lease = scene.pool.lease(_TakeLast())
        scene.pool.drain(lease.worker, lambda: None)
    scene.pool.set_paused(scene["b"], "because")
    scene.pool.set_unpaused(scene["b"])
    assert scene["b"].state is state


@pytest.mark.parametrize("state", [PAUSED, OUTDATED])
def test_these_workers_can_be_drained_and_removed(state: WorkerState) -> None:
    scene = Scene("ab")
    if state is PAUSED:
        scene.pool.set_paused(scene["b"], "because")
    else:
        scene.pool.updated([scene["a"]], "2")
    scene.pool.drain(scene["b"], lambda: None)
    assert scene.states() == {"a": "ready"}


class _TakeLast:
    def choose(self, candidates: Sequence[Unit], request: PlacementRequest) -> Unit:
        return candidates[-1]
