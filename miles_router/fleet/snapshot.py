"""What requests may be sent to at one moment. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from miles_router.fleet.workers import Role, Signs, Unit, Worker, WorkerState


class Units(tuple[Unit, ...]):
    """Some, in order; whether one is among them is told at once, however many they are."""

    def __init__(self, _: Iterable[Unit] = ()) -> None:  # the tuple has them
        self._members = frozenset(self)

    def __contains__(self, unit: object) -> bool:
        return unit in self._members


NO_UNITS = Units()


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Those who take requests; a later one has a higher number."""

    number: int = 0
    routable: Units = NO_UNITS
    paused: Units = NO_UNITS
    #: Of the routable ones, those that compute prompts for others,
    prefill: Units = NO_UNITS
    #: and those that a generation may be sent to, by itself or with one of `prefill`.
    generating: Units = NO_UNITS
    #: Whether ranks are among all these.
    ranked: bool = False

    @classmethod
    def of(cls, number: int, workers: Iterable[Worker]) -> Snapshot:
        """Who may do what. Without a prefill half no decode half generates."""
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

    def left(self, excluded: Collection[Worker], *, generates: bool) -> Sequence[Unit]:
        """What is left for a request where these workers are out of the question."""
        candidates: Sequence[Unit] = (self.generating if generates else self.routable) or self.paused
        if generates and self.prefill and all(unit.worker in excluded for unit in self.prefill):
            candidates = [unit for unit in candidates if unit.worker.role is Role.REGULAR]
        return [unit for unit in candidates if unit.worker not in excluded]

    def excuses(self, worker: Worker, signs: Signs, seconds: float) -> bool:
        """Return True if a worker that did not answer in time keeps its place: a piece of an answer came from it within
        `seconds`, or requests run on it and no other worker does what it does."""
        if signs.heard <= seconds:
            return True
        others = (unit.worker for unit in (*self.routable, *(self.paused if not self.routable else ())))
        return signs.runs and all(other is worker or other.role is not worker.role for other in others)


def why_none(workers: Collection[Worker]) -> str:
    """Why none of them takes a request, in words."""
    if not workers:
        return "no worker is registered; workers register with POST /add_worker"
    halves = {role: [worker for worker in workers if worker.role is role] for role in (Role.PREFILL, Role.DECODE)}
    for role, those in halves.items():
        if any(halves.values()) and not any(worker.state is WorkerState.READY for worker in those):
            return f"no routable {role.value} worker: {_counted(those) or 'none is registered'}"
    return f"no routable worker: {_counted(workers)}"


def _counted(workers: Iterable[Worker]) -> str:
    """How many are in which state."""
    states = Counter(worker.state.value for worker in workers)
    return ", ".join(f"{count} {state}" for state, count in sorted(states.items()))
