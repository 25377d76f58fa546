"""Metrics as plain numbers, so that several processes can show theirs as one. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

#: A sample's name, and its labels in order.
SampleName = tuple[str, tuple[tuple[str, str], ...]]


class PlainFamily(NamedTuple):
    """One family. `shared`: numbers of several processes are not added up, the greatest counts."""

    name: str
    kind: str
    help: str
    shared: bool
    samples: dict[SampleName, float]

    def as_json(self) -> list[Any]:
        """As lists."""
        return [self.name, self.kind, self.help, self.shared, [[*key, number] for key, number in self.samples.items()]]

    @classmethod
    def read(cls, written: Sequence[Any]) -> PlainFamily:
        """What `as_json` gave."""
        name, kind, about, shared, samples = written
        return cls(name, kind, about, shared, {(each, tuple(map(tuple, labels))): n for each, labels, n in samples})


def plain(metrics: Iterable[Metric], shared: set[str]) -> list[PlainFamily]:
    """Families as `prometheus_client` collects them; some of them are `shared`."""
    return [
        PlainFamily(
            each.name,
            each.type,
            each.documentation,
            each.name in shared,
            {(sample.name, tuple(sorted(sample.labels.items()))): sample.value for sample in each.samples},
        )
        for each in metrics
    ]


def merged(parts: Iterable[Iterable[PlainFamily]]) -> list[PlainFamily]:
    """Those of several processes as those of one."""
    families: dict[str, PlainFamily] = {}
    for family in (each for part in parts for each in part):
        known = families.get(family.name)
        if known is None:
            families[family.name] = family._replace(samples=dict(family.samples))
            continue
        samples = known.samples
        for key, number in family.samples.items():
            if key not in samples:
                samples[key] = number
            else:
                samples[key] = max(samples[key], number) if family.shared else samples[key] + number
    return list(families.values())


def lasting(families: Iterable[PlainFamily]) -> list[PlainFamily]:
    """What stays of a process that has ended: what it has counted."""
    return [each for each in families if each.kind != "gauge"]


def rendered(families: Iterable[PlainFamily]) -> bytes:
    """The Prometheus text exposition."""
    registry = CollectorRegistry()
    registry.register(_Families(families))
    return generate_latest(registry)


class _Families(Collector):
    def __init__(self, families: Iterable[PlainFamily]) -> None:
        self._families = families

    def collect(self) -> Iterable[Metric]:
        for family in self._families:
            metric = Metric(family.name, family.help, family.kind)
            for (name, labels), number in family.samples.items():
                metric.add_sample(name, dict(labels), number)
            yield metric
