"""The cache's numbers, for `GET /metrics` and `GET /router/info`."""

from __future__ import annotations

from collections.abc import Iterable

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from middleware_hub.radix_tree.cache import RadixTreeCache

COUNTERS = {
    "lookups": "Texts looked up.",
    "hits": "Look-ups that found recorded tokens to reuse.",
    "reused_tokens": "Recorded tokens given to the engine again.",
    "encoded_tokens": "Tokens that were encoded from text.",
    "recorded": "Generations recorded.",
    "partial": "Of these, generations that were cut short.",
    "unaligned": "Of these, generations that can only be reused whole.",
    "refused": "Generations larger than the whole budget.",
    "evicted": "Generations evicted.",
    "evicted_tokens": "Tokens evicted.",
    "retrievals": "Texts and ids retrieved.",
    "ambiguous": "Retrievals by a text that several different trajectories spell.",
}
GAUGES = {
    "entries": "Generations held.",
    "tokens": "Tokens held, shared prefixes counted once.",
    "token_bytes": "Bytes of the tokens held.",
    "text_characters": "Characters of text held.",
}


def summary(cache: RadixTreeCache) -> dict[str, object]:
    """All numbers under their names."""
    counted = {name: getattr(cache.statistics, name) for name in COUNTERS}
    return {**counted, **_held(cache), "passed_through": dict(cache.statistics.passed_through)}


def _held(cache: RadixTreeCache) -> dict[str, int]:
    return {
        "entries": len(cache),
        "tokens": cache.tokens,
        "token_bytes": cache.nbytes,
        "text_characters": cache.characters,
    }


class CacheCollector(Collector):
    """`miles_router_radix_tree_...` for Prometheus."""

    def __init__(self, cache: RadixTreeCache) -> None:
        self._cache = cache

    def collect(self) -> Iterable[Metric]:
        """One family for each number."""
        for name, text in COUNTERS.items():
            yield CounterMetricFamily(f"miles_router_radix_tree_{name}", text, getattr(self._cache.statistics, name))
        for name, value in _held(self._cache).items():
            yield GaugeMetricFamily(f"miles_router_radix_tree_{name}", GAUGES[name], value)
        passed = CounterMetricFamily(
            "miles_router_radix_tree_passed_through", "Requests and answers left alone, by reason.", labels=("reason",)
        )
        for reason, count in self._cache.statistics.passed_through.items():
            passed.add_metric((reason,), count)
        yield passed
