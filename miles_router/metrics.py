"""What the router counts, kept as plain numbers on the hot path and given to Prometheus only when it asks.

A labelled `prometheus_client` counter takes a lock and a dictionary of its own for each increment; here an increment is
one dictionary addition, and `collect` turns the numbers into metric families at scrape time.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Iterator

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from miles_router.engines import paths
from miles_router.fleet.fleet import Fleet
from miles_router.fleet.gate import Gate
from miles_router.fleet.pool import WorkerPool
from miles_router.fleet.workers import Transition, WorkerState

#: Seconds. From a cache hit to a generation of an hour.
BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600, 1800, 3600)

#: The classes that `route` labels take; anything else is "other", so that no client can grow the table.
ROUTES = {
    paths.GENERATE: "generate",
    paths.CHAT: "chat_completions",
    paths.COMPLETIONS: "completions",
    paths.MESSAGES: "messages",
    paths.RESPONSES: "responses",
    paths.EMBEDDINGS: "embeddings",
    "/retrieve_from_text": "retrieve_from_text",
    "/routed_experts": "routed_experts",
}


def route_class(path: str) -> str:
    """The bounded label of a path."""
    route = ROUTES.get(path)
    if route is None:
        return "sessions" if path.startswith("/sessions") else "other"
    return route


class Histogram:
    """Counts per bucket (seconds), not cumulative; `cumulative` adds them up for Prometheus."""

    __slots__ = ("counts", "total")

    def __init__(self) -> None:
        self.counts = [0] * (len(BUCKETS) + 1)
        self.total = 0.0

    def observe(self, seconds: float) -> None:
        self.counts[bisect_left(BUCKETS, seconds)] += 1
        self.total += seconds

    def cumulative(self) -> list[tuple[str, float]]:
        """Prometheus buckets: `(upper bound, how many up to it)`."""
        running = 0
        buckets = []
        for bound, count in zip([*map(str, BUCKETS), "+Inf"], self.counts, strict=True):
            running += count
            buckets.append((bound, float(running)))
        return buckets


class Metrics:
    """All numbers of one router."""

    def __init__(self, fleet: Fleet) -> None:
        self.requests: Counter[tuple[str, int, str]] = Counter()  # route, status, worker
        self.latency: dict[str, Histogram] = {}
        self.first_byte: dict[str, Histogram] = {}
        self.bytes_in = 0
        self.bytes_out = 0
        self.retries = 0
        self.client_disconnects = 0
        self.broken_replies = 0
        self.transitions: Counter[tuple[str, str]] = Counter()
        self._registry = CollectorRegistry(auto_describe=True)  # else a name could be taken twice
        self.register(_RouterCollector(self, fleet.pool))
        self.register(_GateCollector(fleet.gate))
        fleet.subscribe(self._transition)

    def register(self, collector: Collector) -> None:
        """Add a middleware's own metrics to `GET /metrics`.

        Raises:
            ValueError: one of its names is taken.
        """
        self._registry.register(collector)

    def finished(self, path: str, status: int, worker: str | None, seconds: float, to_head: float | None) -> None:
        """One request is over. `seconds` is its whole time, `to_head` the time until the worker's reply began."""
        route = route_class(path)
        self.requests[route, status, worker or ""] += 1
        self._histogram(self.latency, route).observe(seconds)
        if to_head is not None:
            self._histogram(self.first_byte, route).observe(to_head)

    @staticmethod
    def _histogram(table: dict[str, Histogram], route: str) -> Histogram:
        histogram = table.get(route)
        if histogram is None:
            histogram = table[route] = Histogram()
        return histogram

    def _transition(self, transition: Transition) -> None:
        before = transition.before.value if transition.before else "unknown"
        after = transition.after.value if transition.after else "removed"
        self.transitions[before, after] += 1
        if transition.after is None:
            # A removed worker's series go with it: a fleet that comes and goes must not grow the table for ever.
            for key in [key for key in self.requests if key[2] == transition.worker.url]:
                del self.requests[key]

    def render(self) -> bytes:
        """The Prometheus text exposition of everything."""
        return generate_latest(self._registry)


class _RouterCollector(Collector):
    def __init__(self, metrics: Metrics, pool: WorkerPool) -> None:
        self._metrics = metrics
        self._pool = pool

    def collect(self) -> Iterable[Metric]:
        yield from self._traffic()
        yield from self._simple_counters()
        yield from self._workers()

    def _traffic(self) -> Iterator[Metric]:
        requests = CounterMetricFamily(
            "miles_router_requests",
            "Requests answered, by route class, status and worker.",
            labels=("route", "status", "worker"),
        )
        for (route, status, worker), count in self._metrics.requests.items():
            requests.add_metric((route, str(status), worker), count)
        yield requests
        for name, text, table in (
            ("miles_router_request_seconds", "Time from a request's head to its last byte.", self._metrics.latency),
            ("miles_router_first_byte_seconds", "Time until the worker's reply began.", self._metrics.first_byte),
        ):
            family = HistogramMetricFamily(name, text, labels=("route",))
            for route, histogram in table.items():
                family.add_metric((route,), histogram.cumulative(), histogram.total)
            yield family

    def _simple_counters(self) -> Iterator[Metric]:
        m = self._metrics
        yield CounterMetricFamily("miles_router_request_bytes", "Request body bytes read from clients.", m.bytes_in)
        yield CounterMetricFamily("miles_router_response_bytes", "Reply body bytes sent to clients.", m.bytes_out)
        yield CounterMetricFamily("miles_router_retries", "Requests sent again to another worker.", m.retries)
        yield CounterMetricFamily(
            "miles_router_client_disconnects", "Requests whose client left early.", m.client_disconnects
        )
        yield CounterMetricFamily(
            "miles_router_broken_replies", "Replies cut by a worker after they had begun.", m.broken_replies
        )
        transitions = CounterMetricFamily(
            "miles_router_worker_transitions", "Changes of a worker's state.", labels=("before", "after")
        )
        for key, count in m.transitions.items():
            transitions.add_metric(key, count)
        yield transitions

    def _workers(self) -> Iterator[Metric]:
        in_flight = GaugeMetricFamily("miles_router_in_flight", "Leases held.", labels=("worker",))
        routable = GaugeMetricFamily("miles_router_worker_routable", "1: takes new requests.", labels=("worker",))
        states = GaugeMetricFamily("miles_router_workers", "Registered workers by state.", labels=("state",))
        counts = Counter(worker.state for worker in self._pool)
        for state in WorkerState:
            states.add_metric((state.value,), counts[state])
        for worker in self._pool:
            in_flight.add_metric((worker.url,), worker.in_flight)
            routable.add_metric((worker.url,), float(worker.state is WorkerState.READY))
        yield from (in_flight, routable, states)


class _GateCollector(Collector):
    """Whether generation waits, why, and how many requests do."""

    def __init__(self, gate: Gate) -> None:
        self._gate = gate

    def collect(self) -> Iterable[Metric]:
        gate = self._gate
        paused = GaugeMetricFamily("miles_router_gate_closed", "1: generation waits.", labels=("reason",))
        paused.add_metric(("paused",), float(gate.paused_since is not None))
        paused.add_metric(("asleep",), float(gate.asleep_since is not None))
        paused.add_metric(("workers_paused",), float(gate.workers_paused_since is not None))
        yield paused
        yield GaugeMetricFamily("miles_router_gate_held", "Requests that wait at the gate.", gate.held)
        yield CounterMetricFamily("miles_router_pauses", "Pauses asked of the fleet.", gate.pauses)
