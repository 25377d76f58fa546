"""Metrics: plain numbers where they are counted, JSON and Prometheus text where they are read.

statistics   declarations of numbers, once for both `GET /metrics` and `GET /router/info`
metrics      the router's own numbers, and the registry of all
models       the numbers of several trained models as one
run          the series of `GET /router/run`
loop_delay   the delay of the event loop
"""

from miles_router.metrics.loop_delay import LoopDelay
from miles_router.metrics.metrics import (
    ClientStatistics,
    GateStatistics,
    Metrics,
    StateStatistics,
    Statistics,
    counter,
    gauge,
    histogram,
)

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
