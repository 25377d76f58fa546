"""The units that requests may be sent to at one moment. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from miles_router.fleet.workers import Role, Unit, Worker, WorkerActivity, WorkerState


class Units(tuple[Unit, ...]):
    """An ordered tuple of units with a membership test in constant time."""

    def __init__(self, _: Iterable[Unit] = ()) -> None:  # `tuple.__new__` has stored the units
        self._members = frozenset(self)

    def __contains__(self, unit: object) -> bool:
        return unit in self._members


NO_UNITS = Units()


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The units of a pool, grouped by the requests that they may receive. A later snapshot has a higher number."""

    number: int = 0
    routable: Units = NO_UNITS
    paused: Units = NO_UNITS
    #: The routable units that compute prompts for decode units,
    prefill: Units = NO_UNITS
    #: and the routable units that answer generations, alone or together with one of `prefill`.
    generating: Units = NO_UNITS
    #: Whether any routable or paused unit is a rank.
    ranked: bool = False

    @classmethod
    def of(cls, number: int, workers: Iterable[Worker]) -> Snapshot:
        """Build the snapshot of these workers. Without a prefill worker, decode workers take no generations."""
        units: dict[WorkerState, list[Unit]] = {WorkerState.READY: [], WorkerState.PAUSED: []}
        for worker in workers:
            if worker.state in units:
                units[worker.state] += worker.units
        routable, paused = (Units(each) for each in units.values())
        prefill = Units(unit for unit in routable if unit.worker.role is Role.PREFILL)
        barred = Role.PREFILL if prefill else Role.DECODE
        generating = Units(unit for unit in routable if unit.worker.role is not barred)
        ranked = any(unit.rank is not None for unit in (*routable, *paused))
        return cls(number, routable, paused, prefill, generating, ranked)

    def remaining(self, excluded: Collection[Worker], *, generates: bool) -> Sequence[Unit]:
        """Return the units a request may be sent to when `excluded` workers must not get it."""
        candidates: Sequence[Unit] = (self.generating if generates else self.routable) or self.paused
        if generates and self.prefill and all(unit.worker in excluded for unit in self.prefill):
            candidates = [unit for unit in candidates if unit.worker.role is Role.REGULAR]
        return [unit for unit in candidates if unit.worker not in excluded]

    def excuses_silence(self, worker: Worker, activity: WorkerActivity, seconds: float) -> bool:
        """Return True if a worker that did not answer in time keeps its place: a piece of an answer came from it within
        `seconds`, or requests run on it and no other worker does what it does."""
        if activity.silent_seconds <= seconds:
            return True
        others = (unit.worker for unit in (*self.routable, *(self.paused if not self.routable else ())))
        return activity.has_requests and all(other is worker or other.role is not worker.role for other in others)


def why_no_worker(workers: Collection[Worker]) -> str:
    """Return why no worker takes a request, as text for an error message."""
    if not workers:
        return "no worker is registered; workers register with POST /add_worker"
    by_role = {role: [worker for worker in workers if worker.role is role] for role in (Role.PREFILL, Role.DECODE)}
    for role, workers_of_role in by_role.items():
        if any(by_role.values()) and not any(worker.state is WorkerState.READY for worker in workers_of_role):
            return f"no routable {role.value} worker: {_counted(workers_of_role) or 'none is registered'}"
    return f"no routable worker: {_counted(workers)}"


def _counted(workers: Iterable[Worker]) -> str:
    states = Counter(worker.state.value for worker in workers)
    return ", ".join(f"{count} {state}" for state, count in sorted(states.items()))
