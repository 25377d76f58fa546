"""The worker pools of the leader, which decides, and of a shard, which follows.

Both are ordinary pools with other rules for when a worker is idle and for what happens to observations.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from miles_router.fleet.pool import WorkerPool
from miles_router.fleet.workers import Worker, WorkerState
from miles_router.shards.peer_loads import NO_LOAD, PoolLoad


def make_leader_pool(pool: WorkerPool) -> None:
    """Make a new pool the leader's.

    The leader sends no generations; shards report their requests in flight. A worker that gets no new requests stays in
    the pool, listed by `retiring_workers`, until `release_idle_workers` removes it.
    """
    pool.is_idle = lambda worker: False


def make_shard_pool(pool: WorkerPool, report: Callable[[str, Worker, str], None]) -> None:
    """Make a new pool a shard's, which decides nothing and calls `report(kind, worker, reason)` for each observation.

    A worker that is still registered is never idle, because other shards may have requests there.
    """
    pool.report = report
    pool.is_idle = lambda worker: not worker.in_flight and not worker.serial


def set_loads(pool: WorkerPool, everywhere: PoolLoad) -> None:
    """Set the loads in the leader's pool to the sums over all processes."""
    for worker in pool.known:
        worker.in_flight, loads = everywhere.workers.get(worker.url, (0, ()))
        by_rank = {rank: load for rank, *load in loads}
        for unit in worker.units:
            unit.in_flight, unit.tokens, unit.sessions = (each or 0 for each in by_rank.get(unit.rank, NO_LOAD))


def retiring_workers(pool: WorkerPool) -> dict[Worker, float]:
    """Return the workers that get no new requests (draining or removed), each with the time since which it is so."""
    return {each: each.since for each in pool.known if each.state is WorkerState.DRAINING or not each.serial}


def release_idle_workers(pool: WorkerPool, workers: Mapping[Worker, float]) -> None:
    """Release the given workers that have no requests left.

    Call it after every shard has stopped sending to them and has then reported its counts. A worker that returned and
    is retiring again is skipped, because the counts are older than that.
    """
    still = retiring_workers(pool)
    for worker, since in workers.items():
        if still.get(worker) == since and not worker.in_flight:
            pool.finish_leaving(worker)


def distrust_weights(pool: WorkerPool) -> None:
    """Treat the weights as changed: an update that the previous leader had begun may have taken effect."""
    if pool.weights_epoch or any(worker.caches.number for worker in pool):
        pool.weights_epoch += pool.weights_epoch % 2
        with pool.changing_weights():
            pass
