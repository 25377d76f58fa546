"""Where sessions are at home: the unit that has their prefix in its cache, and how many tokens they hold there.

A home is remembered rather than hashed: that a worker joins moves no session. Policies move them, between two of their
turns. While nothing of a session runs, its tokens count on its unit, for it will come back; until it is told to be
over, or has been away for several times as long as sessions usually are. Nobody says how long a tool works: that is
learned.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Sequence

from miles_router.fleet.workers import Role, Unit

#: A session that is away for so many times as long as sessions are in the mean counts no more; within these bounds, in
#: seconds, and for the longest of them while nobody has come back yet.
PATIENCE, SHORTEST, LONGEST = 10.0, 1.0, 600.0
#: How much one absence weighs in the mean.
_WEIGHT = 0.02
#: Seconds between two looks at who is away for too long.
_BETWEEN_LOOKS = 0.05


def prefill_key(key: str) -> str:
    """What a session is called among those that compute prompts for others."""
    return f"{Role.PREFILL.value} {key}"


class SessionHome:
    """One session's."""

    __slots__ = ("key", "moved", "prompts", "running", "since", "stayed", "tokens", "unit")

    def __init__(self, key: str, unit: Unit) -> None:
        self.key = key
        self.unit = unit
        #: Its requests in flight,
        self.running = 0
        #: and how many of them generate.
        self.prompts = 0
        #: Tokens of its last prompt that was answered.
        self.tokens = 0
        #: Its requests since it came to this unit.
        self.stayed = 0
        #: How often it went to another.
        self.moved = 0
        #: Since when nothing of it runs.
        self.since = 0.0

    def move(self, unit: Unit) -> None:
        """It is at home there from now on."""
        self.unit, self.stayed = unit, 0
        self.moved += 1


class Homes:
    """Those of the `max_keys` sessions that were used last; a forgotten one finds a home anew."""

    def __init__(self, max_keys: int = 100_000, now: Callable[[], float] = time.monotonic) -> None:
        self._max_keys = max_keys
        self._now = now
        self._homes: OrderedDict[str, SessionHome] = OrderedDict()
        self._away: OrderedDict[str, SessionHome] = OrderedDict()  # nothing of them runs, and they count; longest first
        self._mean: float | None = None
        self._looks_at = 0.0

    def __len__(self) -> int:
        return len(self._homes)

    def __contains__(self, key: str) -> bool:
        return key in self._homes

    def begun(self, key: str) -> bool:
        """Whether a generation of this session runs, or was answered."""
        home = self._homes.get(key)
        return home is not None and bool(home.tokens or home.prompts)

    @property
    def away(self) -> Collection[SessionHome]:
        """Those that count and of which nothing runs."""
        return self._away.values()

    def find(self, key: str | None) -> SessionHome | None:
        """The home of a session that sends a request; None for a request of none. What it holds there counts no more:
        `settle` must follow. Who comes back too late to have counted is learned from like all others: the mean would
        stay too short for ever."""
        self.expire()
        if key is None or (home := self._homes.get(key)) is None:
            return None
        if not home.running:
            self._uncount(home)
            absence = min(LONGEST, self._now() - home.since)
            self._mean = absence if self._mean is None else self._mean + _WEIGHT * (absence - self._mean)
        return home

    def settle(
        self,
        key: str,
        home: SessionHome | None,
        unit: Unit,
        candidates: Sequence[Unit],
        routable: Sequence[Unit],
        tokens: int,
    ) -> SessionHome | None:
        """Where a session is at home, now that a request of it goes to `unit`; None where it is elsewhere. It moves
        when its policy has it move, when nothing can be sent home, or nobody answers there, and when nothing was
        generated there. Where this request alone cannot, for it was just lost there, its home is kept."""
        if home is not None and home.unit is not unit and home.unit not in candidates:
            lost = not tokens or self.begun(key)
            if lost and home.unit in routable and not home.unit.worker.failures:
                self.stay_away(home)
                return None
        return self.enter(key, home, unit, tokens)

    def enter(self, key: str, home: SessionHome | None, unit: Unit, tokens: int) -> SessionHome:
        """A session's request goes to `unit`, which is its home from now on."""
        if home is None:
            home = self._homes[key] = SessionHome(key, unit)
            if len(self._homes) > self._max_keys:
                self.forget(next(iter(self._homes)))
        else:
            self._homes.move_to_end(key)
            if home.unit is not unit:
                home.unit.sessions -= home.running > 0
                unit.sessions += home.running > 0
                home.move(unit)
        if not home.running:
            unit.sessions += 1
        home.running += 1
        home.stayed += 1
        if tokens:
            home.prompts += 1
        return home

    def leave(self, home: SessionHome, tokens: int, *, answered: bool) -> None:
        """One of its requests has ended. One that was not answered has added nothing to what it holds."""
        home.running -= 1
        if tokens:
            home.prompts -= 1
        if answered:
            home.tokens = tokens or home.tokens
        if not home.running:
            home.unit.sessions -= 1
            if self._homes.get(home.key) is home:
                home.since = self._now()
                self.stay_away(home)

    def stay_away(self, home: SessionHome) -> None:
        """Count what a session holds at home, unless something of it runs."""
        if not home.running and home.key not in self._away:
            self._away[home.key] = home
            home.unit.tokens += home.tokens
            home.unit.sessions += 1
            home.unit.away += 1

    def forget(self, key: str) -> None:
        """A session is over."""
        if (home := self._homes.pop(key, None)) is not None:
            self._uncount(home)

    def expire(self) -> None:
        """Count nobody who has been away for too long."""
        away, now = self._away, self._now()
        if not away or now < self._looks_at:
            return
        self._looks_at = now + _BETWEEN_LOOKS
        latest = now - (LONGEST if self._mean is None else min(LONGEST, max(SHORTEST, PATIENCE * self._mean)))
        while away and (home := next(iter(away.values()))).since < latest:
            self._uncount(home)

    def _uncount(self, home: SessionHome) -> None:
        if self._away.pop(home.key, None) is not None:
            home.unit.tokens -= home.tokens
            home.unit.sessions -= 1
            home.unit.away -= 1
