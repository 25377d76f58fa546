"""Enforcement of session contracts on turns: budgets, fixed fields, weight freshness, deadlines, group aborts, and the
one weight version of an evaluation.
"""

from __future__ import annotations

import asyncio
import secrets
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any

from middleware_hub.openai_session.agent_apis.agent_api import AgentApi
from middleware_hub.openai_session.archive.archive import SessionArchive
from middleware_hub.openai_session.episodes.contract import (
    REFUSE,
    WAIT,
    Allowance,
    SessionStatus,
    allowance,
    asked_tokens,
    choices_of,
    limit_tokens,
)
from middleware_hub.openai_session.errors import AnswerCut, ContextOverflow
from middleware_hub.openai_session.sessions.replies import RepeatKey
from middleware_hub.openai_session.sessions.session import AgentRequest, Session
from middleware_hub.openai_session.sessions.store import SessionStore
from middleware_hub.openai_session.sessions.turn import Turn
from middleware_hub.openai_session.turns.plan import TurnGrant
from miles_router.engines.answers import ABORT
from miles_router.engines.generate import RID
from miles_router.engines.names import is_generated
from miles_router.engines.openai.choices import Choice
from miles_router.engines.refusals import Overflow
from miles_router.errors import BadRequest, Conflict, NotFound, RouterError
from miles_router.middlewares import Exchange, Pace, Router, spawn, within
from miles_router.middlewares.generation import Evaluation


def evaluation_of(session: Session, router: Router) -> Evaluation | None:
    """Return the evaluation that a turn of this session belongs to, pinned to the version of the recorded turns."""
    if not session.is_evaluation:
        return None
    waits = session.episode.contract.evaluation == WAIT
    began = session.turns[0].facts.get("answered_at") if session.turns else None
    return Evaluation(router.fleet, next(iter(session.weight_versions), None), began, waits=waits)


def check_evaluated(session: Session, exchange: Exchange, choices: Sequence[Choice]) -> None:
    """Check that one weight version sampled an answer and the recorded turns of its session, and that no pause cut it.

    Raises:
        WeightsChanged: the answer must not be recorded, and the agent must not get it.
    """
    if (evaluation := exchange.routing.evaluation) is None:
        return
    evaluation.check(*session.weight_versions, *(run.version for choice in choices for run in choice.versions))
    if any(choice.finish == ABORT for choice in choices) and not exchange.routing.aborted:
        raise evaluation.cut()


#: Seconds that an engine has to end an aborted generation, and seconds between aborts. An abort is repeated because the
#: engine may not have received the generation yet.
ABORT_GRACE, ABORT_INTERVAL = 5.0, 0.2


class RunningTurn:
    """A running turn, which its session can stop.

    To stop a turn, the router asks the engine to abort it; the engine then answers with the tokens sampled so far. The
    router cancels the request if these tokens are not wanted, or if the engine does not end the turn in time.
    """

    def __init__(self, session: Session, exchange: Exchange, router: Router) -> None:
        self.session = session
        #: The rid by which the engine can abort the turn; None if the router did not choose one.
        self.rid: str | None = None
        #: The error with which the session stopped the turn; None if the session did not stop it.
        self.stopped_by: RouterError | None = None
        #: Returns the number of tokens that have streamed; None for a whole answer.
        self.streamed_tokens: Callable[[], int | None] = lambda: None
        self._error: RouterError | None = None
        self._exchange = exchange
        self._router = router
        #: The request context.
        self.routing = exchange.routing
        self._task = asyncio.current_task()
        self._ended = asyncio.Event()

    def stop(self, error: RouterError, *, keep: bool) -> None:
        """Stop the turn.

        Args:
            error: the agent gets this error if the turn has no answer.
            keep: whether the tokens sampled so far are recorded and returned.
        """
        self.routing.aborted = True
        if self.rid is None or self.routing.worker_url is None:
            self._cancel_task(error)
        else:
            end = self._abort_and_wait(self.rid, error) if keep else self._abort_and_cancel(self.rid, error)
            spawn(end, name=f"abort {self.rid}")

    def mark_ended(self) -> None:
        """Note that the turn has ended."""
        self._ended.set()

    async def _abort_and_wait(self, rid: str, error: RouterError) -> None:
        spawn(self._repeat_abort(rid), name=f"abort {rid}")
        await self._wait_for_end(ABORT_GRACE)
        self._cancel_task(error)

    async def _repeat_abort(self, rid: str) -> None:
        while not self._ended.is_set():
            await self._send_abort(rid)
            await self._wait_for_end(ABORT_INTERVAL)

    async def _wait_for_end(self, seconds: float) -> None:
        with suppress(TimeoutError):
            await within(seconds, self._ended.wait(), name="a turn's end")

    async def _abort_and_cancel(self, rid: str, error: RouterError) -> None:
        await asyncio.wait({spawn(self._send_abort(rid), name=f"abort {rid}")}, timeout=ABORT_INTERVAL)
        self._cancel_task(error)

    async def _send_abort(self, rid: str) -> None:
        with suppress(RouterError):  # `_cancel_task` ends the turn if the engine cannot be reached
            await self._router.control.abort(rid, self._exchange.request_id)

    def _cancel_task(self, error: RouterError) -> None:
        if self._error is None and self._task is not None and not self._ended.is_set():
            self._error = error
            self._task.cancel()

    def take_cancellation(self) -> RouterError | None:
        """Return the error for which `stop` cancelled the task, or None if the cancellation came from elsewhere.

        The cancellation is undone (Python 3.11 and later), so that the task can raise the error instead.
        """
        if self._error is not None and sys.version_info >= (3, 11) and self._task is not None:
            self._task.uncancel()
        return self._error


class EpisodeKeeper:
    """The enforcement of the limits in sessions' contracts: turns of an episode that has ended are stopped or refused.

    Args:
        clock: the monotonic clock that the deadlines of sessions refer to.
    """

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
        """Register a turn as running, so that the end of its episode stops it.

        Raises:
            ContextOverflow: the episode ended during the turn.
            NotFound: the session and its running turns were deleted during the turn.
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
            if (error := running.take_cancellation()) is None:
                raise
            raise error from None
        except AnswerCut:
            if running.stopped_by is None:
                raise
            raise running.stopped_by from None  # AnswerCut would invite the agent to retry, which is useless now
        finally:
            running.mark_ended()
            episode.running.discard(running)
            episode.release(running)
            if timer is not None:
                timer.cancel()

    def check(self, session: Session) -> None:
        """Check that a turn may begin.

        Raises:
            Conflict: the session is finalized.
            ContextOverflow: the episode is over.
            NotFound: the session was deleted.
        """
        until = session.episode.deadline()
        if session.ending.status.allows_turns and until is not None and until <= self._clock():
            self.stop(session, SessionStatus.DEADLINE)
        if not session.ending.status.allows_turns:
            raise stop_error(session, session.ending.status)

    def stop(self, session: Session, status: SessionStatus) -> None:
        """End an episode and its running turns. Tokens sampled so far are kept, unless the session is discarded."""
        self._store.end(session, status)
        keep = status is not SessionStatus.DISCARDED
        if keep:
            self._archive.save_soon(session)
        for running in tuple(session.episode.running):
            running.stopped_by = stop_error(session, status)
            running.stop(running.stopped_by, keep=keep)

    async def _end_group(self, group: object) -> None:
        """End every episode of an aborted group, running or not.

        The episodes in memory end first, so that a failing disk cannot prevent that.
        """
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
        """Refuse a request that would not be recorded, if the session has a contract.

        Raises:
            BadRequest: the session has a contract, which cannot be enforced on such a request.
        """
        if session.episode.given:
            raise BadRequest(f"{why}, and the session has a contract")

    async def grant(
        self, api: AgentApi, request: AgentRequest, key: RepeatKey | None, running: RunningTurn
    ) -> TurnGrant:
        """Return the request as the session's contract allows it, with a rid by which the engine can abort it. Pin a
        turn of an evaluation to its weight version.

        Args:
            key: equal for a request and its repetitions; None without a turn id.

        Raises:
            ContextOverflow: the budget is used up.
            BadRequest: weights that are too old would take part in the turn.
            BadRequest: the contract limits the context, and the prompt's length is not known.
            BadRequest: a length field or `n` is invalid, so that the needed budget is not known.
        """
        session, contract = request.session, request.session.episode.contract
        fields, asked_for = contract.apply_fixed(request.fields)
        self._check_freshness(session, request.parents[0].parent)
        running.routing.evaluation = evaluation_of(session, self._router)
        grant = TurnGrant(fields, asked_for)
        if contract.budget.limits_length or contract.budget.max_turns is not None:
            grant = await self._within_budget(api, replace(request, fields=fields), grant, key, running)
        return replace(grant, fields=self._with_rid(request, grant.fields, running))

    def _with_rid(self, request: AgentRequest, fields: Mapping[str, Any], running: RunningTurn) -> Mapping[str, Any]:
        """Return the fields with a rid by which the turn can be aborted at its engine.

        The agent's own rid stays if nothing but a deletion would stop the turn. With several choices the router cannot
        know the rids: SGLang makes one for each choice (`TokenizerManager._handle_batch_request`).
        """
        episode, own = request.session.episode, fields.get(RID)
        if isinstance(own, str) and is_generated(own):  # looks like a rid of the router; other agents may send the same
            fields, own = {**fields, RID: secrets.token_hex(16)}, None
        is_abortable = (
            own is None or episode.deadline() is not None or episode.group(request.session.metadata) is not None
        )
        is_abortable = is_abortable or episode.contract.budget.limits_usage
        if request.has_several_choices or not is_abortable:
            return fields
        running.rid = secrets.token_hex(16)
        return {**fields, RID: running.rid}

    async def _within_budget(
        self, api: AgentApi, request: AgentRequest, grant: TurnGrant, key: RepeatKey | None, running: RunningTurn
    ) -> TurnGrant:
        """Return the grant, limited to the budget that is left, and reserve it. Raises like `grant`.

        If too little is left because other running turns have reserved the rest, wait until they end.
        """
        session, budget = request.session, request.session.episode.contract.budget
        ledger, prompt, window = session.episode.ledger, None, None
        lengths = api.endpoint.length_fields
        choices = choices_of(grant.fields, len(request.parents))
        asked = asked_tokens(grant.fields, lengths, api.endpoint.tokens_by_default)
        if budget.limits_length:
            prompt, window = await api.prompt_tokens(request), await self._window()
        if prompt is None and budget.max_context is not None:
            raise BadRequest("the router cannot tell how long this prompt is, and the contract has a max_context")
        while True:
            left = allowance(budget, ledger, prompt=prompt, choices=choices, window=window)
            short = left.tokens is not None and (asked is None or left.tokens < asked)
            spent = short and left.end is SessionStatus.BUDGET_TOKENS
            if not ledger.reserved or (ledger.has_turns(budget, key) and not spent):
                break
            await session.episode.wait_until_freed()
        if not ledger.has_turns(budget, key):
            self._store.end(session, SessionStatus.TURNS)
            raise stop_error(session, SessionStatus.TURNS)
        if left.tokens is not None and left.tokens < 1:
            self._store.end(session, left.end)
            raise _overflow(left, prompt, ledger.tokens)
        if short and left.tokens is not None:
            grant = replace(grant, cut_by=left.end)
            # A limit that only the engine's window sets is not sent: the engine applies it by itself.
            if asked is not None or left.end is not SessionStatus.CONTEXT or left.limit != window:
                grant = replace(grant, fields=limit_tokens(grant.fields, lengths, left.tokens))
        ledger.reserve(running, (left.tokens if short else asked or 0) * choices if left.tokens is not None else 0)
        return replace(grant, reservation=running)

    async def _window(self) -> int | None:
        """Return the smallest context window of the fleet in tokens; None if none is known."""
        known = [facts.context_length for facts in await self._router.fleet.all_facts()]
        return min((length for length in known if length is not None), default=None)

    def _check_freshness(self, session: Session, parent: Turn | None) -> None:
        """Refuse a turn whose prompt was sampled by weights that are too old, or whose answer would be.

        Raises:
            BadRequest: the contract refuses such turns.
        """
        freshness = session.episode.contract.freshness
        if freshness.oldest_version is None or freshness.otherwise != REFUSE:
            return
        held = [] if parent is None else [run.version for run in parent.trajectory().weight_versions]
        fleet = self._router.pool.weight_version
        old = [version for version in (*held, *([fleet] if fleet is not None else ())) if freshness.is_stale(version)]
        if old:
            self._store.end(session, SessionStatus.STALE)
            oldest = freshness.oldest_version
            raise BadRequest(
                f"weights of version {old[0]} would take part, but the contract's oldest_version is {oldest}"
            )


def stop_error(session: Session, status: SessionStatus) -> RouterError:
    """Return the error for an agent whose session allows no turns any more."""
    budget = session.episode.contract.budget
    words = {
        SessionStatus.TURNS: f"its contract allows {budget.max_turns} turns",
        SessionStatus.DEADLINE: f"its contract allows {budget.deadline_s} seconds",
        SessionStatus.ABORTED: "its group was aborted",
    }
    if status is SessionStatus.DISCARDED:
        return NotFound(f"session {session.id!r} was deleted")
    if status is SessionStatus.FINALIZED:
        return Conflict(f"session {session.id!r} is finalized and takes no further turns")
    return ContextOverflow(status.reason, f"the session is over: {words[status]}")


def _overflow(left: Allowance, prompt: int | None, used: int) -> ContextOverflow:
    if left.end is SessionStatus.CONTEXT and prompt is not None:
        return ContextOverflow(left.end.reason, overflow=Overflow(prompt, left.limit))
    why = f"the session has sampled {used} of the {left.limit} tokens that its contract allows"
    return ContextOverflow(left.end.reason, why)
