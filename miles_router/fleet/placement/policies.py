"""The policies that ship, by name, and one that somebody has written.

A load is what a worker will have to read at each step: tokens. How many a request will still say nobody knows; so each
counts with the tokens of its prompt and some more.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import inf

from miles_router.errors import PolicyFault
from miles_router.fleet.placement.contract import Need, Policy
from miles_router.fleet.placement.prefixes import PrefixIndex
from miles_router.fleet.workers import Unit

#: Tokens that a request in flight counts with beside its prompt: about what it may still say, and its share of what a
#: step costs whatever is in it.
REQUEST = 8_000
#: A worker is full when this part of its memory is held: behind it, sessions evict each other's prefixes.
FULL = 0.85
#: Each so many requests it is looked at whether a session leaves its worker.
SETTLED = 3
#: A session leaves a worker that has so many times as many requests in flight as another one, and so many more, and one
#: more for each so many tokens of its prompt, which are computed anew there.
TIMES, MORE, LONG = 1.5, 2, 16_000
#: Each so many turns that is looked at, and at the second of a session.
OFTEN = 2
#: And it leaves one that is so many times as slow as another one, while that one has at most so much to do, which
#: hardly slows it, or as much as the slower one, each times its pace.
TIMES_SLOWER, FEW = 1.25, 16
#: Workers that it looks at for that at each turn.
LOOKED = 8


def _load(unit: Unit) -> tuple[int, int]:
    return unit.tokens + REQUEST * unit.in_flight, unit.chosen_at


class LeastInFlight:
    """Fewest requests in flight and sessions at home, which will come back, times how slow it is; ties go to the worker
    that was chosen longest ago, so no position in the list wins. A session stays at home, even on a busier worker; but
    between two of its turns it leaves one that is slower than another, or has far more in flight, for one that is not
    slower: the other has come later or is done with its own, and computing the prefix anew pays."""

    def choose(self, candidates: Sequence[Unit], need: Need) -> Unit:
        """See `Policy`."""
        home = need.home
        if home is None:
            return _least_busy(candidates)
        if need.running or not need.tokens:
            return home
        if home.pace == 1 and (home.in_flight < MORE or not need.stayed % OFTEN):
            return home
        looked = _some(candidates, home.chosen_at)
        if home.pace > 1 and need.stayed >> need.moved:  # twice as long before each move, so that none goes to and fro
            faster = [unit for unit in looked if home.pace > TIMES_SLOWER * unit.pace and not _is_full(unit, need)]
            if faster and _takes_on(best := _least_busy(faster), home):
                return best
        more = MORE + need.tokens / LONG
        few = (home.in_flight - more) / TIMES
        idler = [unit for unit in looked if unit.in_flight <= few and unit.pace <= home.pace]
        return best if idler and _has_far_more(home, best := _least_busy(idler), more) else home


def _least_busy(candidates: Sequence[Unit]) -> Unit:
    """As `min` by `_delay`: with a key for each, among hundreds, that takes three times as long."""
    slower: list[Unit] = []
    best, least = candidates[0], inf
    for unit in candidates:
        if unit.pace != 1:
            slower.append(unit)
            continue
        busy = unit.in_flight + unit.sessions
        if busy < least or (busy == least and unit.chosen_at < best.chosen_at):
            best, least = unit, busy
    return min(best, *slower, key=_delay) if slower else best


def _delay(unit: Unit) -> tuple[float, int]:
    return (unit.in_flight + unit.sessions + 1) * unit.pace, unit.chosen_at


def _some(candidates: Sequence[Unit], turn: int) -> Sequence[Unit]:
    """As many as it costs little to look at, others each time."""
    if len(candidates) <= LOOKED:
        return candidates
    start = turn % len(candidates)
    return candidates[start : start + LOOKED]


def _has_far_more(home: Unit, best: Unit, more: float) -> bool:
    """Whether leaving pays where it has far more in flight. Sessions alone come back in waves, each worker's at times
    of its own: where it is not that a worker has more of them, or that it has more of other requests, all would flee
    from each other."""
    return home.sessions >= TIMES * best.sessions + more or _others(home) >= TIMES * _others(best) + more


def _takes_on(best: Unit, slower: Unit) -> bool:
    """Whether one that is faster takes on a session of a slower one. Where there is much to do, it need not do what the
    slower one still does."""
    share = (slower.in_flight + slower.sessions) * slower.pace
    return (best.in_flight + best.sessions) * best.pace <= max(FEW, share)


def _others(unit: Unit) -> int:
    """Requests in flight that are of no session. Sessions that another process knows to be away pass for running: then
    there may be more than this."""
    return max(0, unit.in_flight - unit.sessions + unit.away)


class LeastTokens:
    """Fewest tokens, of requests and of sessions. A session stays at home."""

    def choose(self, candidates: Sequence[Unit], need: Need) -> Unit:
        """See `Policy`."""
        return need.home or min(candidates, key=_load)


class Sessions:
    """Fewest tokens; and a session moves when its worker is full and another has room."""

    def choose(self, candidates: Sequence[Unit], need: Need) -> Unit:
        """See `Policy`."""
        home = need.home
        if home is not None and (need.stayed % SETTLED or not _is_full(home, need)):
            return home
        best = min(candidates, key=_load)
        return best if home is None or _moves(need, home, best) else home


def _is_full(unit: Unit, need: Need) -> bool:
    return unit.capacity is not None and unit.tokens + need.tokens > FULL * unit.capacity


def _moves(need: Need, home: Unit, best: Unit) -> bool:
    """Whether leaving a full worker pays: the prefix is computed anew, once, and its neighbours have room from then on.
    That one worker holds more than another is no reason: the other may be slower."""
    return home is not best and not _is_full(best, need) and home.tokens > best.tokens + need.tokens


class Prefixes(Sessions):
    """As `Sessions`; and a request without a session goes where its prompt's beginning was computed, unless another
    worker has so much less to do that this does not pay."""

    def __init__(self) -> None:
        self._index = PrefixIndex()

    def choose(self, candidates: Sequence[Unit], need: Need) -> Unit:
        """See `Policy`."""
        unit = super().choose(candidates, need)
        if need.home is None and need.body:
            known, part = self._index.find(need.body)
            if known is not None and known in candidates and _load(known)[0] - part * need.tokens <= _load(unit)[0]:
                unit = known
        if need.body:
            self._index.note(need.body, unit)
        return unit


class Checked:
    """A policy that somebody has written: what it chooses is looked at."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy

    def choose(self, candidates: Sequence[Unit], need: Need) -> Unit:
        """See `Policy`.

        Raises:
            PolicyFault: it has failed, or chose none of the candidates.
        """
        name = type(self._policy).__qualname__
        try:
            unit = self._policy.choose(candidates, need)
        except Exception as error:  # foreign code may fail in any way
            raise PolicyFault(f"the policy {name} failed: {type(error).__name__}: {error}") from error
        if not isinstance(unit, Unit) or unit not in candidates:
            raise PolicyFault(f"the policy {name} chose {unit!r}, which is none of the {len(candidates)} candidates")
        return unit


#: By the name that `--policy` takes.
POLICIES: Mapping[str, Callable[[], Policy]] = {
    "least-inflight": LeastInFlight,
    "least-tokens": LeastTokens,
    "session": Sessions,
    "prefix": Prefixes,
}
