"""The home of each session: the unit that has its prefix in the cache, and the tokens that the session holds there.

A home is remembered rather than hashed, so a new worker moves no session. Policies move sessions, between two turns.
While a session has no request in flight (its tools run), its tokens still count on its unit, because its next turn will
come. They stop counting when the session ends, or when it is idle for several times the usual absence. The usual
absence is learned, since clients do not announce how long a tool runs.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Sequence

from miles_router.fleet.workers import Role, Unit

#: A session that is idle for PATIENCE times the mean absence counts no more. The limit is between SHORTEST and LONGEST
#: seconds, and LONGEST until a first session has come back.
PATIENCE, SHORTEST, LONGEST = 10.0, 1.0, 600.0
#: The weight of one absence in the running mean.
_WEIGHT = 0.02
#: Seconds between two checks for sessions that are idle for too long.
_CHECK_INTERVAL = 0.05


def prefill_key(key: str) -> str:
    """Return the key of a session's second home, on a prefill unit."""
    return f"{Role.PREFILL.value} {key}"


class SessionHome:
    """The home of one session."""

    __slots__ = ("idle_since", "key", "moved", "prompts", "running", "stayed", "tokens", "unit")

    def __init__(self, key: str, unit: Unit) -> None:
        self.key = key
        self.unit = unit
        #: The session's requests in flight,
        self.running = 0
        #: and how many of them generate.
        self.prompts = 0
        #: Tokens of the last prompt that was answered.
        self.tokens = 0
        #: Requests since the session moved to this unit.
        self.stayed = 0
        #: How often the session has moved.
        self.moved = 0
        #: When its last request in flight ended.
        self.idle_since = 0.0

    def move(self, unit: Unit) -> None:
        self.unit, self.stayed = unit, 0
        self.moved += 1


class Homes:
    """The homes of the `max_keys` sessions used last. A forgotten session gets a new home with its next request."""

    def __init__(self, max_keys: int = 100_000, now: Callable[[], float] = time.monotonic) -> None:
        self._max_keys = max_keys
        self._now = now
        self._homes: OrderedDict[str, SessionHome] = OrderedDict()
        self._idle: OrderedDict[str, SessionHome] = OrderedDict()  # counted without a request in flight; longest first
        self._mean_absence: float | None = None
        self._next_check = 0.0

    def __len__(self) -> int:
        return len(self._homes)

    def __contains__(self, key: str) -> bool:
        return key in self._homes

    def has_begun(self, key: str) -> bool:
        """Return True if a generation of this session is in flight or was answered."""
        home = self._homes.get(key)
        return home is not None and bool(home.tokens or home.prompts)

    @property
    def idle(self) -> Collection[SessionHome]:
        """The homes that are counted though their session has no request in flight."""
        return self._idle.values()

    def find(self, key: str | None) -> SessionHome | None:
        """Return the home of the session that sends a request, or None if it has none, and stop counting its tokens.

        A call of `record_choice` must follow. The session's absence enters the mean, even if the session was idle too
        long to be counted: otherwise a mean that is too short would never grow.
        """
        self.expire()
        if key is None or (home := self._homes.get(key)) is None:
            return None
        if not home.running:
            self._uncount(home)
            absence = min(LONGEST, self._now() - home.idle_since)
            self._mean_absence = (
                absence if self._mean_absence is None else self._mean_absence + _WEIGHT * (absence - self._mean_absence)
            )
        return home

    def record_choice(
        self,
        key: str,
        home: SessionHome | None,
        unit: Unit,
        candidates: Sequence[Unit],
        routable: Sequence[Unit],
        tokens: int,
    ) -> SessionHome | None:
        """Record that a request of a session goes to `unit`, and return its home, or None if the home is elsewhere.

        The session moves to `unit` in general. It keeps its old home when only this request cannot go there: the home
        is healthy and routable but not a candidate, for example because the request was just lost there.

        Args:
            home: what `find` returned.
            candidates: the units this request could be sent to.
            routable: the units that any request of the session could be sent to.
            tokens: the length of the prompt; 0 for a request that generates nothing.
        """
        if home is not None and home.unit is not unit and home.unit not in candidates:
            lost = not tokens or self.has_begun(key)
            if lost and home.unit in routable and not home.unit.worker.failures:
                self.count_idle(home)
                return None
        return self.record_start(key, home, unit, tokens)

    def record_start(self, key: str, home: SessionHome | None, unit: Unit, tokens: int) -> SessionHome:
        """Count a session's request on `unit`, make `unit` its home, and return that home."""
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

    def record_end(self, home: SessionHome, tokens: int, *, answered: bool) -> None:
        """Record the end of one of the session's requests. Only an answered one changes the tokens it holds."""
        home.running -= 1
        if tokens:
            home.prompts -= 1
        if answered:
            home.tokens = tokens or home.tokens
        if not home.running:
            home.unit.sessions -= 1
            if self._homes.get(home.key) is home:
                home.idle_since = self._now()
                self.count_idle(home)

    def count_idle(self, home: SessionHome) -> None:
        """Count the tokens that a session holds at home, unless a request of it is in flight."""
        if not home.running and home.key not in self._idle:
            self._idle[home.key] = home
            home.unit.tokens += home.tokens
            home.unit.sessions += 1
            home.unit.idle_sessions += 1

    def forget(self, key: str) -> None:
        if (home := self._homes.pop(key, None)) is not None:
            self._uncount(home)

    def expire(self) -> None:
        """Stop counting the sessions that have been idle for too long."""
        idle, now = self._idle, self._now()
        if not idle or now < self._next_check:
            return
        self._next_check = now + _CHECK_INTERVAL
        latest = now - (
            LONGEST if self._mean_absence is None else min(LONGEST, max(SHORTEST, PATIENCE * self._mean_absence))
        )
        while idle and (home := next(iter(idle.values()))).idle_since < latest:
            self._uncount(home)

    def _uncount(self, home: SessionHome) -> None:
        if self._idle.pop(home.key, None) is not None:
            home.unit.tokens -= home.tokens
            home.unit.sessions -= 1
            home.unit.idle_sessions -= 1
