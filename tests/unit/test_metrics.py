"""Numbers and their Prometheus text."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

from miles_router.fleet.placement.policies import LeastInFlight
from miles_router.fleet.pool import WorkerPool
from miles_router.fleet.worker_url import parse_worker_url
from miles_router.metrics import GateStatistics, Metrics, Statistics, counter, gauge, histogram
from miles_router.metrics.metrics import route_class
from miles_router.metrics.statistics import BUCKETS, Histogram
from tests.support.quiet_fleet import quiet_fleet

URL = "http://a:1"


def made() -> tuple[Metrics, WorkerPool]:
    fleet = quiet_fleet()
    metrics = Metrics(fleet)
    fleet.pool.add(parse_worker_url(URL))
    return metrics, fleet.pool


def samples(metrics: Metrics) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    """Every sample of the exposition, by name and labels."""
    families = text_string_to_metric_families(metrics.render().decode())
    return {(s.name, tuple(sorted(s.labels.items()))): s.value for family in families for s in family.samples}


def value(metrics: Metrics, name: str, **labels: str) -> float:
    return samples(metrics)[f"miles_router_{name}", tuple(sorted(labels.items()))]


@pytest.mark.parametrize(
    ("path", "route"),
    [
        ("/generate", "generate"),
        ("/v1/chat/completions", "chat_completions"),
        ("/sessions", "sessions"),
        ("/sessions/abc/v1/chat/completions", "sessions"),
        ("/anything", "other"),
        ("/generate/", "other"),
        ("", "other"),
    ],
)
def test_paths_fall_into_a_bounded_set_of_classes(path: str, route: str) -> None:
    assert route_class(path) == route


@pytest.mark.parametrize(("seconds", "bucket"), [(0.0, 0), (0.001, 0), (0.0011, 1), (1.0, 9), (3600, 19), (3601, 20)])
def test_a_bucket_holds_what_is_up_to_its_bound(seconds: float, bucket: int) -> None:
    histogram = Histogram()
    histogram.observe(seconds)
    assert histogram.counts[bucket] == 1
    assert sum(histogram.counts) == 1
    assert histogram.total == seconds


def test_buckets_are_added_up_for_prometheus() -> None:
    histogram = Histogram()
    for seconds in (0.0005, 0.03, 0.03, 10_000):
        histogram.observe(seconds)
    cumulative = histogram.cumulative()
    assert [bound for bound, _ in cumulative] == [*map(str, BUCKETS), "+Inf"]
    assert (cumulative[0][1], dict(cumulative)["0.05"], cumulative[-2][1], cumulative[-1][1]) == (1, 3, 3, 4)


def test_requests_are_counted_by_route_status_and_worker() -> None:
    metrics, _ = made()
    for status in (200, 200, 500):
        metrics.finished("/generate", status, URL, 0.02, 0.01)
    metrics.finished("/x", 503, None, 0.02, None)
    assert value(metrics, "requests_total", route="generate", status="200", worker=URL) == 2
    assert value(metrics, "requests_total", route="generate", status="500", worker=URL) == 1
    assert value(metrics, "requests_total", route="other", status="503", worker="") == 1
    assert value(metrics, "request_seconds_count", route="generate") == 3
    assert value(metrics, "request_seconds_sum", route="generate") == pytest.approx(0.06)
    assert value(metrics, "first_byte_seconds_bucket", route="generate", le="0.01") == 3
    assert ("miles_router_first_byte_seconds_count", (("route", "other"),)) not in samples(metrics)


def test_bytes_retries_and_losses_are_counted() -> None:
    metrics, _ = made()
    metrics.bytes_in, metrics.bytes_out, metrics.retries = 1, 2, 3
    metrics.client_disconnects, metrics.broken_replies = 4, 5
    names = ("request_bytes", "response_bytes", "retries", "client_disconnects", "broken_replies")
    assert [value(metrics, f"{name}_total") for name in names] == [1, 2, 3, 4, 5]


def test_workers_are_shown_by_load_and_state() -> None:
    metrics, pool = made()
    lease = pool.lease(LeastInFlight())
    assert value(metrics, "in_flight", worker=URL) == 1
    assert value(metrics, "worker_routable", worker=URL) == 1
    pool.record_failure(lease.worker, "gone")
    assert value(metrics, "worker_routable", worker=URL) == 0
    states = {state: value(metrics, "workers", state=state) for state in ("ready", "quarantined", "draining")}
    assert states == {"ready": 0, "quarantined": 1, "draining": 0}
    lease.release()


def test_changes_of_state_are_counted() -> None:
    metrics, pool = made()
    worker = pool.get(URL)
    pool.record_failure(worker, "gone")
    pool.remove(worker)
    for before, after in (("unknown", "ready"), ("ready", "quarantined"), ("quarantined", "removed")):
        assert value(metrics, "worker_transitions_total", before=before, after=after) == 1


def test_a_removed_workers_series_go_with_it() -> None:
    metrics, pool = made()
    metrics.finished("/generate", 200, URL, 0.02, 0.01)
    metrics.finished("/generate", 503, None, 0.02, None)
    pool.remove(pool.get(URL))
    left = [labels for name, labels in samples(metrics) if name == "miles_router_requests_total"]
    assert left == [(("route", "generate"), ("status", "503"), ("worker", ""))]
    assert URL not in metrics.render().decode()


class Own(Collector):
    """A middleware's metric."""

    def collect(self) -> Iterable[Metric]:
        yield GaugeMetricFamily("mine", "Of a middleware.", 7)


def test_a_middlewares_metrics_are_shown_beside_ours() -> None:
    metrics, _ = made()
    metrics.register(Own())
    assert samples(metrics)["mine", ()] == 7


def test_a_name_that_is_taken_is_refused() -> None:
    metrics, _ = made()
    metrics.register(Own())
    with pytest.raises(ValueError, match="mine"):
        metrics.register(Own())


# Numbers that are declared


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


def test_two_of_a_class_count_apart_and_begin_with_nothing() -> None:
    first, second = counted(), counted()
    first.capped += 1
    first.refused["batch"] += 1
    first.held["x"].observe(1)
    assert second.numbers() == counted().numbers()
    assert (second.capped, second.refused, second.waited.total) == (0, {}, 0)


def test_a_gauge_that_nobody_reads_and_a_name_that_is_not_declared_are_refused() -> None:
    with pytest.raises(TypeError, match="a function that reads the gauge 'waiting'"):
        Counts()
    with pytest.raises(TypeError, match="declares no 'capt'"):
        Counts(waiting=int, capt=int)


def test_every_family_of_the_gate_is_given() -> None:
    fleet = quiet_fleet()
    fleet.gate.pause("abort")
    fleet.gate.sleep()
    assert shown(GateStatistics([fleet], [fleet])) == {
        ("miles_router_gate_closed", (("reason", "paused"),)): 1,
        ("miles_router_gate_closed", (("reason", "asleep"),)): 1,
        ("miles_router_gate_closed", (("reason", "workers_paused"),)): 0,
        ("miles_router_gate_held", ()): 0,
        ("miles_router_pauses_total", ()): 1,
    }
