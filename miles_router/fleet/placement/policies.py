"""The default policy, and the wrapper around a policy that a user wrote."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf

from miles_router.errors import PolicyFault
from miles_router.fleet.placement.contract import PlacementRequest, Policy
from miles_router.fleet.workers import Unit

#: The name of `LeastInFlight` in `--policy`.
LEAST_IN_FLIGHT = "least-inflight"

#: A worker counts as full above this part of its KV cache: sessions would evict each other's prefixes.
FULL = 0.85
#: A session leaves a busy worker when that has BUSIER times the requests of another, plus EXTRA, plus one for each
#: TOKENS_PER_EXTRA tokens of the prompt, which the other worker has to compute again.
BUSIER, EXTRA, TOKENS_PER_EXTRA = 1.5, 2, 16_000
#: At a worker of normal pace, a session considers leaving on every second turn only.
TURNS_BETWEEN_CHECKS = 2
#: A session leaves a slow worker when its pace is more than SLOWER times another's, and the other has at most FEW
#: requests and sessions (too few for one more to matter) or less work than the slow one, weighted by pace.
SLOWER, FEW = 1.25, 16
#: How many candidates a session compares with its home on one turn; the next turn takes the following ones.
COMPARED = 8


class LeastInFlight:
    """The policy that chooses the unit with the fewest requests in flight and sessions at home, times its pace.

    Ties go to the unit that was chosen longest ago, so no position in the list is preferred.

    A session stays at home, because its prefix is cached there, even if its worker is busier than others. Between two
    turns it moves when its worker is slower than another or has far more in flight. That happens when a worker joins
    late or finishes its own work early; then computing the prefix again is worth its price.
    """

    def choose(self, candidates: Sequence[Unit], request: PlacementRequest) -> Unit:
        """Return the session's home, or the unit that it moves to; without a home the least busy unit."""
        home = request.home
        if home is None:
            return _least_busy(candidates)
        if request.running or not request.tokens:
            return home
        if home.pace == 1 and (home.in_flight < EXTRA or not request.stayed % TURNS_BETWEEN_CHECKS):
            return home
        compared = _sample(candidates, home.chosen_at)
        # Each move doubles the number of turns before the next one, so that no session swings between two workers.
        if home.pace > 1 and request.stayed >> request.moved:
            faster = [unit for unit in compared if home.pace > SLOWER * unit.pace and not _is_full(unit, request)]
            if faster and _takes_over_from(home, best := _least_busy(faster)):
                return best
        extra = EXTRA + request.tokens / TOKENS_PER_EXTRA
        most = (home.in_flight - extra) / BUSIER
        idler = [unit for unit in compared if unit.in_flight <= most and unit.pace <= home.pace]
        return best if idler and _has_far_more(home, best := _least_busy(idler), extra) else home


def _least_busy(candidates: Sequence[Unit]) -> Unit:
    """Return the minimum by `_cost`. `min` with a key alone takes three times as long among hundreds of units."""
    slower: list[Unit] = []
    best, least = candidates[0], inf
    for unit in candidates:
        if unit.pace != 1:
            slower.append(unit)
            continue
        busy = unit.in_flight + unit.sessions
        if busy < least or (busy == least and unit.chosen_at < best.chosen_at):
            best, least = unit, busy
    return min(best, *slower, key=_cost) if slower else best


def _cost(unit: Unit) -> tuple[float, int]:
    return (unit.in_flight + unit.sessions + 1) * unit.pace, unit.chosen_at


def _sample(candidates: Sequence[Unit], turn: int) -> Sequence[Unit]:
    """Return at most COMPARED candidates, starting at index `turn` modulo their number."""
    if len(candidates) <= COMPARED:
        return candidates
    start = turn % len(candidates)
    return candidates[start : start + COMPARED]


def _is_full(unit: Unit, request: PlacementRequest) -> bool:
    return unit.capacity is not None and unit.tokens + request.tokens > FULL * unit.capacity


def _has_far_more(home: Unit, best: Unit, extra: float) -> bool:
    """Return True if `home` also has far more sessions, or far more requests without a session, than `best`.

    Requests in flight alone do not justify a move: sessions return in waves, at other times on each worker, and all of
    them would flee from each other.
    """
    return home.sessions >= BUSIER * best.sessions + extra or _sessionless(home) >= BUSIER * _sessionless(best) + extra


def _takes_over_from(home: Unit, best: Unit) -> bool:
    """Return True if the faster unit `best` has little enough to do to take over a session of the slower `home`."""
    share = (home.in_flight + home.sessions) * home.pace
    return (best.in_flight + best.sessions) * best.pace <= max(FEW, share)


def _sessionless(unit: Unit) -> int:
    """Return the number of requests in flight that belong to no session.

    The number is too low if other router processes serve sessions on this unit: their idle sessions count as busy.
    """
    return max(0, unit.in_flight - unit.sessions + unit.idle_sessions)


class Checked:
    """A user's policy whose choices are verified."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy

    def choose(self, candidates: Sequence[Unit], request: PlacementRequest) -> Unit:
        """Return the policy's choice.

        Raises:
            PolicyFault: the policy raised an exception, or returned something that is not a candidate.
        """
        name = type(self._policy).__qualname__
        try:
            unit = self._policy.choose(candidates, request)
        except Exception as error:  # foreign code may raise anything
            raise PolicyFault(f"the policy {name} failed: {type(error).__name__}: {error}") from error
        if not isinstance(unit, Unit) or unit not in candidates:
            raise PolicyFault(f"the policy {name} chose {unit!r}, which is not one of the {len(candidates)} candidates")
        return unit
