"""Admission of new sessions: whether and where one may begin, by the tokens that sessions hold in each unit's memory.

The first session in the queue has one unit reserved, and no other session begins there. So the tokens held on that unit
only fall, until even a large prompt fits. Other sessions may begin on the other units, which therefore do not idle.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import inf

from miles_router.fleet.placement.homes import Homes
from miles_router.fleet.snapshot import Snapshot
from miles_router.fleet.workers import Unit


class Admission:
    """The rule for new sessions.

    Args:
        share: the fraction of a unit's memory that sessions may hold when another session begins there; 0: no limit.
    """

    def __init__(self, share: float, homes: Homes, snapshot: Callable[[], Snapshot]) -> None:
        self.is_limited = share > 0
        self._share = share
        self._homes = homes
        self._snapshot = snapshot
        self._reserved: tuple[Unit, ...] = ()

    def begins_session(self, key: str | None) -> bool:
        """Return True if a generation with this key begins a session to which the limit applies."""
        return self.is_limited and key is not None and not self._homes.has_begun(key)

    def has_room(self, tokens: int, *, spare: bool = False) -> bool:
        """Return True if a session with a prompt of `tokens` may begin now. `spare` leaves out the reserved units."""
        return self.longest_prompt(spare=spare) >= tokens

    def longest_prompt(self, *, spare: bool = False) -> float:
        """Return the length in tokens of the longest prompt that a session may begin with now.

        Without any unit this is infinite: the request then fails when it looks for a worker. `spare` leaves out the
        reserved units.
        """
        self._homes.expire()
        taken = self._reserved if spare else ()
        return min(
            (max((self._room(unit) for unit in units if unit not in taken), default=-1) for units in self._groups),
            default=inf,
        )

    def fits_nowhere(self, tokens: int) -> bool:
        """Return True if every unit reports a memory smaller than `tokens`.

        Waiting is then useless. The request is sent at once: the engine refuses it, or counts fewer tokens.
        """
        return any(
            all(unit.capacity is not None and unit.capacity < tokens for unit in units) for units in self._groups
        )

    def count(self, tokens: int) -> int | None:
        """Return how many sessions of `tokens` tokens each have room now, without those in the queue.

        Without a limit (`share` 0) they may hold the whole memory. A unit without sessions has room for at least one.
        None if an engine has not reported its memory.
        """
        self._homes.expire()
        if not self._snapshot().generating:
            return 0
        counts = []
        for units in self._groups:
            if any(unit.capacity is None for unit in units):
                return None
            free = [(self._share or 1.0) * (unit.capacity or 0) - unit.tokens for unit in units]
            counts.append(
                sum(max(int(room // tokens), 0 if unit.sessions else 1) for unit, room in zip(units, free, strict=True))
            )
        return min(counts, default=0)

    def units_with_room(self, key: str | None, units: Sequence[Unit], tokens: int) -> Sequence[Unit]:
        """Return the units where a generation may go: all, unless it begins a session and some units have room."""
        if not tokens or not self.begins_session(key):
            return units
        return [unit for unit in units if unit not in self._reserved and self._room(unit) >= tokens] or units

    def reserve(self) -> None:
        """Reserve a unit for the first session in the queue: the reserved one if it still exists, else the emptiest."""
        self._reserved = tuple(
            next((unit for unit in self._reserved if unit in units), None) or max(units, key=self._room)
            for units in self._groups
        )

    def unreserve(self) -> None:
        """End the reservation, because the first session in the queue has begun or left."""
        self._reserved = ()

    @property
    def _groups(self) -> list[Sequence[Unit]]:
        """The non-empty groups of units of which a session needs one each: units that answer, and prefill units."""
        snapshot = self._snapshot()
        return [units for units in (snapshot.generating, snapshot.prefill) if units]

    def _room(self, unit: Unit) -> float:
        """Return how many tokens may be added to a unit.

        This is infinite for a unit without sessions, so that the queue always advances. It is also infinite for a unit
        whose engine was asked for its memory and did not report it.
        """
        if not (unit.tokens and unit.sessions):
            return inf
        if unit.capacity is None:
            return inf if unit.worker.asked else -1
        return self._share * unit.capacity - unit.tokens
