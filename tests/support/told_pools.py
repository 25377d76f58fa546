"""The pools of a leader and of shards, which tell each other what they have when a test says so."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable

from miles_router.fleet.pool import WorkerPool
from miles_router.fleet.worker_url import WorkerUrl
from miles_router.fleet.workers import Worker
from miles_router.shards.peer_loads import PeerLoads, Row, joined
from miles_router.shards.pools import counted, deciding_pool, ending, following_pool, settle
from miles_router.shards.state import follow_workers, own_numbers, written_workers


class ToldPools:
    """One that decides, and `count` that follow it. What is written goes through JSON."""

    def __init__(self, count: int) -> None:
        self._generations = itertools.count()
        self.reports: list[tuple[str, str, str]] = []
        self.control = deciding_pool()
        self._numbers: dict[WorkerPool, Callable[[], int]] = {}
        self.loads: dict[WorkerPool, PeerLoads] = {}
        self.data = [self.started() for _ in range(count)]

    def started(self) -> WorkerPool:
        pool = following_pool(self._report)
        self.loads[pool] = PeerLoads(pool)
        self._numbers[pool] = own_numbers(next(self._generations)).__next__
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
            follow_workers(pool, json.loads(json.dumps(written_workers(self.control))), self._numbers[pool])

    def tell(self) -> None:
        """Everybody tells what it has, and hears what all others have."""
        rows = [Row(*json.loads(json.dumps(self.loads[pool].own()))) for pool in self.data]
        counted(self.control, joined(rows))
        for index, pool in enumerate(self.data):
            self.loads[pool].told(joined(rows[:index] + rows[index + 1 :]))

    def shown(self) -> dict[str, int]:
        """Requests in flight as the leader shows them, which lets go of workers that are done."""
        self.tell()
        settle(self.control, ending(self.control))
        return {worker.url: worker.in_flight for worker in self.control}
