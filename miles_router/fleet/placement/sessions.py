"""Sessions on units: the affinity key of a request, the home of each session, and the admission of new ones.

The home is the unit that has the session's prefix in the cache, with the tokens that the session holds there. It is
remembered rather than hashed, so a new worker moves no session. Policies move sessions, between two turns. While a
session has no request in flight (its tools run), its tokens still count on its unit, because its next turn will come.
They stop counting when the session ends, or when it is idle for several times the usual absence. The usual absence is
learned, since clients do not announce how long a tool runs.

Whether and where a new session may begin depends on the tokens that sessions hold in each unit's memory. The first
session in the queue has one unit reserved, and no other session begins there. So the tokens held on that unit only
fall, until even a large prompt fits. Other sessions may begin on the other units, which therefore do not idle.
"""

from __future__ import annotations

import re
import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import suppress
from math import inf

from miles_router.asgi.wire import RawHeaders
from miles_router.engines.json_bytes import Field, Incomplete, value_at
from miles_router.engines.paths import CHAT, COMPLETIONS, MESSAGES, RESPONSES
from miles_router.fleet.snapshot import Snapshot
from miles_router.fleet.workers import Role, Unit

#: The path prefix of session requests, before the engine's own path: `/sessions/{id}/...`.
SESSION_PREFIX = "/sessions/"
#: Headers that name a conversation, on every path.
ROUTING_KEY, SESSION_ID = b"x-smg-routing-key", b"x-session-id"
#: Where coding agents name their conversation. Headers: Claude Code, and Codex in two spellings. Body fields:
#: `prompt_cache_key` (Codex, pi, OpenCode; from OpenAI's APIs) and `session_id` (others).
NAMES = ("x-claude-code-session-id", "session_id", "session-id", "body:prompt_cache_key", "body:session_id")
#: The prefix that marks a name as a body field.
BODY = "body:"
#: Bytes at each end of a body that are searched for fields. The request's own fields stand before or after its
#: messages, which may be long and are not searched.
EDGE = 16 * 1024
#: The paths whose bodies are searched for these fields.
PATHS = frozenset({CHAT, COMPLETIONS, MESSAGES, RESPONSES})
MAX_KEY_LENGTH = 512
_HEADER_NAME = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
_FIELD_NAME = re.compile(r"[ !#-\[\]-~]+")  # ASCII that JSON does not escape


def invalid_name_reason(names: Iterable[str]) -> str | None:
    """Return why `names` are not valid header or field names, or None if they are."""
    for name in names:
        pattern, named = (_FIELD_NAME, name[len(BODY) :]) if name.startswith(BODY) else (_HEADER_NAME, name)
        if pattern.fullmatch(named) is None:
            return f"each must be the name of a header, or {BODY}NAME for a field of a JSON body"
    return None


class Affinity:
    """A finder of affinity keys.

    The key is the first of these that is not empty: the routing key header, the session header, the session in the
    path, a configured header, a configured body field.
    """

    def __init__(self, names: Iterable[str] = ()) -> None:
        given = [*names]
        self._headers = [name.lower().encode("ascii") for name in given if not name.startswith(BODY)]
        self._fields = [Field(name[len(BODY) :]) for name in given if name.startswith(BODY)]
        #: Headers that name a conversation.
        self.header_names = frozenset({ROUTING_KEY, SESSION_ID, *self._headers})

    def key_from_headers(self, path: str, headers: RawHeaders) -> str | None:
        """Return the key from the headers or the path, or None."""
        given = {name: value for name, value in reversed(headers) if name in self.header_names}
        found = given.get(ROUTING_KEY) or given.get(SESSION_ID)
        if not found and path.startswith(SESSION_PREFIX) and (session := path[len(SESSION_PREFIX) :].partition("/")[0]):
            return session[:MAX_KEY_LENGTH]
        found = found or next((given[name] for name in self._headers if given.get(name)), b"")
        return found[:MAX_KEY_LENGTH].decode("latin-1") or None

    def may_be_in_body(self, path: str) -> bool:
        """Return True if the body of a request to this path may contain a key."""
        return path in PATHS and bool(self._fields)

    def key_from_body(self, path: str, body: bytes) -> str | None:
        """Return the key from a body field of an OpenAI or Anthropic request, or None, without parsing the body.

        A configured field counts at any depth; its first value that is a non-empty string is the key.
        """
        if not self.may_be_in_body(path):
            return None
        edges = body if len(body) <= 2 * EDGE else b"%b\n%b" % (body[:EDGE], body[-EDGE:])
        for field in self._fields:
            for place in field.places(edges):
                with suppress(Incomplete):  # the edge cuts the value, or the JSON is malformed; the engine refuses that
                    value = value_at(edges, place)
                    if isinstance(value, str) and value:
                        return value[:MAX_KEY_LENGTH]
        return None


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
