"""The pools of a leader and of shards, which tell each other what they have when a test says so."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from typing import Any

from miles_router.fleet.pool import WorkerPool
from miles_router.fleet.worker_url import WorkerUrl
from miles_router.fleet.workers import Worker
from miles_router.shards.peer_loads import PeerLoads, PoolLoad, sum_loads
from miles_router.shards.pools import (
    make_leader_pool,
    make_shard_pool,
    release_idle_workers,
    retiring_workers,
    set_loads,
)
from miles_router.shards.state import apply_workers, dump_workers, own_cache_numbers


def leader_pool(**settings: Any) -> WorkerPool:
    """Return a new pool of a leader."""
    pool = WorkerPool(**settings)
    make_leader_pool(pool)
    return pool


def shard_pool(report: Callable[[str, Worker, str], None], **settings: Any) -> WorkerPool:
    """Return a new pool of a shard."""
    pool = WorkerPool(**settings)
    make_shard_pool(pool, report)
    return pool


class SharedPools:
    """One that decides, and `count` that follow it. What is written goes through JSON."""

    def __init__(self, count: int) -> None:
        self._generations = itertools.count()
        self.reports: list[tuple[str, str, str]] = []
        self.control = leader_pool()
        self._numbers: dict[WorkerPool, Callable[[], int]] = {}
        self.loads: dict[WorkerPool, PeerLoads] = {}
        self.data = [self.started() for _ in range(count)]

    def started(self) -> WorkerPool:
        pool = shard_pool(self._report)
        self.loads[pool] = PeerLoads(pool)
        self._numbers[pool] = own_cache_numbers(next(self._generations)).__next__
        self.follow(pool)
        return pool

    def _report(self, kind: str, worker: Worker, reason: str) -> None:
        self.reports.append((kind, worker.url, reason))

    def add(self, *addresses: WorkerUrl) -> None:
        for address in addresses:
            self.control.add(address)
        self.follow(*self.data)

    def follow(self, *pools: WorkerPool) -> None:
        """These act by what is decided now."""
        for pool in pools:
            apply_workers(pool, json.loads(json.dumps(dump_workers(self.control))), self._numbers[pool])

    def tell(self) -> None:
        """Everybody tells what it has, and hears what all others have."""
        rows = [PoolLoad(*json.loads(json.dumps(self.loads[pool].own_load()))) for pool in self.data]
        set_loads(self.control, sum_loads(rows))
        for index, pool in enumerate(self.data):
            self.loads[pool].update(sum_loads(rows[:index] + rows[index + 1 :]))

    def shown(self) -> dict[str, int]:
        """Requests in flight as the leader shows them, which lets go of workers that are done."""
        self.tell()
        release_idle_workers(self.control, retiring_workers(self.control))
        return {worker.url: worker.in_flight for worker in self.control}
