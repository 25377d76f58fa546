"""Declarations of numbers: plain attributes where they are counted, JSON and Prometheus families where they are read.

    class Counts(Statistics, prefix="token_cap"):
        capped = counter("Requests whose budget was cut.")
        refused = counter("Requests refused, by reason.", by="reason")
        waiting = gauge("Requests that wait.")

    counts = Counts(waiting=lambda: len(queue))
    counts.capped += 1
    counts.refused["batch"] += 1

A labelled `prometheus_client` counter takes a lock and a dictionary lookup for each increment. Here an increment is one
addition, and `collect` builds the families when Prometheus scrapes.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, NamedTuple, overload

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.registry import Collector

#: Bucket bounds in seconds, from a cache hit to a generation of an hour.
BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600, 1800, 3600)

Family = CounterMetricFamily | GaugeMetricFamily | HistogramMetricFamily
FAMILIES: Mapping[str, type[Family]] = {
    "counter": CounterMetricFamily,
    "gauge": GaugeMetricFamily,
    "histogram": HistogramMetricFamily,
}


class Histogram:
    """A histogram of seconds with a count for each bucket; `cumulative` adds the counts up for Prometheus."""

    __slots__ = ("counts", "total")

    def __init__(self) -> None:
        self.counts = [0] * (len(BUCKETS) + 1)
        self.total = 0.0

    def observe(self, seconds: float) -> None:
        self.counts[bisect_left(BUCKETS, seconds)] += 1
        self.total += seconds

    def cumulative(self) -> list[tuple[str, float]]:
        """Return Prometheus buckets: `(upper bound, count of values up to it)`."""
        running = 0
        buckets = []
        for bound, count in zip([*map(str, BUCKETS), "+Inf"], self.counts, strict=True):
            running += count
            buckets.append((bound, float(running)))
        return buckets


class FamilyDescription(NamedTuple):
    """A Prometheus family as the documentation lists it."""

    name: str
    kind: str
    labels: tuple[str, ...]
    help: str


@dataclass(frozen=True)
class Declaration:
    """A declared attribute. `by`: the labels that key its values. `labels`: constant labels with their values."""

    kind: str
    help: str
    name: str | None
    by: tuple[str, ...] = ()
    labels: Mapping[str, str] = field(default_factory=dict)

    def zero(self) -> object:
        """Return the attribute's initial value."""
        if self.kind == "histogram":
            return defaultdict(Histogram) if self.by else Histogram()
        return Counter() if self.by else 0

    def family(self) -> Family:
        """Return an empty Prometheus family."""
        return FAMILIES[self.kind](self.name or "", self.help, labels=(*self.by, *self.labels))

    def fill(self, family: Family, value: Any) -> None:
        """Add the attribute's values to the family."""
        for key, number in value.items() if self.by else [((), value)]:
            labels = (*map(str, key if isinstance(key, tuple) else (key,)), *self.labels.values())
            if isinstance(family, HistogramMetricFamily):
                family.add_metric(labels, number.cumulative(), number.total)
            else:
                family.add_metric(labels, number)

    def plain(self, value: Any) -> object:
        """Convert a value to JSON types."""
        if self.by:
            return {
                ",".join(map(str, key)) if isinstance(key, tuple) else key: _plain(each) for key, each in value.items()
            }
        return _plain(value)


def _plain(number: Any) -> object:
    return {"count": sum(number.counts), "sum": number.total} if isinstance(number, Histogram) else number


@overload
def counter(help: str, *, name: str | None = None, labels: Mapping[str, str] | None = None) -> int: ...
@overload
def counter(help: str, *, by: str | tuple[str, ...], name: str | None = None) -> Counter[Any]: ...
def counter(help: str, *, by: Any = (), name: str | None = None, labels: Any = None) -> Any:
    """Declare a number that only grows, from 0; with `by`, one for each value of a label.

    Args:
        by: the label that keys its values, `counts.refused["batch"] += 1`; with several labels, keys are tuples.
        name: the metric's name without the prefix and `_total`; by default the attribute's name.
        labels: constant labels, which distinguish attributes that share a `name`.
    """
    return Declaration("counter", help, name, _names(by), labels or {})


def gauge(help: str, *, by: str | tuple[str, ...] = (), name: str | None = None) -> Any:
    """Declare a number that is read on demand by a function passed to `Statistics(...)`.

    With `by`, that function returns a mapping. The arguments are the same as for `counter`.
    """
    return Declaration("gauge", help, name, _names(by))


@overload
def histogram(help: str, *, name: str | None = None) -> Histogram: ...
@overload
def histogram(help: str, *, by: str | tuple[str, ...], name: str | None = None) -> defaultdict[Any, Histogram]: ...
def histogram(help: str, *, by: Any = (), name: str | None = None) -> Any:
    """Declare a histogram of seconds: `counts.waited.observe(seconds)`. The arguments are the same as for `counter`."""
    return Declaration("histogram", help, name, _names(by))


def _names(by: str | tuple[str, ...]) -> tuple[str, ...]:
    return (by,) if isinstance(by, str) else by


class Statistics(Collector):
    """The base class for declarations of numbers; `prefix` begins the names of its metrics.

    A class without a prefix declares numbers for its subclasses, which each have a prefix.

    Args:
        read: for each gauge, and each counter that is counted elsewhere, the function that reads it.
    """

    _declared: ClassVar[Mapping[str, Declaration]] = {}
    _without_prefix: ClassVar[Mapping[str, Declaration]] = {}

    def __init_subclass__(cls, *, prefix: str | None = None) -> None:
        own = {name: each for name, each in vars(cls).items() if isinstance(each, Declaration)}
        for name in own:
            delattr(cls, name)  # an unset attribute must raise AttributeError, not return its declaration
        cls._without_prefix = {**cls._without_prefix, **own}
        if prefix is None:
            return
        cls._declared = {
            name: replace(each, name="_".join(filter(None, (prefix, name if each.name is None else each.name))))
            for name, each in cls._without_prefix.items()
        }

    def __init__(self, **read: Callable[[], Any]) -> None:
        gauges = {name for name, each in self._declared.items() if each.kind == "gauge"}
        if unknown := read.keys() - self._declared.keys():
            raise TypeError(f"{type(self).__name__} declares no {min(unknown)!r}")
        if unread := gauges - read.keys():
            raise TypeError(f"{type(self).__name__} needs a function that reads the gauge {min(unread)!r}")
        self._read = read
        for name, each in self._declared.items():
            if name not in read:
                setattr(self, name, each.zero())

    def _values(self) -> Iterator[tuple[str, Declaration, Any]]:
        for name, each in self._declared.items():
            yield name, each, self._read[name]() if name in self._read else getattr(self, name)

    def numbers(self) -> dict[str, object]:
        """Return all numbers by attribute, as `GET /router/info` shows them."""
        return {name: each.plain(value) for name, each, value in self._values()}

    def collect(self) -> Iterable[Family]:
        """Return all numbers as Prometheus families; attributes with the same metric name form one family."""
        families: dict[str | None, Family] = {}
        for _, each, value in self._values():
            each.fill(families.setdefault(each.name, each.family()), value)
        return families.values()

    @classmethod
    def declared(cls) -> Mapping[str, Declaration]:
        """Return the declarations by attribute, with the full names of their families."""
        return cls._declared

    @classmethod
    def descriptions(cls) -> list[FamilyDescription]:
        """Return a description of each family that `collect` returns."""
        return list(
            {
                each.name: FamilyDescription(
                    f"{each.name}_total" if each.kind == "counter" else str(each.name),
                    each.kind,
                    (*each.by, *each.labels),
                    each.help,
                )
                for each in cls._declared.values()
            }.values()
        )
