"""Holds turns to the contract of their session: what they may still have, what they must carry, and when they end."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from middleware_hub.openai_session.archive.archive import SessionArchive
from middleware_hub.openai_session.episodes.contract import REFUSE, SessionStatus
from middleware_hub.openai_session.episodes.ledger import Allowance, allowance, asked_tokens, choices_of, cut
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
from middleware_hub.openai_session.turns.running import RunningTurn
from miles_router.engines.generate import RID
from miles_router.engines.names import is_made
from miles_router.engines.refusals import Overflow
from miles_router.errors import RouterError
from miles_router.middlewares import Exchange, Pace, Router


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
        fields, asked_for = contract.fixed(request.fields)
        self._check_freshness(session, request.places[0].parent)
        grant = TurnGrant(fields, asked_for)
        if contract.budget.measures or contract.budget.max_turns is not None:
            grant = await self._measured(face, replace(request, fields=fields), grant, key, running)
        return replace(grant, fields=self._named(request, grant.fields, running))

    def _named(self, request: AgentRequest, fields: Mapping[str, Any], running: RunningTurn) -> Mapping[str, Any]:
        """Give a turn a name at its engine, so that it can be ended there. Where only a deletion would end it, the
        agent's own name stays. Of several choices each gets another name, which the router does not learn (SGLang,
        `TokenizerManager._handle_batch_request`)."""
        episode, own = request.session.episode, fields.get(RID)
        if isinstance(own, str) and is_made(own):  # it passes for one of ours, and other agents may send it too
            fields, own = {**fields, RID: secrets.token_hex(16)}, None
        ends = own is None or episode.deadline() is not None or episode.group(request.session.metadata) is not None
        ends = ends or episode.contract.budget.counts
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
        if budget.measures:
            prompt, window = await face.prompt_tokens(request), await self._window()
        if prompt is None and budget.max_context is not None:
            raise OutsideContract("the router cannot tell how long this prompt is, and the contract has a max_context")
        while True:
            left = allowance(budget, ledger, prompt=prompt, choices=choices, window=window)
            short = left.tokens is not None and (asked is None or left.tokens < asked)
            spent = short and left.end is SessionStatus.BUDGET_TOKENS
            if not ledger.reserved or (ledger.has_turns(budget, key) and not spent):
                break
            await session.episode.freed()
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
                grant = replace(grant, fields=cut(grant.fields, lengths, left.tokens))
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
