"""What is counted: plain numbers where they change, JSON and Prometheus' text where somebody asks.

statistics   how numbers are declared: once, for `GET /metrics` and `GET /router/info`
metrics      the router's own, and the registry of all
"""

from miles_router.metrics.metrics import ClientStatistics, GateStatistics, Metrics
from miles_router.metrics.statistics import Statistics, counter, gauge, histogram

__all__ = ["ClientStatistics", "GateStatistics", "Metrics", "Statistics", "counter", "gauge", "histogram"]
