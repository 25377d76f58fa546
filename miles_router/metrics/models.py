"""Merge the metrics of several trained models: samples of one metric family differ in their label `model_id`."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence

from prometheus_client import Metric
from prometheus_client.registry import Collector

MODEL = "model_id"


class ModelsCollector(Collector):
    """One Prometheus collector for several models, whose middlewares have a collector of the same class each.

    Args:
        default: the default model's collector; its samples get no `model_id` label.
        others: the other models' collectors, by `model_id`.
    """

    def __init__(self, default: Collector, others: Mapping[str, Collector]) -> None:
        self._default = default
        self._others = others

    def collect(self) -> Iterable[Metric]:
        """Return the metric families; in each, the default model's samples come first."""
        families = {family.name: family for family in self._default.collect()}
        for model, collector in self._others.items():
            for family in collector.collect():
                samples = [each._replace(labels={**each.labels, MODEL: model}) for each in family.samples]
                shown = families.setdefault(family.name, family)
                shown.samples = samples if shown is family else [*shown.samples, *samples]
        return families.values()


def merge_models(default: Sequence[Collector], others: Mapping[str, Sequence[Collector]]) -> Iterator[Collector]:
    """Yield the default model's collectors, each merged with the other models' collectors of the same class.

    Several collectors of one class are matched by their order. The other models' collectors without a match are left
    out.
    """
    left: dict[str, dict[type, deque[Collector]]] = {}
    for model, collectors in others.items():
        by_class = left[model] = defaultdict(deque)
        for each in collectors:
            by_class[type(each)].append(each)
    for each in default:
        same = {model: found.popleft() for model, by_class in left.items() if (found := by_class[type(each)])}
        yield ModelsCollector(each, same) if same else each
