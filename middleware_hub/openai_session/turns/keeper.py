"""Holds turns to the contract of their session: what they may still have, what they must carry, and when they end."""

from __future__ import annotations

import asyncio
import secrets
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any

from middleware_hub.openai_session.archive.archive import SessionArchive
from middleware_hub.openai_session.episodes.contract import REFUSE, SessionStatus
from middleware_hub.openai_session.episodes.episode import Allowance, allowance, asked_tokens, choices_of, limit_tokens
from middleware_hub.openai_session.errors import (
    AnswerCut,
    ContextOverflow,
    OutsideContract,
    SessionNotFound,
    StaleWeights,
)
from middleware_hub.openai_session.faces.face import Face
from middleware_hub.openai_session.sessions.agent_request import AgentRequest
from middleware_hub.openai_session.sessions.replies import RepeatKey
from middleware_hub.openai_session.sessions.session import Session
from middleware_hub.openai_session.sessions.store import SessionStore
from middleware_hub.openai_session.sessions.turn import Turn
from middleware_hub.openai_session.turns.plan import TurnGrant
from miles_router.engines.generate import RID
from miles_router.engines.names import is_generated
from miles_router.engines.refusals import Overflow
from miles_router.errors import RouterError
from miles_router.middlewares import Exchange, Pace, Router, spawn, within

#: Seconds in which an engine ends a generation that it was told to abort, and after which it is told again: it may not
#: have had it yet.
GRACE, AGAIN = 5.0, 0.2


class RunningTurn:
    """A turn from its request to its end, and how it is ended when it is no longer wanted.

    It ends at its engine: that is told to abort it. What it has sampled until then comes as its answer, where that is
    to stay. Where it is not, or where the engine does not end it, its connection is broken off too.
    """

    def __init__(self, session: Session, exchange: Exchange, router: Router) -> None:
        self.session = session
        #: Its name at the engine, by which it is aborted; None where the engine knows it by others.
        self.rid: str | None = None
        #: The error for which its session ended it; None while the session goes on.
        self.stopped_by: RouterError | None = None
        #: Tells the tokens of its stream that have come; None for a whole answer.
        self.streamed_tokens: Callable[[], int | None] = lambda: None
        self._error: RouterError | None = None
        self._exchange = exchange
        self._router = router
        #: Where its request is.
        self.flight = exchange.flight
        self._task = asyncio.current_task()
        self._ended = asyncio.Event()

    def stop(self, error: RouterError, *, keep: bool) -> None:
        """End it; `keep`: what was sampled until now stays. `error` is what its agent is told where nothing does."""
        self.flight.aborted = True
        if self.rid is None or self.flight.worker_url is None:
            self._break_off(error)
        else:
            end = self._abort(self.rid, error) if keep else self._drop(self.rid, error)
            spawn(end, name=f"abort {self.rid}")

    def over(self) -> None:
        """It has ended."""
        self._ended.set()

    async def _abort(self, rid: str, error: RouterError) -> None:
        spawn(self._tell_until_it_ends(rid), name=f"tell {rid}")
        await self._ends_within(GRACE)
        self._break_off(error)

    async def _tell_until_it_ends(self, rid: str) -> None:
        while not self._ended.is_set():
            await self._tell(rid)
            await self._ends_within(AGAIN)

    async def _ends_within(self, seconds: float) -> None:
        with suppress(TimeoutError):
            await within(seconds, self._ended.wait(), name="a turn's end")

    async def _drop(self, rid: str, error: RouterError) -> None:
        await asyncio.wait({spawn(self._tell(rid), name=f"tell {rid}")}, timeout=AGAIN)
        self._break_off(error)

    async def _tell(self, rid: str) -> None:
        with suppress(RouterError):  # who cannot be told is broken off
            await self._router.control.abort(rid, self._exchange.request_id)

    def _break_off(self, error: RouterError) -> None:
        if self._error is None and self._task is not None and not self._ended.is_set():
            self._error = error
            self._task.cancel()

    def cancelled(self) -> RouterError | None:
        """Why its task was cancelled, if it was from here."""
        if self._error is not None and sys.version_info >= (3, 11) and self._task is not None:
            self._task.uncancel()
        return self._error


class EpisodeKeeper:
    """Keeps the contracts of all sessions. `clock` is the one by which they began."""

    def __init__(
        self, router: Router, store: SessionStore, archive: SessionArchive, clock: Callable[[], float]
    ) -> None:
        self._router = router
        self._store = store
        self._archive = archive
        self._clock = clock
        router.control.group_listeners.append(self._end_group)

    @contextmanager
    def running(self, session: Session, exchange: Exchange) -> Iterator[RunningTurn]:
        """While a turn runs, what ends its episode ends it.

        Raises:
            ContextOverflow: the episode ends meanwhile.
            SessionNotFound: the session is deleted meanwhile, together with what runs in it.
        """
        episode, running, timer = session.episode, RunningTurn(session, exchange, self._router), None
        if (until := episode.deadline()) is not None:
            timer = asyncio.get_running_loop().call_later(
                until - self._clock(), self.stop, session, SessionStatus.DEADLINE
            )
        episode.running.add(running)
        try:
            yield running
        except asyncio.CancelledError:
            if (error := running.cancelled()) is None:
                raise
            raise error from None
        except AnswerCut:
            if running.stopped_by is None:
                raise
            raise running.stopped_by from None  # its agent need not ask again
        finally:
            running.over()
            episode.running.discard(running)
            episode.release(running)
            if timer is not None:
                timer.cancel()

    def check(self, session: Session) -> None:
        """See whether a turn may begin.

        Raises:
            ContextOverflow: the episode is over.
            SessionNotFound: the session was deleted.
        """
        until = session.episode.deadline()
        if not session.ending.status.stops_turns and until is not None and until <= self._clock():
            self.stop(session, SessionStatus.DEADLINE)
        if session.ending.status.stops_turns:
            raise stopped(session, session.ending.status)

    def stop(self, session: Session, status: SessionStatus) -> None:
        """End an episode, and what runs in it. What was sampled until now stays, unless the session is discarded."""
        self._store.end(session, status)
        keep = status is not SessionStatus.DISCARDED
        if keep:
            self._archive.save_soon(session)
        for running in tuple(session.episode.running):
            running.stopped_by = stopped(session, status)
            running.stop(running.stopped_by, keep=keep)

    async def _end_group(self, group: object) -> None:
        """End every episode of a group that is aborted, whether something runs in it or not: first those in memory,
        whatever the disk says."""
        ended: set[Session] = set()
        await self._stop_all(group, ended)
        await self._archive.load_all(lambda head: head["group"] == str(group))
        await self._stop_all(group, ended)
        for session in ended:
            await self._archive.save(session)

    async def _stop_all(self, group: object, ended: set[Session]) -> None:
        pace = Pace()
        for session in self._store:
            named = session.episode.group(session.metadata)
            if session not in ended and named is not None and str(named) == str(group):
                ended.add(session)
                self.stop(session, SessionStatus.ABORTED)
            await pace.step()

    def refuse_untraced(self, session: Session, why: str) -> None:
        """What is not traced cannot be held to a contract.

        Raises:
            OutsideContract: the session has one.
        """
        if session.episode.given:
            raise OutsideContract(f"{why}, and the session has a contract")

    async def grant(self, face: Face, request: AgentRequest, key: RepeatKey | None, running: RunningTurn) -> TurnGrant:
        """Return what the session's contract allows of a request, with a name by which it can be ended at its engine.

        Raises:
            ContextOverflow: nothing is left for it.
            StaleWeights: the weights that would have a part in it are too old.
            OutsideContract: its prompt's length is not known.
            BadRequest: nobody can tell how much it asks for.
        """
        session, contract = request.session, request.session.episode.contract
        fields, asked_for = contract.apply_fixed(request.fields)
        self._check_freshness(session, request.places[0].parent)
        grant = TurnGrant(fields, asked_for)
        if contract.budget.limits_length or contract.budget.max_turns is not None:
            grant = await self._measured(face, replace(request, fields=fields), grant, key, running)
        return replace(grant, fields=self._named(request, grant.fields, running))

    def _named(self, request: AgentRequest, fields: Mapping[str, Any], running: RunningTurn) -> Mapping[str, Any]:
        """Give a turn a name at its engine, so that it can be ended there. Where only a deletion would end it, the
        agent's own name stays. Of several choices each gets another name, which the router does not learn (SGLang,
        `TokenizerManager._handle_batch_request`)."""
        episode, own = request.session.episode, fields.get(RID)
        if isinstance(own, str) and is_generated(own):  # it passes for one of ours, and other agents may send it too
            fields, own = {**fields, RID: secrets.token_hex(16)}, None
        ends = own is None or episode.deadline() is not None or episode.group(request.session.metadata) is not None
        ends = ends or episode.contract.budget.limits_usage
        if request.several or not ends:
            return fields
        running.rid = secrets.token_hex(16)
        return {**fields, RID: running.rid}

    async def _measured(
        self, face: Face, request: AgentRequest, grant: TurnGrant, key: RepeatKey | None, running: RunningTurn
    ) -> TurnGrant:
        """Return the grant, cut to what is left. Where that is less than the request asks for and other turns hold the
        rest, it waits for them. Raises as `grant`."""
        session, budget = request.session, request.session.episode.contract.budget
        ledger, prompt, window = session.episode.ledger, None, None
        lengths = face.endpoint.length_fields
        choices = choices_of(grant.fields, len(request.places))
        asked = asked_tokens(grant.fields, lengths, face.endpoint.tokens_by_default)
        if budget.limits_length:
            prompt, window = await face.prompt_tokens(request), await self._window()
        if prompt is None and budget.max_context is not None:
            raise OutsideContract("the router cannot tell how long this prompt is, and the contract has a max_context")
        while True:
            left = allowance(budget, ledger, prompt=prompt, choices=choices, window=window)
            short = left.tokens is not None and (asked is None or left.tokens < asked)
            spent = short and left.end is SessionStatus.BUDGET_TOKENS
            if not ledger.reserved or (ledger.has_turns(budget, key) and not spent):
                break
            await session.episode.wait_until_freed()
        if not ledger.has_turns(budget, key):
            self._store.end(session, SessionStatus.TURNS)
            raise stopped(session, SessionStatus.TURNS)
        if left.tokens is not None and left.tokens < 1:
            self._store.end(session, left.end)
            raise _overflow(left, prompt, ledger.tokens)
        if short and left.tokens is not None:
            grant = replace(grant, cut_by=left.end)
            # What only the engine's window bounds is not told to the engine: it has the same bound by itself.
            if asked is not None or left.end is not SessionStatus.CONTEXT or left.limit != window:
                grant = replace(grant, fields=limit_tokens(grant.fields, lengths, left.tokens))
        ledger.reserve(running, (left.tokens if short else asked or 0) * choices if left.tokens is not None else 0)
        return replace(grant, reservation=running)

    async def _window(self) -> int | None:
        """Tokens that every engine's context window holds."""
        known = [facts.context_length for facts in await self._router.fleet.all_facts()]
        return min((length for length in known if length is not None), default=None)

    def _check_freshness(self, session: Session, parent: Turn | None) -> None:
        """Refuse a turn that goes on from tokens of weights that are too old, or would be sampled with such."""
        freshness = session.episode.contract.freshness
        if freshness.oldest_version is None or freshness.otherwise != REFUSE:
            return
        held = [] if parent is None else [run.version for run in parent.trajectory().weight_versions]
        fleet = self._router.pool.weight_version
        old = [version for version in (*held, *([fleet] if fleet is not None else ())) if freshness.is_stale(version)]
        if old:
            self._store.end(session, SessionStatus.STALE)
            oldest = freshness.oldest_version
            raise StaleWeights(f"weights of version {old[0]} would take part, and the contract's oldest is {oldest}")


def stopped(session: Session, status: SessionStatus) -> RouterError:
    """What an agent is told whose episode is over."""
    budget = session.episode.contract.budget
    words = {
        SessionStatus.TURNS: f"its contract allows {budget.max_turns} turns",
        SessionStatus.DEADLINE: f"its contract allows {budget.deadline_s} seconds",
        SessionStatus.ABORTED: "its group was aborted",
    }
    if status is SessionStatus.DISCARDED:
        return SessionNotFound(f"session {session.id!r} was deleted")
    return ContextOverflow(status.reason, f"the session is over, {words[status]}")


def _overflow(left: Allowance, prompt: int | None, used: int) -> ContextOverflow:
    if left.end is SessionStatus.CONTEXT and prompt is not None:
        return ContextOverflow(left.end.reason, overflow=Overflow(prompt, left.limit))
    why = f"{used} of the {left.limit} tokens of the session's contract are sampled"
    return ContextOverflow(left.end.reason, why)
