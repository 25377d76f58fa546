"""What requests may be sent to at one moment. Pure."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from miles_router.fleet.workers import Role, Unit, Worker


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Those who take requests; a later one has a higher number."""

    number: int = 0
    routable: tuple[Unit, ...] = ()
    paused: tuple[Unit, ...] = ()
    #: Of the routable ones, those that compute prompts for others,
    prefill: tuple[Unit, ...] = ()
    #: and those that a generation may be sent to, by itself or with one of `prefill`.
    generating: tuple[Unit, ...] = ()

    @classmethod
    def of(cls, number: int, routable: tuple[Unit, ...], paused: tuple[Unit, ...]) -> Snapshot:
        """Who may do what. Without a prefill half no decode half generates."""
        prefill = tuple(unit for unit in routable if unit.worker.role is Role.PREFILL)
        barred = Role.PREFILL if prefill else Role.DECODE
        generating = tuple(unit for unit in routable if unit.worker.role is not barred)
        return cls(number, routable, paused, prefill, generating)

    def left(self, excluded: Collection[Worker], *, generates: bool) -> Sequence[Unit]:
        """What is left for a request where these workers are out of the question."""
        candidates: Sequence[Unit] = (self.generating if generates else self.routable) or self.paused
        if generates and self.prefill and all(unit.worker in excluded for unit in self.prefill):
            candidates = [unit for unit in candidates if unit.worker.role is Role.REGULAR]
        return [unit for unit in candidates if unit.worker not in excluded]
