"""The decided state of one pool: written by the leader, applied by other processes. Without I/O.

A process that has applied a state places requests as its writer would: the same routable workers, weights and shared
prefix caches. Cache numbers have more than 64 bits, so the state is written with `json`; `orjson` cannot.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from miles_router.fleet.fleet import Fleet
from miles_router.fleet.gate import REMEMBERED, ClosedTime
from miles_router.fleet.pool import WorkerPool
from miles_router.fleet.standstill import dump_standstill
from miles_router.fleet.worker_url import parse_worker_url
from miles_router.fleet.workers import Transition, Worker, WorkerState

Record = dict[str, Any]

#: Attributes of a pool that are copied unchanged.
_POOL = ("weight_version", "weights_epoch", "unnamed_weights", "updated", "stalls")
#: Attributes of a gate, except the requests that wait at it.
_GATE = ("mode", "paused_since", "asleep_since", "workers_paused_since", "pauses", "aborting_pauses")
#: Attributes of a worker that are copied unchanged.
_COPIED = (
    "reason",
    "since",
    "failures",
    "stalled",
    "weight_version",
    "missed_update",
    "api_key",
    "rank_fault",
    "applies_adapters",
    "vouched",
)


def dump_fleet(fleet: Fleet) -> Record:
    """Return the state of a pool that other processes follow, and that a restarted leader restores."""
    pool = fleet.pool
    return {
        **{name: getattr(pool, name) for name in _POOL},
        "gate": {**{name: getattr(fleet.gate, name) for name in _GATE}, "past": [*fleet.gate.past]},
        **dump_standstill(fleet),
        "names": list(fleet.model_names),
        "applies_adapters": fleet.applies_adapters,
        "adapters": dict(fleet.adapter_names),
        "workers": dump_workers(pool),
    }


def dump_workers(pool: WorkerPool) -> list[Record]:
    """Return the workers of a pool and their states."""
    return [
        {
            "url": worker.url,
            "serial": worker.serial,
            "state": worker.state.value,
            "attributes": worker.attributes,
            "caches": worker.caches.state(),
            **{name: getattr(worker, name) for name in _COPIED},
        }
        for worker in pool
    ]


def apply_workers(pool: WorkerPool, records: Iterable[Record], own_number: Callable[[], int]) -> None:
    """Replace the workers of a pool by these, in these states. Makes no decisions."""
    members: list[Worker] = []
    transitions: list[Transition] = []
    for record in records:
        worker, before = _member(pool, record, transitions)
        for name in _COPIED:
            setattr(worker, name, record[name])
        worker.state = WorkerState(record["state"])
        worker.set_attributes(record["attributes"])
        worker.caches.apply_state(record["caches"], own_number)
        members.append(worker)
        if worker.state is not before:
            transitions.append(Transition(worker, before, worker.state, worker.reason))
    pool.replace_all(members, transitions)


def _member(pool: WorkerPool, record: Record, transitions: list[Transition]) -> tuple[Worker, WorkerState | None]:
    """Return the worker of a record and its previous state, or None for a registration that is new here."""
    address = parse_worker_url(record["url"])
    known = pool.find(address.url)
    if known is not None and known.serial == record["serial"]:
        return known, known.state
    worker = Worker(address)
    if known is not None and known.in_flight:  # keep the object, because it counts requests in flight
        worker = known
        if known.serial:
            transitions.append(Transition(known, known.state, None, "removed"))
    worker.caches = type(worker.caches)()  # requests that chose an old cache must choose again
    worker.serial = record["serial"]
    return worker, None


def apply_fleet(record: Record, fleet: Fleet, own_number: Callable[[], int]) -> None:
    """Apply a pool's state to a fleet."""
    for name in _POOL:
        setattr(fleet.pool, name, record[name])
    apply_workers(fleet.pool, record["workers"], own_number)
    fleet.model_names.update(dict.fromkeys(record["names"]))
    fleet.invalidate_reported()
    fleet.applies_adapters |= record["applies_adapters"]
    for name, changed_at in record["adapters"].items():
        fleet.note_adapters([name], changed_at)
    gate, gate_record = fleet.gate, record["gate"]
    for name in _GATE:
        setattr(gate, name, gate_record[name])
    gate.past = deque((ClosedTime(*each) for each in gate_record["past"]), REMEMBERED)
    gate.update()


def own_cache_numbers(generation: int) -> Iterator[int]:
    """Yield cache numbers that no other process uses; `generation` (31 bits) is unique to each process."""
    return itertools.count((generation << 32) + 1)
