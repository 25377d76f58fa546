"""Whether a new session may begin, and where: by what sessions hold in the memory of each unit.

Whoever waits first has one unit reserved, on which nobody else begins meanwhile: what is held there only becomes less
until it has room, however large its prompt is. Others may begin elsewhere, so that no unit stands idle for it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import inf

from miles_router.fleet.placement.homes import Homes
from miles_router.fleet.snapshot import Snapshot
from miles_router.fleet.workers import Unit


class Admission:
    """`share`: the part of a unit's memory that sessions may hold where another one begins; 0: all begin at once."""

    def __init__(self, share: float, homes: Homes, snapshot: Callable[[], Snapshot]) -> None:
        #: Whether it bounds anything.
        self.bounds = share > 0
        self._share = share
        self._homes = homes
        self._snapshot = snapshot
        self._reserved: tuple[Unit, ...] = ()

    def begins(self, key: str | None) -> bool:
        """Whether a generation with this key begins a session whose beginning is bounded."""
        return self.bounds and key is not None and not self._homes.begun(key)

    def has_room(self, tokens: int, *, spare: bool = False) -> bool:
        """Whether a session with such a prompt may begin; `spare`: beside what is reserved."""
        return self.most(spare=spare) >= tokens

    def most(self, *, spare: bool = False) -> float:
        """Tokens of the longest prompt that a session may begin with. Where there is no unit at all, whoever looks for
        one says so."""
        self._homes.expire()
        taken = self._reserved if spare else ()
        return min(
            (max((self._room(unit) for unit in units if unit not in taken), default=-1) for units in self._groups),
            default=inf,
        )

    def fits_nowhere(self, tokens: int) -> bool:
        """Whether no unit ever has so much memory, as far as they say: then there is nothing to wait for, and an engine
        that is asked refuses it, or knows better how long the prompt is."""
        return any(
            all(unit.capacity is not None and unit.capacity < tokens for unit in units) for units in self._groups
        )

    def places(self, key: str | None, units: Sequence[Unit], tokens: int) -> Sequence[Unit]:
        """Those of the units where a generation may go: all, unless it begins a session and some have room for it."""
        if not tokens or not self.begins(key):
            return units
        return [unit for unit in units if unit not in self._reserved and self._room(unit) >= tokens] or units

    def reserve(self) -> None:
        """Keep the unit with the most room for one session, and a unit that is kept already for as long as there is
        one."""
        self._reserved = tuple(
            next((unit for unit in self._reserved if unit in units), None) or max(units, key=self._room)
            for units in self._groups
        )

    def unreserve(self) -> None:
        """That session waits no more."""
        self._reserved = ()

    @property
    def _groups(self) -> list[Sequence[Unit]]:
        """A session needs one of each: those that answer, and in front of decode units those that compute prompts."""
        snapshot = self._snapshot()
        return [units for units in (snapshot.generating, snapshot.prefill) if units]

    def _room(self, unit: Unit) -> float:
        """Tokens that may be added. A unit without sessions takes any, so that somebody always goes on; and so does one
        whose engine was asked for its memory and did not say."""
        if not (unit.tokens and unit.sessions):
            return inf
        if unit.capacity is None:
            return inf if unit.worker.asked else -1
        return self._share * unit.capacity - unit.tokens
