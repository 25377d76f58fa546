"""What of fleets outlives the process (`--state-dir`): the workers that joined, and whether a fleet stands still."""

from __future__ import annotations

import logging
from typing import Any

import orjson

from miles_router.errors import BadRequest, StateDamaged
from miles_router.fleet.fleet import Fleet
from miles_router.fleet.standstill import stand_still, standstill
from miles_router.fleet.worker_url import parse_worker_url
from miles_router.fleet.workers import Worker
from miles_router.pools.pools import Pools
from miles_router.slots import CONTROL
from miles_router.state.rows import Change
from miles_router.state.store import StateStore

logger = logging.getLogger(__name__)

OWNER, WORKER, RUN, STANDSTILL = "router", "worker", "run", "standstill"


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

    async def _stand_still(self, name: str, row: bytes) -> None:
        try:
            record = orjson.loads(row)
            pool = await self._pools.open(name or None)
            stand_still(pool.fleet, record)
            gate = pool.fleet.gate
            gate.mode = record["pause"]
            gate.paused_since, gate.asleep_since = record["paused_since"], record["asleep_since"]
        except (KeyError, TypeError, ValueError) as error:
            raise StateDamaged(f"whether the fleet {name!r} stands still cannot be read: {error!r}") from error
        except BadRequest as error:  # by other settings there is no such pool
            logger.warning("standstill_forgotten", extra={"fields": {"pool": name, "reason": str(error)}})
            return
        gate.update()
        fields = {"pool": name, "paused": gate.mode, "asleep": gate.asleep_since is not None}
        logger.warning("fleet_still_stands", extra={"fields": fields})

    async def restore(self, *, of_this_run: bool = False) -> None:
        """Register those that were registered; whether they are still there, probes will say.

        What another run of the router has left in the caches of workers is of weights that nobody knows any more: no
        generation goes on from that.

        A fleet that stood still stands still: its engines were told, and nobody has told them to go on.

        Args:
            of_this_run: whether this run of the router has held them, and knows what is in their caches.

        Raises:
            StateError: nobody can tell who they were.
        """
        if self.store is None:
            return
        rows = await self.store.load(OWNER, slot=CONTROL)
        for row in rows:
            if row.kind == STANDSTILL and not of_this_run:
                await self._stand_still(str(row.key), row.value)
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


class StandstillRow:
    """Where it outlives the process whether a pool's fleet stands still."""

    def __init__(self, store: StateStore, pool: str, fleet: Fleet) -> None:
        self._store = store
        self._pool = pool
        self._fleet = fleet
        #: What is there; nobody knows it before the first change.
        self._record: dict[str, Any] | None = {}

    async def keep(self) -> None:
        """Make durable what is now. Raises StateError where that cannot be."""
        gate, record = self._fleet.gate, None
        if gate.deliberate:
            since = {"paused_since": gate.paused_since, "asleep_since": gate.asleep_since}
            record = {**standstill(self._fleet), **since}
        if record != self._record:
            value = None if record is None else orjson.dumps(record)
            await self._store.commit(OWNER, [Change(STANDSTILL, self._pool, value)], slot=CONTROL)
            self._record = record
