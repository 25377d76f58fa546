"""The state of fleets that outlives the process (`--state-dir`): registered workers, and pauses and sleeps in
effect."""

from __future__ import annotations

import logging
from typing import Any

import orjson

from miles_router.errors import BadRequest, ConfigError, StateError
from miles_router.fleet.fleet import Fleet
from miles_router.fleet.standstill import dump_standstill, restore_standstill
from miles_router.fleet.worker_url import parse_worker_url
from miles_router.fleet.workers import Worker
from miles_router.pools.pools import Pools
from miles_router.slots import CONTROL
from miles_router.state.store import StateStore

logger = logging.getLogger(__name__)

#: Kinds of records in the router's own slot. The kind begins a record's name; a URL, nothing, or a pool's name follows.
WORKER, RUN, STANDSTILL = "worker", "run", "standstill"


def _owner(kind: str, name: str) -> str:
    return f"{kind} {name}"


def check_state(store: StateStore, model_id: str | None) -> None:
    """Check, before anything runs, that the router can use its state directory.

    Raises:
        ConfigError: another running router has it, its file cannot be used, or its sessions and texts are those of
            another default model.
    """
    _check_model(store, store.check(_owner(RUN, "")).get(0), model_id)


def _check_model(store: StateStore, head: bytes | None, model_id: str | None) -> None:
    recorded = None if head is None else orjson.loads(head).get("model_id")
    if None not in (recorded, model_id) and recorded != model_id:
        raise ConfigError(
            f"state_dir: {store.directory} has the sessions and texts of the model {recorded!r}, not of {model_id!r}; "
            "use another directory, or the same --model-id"
        )


class Registrations:
    """The record of registered workers; without a store it records nothing. It is in the router's own slot: a second
    router on the same directory finds the slot taken, and does not start."""

    def __init__(self, store: StateStore | None, pools: Pools) -> None:
        self.store = store if store is not None and CONTROL in store.slots else None
        self._pools = pools

    async def check_model(self) -> None:
        """Check a directory that other running processes may have open, which `check_state` cannot.

        Raises:
            ConfigError: its sessions and texts are those of another default model.
            StateError: it cannot be read.
        """
        if self.store is not None:
            head = (await self.store.load(_owner(RUN, ""), slot=CONTROL)).get(0)
            _check_model(self.store, head, self._pools.default.name or None)

    async def hold(self, worker: Worker, pool: str) -> None:
        """Record a worker that has joined this pool or was changed. Raises StateError if it cannot be made durable."""
        if self.store is not None:
            held = {"url": worker.url, "pool": pool, "api_key": worker.api_key, "attributes": worker.attributes}
            head = orjson.dumps({"kind": WORKER, **held})
            await self.store.append(_owner(WORKER, worker.url), {0: head}, slot=CONTROL)

    async def drop(self, worker: Worker) -> None:
        """Delete the record of a worker that leaves. Raises as `hold` does."""
        if self.store is not None:
            await self.store.delete(_owner(WORKER, worker.url), slot=CONTROL)

    async def _stand_still(self, record: dict[str, Any]) -> None:
        name = str(record.get("pool", ""))
        try:
            pool = await self._pools.open(name or None)
            restore_standstill(pool.fleet, record)
            gate = pool.fleet.gate
            gate.mode = record["pause"]
            gate.paused_since, gate.asleep_since = record["paused_since"], record["asleep_since"]
        except (KeyError, TypeError, ValueError) as error:
            raise StateError(f"the record of a pause of the fleet {name!r} cannot be read: {error!r}") from error
        except BadRequest as error:  # the settings have changed, and no longer allow this pool
            logger.warning("pause_state_dropped", extra={"fields": {"pool": name, "reason": str(error)}})
            return
        gate.update()
        fields = {"pool": name, "paused": gate.mode, "asleep": gate.asleep_since is not None}
        logger.warning("fleet_still_paused", extra={"fields": fields})

    async def restore(self, *, of_this_run: bool = False) -> None:
        """Register the recorded workers again; probes find out whether they are still there.

        If another run of the router recorded them, the entries in their caches may be of any weights, so no generation
        is continued from them. A fleet that was paused or asleep still is: its engines have not been told to
        continue.

        Args:
            of_this_run: whether this run recorded the workers, and so knows the contents of their caches.

        Raises:
            StateError: the records cannot be read.
        """
        if self.store is None:
            return
        held = await self._held(self.store)
        for record in held:
            if record["kind"] == STANDSTILL and not of_this_run:
                await self._stand_still(record)
            if record["kind"] == WORKER:
                await self._register(record)
        if held and not of_this_run:
            for each in self._pools:
                each.fleet.pool.distrust_caches()
        run = {"kind": RUN, **({"model_id": name} if (name := self._pools.default.name) else {})}
        if all(record["kind"] != RUN or record.keys() < run.keys() for record in held):
            # Written once: a restart works even on a full disk.
            await self.store.append(_owner(RUN, ""), {0: orjson.dumps(run)}, slot=CONTROL)

    async def _register(self, record: dict[str, Any]) -> None:
        try:
            pool = await self._pools.open(record["pool"] or None)
        except BadRequest as error:  # the settings have changed, and no longer allow this pool
            logger.warning("worker_not_restored", extra={"fields": {"url": record["url"], "reason": str(error)}})
            return
        attributes = {**record["attributes"], "model_id": pool.name} if pool.name else record["attributes"]
        pool.fleet.pool.add(parse_worker_url(record["url"]), api_key=record["api_key"], attributes=attributes)

    @staticmethod
    async def _held(store: StateStore) -> list[dict[str, Any]]:
        try:
            return [orjson.loads(head) async for _, head in store.owners(CONTROL)]
        except ValueError as error:
            raise StateError(f"the record of registered workers cannot be read: {error!r}") from error


class StandstillRow:
    """The durable record of whether a pool's fleet is paused or asleep."""

    def __init__(self, store: StateStore, pool: str, fleet: Fleet) -> None:
        self._store = store
        self._pool = pool
        self._fleet = fleet
        #: The record as it was last written; {}: not known, so the next `keep` writes it.
        self._record: dict[str, Any] | None = {}

    async def save(self) -> None:
        """Write the record if it has changed. Raises StateError if it cannot be made durable."""
        gate, record = self._fleet.gate, None
        if gate.closed_by_router:
            since = {"paused_since": gate.paused_since, "asleep_since": gate.asleep_since}
            record = {**dump_standstill(self._fleet), **since}
        if record != self._record:
            self._record = {}  # a commit that raises may have been written all the same
            owner = _owner(STANDSTILL, self._pool)
            if record is None:
                await self._store.delete(owner, slot=CONTROL)
            else:
                head = orjson.dumps({"kind": STANDSTILL, "pool": self._pool, **record})
                await self._store.append(owner, {0: head}, slot=CONTROL)
            self._record = record
