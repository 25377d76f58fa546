"""What the leader decides of one pool, written so that another process can follow it, and followed. Pure.

Whoever has followed a state chooses as the process that wrote it would: who is routable, under which weights, and which
prefix caches may be shared. The numbers of caches have more than 64 bits: `json` writes them, `orjson` does not.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from miles_router.fleet.fleet import Fleet
from miles_router.fleet.gate import REMEMBERED, ClosedTime, Gate
from miles_router.fleet.pool import WorkerPool
from miles_router.fleet.standstill import standstill
from miles_router.fleet.worker_url import parse_worker_url
from miles_router.fleet.workers import Transition, Worker, WorkerState

Record = dict[str, Any]

#: Of a gate, all that it knows beside who waits at it.
_GATE = ("mode", "paused_since", "asleep_since", "workers_paused_since", "pauses", "cuts")
#: Of a worker, what is copied as it is.
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
)


class SharedPool(WorkerPool):
    """A pool of which every process has one. Its registrations are numbered."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        #: The number of each worker's registration.
        self.serials: dict[Worker, int] = {}

    def follow(self, records: Iterable[Record], own_number: Callable[[], int]) -> None:
        """Have these workers in these states, and no others. No decision is made here."""
        settling, self._settling = self._settling, True
        transitions: list[Transition] = []
        order: dict[str, Worker] = {}
        for record in records:
            worker, before = self._of(record, transitions)
            self._copy(worker, record, own_number)
            order[worker.url] = worker
            if before is not worker.state:
                transitions.append(Transition(worker, before, worker.state, worker.reason))
        gone = [worker for url, worker in self._workers.items() if order.get(url) is not worker]
        transitions += [self._leave(worker) for worker in gone]
        self._workers = order
        self._publish()
        for transition in transitions:
            self._tell(transition)
        self._settling = settling

    def _of(self, record: Record, transitions: list[Transition]) -> tuple[Worker, WorkerState | None]:
        """The worker of a record, and its state before; None for a registration that is new here."""
        address, serial = parse_worker_url(record["url"]), record["serial"]
        known = self._workers.get(address.url)
        if known is not None and self.serials[known] == serial:
            return known, known.state
        if known is not None:
            transitions.append(self._leave(known))
        worker = self._leaving.pop(address.url, None) or Worker(address)
        worker.caches = type(worker.caches)()  # who has chosen one of the old ones must choose again
        self.serials[worker] = serial
        return worker, None

    def _leave(self, worker: Worker) -> Transition:
        del self._workers[worker.url]
        if worker.in_flight:
            self._leaving[worker.url] = worker
        del self.serials[worker]
        return Transition(worker, worker.state, None, "removed")

    def _copy(self, worker: Worker, record: Record, own_number: Callable[[], int]) -> None:
        for name in _COPIED:
            setattr(worker, name, record[name])
        worker.state = WorkerState(record["state"])
        worker.set_attributes(record["attributes"])
        worker.caches.follow(record["caches"], own_number)


def written(fleet: Fleet, pool: SharedPool) -> Record:
    """All that another process has to know of a pool, and what this one needs to be started anew."""
    return {
        "weight_version": pool.weight_version,
        "weights_epoch": pool.weights_epoch,
        "unnamed_weights": pool.unnamed_weights,
        "gate": {**{name: getattr(fleet.gate, name) for name in _GATE}, "past": [*fleet.gate.past]},
        "stalls": pool.stalls,
        **standstill(fleet),
        "names": list(fleet.model_names),
        "applies_adapters": fleet.applies_adapters,
        "adapters": list(fleet.adapter_names),
        "workers": written_workers(pool),
    }


def written_workers(pool: SharedPool) -> list[Record]:
    """Who they are, and their states."""
    return [_record(pool, worker) for worker in pool]


def _record(pool: SharedPool, worker: Worker) -> Record:
    return {
        "url": worker.url,
        "serial": pool.serials[worker],
        "state": worker.state.value,
        "attributes": worker.attributes,
        "caches": worker.caches.state(),
        **{name: getattr(worker, name) for name in _COPIED},
    }


def followed(record: Record, fleet: Fleet, pool: SharedPool, own_number: Callable[[], int]) -> None:
    """Have a pool be as it was written."""
    pool.weight_version, pool.weights_epoch = record["weight_version"], record["weights_epoch"]
    pool.stalls, pool.unnamed_weights = record["stalls"], record["unnamed_weights"]
    pool.follow(record["workers"], own_number)
    fleet.model_names.update(dict.fromkeys(record["names"]))
    fleet.note_heard()
    fleet.applies_adapters |= record["applies_adapters"]
    fleet.note_adapters(record["adapters"])
    follow_gate(fleet.gate, record["gate"])


def follow_gate(gate: Gate, record: Record) -> None:
    """Be open or closed as another gate is."""
    for name in _GATE:
        setattr(gate, name, record[name])
    gate.past = deque((ClosedTime(*each) for each in record["past"]), REMEMBERED)
    gate.update()


def own_numbers(generation: int) -> Iterator[int]:
    """Numbers that no other process gives, for processes that are numbered as they are started."""
    return itertools.count((generation << 32) + 1)
