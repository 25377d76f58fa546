"""Metrics as plain numbers, so that several processes can show theirs as one. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import Any, NamedTuple

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from miles_router.metrics.statistics import Declaration, Together

#: A sample's name, and its labels in order.
SampleName = tuple[str, tuple[tuple[str, str], ...]]
Samples = Mapping[SampleName, float]


class PlainFamily(NamedTuple):
    """One family."""

    name: str
    kind: str
    help: str
    together: Together
    samples: Samples

    def as_json(self) -> list[Any]:
        """As lists."""
        return [
            self.name,
            self.kind,
            self.help,
            self.together,
            [[*key, number] for key, number in self.samples.items()],
        ]

    @classmethod
    def read(cls, written: Sequence[Any]) -> PlainFamily:
        """What `as_json` gave."""
        name, kind, about, together, samples = written
        return cls(name, kind, about, together, {(each, tuple(map(tuple, labels))): n for each, labels, n in samples})


def plain(metrics: Iterable[Metric], together: Mapping[str, Together]) -> list[PlainFamily]:
    """Families as `prometheus_client` collects them, and by name what those of several processes are together; of a
    middleware's own making they are added up."""
    return [
        PlainFamily(
            each.name,
            each.type,
            each.documentation,
            together.get(each.name, "sum"),
            {(sample.name, tuple(sorted(sample.labels.items()))): sample.value for sample in each.samples},
        )
        for each in metrics
    ]


def merged(parts: Iterable[Iterable[PlainFamily]]) -> list[PlainFamily]:
    """Those of several processes as those of one. Who decides comes last."""
    families: dict[str, PlainFamily] = {}
    for family in (each for part in parts for each in part):
        known = families.get(family.name)
        samples = family.samples if known is None else _together(family.together, known.samples, family.samples)
        families[family.name] = family._replace(samples=samples)
    return list(families.values())


def _together(rule: Together, one: Samples, other: Samples) -> Samples:
    if rule == "last":
        return other
    of_both = max if rule == "max" else _sum
    return {**one, **{key: of_both(one[key], number) if key in one else number for key, number in other.items()}}


def _sum(one: float, other: float) -> float:
    return one + other


def lasting(families: Iterable[PlainFamily]) -> list[PlainFamily]:
    """What stays of a process that has ended: what it has counted."""
    return [each for each in families if each.kind != "gauge"]


def numbers_in(families: Iterable[PlainFamily], declared: Mapping[str, Declaration]) -> dict[str, object]:
    """Of families the numbers that are so declared, by attribute, as `Statistics.numbers` would show them."""
    samples = {family.name: family.samples for family in families}
    return {name: _shown(each, samples.get(str(each.name), {})) for name, each in declared.items()}


def written_declarations(layers: Mapping[str, Mapping[str, Declaration]]) -> dict[str, Any]:
    """Which numbers layers have, by name and attribute, for another process."""
    return {name: {number: asdict(each) for number, each in declared.items()} for name, declared in layers.items()}


def read_declarations(written: Mapping[str, Any]) -> dict[str, dict[str, Declaration]]:
    """What `written_declarations` gave."""
    return {
        name: {number: Declaration(**{**each, "by": tuple(each["by"])}) for number, each in declared.items()}
        for name, declared in written.items()
    }


def _shown(declared: Declaration, samples: Samples) -> object:
    found: dict[str, Any] = {}
    for (name, pairs), number in samples.items():
        labels = dict(pairs)
        if any(labels[label] != value for label, value in declared.labels.items()):
            continue
        key = ",".join(labels[label] for label in declared.by)
        if declared.kind != "histogram":
            found[key] = number
        elif name == f"{declared.name}_count":
            found.setdefault(key, {})["count"] = int(number)
        elif name == f"{declared.name}_sum":
            found.setdefault(key, {})["sum"] = number
    return found if declared.by else found.get("", declared.plain(declared.zero()))


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
