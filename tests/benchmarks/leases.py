"""What choosing a worker costs: a lease taken and given back in a fleet with requests in flight, timed in-process, with
what is learned from the end of an answer.

python -m tests.benchmarks.leases [--workers 128] [--ranks 1] [--repeat 15] [--processes 2]

With several processes the leases are those of one of them, which supposes that the others choose as often as it does.
"""

from __future__ import annotations

import argparse
import itertools
import time
from collections.abc import Callable
from statistics import median

import orjson

from miles_router.engines.json_bytes import sampled_tokens
from miles_router.fleet.placement.contract import Policy
from miles_router.fleet.placement.policies import LeastInFlight
from miles_router.fleet.pool import WorkerPool
from miles_router.fleet.worker_url import parse_worker_url
from miles_router.shards.peer_loads import PeerLoads, PoolLoad
from miles_router.shards.state import apply_workers, dump_workers
from tests.support.shared_pools import leader_pool, shard_pool

LEASES = 4_000
#: Of each prompt.
TOKENS = 5_000
#: Requests in flight on each unit meanwhile.
BUSY = 8
#: The end of each answer.
ANSWER = orjson.dumps(
    {"text": "a" * 3000, "meta_info": {"completion_tokens": 700, "cached_tokens": 0, "e2e_latency": 9.8}}
)


def fleet(pool: WorkerPool, workers: int, ranks: int) -> None:
    for number in range(workers):
        worker = pool.add(parse_worker_url(f"http://10.0.{number // 250}.{number % 250}:30000"))
        if ranks > 1:
            pool.set_ranks(worker, ranks)


def pools(processes: int, workers: int, ranks: int) -> list[WorkerPool]:
    """The pool of each process that takes requests."""
    if processes == 1:
        fleet(alone := WorkerPool(), workers, ranks)
        return [alone]
    fleet(control := leader_pool(), workers, ranks)
    following = [shard_pool(lambda *_: None) for _ in range(processes)]
    for pool in following:
        loads = PeerLoads(pool)
        apply_workers(pool, dump_workers(control), lambda: 0)
        for worker in pool:
            pool.set_ranks(worker, ranks)
        loads.update(PoolLoad(0, {}, processes - 1))
    return [*following]


def microseconds(pool: WorkerPool, policy: Policy, key: Callable[[int], str | None]) -> float:
    """Mean time of one lease, with keys as they come."""
    keys, taken = [key(number) for number in range(LEASES)], 0.0
    for each in keys:
        begin = time.thread_time()
        lease = pool.lease(policy, each, tokens=TOKENS)
        lease.release(sampled=sampled_tokens(ANSWER) if lease.measures_pace else 0)
        taken += time.thread_time() - begin
    return taken / LEASES * 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=128)
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--repeat", type=int, default=15)
    parser.add_argument("--processes", type=int, default=1)
    options = parser.parse_args()
    policy = LeastInFlight()
    pool, *others = pools(options.processes, options.workers, options.ranks)
    for each in (pool, *others):
        for _ in range(options.workers * options.ranks * BUSY // options.processes):
            each.lease(policy)
    fresh = itertools.count()
    kinds: dict[str, Callable[[int], str | None]] = {
        "without a key": lambda number: None,
        "with a key that is known": lambda number: f"known {number % 100}",
        "with a key that is new": lambda number: f"new {next(fresh)}",
    }
    workers = f"{options.workers} workers with {options.ranks} ranks each, {BUSY} requests on each"
    print(f"{workers}, processes: {options.processes}")
    for name, key in kinds.items():
        times = [microseconds(pool, policy, key) for _ in range(options.repeat)]
        print(f"{name:25} {median(times):6.2f} us a lease")


if __name__ == "__main__":
    main()
