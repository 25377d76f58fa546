"""Who is registered, beyond the process: workers that joined are there again after a restart (`--state-dir`)."""

from __future__ import annotations

from typing import Any

import orjson

from miles_router.fleet.worker_url import parse_worker_url
from miles_router.fleet.workers import Worker
from miles_router.pools.pools import Pools
from miles_router.slots import CONTROL
from miles_router.state.rows import Change
from miles_router.state.store import StateStore

OWNER, WORKER, RUN = "router", "worker", "run"


class Registrations:
    """Without a store it holds nothing. Its slot is the router's own: a second router on the same directory finds it
    taken, and does not start."""

    def __init__(self, store: StateStore | None, pools: Pools) -> None:
        self.store = store if store is not None and CONTROL in store.slots else None
        self._pools = pools

    async def hold(self, worker: Worker, pool: str) -> None:
        """A worker has joined this pool, or has been changed. Raises StateError where that cannot be made durable."""
        held = {"url": worker.url, "pool": pool, "api_key": worker.api_key, "attributes": worker.attributes}
        await self._change(worker.url, orjson.dumps(held))

    async def drop(self, worker: Worker) -> None:
        """A worker leaves. Raises as `hold`."""
        await self._change(worker.url, None)

    async def _change(self, url: str, value: bytes | None) -> None:
        if self.store is not None:
            await self.store.commit(OWNER, [Change(WORKER, url, value)], slot=CONTROL)

    async def restore(self, *, of_this_run: bool = False) -> None:
        """Register those that were registered; whether they are still there, probes will say.

        What another run of the router has left in the caches of workers is of weights that nobody knows any more: no
        generation goes on from that.

        Args:
            of_this_run: whether this run of the router has held them, and knows what is in their caches.

        Raises:
            StateError: nobody can tell who they were.
        """
        if self.store is None:
            return
        rows = await self.store.load(OWNER, slot=CONTROL)
        for row in rows:
            if row.kind == WORKER:
                held: dict[str, Any] = orjson.loads(row.value)
                pool = await self._pools.open(held["pool"] or None)
                pool.fleet.pool.add(
                    parse_worker_url(held["url"]), api_key=held["api_key"], attributes=held["attributes"]
                )
        if rows and not of_this_run:
            for each in self._pools:
                each.fleet.pool.distrust_caches()
        await self.store.commit(OWNER, [Change(RUN, 0, b"1")], slot=CONTROL)
