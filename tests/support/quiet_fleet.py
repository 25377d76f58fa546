"""A fleet as the router has one, for tests that ask no worker anything."""

from __future__ import annotations

from miles_router.control.fan_out import FanOut
from miles_router.control.probes import Probes
from miles_router.fleet.fleet import Fleet
from miles_router.fleet.gate import Gate
from miles_router.fleet.placement.policies import LeastInFlight
from miles_router.fleet.pool import WorkerPool
from miles_router.forwarding.upstream import Upstream


def quiet_fleet() -> Fleet:
    upstream, pool = Upstream(), WorkerPool(failure_threshold=1)
    return Fleet(
        pool=pool,
        gate=Gate(pool.admission, max_held=10, timeout=0),
        policy=LeastInFlight(),
        probes=Probes(upstream, timeout=1.0),
        fan_out=FanOut(upstream),
    )
