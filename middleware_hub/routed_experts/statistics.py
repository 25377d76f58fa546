"""The numbers of routed experts, for `GET /metrics` and `GET /router/info`."""

from __future__ import annotations

from collections.abc import Iterable

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from middleware_hub.routed_experts.store import ExpertStore
from miles_router.middlewares.experts import Experts

PREFIX = "miles_router_routed_experts"
COUNTERS = {
    "answers": "Answers whose rows were taken.",
    "transferred_rows": "Rows that came from workers.",
    "reused_rows": "Rows that were held already and did not come again.",
    "saved_bytes": "Bytes that these would have taken on the way from the worker.",
    "evicted": "Generations whose rows were let go for want of room.",
    "evicted_bytes": "Bytes of these rows.",
}


def summary(store: ExpertStore, experts: Experts) -> dict[str, object]:
    """All numbers under their names, and the model's shape where it is known."""
    counted = {name: getattr(store.statistics, name) for name in COUNTERS}
    shape = None if experts.shape is None else experts.shape._asdict()
    return {
        **counted,
        "generations": len(store),
        "bytes": store.nbytes,
        "missing": dict(store.statistics.missing),
        "shape": shape,
    }


class ExpertsCollector(Collector):
    """`miles_router_routed_experts_...` for Prometheus."""

    def __init__(self, store: ExpertStore) -> None:
        self._store = store

    def collect(self) -> Iterable[Metric]:
        """One family for each number."""
        statistics = self._store.statistics
        for name, text in COUNTERS.items():
            yield CounterMetricFamily(f"{PREFIX}_{name}", text, getattr(statistics, name))
        yield GaugeMetricFamily(f"{PREFIX}_generations", "Generations whose rows are held.", len(self._store))
        yield GaugeMetricFamily(f"{PREFIX}_bytes", "Bytes of rows held.", self._store.nbytes)
        missing = CounterMetricFamily(
            f"{PREFIX}_missing", "Answers without rows that could be held, by reason.", labels=("reason",)
        )
        for reason, count in statistics.missing.items():
            missing.add_metric((reason,), count)
        yield missing
