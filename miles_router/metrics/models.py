"""The metrics of several trained models as one: equal families, told apart by the label `model_id`."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence

from prometheus_client import Metric
from prometheus_client.registry import Collector

MODEL = "model_id"


class OfModels(Collector):
    """The collectors that the middlewares of several models have of one kind.

    Args:
        default: that of the default model, whose samples have no further label.
        others: those of the other models, by `model_id`.
    """

    def __init__(self, default: Collector, others: Mapping[str, Collector]) -> None:
        self._default = default
        self._others = others

    def collect(self) -> Iterable[Metric]:
        """Return the families of the default model, with the samples of the other models behind its own."""
        families = {family.name: family for family in self._default.collect()}
        for model, collector in self._others.items():
            for family in collector.collect():
                samples = [each._replace(labels={**each.labels, MODEL: model}) for each in family.samples]
                shown = families.setdefault(family.name, family)
                shown.samples = samples if shown is family else [*shown.samples, *samples]
        return families.values()


def grouped(default: Sequence[Collector], others: Mapping[str, Sequence[Collector]]) -> Iterator[Collector]:
    """Yield the collectors of the default model, each with those of the same class of the other models."""
    left: dict[str, dict[type, deque[Collector]]] = {}
    for model, collectors in others.items():
        by_class = left[model] = defaultdict(deque)
        for each in collectors:
            by_class[type(each)].append(each)
    for each in default:
        same = {model: found.popleft() for model, by_class in left.items() if (found := by_class[type(each)])}
        yield OfModels(each, same) if same else each
