"""The store of all sessions: creation, lookup, expiry and limits, and the paths `/sessions/{id}/...` that name a
session. The clocks are passed in.
"""

from __future__ import annotations

import logging
import re
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from middleware_hub.openai_session.episodes.contract import NO_CONTRACT, Contract, SessionStatus
from middleware_hub.openai_session.errors import SessionLost, TooManySessions
from middleware_hub.openai_session.sessions.equality import MEANING, Equality
from middleware_hub.openai_session.sessions.messages import message_bytes
from middleware_hub.openai_session.sessions.recent import WrittenIds
from middleware_hub.openai_session.sessions.rewards import MAX_ENTRIES, RewardEntry, entry_bytes
from middleware_hub.openai_session.sessions.session import Session
from middleware_hub.openai_session.statistics import SessionStatistics
from miles_router.engines.known import TOKENIZERS
from miles_router.errors import BadRequest, ConfigError, Conflict, NotFound, RouterError
from miles_router.middlewares import Scope
from miles_router.middlewares.episodes import EpisodeShelf
from miles_router.middlewares.state import HeldNames, Owners

logger = logging.getLogger(__name__)

ID = re.compile(r"[A-Za-z0-9._~:-]{1,128}")
#: The most bytes of client data besides the turns, for each of: metadata, contract, and label with reward.
MAX_CARRIED_BYTES = 1 << 20


@dataclass(frozen=True)
class Bounds:
    """The limits of the store; `idle_timeout` is in seconds, 0 means that sessions never expire."""

    sessions: int
    turns: int  # per session
    session_bytes: int
    total_bytes: int
    idle_timeout: float

    def check(self, middleware: str) -> None:
        """Check that every limit is large enough to be usable.

        Raises:
            ConfigError: a limit is too small; the message names the option of the middleware.
        """
        options = (
            ("max_sessions", self.sessions, 1),
            ("max_turns", self.turns, 1),
            ("max_session_bytes", self.session_bytes, 1),
            ("max_bytes", self.total_bytes, 1),
            ("idle_timeout", self.idle_timeout, 0),
        )
        for option, value, least in options:
            if not value >= least:
                raise ConfigError(f"{middleware}.{option}: must be at least {least}, not {value}")


class SessionStore:
    """The sessions by id, least recently used first.

    Args:
        now: returns Unix seconds, for display.
        clock: returns monotonic seconds, for expiry.
        owners: finds the process that has a session.
        names: records which sessions this process has, so that its successor knows which were lost.
        equal: compares a message that an agent sends back with the recorded one.
    """

    def __init__(
        self,
        bounds: Bounds,
        now: Callable[[], float],
        clock: Callable[[], float],
        owners: Owners | None = None,
        *,
        names: HeldNames | None = None,
        equal: Equality = MEANING,
    ) -> None:
        self.bounds = bounds
        self.equal = equal
        #: Tells which process has which session, if there are several processes.
        self.owners = owners or Owners()
        self._names = names or HeldNames()
        self.nbytes = 0
        self.written_ids = WrittenIds()
        self.statistics = SessionStatistics(sessions=lambda: len(self), bytes=lambda: self.nbytes)
        #: Called with the id of each session that is removed.
        self.when_deleted: Callable[[str], None] = lambda session_id: None
        #: Called with the id of each session whose work is over, possibly more than once.
        self.when_over: Callable[[str], None] = lambda session_id: None
        #: All sessions in the order of creation.
        self.shelf = EpisodeShelf[Session]()
        self._now = now
        self._clock = clock
        self._sessions: OrderedDict[str, Session] = OrderedDict()
        self._by_header: OrderedDict[str, Session] = OrderedDict()  # the sessions that their first turn created

    def __len__(self) -> int:
        return len(self._sessions)

    def __iter__(self) -> Iterator[Session]:
        return iter(tuple(self._sessions.values()))

    def __contains__(self, session_id: str) -> bool:
        self.expire()
        return session_id in self._sessions

    def create(
        self,
        session_id: str | None = None,
        metadata: Mapping[str, Any] | None = None,
        contract: Contract = NO_CONTRACT,
        *,
        by_header: bool = False,
    ) -> Session:
        """Create a session.

        If the store is full, it evicts sessions that only an `X-Session-Id` header created. For a session that
        `POST /sessions` creates it also evicts such sessions with a running turn, which is answered but not recorded.

        Raises:
            BadRequest: the id does not fit into a path, or metadata or contract exceed `MAX_CARRIED_BYTES`.
            Conflict: the id is taken.
            TooManySessions: the store is full, even after expiry and eviction.
        """
        if session_id is None:
            session_id = self.owners.new_name()
        elif not is_session_name(session_id):
            raise BadRequest("session_id must be 1 to 128 of the characters A-Z a-z 0-9 . _ ~ : -")
        nbytes = _carried_bytes("metadata", metadata or {}) + _carried_bytes("contract", contract.given)
        self.expire()
        if session_id in self._sessions:
            raise Conflict(f"session {session_id!r} exists already")
        self._check_count(running=not by_header)
        session = self._sessions[session_id] = Session(
            session_id,
            now=self._now(),
            clock=self._clock(),
            metadata=metadata,
            contract=contract,
            by_header=by_header,
            equal=self.equal,
        )
        if by_header:
            self._by_header[session_id] = session
        self._names.add(session_id)
        self.shelf.add(session.sort_key, session)
        self.account(session, nbytes)
        self.statistics.created += 1
        return session

    def get(self, session_id: str) -> Session:
        """Return the session with this id and mark it as used. Raises like `peek`."""
        session = self.peek(session_id)
        self._touch(session)
        return session

    def peek(self, session_id: str) -> Session:
        """Return the session with this id without marking it as used.

        Raises:
            NotFound: there is no such session, or it has expired or was deleted.
            SessionLost: the session was in a process that has ended.
        """
        session = self.find(session_id)
        if session is None:
            self.check_lost(session_id)
            raise NotFound(f"no session {session_id!r}; make it with POST /sessions")
        return session

    def find(self, session_id: str) -> Session | None:
        """Return the session with this id without marking it as used, or None if it does not exist."""
        self.expire()
        return self._sessions.get(session_id)

    def get_or_create(self, session_id: str, contract: Contract = NO_CONTRACT) -> Session:
        """Return the session with this id, or create it with this contract.

        Raises:
            SessionLost: the session was in a process that has ended. Its agent must not start a new one unknowingly.
            BadRequest, TooManySessions: as in `create`.
        """
        self.expire()  # first: `get` would raise for a session that has expired
        if session_id in self._sessions:
            return self.get(session_id)
        self.check_lost(session_id)
        return self.create(session_id, contract=contract, by_header=True)

    def check_lost(self, session_id: str) -> None:
        """Raise SessionLost if a process that has ended had a session with this id."""
        if session_id not in self._sessions and self._names.was_lost(session_id):
            raise SessionLost(f"session {session_id!r} is lost with its router process; start a new session")

    def forget_lost(self, session_id: str) -> None:
        """Free the id of a lost session, after its client has learned of the loss."""
        if session_id not in self._sessions:
            self._names.remove(session_id)

    def drop_unused(self, session: Session) -> None:
        """Delete a session that its first turn created, if that turn was refused: no client knows the session."""
        if session.by_header and not (session.turns or session.untraced or session.in_flight):
            self.delete(session)

    def delete(self, session: Session) -> None:
        """Remove a session. Its requests in flight finish, and their results are dropped."""
        if self._sessions.get(session.id) is session:
            self.end(session, SessionStatus.DELETED)
            del self._sessions[session.id]
            self._by_header.pop(session.id, None)
            self._names.remove(session.id)
            self.shelf.remove(session.sort_key)
            self.nbytes -= session.nbytes
            self.written_ids.forget(session.id)
            session.clear()
            self.when_deleted(session.id)

    def restore(self, session: Session) -> None:
        """Add a session that the archive has loaded.

        Raises:
            TooManySessions: the store is full.
        """
        self._check_count(running=False)
        self._sessions[session.id] = session
        if session.by_header:
            self._by_header[session.id] = session
        self.shelf.add(session.sort_key, session)
        self.nbytes += session.nbytes

    def end(self, session: Session, status: SessionStatus) -> None:
        """End a session's work with this status, if its present status allows that, and count the end."""
        if status is not SessionStatus.CONTEXT:
            self.when_over(session.id)
        before, session.ending = session.ending, session.ending.after(status)
        if session.ending.cause is not before.cause:
            self.statistics.ended[status.reason] += 1

    def finalize(self, session: Session, carried: Mapping[str, Any]) -> None:
        """End a session and store its label and reward, in place of earlier ones.

        Raises:
            BadRequest: label and reward exceed `MAX_CARRIED_BYTES`.
        """
        before = message_bytes(session.finalized_with) if session.finalized_with is not None else 0
        self.account(session, _carried_bytes("label and reward", carried) - before)
        session.finalized_with = carried
        self.end(session, SessionStatus.FINALIZED)

    def set_rewards(self, session: Session, entries: Sequence[RewardEntry]) -> None:
        """Set rewards of turns, segments and spans, in place of earlier ones of the same name and place.

        Raises:
            BadRequest, TooManySessions: there is no room; none is set.
        """
        if len(session.rewards.log) + len(entries) > MAX_ENTRIES:
            held = f"{len(session.rewards.log)} were set, replaced ones included"
            raise BadRequest(f"a session may have {MAX_ENTRIES} rewards of turns: {held}")
        self.check_room(session)
        session.rewards.set(entries)
        self.account(session, entry_bytes(entries))

    def expire(self) -> None:
        """Delete the sessions that have been idle for `idle_timeout`."""
        if not self.bounds.idle_timeout:
            return
        before = self._clock() - self.bounds.idle_timeout
        for session in list(self._idle_since(before)):
            self.end(session, SessionStatus.EXPIRED)
            self.delete(session)
            self.statistics.expired += 1

    def _idle_since(self, before: float) -> Iterator[Session]:
        for session in self._sessions.values():
            if session.idle_since > before:
                return
            if not session.in_flight:
                yield session

    def check_room(self, session: Session) -> None:
        """Check that there is room for another turn, before it is generated.

        Raises:
            BadRequest: the session has reached its limit of turns or bytes.
            TooManySessions: the store has reached its limit of bytes.
        """
        if len(session.turns) + session.in_flight > self.bounds.turns:
            under_way = f" and {session.in_flight - 1} running" if session.in_flight > 1 else ""
            raise self._full("max_turns", BadRequest, f"the session has {len(session.turns)} turns already{under_way}")
        if session.nbytes >= self.bounds.session_bytes:
            raise self._full("max_session_bytes", BadRequest, f"the session holds {session.nbytes} bytes already")
        self._check_room()

    def _check_count(self, *, running: bool) -> None:
        """Evict sessions that only a header created, until there is room for another session.

        Raises:
            TooManySessions: no session can be evicted.
        """
        while len(self._sessions) >= self.bounds.sessions and self._evict("max_sessions", running=running):
            pass
        if len(self._sessions) >= self.bounds.sessions:
            raise self._full(
                "max_sessions",
                TooManySessions,
                f"{len(self._sessions)} sessions exist already; delete those you have collected",
            )
        self._check_room(running=running)

    def _evict(self, bound: str, *, running: bool) -> bool:
        """Delete the least recently used session that only a header created, and return whether there was one.

        With `running`, a session with a running turn is deleted if no idle one is left.
        """
        header_only = (session for session in self._by_header.values() if _has_header_only(session))
        idle = (session for session in self._by_header.values() if not session.in_flight and _has_header_only(session))
        session = next(idle, None) or (next(header_only, None) if running else None)
        if session is None:
            return False
        fields = {"session_id": session.id, "turns": len(session.turns), "bound": bound}
        logger.warning("header_session_evicted", extra={"fields": fields})
        self.end(session, SessionStatus.EXPIRED)
        self.delete(session)
        self.statistics.evicted += 1
        return True

    def _check_room(self, *, running: bool = False) -> None:
        while self.nbytes >= self.bounds.total_bytes and self._evict("max_bytes", running=running):
            pass
        if self.nbytes >= self.bounds.total_bytes:
            message = f"sessions hold {self.nbytes} bytes already; delete those you have collected"
            raise self._full("max_bytes", TooManySessions, message)

    def _full(self, bound: str, error: type[RouterError], message: str) -> RouterError:
        self.statistics.refused[bound] += 1
        return error(f"{message} ({bound})")

    @contextmanager
    def in_use(self, session: Session) -> Iterator[None]:
        """Keep the session from expiring while a request runs in it."""
        session.in_flight += 1
        try:
            yield
        finally:
            session.in_flight -= 1
            if not session.ending.status.is_forgotten:
                self._touch(session)
            if (
                session.ending.status.is_over
                and not session.in_flight
                and self._sessions.get(session.id, session) is session
            ):
                self.when_over(session.id)  # again: this request may have reached its worker after the session's end

    def _touch(self, session: Session) -> None:
        session.used_at, session.idle_since = self._now(), self._clock()
        self._sessions.move_to_end(session.id)
        if session.id in self._by_header:
            self._by_header.move_to_end(session.id)

    def account(self, session: Session, nbytes: int) -> None:
        """Add `nbytes` (negative to subtract) to the size of a session and of the store."""
        if not session.ending.status.is_forgotten:
            session.nbytes += nbytes
            self.nbytes += nbytes


def is_session_name(name: str) -> bool:
    """Return True if a session id is valid."""
    return ID.fullmatch(name) is not None and name not in (".", "..")


def _has_header_only(session: Session) -> bool:
    """Return True if the `X-Session-Id` header is the only sign of an episode: no instance, turn ids or finalization.

    An agent may send this header for its own purposes, so that no client will ever collect the session.
    """
    named = "instance_id" in session.metadata or any(turn.facts.get("turn_id") for turn in session.turns)
    return not named and session.ending.status is not SessionStatus.FINALIZED


def _carried_bytes(what: str, carried: Mapping[str, Any]) -> int:
    nbytes = message_bytes(carried)
    if nbytes > MAX_CARRIED_BYTES:
        raise BadRequest(f"{what} may take {MAX_CARRIED_BYTES} bytes of memory, not {nbytes}")
    return nbytes


SESSIONS, PREFIX = "/sessions", "/sessions/"
#: Paths behind the session id that agents use begin with this.
AGENT_PATHS = "v1/"
#: The header by which a router behind this one keeps the requests of a session on one worker.
ROUTING_HEADER = b"x-smg-routing-key"


def path_in_session(path: str) -> str:
    """Return the part of a path behind the session id; the path must begin with `PREFIX`."""
    return "/" + path[len(PREFIX) :].partition("/")[2]


def session_key(store: SessionStore, path: str) -> str | None:
    """Return the session's own API key for this path, or None if the session has none.

    The key opens only the paths that agents use (`/v1/...` and the tokenizer routes), not the paths that manage a
    session.

    Raises:
        SessionLost: the session was lost, and its key with it.
    """
    name, _, rest = path[len(PREFIX) :].partition("/")
    if not path.startswith(PREFIX) or not (rest.startswith(AGENT_PATHS) or f"/{rest}" in TOKENIZERS):
        return None
    session = store.find(name)
    if session is None:
        store.check_lost(name)  # its key is lost too: without this check the agent would read that its key is wrong
    return None if session is None else session.episode.key


def resolve(store: SessionStore, scope: Scope) -> tuple[Session, Scope]:
    """Return the session that the path names, and the scope without the session prefix.

    The new scope has the session id as `x-session-id`, so that the policy keeps the session on its worker.

    Raises:
        NotFound: the path names no session.
    """
    name, _, rest = scope["path"][len(PREFIX) :].partition("/")
    session = store.get(name)
    raw = scope["raw_path"].split(b"/", 3)
    if len(raw) < 4:
        raise NotFound(f"no session at {scope['path']!r}")
    headers = [pair for pair in scope["headers"] if pair[0] != b"x-session-id"]
    name_bytes = session.id.encode("ascii")
    headers.append((b"x-session-id", name_bytes))
    if not any(pair[0] == ROUTING_HEADER for pair in headers):
        headers.append((ROUTING_HEADER, name_bytes))
    return session, {**scope, "path": f"/{rest}", "raw_path": b"/" + raw[3], "headers": headers}
