"""The pool of the leader, which decides, and that of a shard, which follows. Both are the pool of a router alone; what
is idle, and what becomes of what is seen, is for others to say."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from miles_router.fleet.pool import WorkerPool
from miles_router.fleet.workers import Worker, WorkerState
from miles_router.shards.peer_loads import NOTHING, Row


def deciding_pool(**settings: Any) -> WorkerPool:
    """Return the pool of a leader. It sends nothing itself: what is in flight it is told, and whoever gets nothing new
    is `ending` until everybody has heard of it."""
    pool = WorkerPool(**settings)
    pool.is_idle = lambda worker: False
    return pool


def following_pool(report: Callable[[str, Worker, str], None], **settings: Any) -> WorkerPool:
    """Return the pool of a shard. What it sees of workers it reports, `(what, worker, reason)`, and it decides
    nothing: while a worker is registered, others may have requests there."""
    pool = WorkerPool(**settings)
    pool.report = report
    pool.is_idle = lambda worker: not worker.in_flight and not worker.serial
    return pool


def counted(pool: WorkerPool, everywhere: Row) -> None:
    """Note in the leader's pool what all processes together have in flight."""
    for worker in pool.known:
        worker.in_flight, loads = everywhere.workers.get(worker.url, (0, ()))
        told = {rank: load for rank, *load in loads}
        for unit in worker.units:
            unit.in_flight, unit.tokens, unit.sessions = (each or 0 for each in told.get(unit.rank, NOTHING))


def ending(pool: WorkerPool) -> dict[Worker, float]:
    """Return the workers that get nothing new, those that drain and removed ones, and since when each is what it is."""
    return {each: each.since for each in pool.known if each.state is WorkerState.DRAINING or not each.serial}


def settle(pool: WorkerPool, workers: Mapping[Worker, float]) -> None:
    """Let go of those of these workers that are without requests. Everybody has heard that they get nothing new, and
    has told since what it has; of one that has returned meanwhile, and ends again, nobody has."""
    still = ending(pool)
    for worker, since in workers.items():
        if still.get(worker) == since and not worker.in_flight:
            pool.left(worker)


def distrust_weights(pool: WorkerPool) -> None:
    """Another process has decided so far: an update of the weights that was under way then may have taken effect."""
    if pool.weights_epoch or any(worker.caches.number for worker in pool):
        pool.weights_epoch += pool.weights_epoch % 2
        with pool.changing_weights():
            pass
