"""All sessions: their creation, lookup, expiry and bounds. Time comes from outside."""

from __future__ import annotations

import logging
import re
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from middleware_hub.openai_session.episodes.contract import NO_CONTRACT, Contract, SessionStatus
from middleware_hub.openai_session.errors import (
    SessionExists,
    SessionFull,
    SessionLost,
    SessionNotFound,
    TooManySessions,
)
from middleware_hub.openai_session.sessions.equality import MEANING, Equality
from middleware_hub.openai_session.sessions.messages import message_bytes
from middleware_hub.openai_session.sessions.recent import WrittenIds
from middleware_hub.openai_session.sessions.session import Session
from middleware_hub.openai_session.statistics import SessionStatistics
from miles_router.errors import BadRequest, ConfigError, RouterError
from miles_router.middlewares.episodes import EpisodeShelf
from miles_router.middlewares.state import HeldNames, Owners

logger = logging.getLogger(__name__)

ID = re.compile(r"[A-Za-z0-9._~:-]{1,128}")
#: Bytes of what a client may have a session carry beside its turns: metadata, and label and reward.
MAX_CARRIED_BYTES = 1 << 20


@dataclass(frozen=True)
class Bounds:
    """How much is held; `idle_timeout` in seconds, 0 for never."""

    sessions: int
    turns: int  # of one session
    session_bytes: int
    total_bytes: int
    idle_timeout: float

    def check(self, of: str) -> None:
        """Refuse what would let nothing in, or expire everything at once.

        Raises:
            ConfigError: naming the option of the middleware `of`.
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
                raise ConfigError(f"{of}.{option}: must be at least {least}, not {value}")


class SessionStore:
    """Sessions by id, least recently used first.

    Args:
        now: Unix seconds, which are shown.
        clock: seconds that never jump, by which sessions expire.
        owners: which process has what, and what those before this one had.
        durable: whether sessions outlive their process, so that none is lost with it.
        equal: whether a message that an agent sends back is one that is held.
    """

    def __init__(
        self,
        bounds: Bounds,
        now: Callable[[], float],
        clock: Callable[[], float],
        owners: Owners | None = None,
        *,
        durable: bool = False,
        equal: Equality = MEANING,
    ) -> None:
        self.bounds = bounds
        self.equal = equal
        #: Which process has what, where there are several.
        self.owners = owners or Owners()
        self._names = HeldNames() if durable else self.owners.held_names("sessions", bounds.sessions)
        self.nbytes = 0
        self.written_ids = WrittenIds()
        self.statistics = SessionStatistics(sessions=lambda: len(self), bytes=lambda: self.nbytes)
        #: Hears the id of each session that is forgotten.
        self.when_deleted: Callable[[str], None] = lambda session_id: None
        #: Hears the id of each session whose work is over.
        self.when_over: Callable[[str], None] = lambda session_id: None
        #: All of them in the order in which they were made.
        self.shelf = EpisodeShelf[Session]()
        self._now = now
        self._clock = clock
        self._sessions: OrderedDict[str, Session] = OrderedDict()
        self._by_header: OrderedDict[str, Session] = OrderedDict()  # those of them that their first turn made

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
        """A new session. Where there is no room, sessions of bare headers make it; for one that is made by its own
        request those in which a turn runs, too: it is answered, and not recorded.

        Raises:
            BadRequest: an id that does not fit into a path, or metadata or contract of more than `MAX_CARRIED_BYTES`.
            SessionExists: the id is taken.
            TooManySessions: there is no room, even without those that have expired.
        """
        if session_id is None:
            session_id = self.owners.new_name()
        elif not is_session_name(session_id):
            raise BadRequest("session_id must be 1 to 128 of the characters A-Z a-z 0-9 . _ ~ : -")
        nbytes = _carried_bytes("metadata", metadata or {}) + _carried_bytes("contract", contract.given)
        self.expire()
        if session_id in self._sessions:
            raise SessionExists(f"session {session_id!r} exists already")
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
        self.shelf.add(session.place_in_order, session)
        self.account(session, nbytes)
        self.statistics.created += 1
        return session

    def get(self, session_id: str) -> Session:
        """The session with this id, now the most recently used. Raises as `look_at`."""
        session = self.look_at(session_id)
        self._used(session)
        return session

    def look_at(self, session_id: str) -> Session:
        """The session with this id; that somebody looked is no use of it.

        Raises:
            SessionNotFound: there is none (any more).
            SessionLost: there was one, in a process that has ended.
        """
        session = self.find(session_id)
        if session is None:
            self.check_lost(session_id)
            raise SessionNotFound(f"no session {session_id!r}; make it with POST /sessions")
        return session

    def find(self, session_id: str) -> Session | None:
        """As `look_at`; None where there is none."""
        self.expire()
        return self._sessions.get(session_id)

    def get_or_create(self, session_id: str, contract: Contract = NO_CONTRACT) -> Session:
        """The session with this id, made with this contract if there is none.

        Raises:
            SessionLost: there was one, in a process that has ended; who goes on in it must not begin a new one unknown.
            BadRequest, TooManySessions: as `create`.
        """
        self.expire()  # first: `get` would find that it has expired
        if session_id in self._sessions:
            return self.get(session_id)
        self.check_lost(session_id)
        return self.create(session_id, contract=contract, by_header=True)

    def check_lost(self, session_id: str) -> None:
        """Raises:
        SessionLost: there was a session with this id in a process that has ended.
        """
        if session_id not in self._sessions and self._names.was_lost(session_id):
            raise SessionLost(f"session {session_id!r} was lost with the process that had it; begin another")

    def forget_lost(self, session_id: str) -> None:
        """Somebody knows that a session was lost, if it was: its id is free again."""
        if session_id not in self._sessions:
            self._names.remove(session_id)

    def drop_unused(self, session: Session) -> None:
        """Forget a session that was made by its first turn, where that was refused: nobody knows of it."""
        if session.by_header and not (session.turns or session.untraced or session.in_flight):
            self.delete(session)

    def delete(self, session: Session) -> None:
        """Forget it; requests in flight finish and their results are dropped."""
        if self._sessions.get(session.id) is session:
            self.end(session, SessionStatus.DELETED)
            del self._sessions[session.id]
            self._by_header.pop(session.id, None)
            self._names.remove(session.id)
            self.shelf.remove(session.place_in_order)
            self.nbytes -= session.nbytes
            self.written_ids.forget(session.id)
            session.clear()
            self.when_deleted(session.id)

    def restore(self, session: Session) -> None:
        """A session that was made before, and is in memory again.

        Raises:
            TooManySessions: there is no room.
        """
        self._check_count(running=False)
        self._sessions[session.id] = session
        if session.by_header:
            self._by_header[session.id] = session
        self.shelf.add(session.place_in_order, session)
        self.nbytes += session.nbytes

    def end(self, session: Session, status: SessionStatus) -> None:
        """End a session's work, as far as its status allows."""
        if status is not SessionStatus.CONTEXT:
            self.when_over(session.id)
        before, session.ending = session.ending, session.ending.after(status)
        if session.ending.cause is not before.cause:
            self.statistics.ended[status.reason] += 1

    def finalize(self, session: Session, carried: Mapping[str, Any]) -> None:
        """End a session, which carries label and reward from now on, in place of those it has.

        Raises:
            BadRequest: they have more than `MAX_CARRIED_BYTES`.
        """
        before = message_bytes(session.finalized_with) if session.finalized_with is not None else 0
        self.account(session, _carried_bytes("label and reward", carried) - before)
        session.finalized_with = carried
        self.end(session, SessionStatus.FINALIZED)

    def expire(self) -> None:
        """Forget the sessions that nobody has used for `idle_timeout`."""
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
        """Refuse a turn before it is generated rather than lose it afterwards.

        Raises:
            SessionFull, TooManySessions: there is no room for another turn.
        """
        if len(session.turns) + session.in_flight > self.bounds.turns:
            under_way = f" and {session.in_flight - 1} under way" if session.in_flight > 1 else ""
            raise self._full("max_turns", SessionFull, f"the session has {len(session.turns)} turns already{under_way}")
        if session.nbytes >= self.bounds.session_bytes:
            raise self._full("max_session_bytes", SessionFull, f"the session holds {session.nbytes} bytes already")
        self._check_room()

    def _check_count(self, *, running: bool) -> None:
        """Raises:
        TooManySessions: there is no room for another session.
        """
        while len(self._sessions) >= self.bounds.sessions and self._evict("max_sessions", running=running):
            pass
        if len(self._sessions) >= self.bounds.sessions:
            raise self._full("max_sessions", TooManySessions, f"{len(self._sessions)} sessions are held already")
        self._check_room(running=running)

    def _evict(self, bound: str, *, running: bool) -> bool:
        """Forget the least recently used session that a bare header made; with `running` one in which a turn runs,
        where no other is left. Return whether there was one."""
        bare = (session for session in self._by_header.values() if _is_bare(session))
        idle = (session for session in self._by_header.values() if not session.in_flight and _is_bare(session))
        session = next(idle, None) or (next(bare, None) if running else None)
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
            message = f"sessions hold {self.nbytes} bytes already; delete those collected"
            raise self._full("max_bytes", TooManySessions, message)

    def _full(self, bound: str, error: type[RouterError], message: str) -> RouterError:
        self.statistics.refused[bound] += 1
        return error(f"{message} ({bound})")

    @contextmanager
    def in_use(self, session: Session) -> Iterator[None]:
        """A request is under way in it: it does not expire."""
        session.in_flight += 1
        try:
            yield
        finally:
            session.in_flight -= 1
            if not session.ending.status.is_forgotten:
                self._used(session)
            if (
                session.ending.status.is_over
                and not session.in_flight
                and self._sessions.get(session.id, session) is session
            ):
                self.when_over(session.id)  # again: what has run until now may have come to its worker after the end

    def _used(self, session: Session) -> None:
        session.used_at, session.idle_since = self._now(), self._clock()
        self._sessions.move_to_end(session.id)
        if session.id in self._by_header:
            self._by_header.move_to_end(session.id)

    def account(self, session: Session, nbytes: int) -> None:
        """`nbytes` more are held for a session."""
        if not session.ending.status.is_forgotten:
            session.nbytes += nbytes
            self.nbytes += nbytes


def is_session_name(name: str) -> bool:
    """Return whether a session may have this name."""
    return ID.fullmatch(name) is not None and name not in (".", "..")


def _is_bare(session: Session) -> bool:
    """Return whether nothing but `X-Session-Id` says that a session is one: no instance, no turn ids, not finalized. It
    may be an agent's own header, that nobody collects."""
    named = "instance_id" in session.metadata or any(turn.facts.get("turn_id") for turn in session.turns)
    return not named and session.finalized_with is None


def _carried_bytes(what: str, carried: Mapping[str, Any]) -> int:
    nbytes = message_bytes(carried)
    if nbytes > MAX_CARRIED_BYTES:
        raise BadRequest(f"{what} may take {MAX_CARRIED_BYTES} bytes of memory, not {nbytes}")
    return nbytes
