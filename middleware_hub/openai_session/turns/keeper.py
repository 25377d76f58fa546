"""Holds turns to the contract of their session: what they may still have, what they must carry, and when they end.

A turn that is no longer wanted ends at its engine. Where what it has sampled is to stay, the engine is told to abort it
and its answer comes as far as it goes; else, or where the engine does not end it, its connection is broken off.
"""

from __future__ import annotations

import asyncio
import secrets
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from middleware_hub.openai_session.episodes.contract import (
    ABORTED,
    BUDGET_TOKENS,
    CONTEXT,
    DEADLINE,
    DELETED,
    REFUSE,
    STALE,
    TURNS,
)
from middleware_hub.openai_session.episodes.ledger import Allowance, allowance, asked_tokens, choices_of, cut
from middleware_hub.openai_session.errors import (
    ContextOverflow,
    OutsideContract,
    SessionNotFound,
    StaleWeights,
)
from middleware_hub.openai_session.faces.face import Face
from middleware_hub.openai_session.sessions.pending import PendingTurn
from middleware_hub.openai_session.sessions.store import SessionStore
from middleware_hub.openai_session.sessions.tree import Session, Turn
from miles_router.errors import RouterError
from miles_router.middlewares import ABORT, Exchange, Pace, Router, spawn

#: Seconds in which an engine ends a generation that it was told to abort, and after which it is told again: it may not
#: have had it yet.
GRACE, AGAIN = 5.0, 0.2


class RunningTurn:
    """A turn from its request to its end."""

    def __init__(self, session: Session, exchange: Exchange, router: Router) -> None:
        self.session = session
        #: Its name at the engine, by which it is aborted; None where the engine knows it by others.
        self.rid: str | None = None
        self.error: RouterError | None = None
        self._exchange = exchange
        self._router = router
        self._task = asyncio.current_task()
        self._ended = asyncio.Event()

    def stop(self, reason: str, *, keep: bool) -> None:
        """End it; `keep`: what was sampled until now stays."""
        self._exchange.flight.aborted = True
        error = stopped(self.session, reason)
        if keep and self.rid is not None and self._exchange.flight.worker_url is not None:
            spawn(self._abort(self.rid, error), name=f"abort {self.rid}")
        else:
            self._break_off(error)

    def over(self) -> None:
        """It has ended."""
        self._ended.set()

    async def _abort(self, rid: str, error: RouterError) -> None:
        loop = asyncio.get_running_loop()
        until = loop.time() + GRACE
        while not self._ended.is_set() and loop.time() < until:
            with suppress(RouterError):  # who cannot be told is broken off below
                await self._router.control.order(ABORT, self._exchange.request_id, rid=rid)
            with suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._ended.wait(), AGAIN)
        if not self._ended.is_set():
            self._break_off(error)

    def _break_off(self, error: RouterError) -> None:
        if self.error is None and self._task is not None:
            self.error = error
            self._task.cancel()

    def cancelled(self) -> RouterError | None:
        """Why its task was cancelled, if it was from here."""
        if self.error is not None and sys.version_info >= (3, 11) and self._task is not None:
            self._task.uncancel()
        return self.error


class EpisodeKeeper:
    """Keeps the contracts of all sessions. `clock` is the one by which they began."""

    def __init__(self, router: Router, store: SessionStore, clock: Callable[[], float]) -> None:
        self._router = router
        self._store = store
        self._clock = clock
        router.control.group_listeners.append(self._end_group)

    @contextmanager
    def running(self, session: Session, exchange: Exchange) -> Iterator[RunningTurn]:
        """While a turn runs, what ends its episode ends it.

        Raises:
            ContextOverflow: the episode is over, or ends meanwhile.
            SessionNotFound: the session is deleted meanwhile, together with what runs in it.
        """
        episode = session.episode
        if episode.closed is not None:
            raise stopped(session, episode.closed)
        running, timer = RunningTurn(session, exchange, self._router), None
        if (until := episode.deadline()) is not None:
            if (left := until - self._clock()) <= 0:
                self.stop(session, DEADLINE)
                raise stopped(session, DEADLINE)
            timer = asyncio.get_running_loop().call_later(left, self.stop, session, DEADLINE)
        episode.running.add(running)
        try:
            yield running
        except asyncio.CancelledError:
            if (error := running.cancelled()) is None:
                raise
            raise error from None
        finally:
            running.over()
            episode.running.discard(running)
            episode.release(running)
            if timer is not None:
                timer.cancel()

    def stop(self, session: Session, reason: str) -> None:
        """End an episode, and what runs in it. What was sampled until now stays, unless the session is deleted."""
        self._store.end(session, reason)
        session.episode.closed = reason
        for running in tuple(session.episode.running):
            running.stop(reason, keep=reason != DELETED)

    async def _end_group(self, group: object) -> None:
        """End every episode of a group that is aborted, whether something runs in it or not."""
        pace = Pace()
        for session in self._store:
            named = session.episode.group(session.metadata)
            if named is not None and str(named) == str(group):
                self.stop(session, ABORTED)
            await pace.step()

    def refuse_untraced(self, session: Session, why: str) -> None:
        """What is not traced cannot be held to a contract.

        Raises:
            OutsideContract: the session has one.
        """
        if session.episode.given:
            raise OutsideContract(f"{why}, and the session has a contract")

    async def bind(self, face: Face, turn: PendingTurn, running: RunningTurn) -> None:
        """Give a turn what it may have and must carry.

        Raises:
            ContextOverflow: nothing is left for it.
            StaleWeights: the weights that would have a part in it are too old.
            OutsideContract: its prompt's length is not known.
            BadRequest: nobody can tell how much it asks for.
        """
        episode, session = turn.session.episode, turn.session
        contract = episode.contract
        turn.fields, turn.asked_for = contract.fixed(turn.fields)
        self._check_freshness(session, turn.places[0].parent)
        if contract.budget.measures or contract.budget.max_turns is not None:
            await self._measure(face, turn, running)
        stays = contract.budget.deadline_s is not None or episode.group(session.metadata) is not None
        if stays and not turn.several:
            running.rid = secrets.token_hex(16)
            turn.fields = {**turn.fields, "rid": running.rid}

    async def _measure(self, face: Face, turn: PendingTurn, running: RunningTurn) -> None:
        """Cut it to what is left. Where that is less than it asks for and other turns hold the rest, it waits for
        them."""
        episode, budget = turn.session.episode, turn.session.episode.contract.budget
        ledger, prompt, window = episode.ledger, None, None
        lengths = face.endpoint.length_fields
        choices = choices_of(turn.fields, len(turn.places))
        asked = asked_tokens(turn.fields, lengths, face.endpoint.tokens_by_default)
        if budget.measures:
            prompt, window = await face.prompt_tokens(turn), await self._window()
        if prompt is None and budget.max_context is not None:
            raise OutsideContract("the router cannot tell how long this prompt is, and the contract has a max_context")
        while True:
            left = allowance(budget, ledger, prompt=prompt, choices=choices, window=window)
            short = left.tokens is not None and (asked is None or left.tokens < asked)
            waits = not ledger.has_turns(budget) or (short and left.reason == BUDGET_TOKENS)
            if not waits or not ledger.reserved:
                break
            await episode.freed()
        if not ledger.has_turns(budget):
            self._store.end(turn.session, TURNS)
            raise stopped(turn.session, TURNS)
        if left.tokens is not None and left.tokens < 1:
            self._store.end(turn.session, left.reason)
            raise _overflow(left, prompt, ledger.tokens)
        if short and left.tokens is not None:
            turn.cut_by = left.reason
            # What only the engine's window bounds is not told to the engine: it has the same bound by itself.
            if asked is not None or left.limit != window:
                turn.fields = cut(turn.fields, lengths, left.tokens)
        ledger.reserve(running, (left.tokens if short else asked or 0) * choices if left.tokens is not None else 0)
        turn.reservation = running

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
            self._store.end(session, STALE)
            oldest = freshness.oldest_version
            raise StaleWeights(f"weights of version {old[0]} would take part, and the contract's oldest is {oldest}")


def stopped(session: Session, reason: str) -> RouterError:
    """What an agent is told whose episode is over."""
    budget = session.episode.contract.budget
    words = {
        TURNS: f"its contract allows {budget.max_turns} turns",
        DEADLINE: f"its contract allows {budget.deadline_s} seconds",
        ABORTED: "its group was aborted",
    }
    if reason == DELETED:
        return SessionNotFound(f"session {session.id!r} was deleted")
    return ContextOverflow(reason, f"reached: the session is over, {words[reason]}")


def _overflow(left: Allowance, prompt: int | None, used: int) -> ContextOverflow:
    if left.reason == CONTEXT:
        message = f"{left.limit} tokens. However, your messages resulted in {prompt} tokens."
        return ContextOverflow(CONTEXT, message, prompt=prompt, limit=left.limit)
    message = f"reached: {used} of the {left.limit} tokens that the session's contract allows are sampled"
    return ContextOverflow(left.reason, message)
