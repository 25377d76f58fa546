"""Intervals of the run: their bounds, and what becomes of them when the clock or the fleet's version goes back."""

from __future__ import annotations

import math
from typing import Any

import pytest

from middleware_hub.dashboard.gathering import one_run
from miles_router.metrics.run import INTERVAL, INTERVALS, NAMES, VERSIONS, RunSeries


class Scene:
    def __init__(self) -> None:
        self.time = 1_000_000.5
        self.version: str | None = "1"
        self.series = RunSeries(lambda: self.version, now=lambda: self.time)

    def starts(self) -> list[int]:
        return [interval["start"] for interval in self.series.describe()["intervals"]]

    def turn(self) -> None:
        self.series.record({"1": 1}, given=1, reused=0)


def test_intervals_begin_with_whole_multiples_and_only_where_something_happened() -> None:
    scene = Scene()
    scene.turn()
    scene.time += 3 * INTERVAL
    scene.turn()
    scene.turn()
    assert scene.starts() == [1_000_000, 1_000_030]
    assert [each["turns"] for each in scene.series.describe()["intervals"]] == [1, 2]


def test_a_version_that_comes_back_within_an_interval_goes_on_in_its_own() -> None:
    scene = Scene()
    for version in ("1", None, "2", None, "2"):
        scene.version = version
        scene.turn()
    told = scene.series.describe()
    assert [(each["weight_version"], each["turns"]) for each in told["intervals"]] == [("1", 1), (None, 2), ("2", 2)]
    assert [(each["weight_version"], each["turns"]) for each in told["versions"]] == [("1", 1), (None, 2), ("2", 2)]


def test_a_clock_that_is_set_back_makes_no_earlier_interval() -> None:
    scene = Scene()
    scene.turn()
    scene.time -= 10 * INTERVAL
    scene.turn()
    assert scene.starts() == [1_000_000]


def test_intervals_versions_and_names_are_bounded() -> None:
    scene = Scene()
    for number in range(INTERVALS + 5):
        scene.version = str(number)
        scene.turn()
        scene.time += INTERVAL
    told = scene.series.describe()
    assert (len(told["intervals"]), len(told["versions"])) == (INTERVALS, VERSIONS)
    assert told["since"] == told["intervals"][0]["start"] == 1_000_000 + 5 * INTERVAL
    assert told["versions"][-1]["weight_version"] == str(INTERVALS + 4)
    scene.series.record({str(version): 1 for version in range(3 * NAMES)}, given=0, reused=0)
    sampled = scene.series.describe()["intervals"][-1]["sampled"]
    assert (len(sampled), sum(sampled.values()), sampled["other"]) == (NAMES + 1, 3 * NAMES, 2 * NAMES)


def test_how_stale_nobody_can_tell_is_unknown() -> None:
    scene = Scene()
    scene.version = "7"
    scene.series.train({"5": 1, "7": 2, "9": 4, None: 8, "v2": 16})
    assert scene.series.describe()["intervals"][0]["staleness"] == {"2": 1, "0": 2, "unknown": 28}


def test_rewards_are_kept_of_the_last_versions_alone() -> None:
    scene = Scene()
    for version in range(VERSIONS + 1):
        scene.series.reward(str(version), version)
        scene.series.reward(str(version), 0.5)
    told = scene.series.describe()["rewards"]
    kept = range(1, VERSIONS + 1)
    assert told == [{"weight_version": str(version), "count": 2, "sum": version + 0.5} for version in kept]


@pytest.mark.parametrize("odd", [None, True, "1", {"a": 1}, math.nan, math.inf, -math.inf, 1e16, 10**400])
def test_what_is_no_number_is_no_reward(odd: object) -> None:
    scene = Scene()
    scene.series.reward("1", odd)
    assert scene.series.describe()["rewards"] == []


def test_rewards_of_several_processes_are_added_up() -> None:
    runs = []
    for rewards in ({"1": 1.0, "2": 3}, {"2": -0.5, "3": 2}):
        scene = Scene()
        for version, reward in rewards.items():
            scene.series.reward(version, reward)
        runs.append({**scene.series.describe(), "gate": {"closed": False, "held": 0}})
    assert [tuple(each.values()) for each in one_run(runs)["rewards"]] == [("1", 1, 1.0), ("2", 2, 2.5), ("3", 1, 2.0)]


def test_rewards_of_several_processes_stand_in_the_order_of_the_versions() -> None:
    runs = []
    for version in ("2", "1"):
        scene = Scene()
        scene.time, scene.version = 100.0 * int(version), version
        scene.turn()
        scene.series.reward(version, 1.0)
        runs.append({**scene.series.describe(), "gate": {"closed": False, "held": 0}})
    assert [each["weight_version"] for each in one_run(runs)["rewards"]] == ["1", "2"]


def test_from_when_on_nothing_is_forgotten_is_said() -> None:
    scene = Scene()
    assert scene.series.describe()["since"] == 1_000_000
    for number in range(INTERVALS + 1):
        scene.version = str(number % 2)
        scene.turn()
        scene.time += INTERVAL / 2
    told = scene.series.describe()
    assert told["since"] == 1_000_000 + INTERVAL, "half of the first interval is gone"
    assert told["intervals"][0]["start"] == 1_000_000


def test_of_several_processes_all_is_known_once_each_knows_all() -> None:
    def run(first: int, since: int) -> dict[str, Any]:
        scene = Scene()
        scene.time = first + 0.5
        for _ in range(3):
            scene.turn()
            scene.time += INTERVAL
        return {**scene.series.describe(), "since": since, "gate": {"closed": False, "held": 0}}

    assert one_run([run(100, 100), run(110, 110)])["since"] == 110
    many = [run(start, 0) for start in range(0, (INTERVALS + 2) * INTERVAL, 3 * INTERVAL)]
    whole = one_run(many)
    assert (len(whole["intervals"]), whole["since"]) == (INTERVALS, whole["intervals"][0]["start"])
