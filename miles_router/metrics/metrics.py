"""The router's own metrics, and declarations of numbers: plain attributes where they are counted, JSON and Prometheus
families where they are read.

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
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, NamedTuple, overload

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.registry import Collector

from miles_router.asgi.backlog import Backlog
from miles_router.engines import paths
from miles_router.fleet.fleet import Fleet
from miles_router.fleet.gate import endpoint
from miles_router.fleet.workers import Transition, Worker, WorkerState
from miles_router.log import dropped_lines
from miles_router.state.store import StateStore

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


#: The values of the `route` label. All other paths are "sessions" or "other", so that clients cannot add series.
ROUTES = {
    paths.GENERATE: "generate",
    paths.CHAT: "chat_completions",
    paths.COMPLETIONS: "completions",
    paths.MESSAGES: "messages",
    paths.RESPONSES: "responses",
    paths.EMBEDDINGS: "embeddings",
    "/retrieve_from_text": "retrieve_from_text",
    "/routed_experts": "routed_experts",
    "/indexer_topk": "indexer_topk",
}


def route_class(path: str) -> str:
    """Return the value of the `route` label for a path."""
    route = ROUTES.get(path)
    if route is None:
        return "sessions" if path.startswith("/sessions") else "other"
    return route


class Metrics(Statistics, prefix="miles_router"):
    """The numbers of one router, and the registry to which middlewares add their own."""

    requests = counter("Requests answered, by route class, status and worker.", by=("route", "status", "worker"))
    latency = histogram("Time from a request's head to its last byte.", by="route", name="request_seconds")
    first_byte = histogram("Time until the worker's reply began.", by="route", name="first_byte_seconds")
    bytes_in = counter("Request body bytes read from clients.", name="request_bytes")
    bytes_out = counter("Reply body bytes sent to clients.", name="response_bytes")
    retries = counter("Requests sent again to another worker.")
    client_disconnects = counter("Requests whose client left early.")
    broken_replies = counter("Replies cut by a worker after they had begun.")
    unread_replies = counter("Replies that a middleware (layer) could not read, by reason.", by=("layer", "reason"))
    transitions = counter("Changes of a worker's state.", by=("before", "after"), name="worker_transitions")
    unkeyed_generations = counter("Generations that may use a cache of older weights: their path takes no cache key.")
    unpinned_generations = counter("Generations on workers with ranks whose path takes no rank: the engine chooses.")
    ignored_ranks = counter("Answers from another rank than the requested one.")
    moved_generations = counter("Generations that were moved to another worker to balance the load.")
    unmoved_generations = counter("Generations that were chosen for a move and stayed, by reason.", by="reason")
    stalled_workers = counter("Workers quarantined because their engine stalled while requests were running.")
    dropped_log_lines = counter("Log lines that were dropped because the output did not take them in time.")
    in_flight = gauge("Requests in flight.", by="worker")
    rank_in_flight = gauge("Requests in flight on workers with several ranks.", by=("worker", "rank"))
    worker_routable = gauge("1: takes new requests.", by="worker")
    worker_type = gauge("1: the part of a generation that the worker computes.", by=("worker", "type"))
    workers = gauge("Registered workers by state.", by="state")

    def __init__(self, *fleets: Fleet) -> None:
        self._sending: list[Fleet] = []
        self._deciding: list[Fleet] = []
        super().__init__(
            stalled_workers=lambda: sum(fleet.pool.stalls for fleet in self._deciding),
            dropped_log_lines=dropped_lines,
            in_flight=lambda: {worker.url: worker.in_flight for worker in _workers(self._sending)},
            rank_in_flight=lambda: {
                (worker.url, unit.rank): unit.in_flight for worker in _workers(self._sending) for unit in worker.ranks
            },
            worker_routable=lambda: {
                worker.url: worker.state is WorkerState.READY for worker in _workers(self._deciding)
            },
            worker_type=lambda: {(worker.url, worker.role.value): 1 for worker in _workers(self._deciding)},
            workers=lambda: _states(_workers(self._deciding)),
        )
        self._registry = CollectorRegistry(auto_describe=True)  # detects duplicate names
        self.register(self)
        self.register(GateStatistics(self._sending, self._deciding))
        for fleet in fleets:
            self.count(fleet)

    def count(self, fleet: Fleet, *, sends: bool = True, decides: bool = True) -> None:
        """Include a fleet in the numbers.

        With several processes, each counts only its own work, so that a sum over the processes counts nothing twice.

        Args:
            sends: whether this process sends the fleet's requests.
            decides: whether this process decides about the fleet's workers.
        """
        fleet.subscribe(self._forget_removed)
        if sends:
            self._sending.append(fleet)
        if decides:
            self._deciding.append(fleet)
            fleet.subscribe(self._transition)

    def register(self, collector: Collector) -> None:
        """Add a middleware's own metrics to `GET /metrics`.

        Raises:
            ValueError: a metric name is already registered.
        """
        self._registry.register(collector)

    def finished(self, path: str, status: int, worker: str | None, seconds: float, to_head: float | None) -> None:
        """Count a finished request. `seconds` is its total time, `to_head` the time until the worker's reply began."""
        route = route_class(path)
        self.requests[route, status, worker or ""] += 1
        self.latency[route].observe(seconds)
        if to_head is not None:
            self.first_byte[route].observe(to_head)

    @staticmethod
    def route(path: str) -> str:
        """Return the route class of what a path asks of an engine, within a session or not."""
        return route_class(endpoint(path))

    def unread_reply(self, layer: str, reason: str) -> None:
        """Count a reply that a middleware could not read: compressed, too long, or of another kind."""
        self.unread_replies[layer, reason] += 1

    def _transition(self, transition: Transition) -> None:
        before = transition.before.value if transition.before else "unknown"
        after = transition.after.value if transition.after else "removed"
        self.transitions[before, after] += 1

    def _forget_removed(self, transition: Transition) -> None:
        if transition.after is None:
            # Drop a removed worker's series: a changing fleet must not grow the table without bound.
            for key in [key for key in self.requests if key[2] == transition.worker.url]:
                del self.requests[key]

    def render(self) -> bytes:
        """Return all metrics as Prometheus text."""
        return generate_latest(self._registry)


def _workers(fleets: Iterable[Fleet]) -> Iterator[Worker]:
    return (worker for fleet in fleets for worker in fleet.pool)


def _states(workers: Iterable[Worker]) -> dict[str, int]:
    counts = Counter(worker.state for worker in workers)
    return {state.value: counts[state] for state in WorkerState}


class GateStatistics(Statistics, prefix="miles_router"):
    """The numbers of the gates: whether generations wait, why, and how many."""

    closed = gauge("1: generations wait.", by="reason", name="gate_closed")
    held = gauge("Requests that wait at the gate.", name="gate_held")
    pauses = counter("Pauses of the fleet by the router.")

    def __init__(self, sending: Sequence[Fleet], deciding: Sequence[Fleet]) -> None:
        super().__init__(
            closed=lambda: {
                "paused": any(fleet.gate.paused_since is not None for fleet in deciding),
                "asleep": any(fleet.gate.asleep_since is not None for fleet in deciding),
                "workers_paused": any(fleet.gate.workers_paused_since is not None for fleet in deciding),
            },
            held=lambda: sum(fleet.gate.held for fleet in sending),
            pauses=lambda: sum(fleet.gate.pauses for fleet in deciding),
        )


class StateStatistics(Statistics, prefix="miles_router_state"):
    """The numbers of the state store (`--state-dir`)."""

    commits = counter("Commits that are durable.")
    refused = counter("Commits that were refused, by error.", by="error")
    written_bytes = counter("Bytes of rows that were committed.", name="bytes")
    waiting_bytes = gauge("Bytes of changes that are being committed.")
    seconds = histogram("Time until a commit was durable.", name="commit_seconds")

    def __init__(self, store: StateStore) -> None:
        super().__init__(
            commits=lambda: store.commits,
            refused=lambda: store.refused,
            written_bytes=lambda: store.written,
            waiting_bytes=lambda: store.waiting,
        )
        store.observe = self.seconds.observe


class ClientStatistics(Statistics, prefix="miles_router"):
    """The numbers of client connections: open, ended by the router, and bytes that wait on them."""

    connections = gauge("Connections of clients.", name="client_connections")
    ended = counter("Connections of clients that the router ended, by reason.", by="reason", name="ended_connections")
    waiting_bytes = gauge("Bytes of replies that wait for clients which read slowly.", name="waiting_reply_bytes")

    def __init__(self, backlog: Backlog) -> None:
        #: Open connections; the server updates it.
        self.open = 0
        super().__init__(connections=lambda: self.open, waiting_bytes=lambda: backlog.size)
        self.backlog = backlog
