"""Prometheus texts of several engines as one, which the official parser reads."""

from __future__ import annotations

from prometheus_client.parser import text_string_to_metric_families as families_of

from miles_router.control.engine_metrics import LABEL, merge

ONE = """\
# HELP sglang:num_running_reqs The number of running requests.
# TYPE sglang:num_running_reqs gauge
sglang:num_running_reqs{model_name="m",note="a, {b} \\"c\\""} 42.0
# HELP sglang:latency_seconds Latency.
# TYPE sglang:latency_seconds histogram
sglang:latency_seconds_bucket{le="1.0"} 1.0
sglang:latency_seconds_bucket{le="+Inf"} 2.0
sglang:latency_seconds_sum 1.5
sglang:latency_seconds_count 2.0
bare 1
"""
A, B = "http://a:1", "http://b:2"


def test_every_sample_has_its_worker_and_each_family_stands_once() -> None:
    text, unreadable = merge({A: ONE, B: ONE.replace("42.0", "7.0")}, LABEL)
    assert not unreadable
    read = {family.name: family for family in families_of(text)}
    assert list(read) == ["sglang_num_running_reqs", "sglang_latency_seconds", "bare"]
    running = read["sglang_num_running_reqs"]
    assert (running.type, running.documentation) == ("gauge", "The number of running requests.")
    assert [(each.labels["worker_addr"], each.value) for each in running.samples] == [(A, 42.0), (B, 7.0)]
    assert running.samples[0].labels["note"] == 'a, {b} "c"'
    assert [each.labels.get("le") for each in read["sglang_latency_seconds"].samples] == ["1.0", "+Inf", None, None] * 2
    assert text.count("# TYPE") == 3


def test_a_worker_that_is_a_router_keeps_its_own_labels() -> None:
    own = 'sglang_num_running_reqs{worker_addr="http://10.0.0.1:15000",model_name="m"} 42.0\n'
    text, _ = merge({A: own}, LABEL)
    (family,) = families_of(text)
    assert [sample.labels for sample in family.samples] == [{"worker_addr": "http://10.0.0.1:15000", "model_name": "m"}]


def test_a_text_that_is_not_prometheus_is_left_out_by_name() -> None:
    text, unreadable = merge({A: "<html>not a sample</html>\n", B: "# EOF\n\nup 1\n"}, LABEL)
    assert list(unreadable) == [A]
    assert [(each.labels, each.value) for family in families_of(text) for each in family.samples] == [
        ({"worker_addr": B}, 1.0)
    ]
