"""Numbers: what is declared once, intervals of a run, spans of a request."""

from __future__ import annotations

from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from middleware_hub.dashboard.gathering import one_run
from middleware_hub.traces.parts import parts_of
from miles_router.fleet.pool import WorkerPool
from miles_router.fleet.worker_url import parse_worker_url
from miles_router.metrics import Metrics, Statistics, counter, gauge, histogram
from miles_router.metrics.run import INTERVAL, INTERVALS, NAMES, VERSIONS, RunSeries
from miles_router.middlewares.generation import Mark
from tests.support.quiet_fleet import quiet_fleet

URL = "http://a:1"


def made() -> tuple[Metrics, WorkerPool]:
    fleet = quiet_fleet()
    metrics = Metrics(fleet)
    fleet.pool.add(parse_worker_url(URL))
    return metrics, fleet.pool


def samples(metrics: Metrics) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    families = text_string_to_metric_families(metrics.render().decode())
    return {(s.name, tuple(sorted(s.labels.items()))): s.value for family in families for s in family.samples}


def test_a_removed_workers_series_go_with_it() -> None:
    metrics, pool = made()
    metrics.finished("/generate", 200, URL, 0.02, 0.01)
    metrics.finished("/generate", 503, None, 0.02, None)
    pool.remove(pool.get(URL))
    left = [labels for name, labels in samples(metrics) if name == "miles_router_requests_total"]
    assert left == [(("route", "generate"), ("status", "503"), ("worker", ""))]
    assert URL not in metrics.render().decode()


class Counts(Statistics, prefix="cap"):
    capped = counter("Requests whose budget was cut.")
    refused = counter("Requests refused, by reason.", by="reason")
    pairs = counter("By two labels.", by=("a", "b"), name="by_two")
    text = counter("Tokens, by origin.", name="tokens", labels={"origin": "text"})
    ids = counter("Tokens, by origin.", name="tokens", labels={"origin": "ids"})
    waited = histogram("Time waited.")
    held = histogram("Time held, by route.", by="route")
    waiting = gauge("Requests that wait.", name="")
    elsewhere = counter("Counted by somebody else.")


def counted(**numbers: float) -> Counts:
    return Counts(waiting=lambda: numbers.get("waiting", 0), elsewhere=lambda: 7)


def shown(statistics: Statistics) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    """What Prometheus is given, but for buckets."""
    families = list(statistics.collect())
    assert [(each.name, each.documentation) for each in families] == [
        (each.name.removesuffix("_total"), each.help) for each in type(statistics).descriptions()
    ]
    return {
        (sample.name, tuple(sample.labels.items())): sample.value
        for family in families
        for sample in family.samples
        if not sample.name.endswith("_bucket")
    }


def count_some(counts: Counts) -> None:
    counts.capped += 2
    counts.refused["batch"] += 1
    counts.pairs["x", 1] += 4
    counts.text, counts.ids = 5, 6
    counts.waited.observe(0.5)
    counts.held["/generate"].observe(2)


def test_what_is_declared_once_is_shown_as_json_and_to_prometheus() -> None:
    counts = counted(waiting=3)
    count_some(counts)
    assert counts.numbers() == {
        "capped": 2,
        "refused": {"batch": 1},
        "pairs": {"x,1": 4},
        "text": 5,
        "ids": 6,
        "waited": {"count": 1, "sum": 0.5},
        "held": {"/generate": {"count": 1, "sum": 2.0}},
        "waiting": 3,
        "elsewhere": 7,
    }
    assert shown(counts) == {
        ("cap_capped_total", ()): 2,
        ("cap_refused_total", (("reason", "batch"),)): 1,
        ("cap_by_two_total", (("a", "x"), ("b", "1"))): 4,
        ("cap_tokens_total", (("origin", "text"),)): 5,
        ("cap_tokens_total", (("origin", "ids"),)): 6,
        ("cap_waited_count", ()): 1,
        ("cap_waited_sum", ()): 0.5,
        ("cap_held_count", (("route", "/generate"),)): 1,
        ("cap_held_sum", (("route", "/generate"),)): 2,
        ("cap", ()): 3,
        ("cap_elsewhere_total", ()): 7,
    }


def test_a_gauge_that_nobody_reads_and_a_name_that_is_not_declared_are_refused() -> None:
    with pytest.raises(TypeError, match="a function that reads the gauge 'waiting'"):
        Counts()
    with pytest.raises(TypeError, match="declares no 'capt'"):
        Counts(waiting=int, capt=int)


class Scene:
    def __init__(self) -> None:
        self.time = 1_000_000.5
        self.version: str | None = "1"
        self.series = RunSeries(lambda: self.version, now=lambda: self.time)

    def turn(self) -> None:
        self.series.record({"1": 1}, given=1, reused=0)


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


def test_rewards_are_kept_of_the_last_versions_alone() -> None:
    scene = Scene()
    for version in range(VERSIONS + 1):
        scene.series.reward(str(version), version)
        scene.series.reward(str(version), 0.5)
    told = scene.series.describe()["rewards"]
    kept = range(1, VERSIONS + 1)
    assert told == [{"weight_version": str(version), "count": 2, "sum": version + 0.5} for version in kept]


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


WORKER = {"worker": "http://a:1", "weight_version": "3"}


def test_marks_of_generations_side_by_side_are_told_apart() -> None:
    marks = [
        Mark("gate", 2.0, 1, {"seconds": 1.5}),
        Mark("worker_chosen", 2.0, 1, WORKER),
        Mark("worker_chosen", 3.0, 2, WORKER),
        Mark("first_byte", 4.0, 2, WORKER),
        Mark("first_byte", 5.0, 1, WORKER),
        Mark("reply_ended", 6.0, 1, {}),
        Mark("reply_ended", 7.0, 1, {}),
    ]
    assert [(part.name, part.began_at, part.ended_at) for part in parts_of(marks, 9.0)] == [
        ("gate", 0.5, 2.0),
        ("first_byte", 3.0, 4.0),
        ("first_byte", 2.0, 5.0),
        ("generation", 5.0, 6.0),
        ("generation", 4.0, 9.0),
    ]


def test_a_worker_that_was_not_asked_has_no_part() -> None:
    marks = [Mark("worker_chosen", 1.0, 1, WORKER), Mark("not_admitted", 2.0, 1, {})]
    assert [*parts_of(marks, 9.0)] == []
    lost = [Mark("worker_chosen", 1.0, 1, {}), Mark("worker_lost", 2.0, 1, {}), Mark("worker_chosen", 3.0, 1, WORKER)]
    assert [*parts_of(lost, 9.0)] == [("first_byte", 1.0, 9.0, WORKER)]
