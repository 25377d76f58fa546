"""The pools of a leader and of shards, which tell each other what they have when a test says so."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable

from miles_router.fleet.worker_url import WorkerUrl
from miles_router.fleet.workers import Worker
from miles_router.shards.peer_loads import Row, joined
from miles_router.shards.pools import DecidingPool, FollowingPool
from miles_router.shards.state import own_numbers, written_workers


class ToldPools:
    """One that decides, and `count` that follow it. What is written goes through JSON."""

    def __init__(self, count: int) -> None:
        serials, self._generations = itertools.count(1), itertools.count()
        self.reports: list[tuple[str, str, str]] = []
        self.control = DecidingPool(lambda: next(serials))
        self._numbers: dict[FollowingPool, Callable[[], int]] = {}
        self.data = [self.started() for _ in range(count)]

    def started(self) -> FollowingPool:
        """One that was started just now."""
        pool = FollowingPool(self._report)
        self._numbers[pool] = own_numbers(next(self._generations)).__next__
        self.follow(pool)
        return pool

    def _report(self, kind: str, worker: Worker, reason: str) -> None:
        self.reports.append((kind, worker.url, reason))

    def add(self, *addresses: WorkerUrl) -> None:
        """Workers, of which everybody hears."""
        for address in addresses:
            self.control.add(address)
        self.follow(*self.data)

    def follow(self, *pools: FollowingPool) -> None:
        """These act by what is decided now."""
        for pool in pools:
            pool.follow(json.loads(json.dumps(written_workers(self.control))), self._numbers[pool])

    def tell(self) -> None:
        """Everybody tells what it has, and hears what all others have."""
        rows = [Row(*json.loads(json.dumps(pool.peer_loads.own()))) for pool in self.data]
        self.control.counted(joined(rows))
        for index, pool in enumerate(self.data):
            pool.peer_loads.told(joined(rows[:index] + rows[index + 1 :]))

    def shown(self) -> dict[str, int]:
        """Requests in flight as the leader shows them, which lets go of workers that are done."""
        self.tell()
        self.control.settle(self.control.ending)
        return {worker.url: worker.in_flight for worker in self.control}
