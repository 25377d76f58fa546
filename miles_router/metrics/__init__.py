"""What is counted: plain numbers where they change, JSON and Prometheus' text where somebody asks.

statistics   how numbers are declared: once, for `GET /metrics` and `GET /router/info`
metrics      the router's own, and the registry of all
plain        all of that as numbers that several processes can add up
loop_delay   how long the event loop was held
"""

from miles_router.metrics.loop_delay import LoopDelay
from miles_router.metrics.metrics import ClientStatistics, GateStatistics, Metrics, StateStatistics
from miles_router.metrics.statistics import Statistics, counter, gauge, histogram

__all__ = [
    "ClientStatistics",
    "GateStatistics",
    "LoopDelay",
    "Metrics",
    "StateStatistics",
    "Statistics",
    "counter",
    "gauge",
    "histogram",
]
