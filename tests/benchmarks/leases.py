"""What choosing a worker costs: a lease taken and given back in a fleet with requests in flight, timed in-process.

python -m tests.benchmarks.leases [--workers 128] [--ranks 1] [--repeat 15]
"""

from __future__ import annotations

import argparse
import itertools
import time
from collections.abc import Callable
from statistics import median

from miles_router.fleet.placement.contract import Policy
from miles_router.fleet.placement.policies import POLICIES
from miles_router.fleet.pool import WorkerPool
from miles_router.fleet.worker_url import parse_worker_url

LEASES = 4_000
#: Requests in flight on each unit meanwhile.
BUSY = 8


def fleet(workers: int, ranks: int, name: str) -> tuple[WorkerPool, Policy]:
    """A pool that is as busy as in a rollout, and its policy."""
    pool, policy = WorkerPool(), POLICIES[name]()
    for number in range(workers):
        worker = pool.add(parse_worker_url(f"http://10.0.{number // 250}.{number % 250}:30000"))
        if ranks > 1:
            pool.set_ranks(worker, ranks)
    for _ in range(workers * ranks * BUSY):
        pool.lease(policy)
    return pool, policy


def microseconds(pool: WorkerPool, policy: Policy, key: Callable[[int], str | None]) -> float:
    """Mean time of one lease, with keys as they come."""
    keys = [key(number) for number in range(LEASES)]
    begin = time.perf_counter()
    for each in keys:
        pool.lease(policy, each).release()
    return (time.perf_counter() - begin) / LEASES * 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=128)
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--repeat", type=int, default=15)
    parser.add_argument("--policy", choices=POLICIES, default="least-inflight")
    options = parser.parse_args()
    pool, policy = fleet(options.workers, options.ranks, options.policy)
    fresh = itertools.count()
    kinds: dict[str, Callable[[int], str | None]] = {
        "without a key": lambda number: None,
        "with a key that is known": lambda number: f"known {number % 100}",
        "with a key that is new": lambda number: f"new {next(fresh)}",
    }
    print(f"{options.workers} workers with {options.ranks} ranks each, {BUSY} requests on each, {options.policy}")
    for name, key in kinds.items():
        times = [microseconds(pool, policy, key) for _ in range(options.repeat)]
        print(f"{name:25} {median(times):6.2f} us a lease")


if __name__ == "__main__":
    main()
