"""One turn: what an agent asks, the engine's answer to it, and its record, as one coroutine."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

from middleware_hub.openai_session.archive.archive import SessionArchive
from middleware_hub.openai_session.episodes.contract import SessionStatus
from middleware_hub.openai_session.errors import ContextOverflow, SessionFinalized, UnusableAnswer
from middleware_hub.openai_session.faces.face import Face, RunSettings, StreamForm, head
from middleware_hub.openai_session.sessions.agent_request import AgentRequest
from middleware_hub.openai_session.sessions.session import Session
from middleware_hub.openai_session.sessions.store import SessionStore
from middleware_hub.openai_session.sessions.turn import ADAPTER, RESHAPED_BY, SAMPLING, UNRENDERED
from middleware_hub.openai_session.sessions.values import refuse_long_turn
from middleware_hub.openai_session.turns.keeper import EpisodeKeeper, RunningTurn
from middleware_hub.openai_session.turns.leaving import SeenThrough
from middleware_hub.openai_session.turns.plan import TurnGrant, TurnPlan, TurnRequest
from middleware_hub.openai_session.turns.raw_turn import RawTurn, check_fields, obstacle, written_ids
from middleware_hub.openai_session.turns.recorder import TurnRecorder
from middleware_hub.openai_session.turns.reply import EVENT_STREAM, ReplySender, first_of_repeated
from middleware_hub.openai_session.turns.sampling import WHOLE, SamplingServices, StreamedTurn, TurnSampling, WholeTurn
from middleware_hub.tokenizing.agreement import TokenizerAgreement
from miles_router.engines import models, paths
from miles_router.engines.answers import ABORT
from miles_router.engines.facts import Facts
from miles_router.engines.models import DEFAULT
from miles_router.engines.openai.chat import ids_obstacle
from miles_router.engines.openai.choices import Choice, OpenAIEndpoint
from miles_router.engines.openai.text_reader import TextReader
from miles_router.engines.recomputing import AskedSampling, adapter_in
from miles_router.engines.rows import ROW_FIELDS
from miles_router.errors import PromptNotRead, RouterError, StateError, UnsupportedByEngine, UpstreamError
from miles_router.middlewares import ASGIApp, Exchange, Receive, Router, Scope, Send, Watch, replay, with_body
from miles_router.middlewares.generation import Heartbeat, flag_worker
from miles_router.middlewares.rows import RowDeliveries


class TurnRunner:
    """Runs the turns of all sessions.

    Args:
        app: the app inside, which asks an engine.
        now: Unix seconds.
        whole_answers: every chat turn is generated whole, and given as a stream afterwards.
        heartbeat: seconds of silence after which a stream says that it goes on; 0 for never.
    """

    def __init__(
        self,
        app: ASGIApp,
        router: Router,
        store: SessionStore,
        archive: SessionArchive,
        keeper: EpisodeKeeper,
        recorder: TurnRecorder,
        sampling: SamplingServices,
        settings: RunSettings,
        *,
        now: Callable[[], float],
        whole_answers: bool,
        heartbeat: float,
    ) -> None:
        self._app = app
        self._router = router
        self._store = store
        self._archive = archive
        self._keeper = keeper
        self._recorder = recorder
        self._sampling = sampling
        self._settings = settings
        self._now = now
        self._whole_answers = whole_answers
        self._stream_facts = sampling.stream_facts
        self._heartbeat = heartbeat
        self._agreement = TokenizerAgreement.of(router)

    async def run_turn(self, face: Face, session: Session, scope: Scope, receive: Receive, send: Send) -> None:
        """Run one turn: read, place, grant, plan, sample, record, save, and end the reply.

        Raises:
            BadRequest: the request is invalid, or the session has no room, is finalized or has a contract against it.
            UnusableAnswer: the worker's answer cannot be read or recorded.
            TokenizerDiffers: a worker has another tokenizer than the router.
            StateError: what became of it cannot be made durable.
        """
        exchange = Exchange.of(scope)
        exchange.error_body, exchange.flight.private = face.error_body, True
        body = await exchange.read(receive)
        parsed = exchange.loads(body)
        refuse_long_turn(body, parsed)
        form = face.stream_form(session, parsed)
        streams = isinstance(parsed, Mapping) and parsed.get("stream") is True
        async with Heartbeat(send, exchange, form, self._heartbeat if streams else 0.0) as heartbeat:
            reply = ReplySender(heartbeat.send, partial(self._archive.save, session))
            try:
                asked = TurnRequest.read(face, scope, receive, body, parsed)
                with self._store.in_use(session):
                    await self._run_once(session, asked, form, reply)
            except StateError:
                raise
            except RouterError:  # which may have ended the episode
                await self._archive.save(session)
                raise
            except asyncio.CancelledError:
                self._archive.save_soon(session)
                raise

    async def _run_once(self, session: Session, asked: TurnRequest, form: StreamForm, reply: ReplySender) -> None:
        face = asked.face
        if (reason := face.untraceable(asked.parsed)) is not None:
            await self.pass_untraced(session, reason, asked.body, asked.scope, asked.receive, reply.send)
            return
        account = partial(self._store.account, session)
        async with first_of_repeated(session, asked.repeat_key, asked.receive, reply, account) as is_first:
            if not is_first:
                return
            try:
                await self._run(session, asked, form, reply)
            except ContextOverflow as error:
                # Harnesses of some APIs look for it in the stream; a stream that a heartbeat has begun is told anyway.
                events = None if form.began else face.as_stream(session, asked.parsed, error)
                if events is None:
                    raise
                await reply.finish(events, head(events, EVENT_STREAM))

    async def _run(self, session: Session, asked: TurnRequest, form: StreamForm, reply: ReplySender) -> None:
        # Only now: a recorded answer is given again even where there is no room for another turn.
        if session.ending.status is SessionStatus.FINALIZED:
            raise SessionFinalized(f"session {session.id!r} is finalized")
        self._store.check_room(session)
        if not self._archive.is_saved(session):  # what could not be made durable must be, before there is more of it
            await self._archive.save(session)
        self._keeper.check(session)
        with self._keeper.running(session, asked.exchange) as running:
            with Watch(asked.receive):  # a long text takes its time, which is not spent for an agent that has left
                request = await asked.face.turn(session, asked.parsed, now=self._now())
                form.is_of(request)
                grant = await self._keeper.grant(asked.face, request, asked.repeat_key, running)
            async with self._seen_through(request, grant, asked, running, reply) as receive:
                plan = await self._plan(asked, request, grant)
                try:
                    await self._sample(plan, asked, receive, running, reply)
                except UnusableAnswer:
                    flag_worker(self._recorder.statistics.invalid_answers, asked.exchange.flight.worker_url)
                    raise

    def _seen_through(
        self, request: AgentRequest, grant: TurnGrant, asked: TurnRequest, running: RunningTurn, reply: ReplySender
    ) -> AbstractAsyncContextManager[Receive]:
        if not request.session.episode.contract.budget.counts:
            return nullcontext(asked.receive)
        return SeenThrough(request, grant, asked.repeat_key, running, asked.receive, reply)

    # Plan

    async def _plan(self, asked: TurnRequest, request: AgentRequest, grant: TurnGrant) -> TurnPlan:
        await self._agreement.require(asked.scope)
        asked.exchange.flight.mark("read", mode="session", session=request.session.id)
        self._settle_adapter(grant, asked.exchange)
        endpoint, parent = asked.face.endpoint, request.places[0].parent
        if request.prompt is not None and parent is not None:
            asked.exchange.flight.goes_on = parent.cache
        missing = endpoint.rows_missing if request.several else None
        deliveries = RowDeliveries.captured(
            self._router.rows, lambda kind: [request.held_rows(kind)], per_prompt=sys.maxsize, missing=missing
        )
        written: Sequence[bytes] = ()
        if request.prompt is not None and endpoint.takes_ids:
            written = self._recorder.written_ids.prompt(request.session.id, request.prompt)
        candidates = await self._stream_facts.candidates(request)
        raw = None
        if endpoint.takes_ids and (facts := _without_ids(candidates)) is not None:
            raw, written = await self._raw(asked.face, request, grant, facts, written)
        plan = TurnPlan(
            request,
            grant,
            deliveries=deliveries,
            written=written,
            turn_id=asked.turn_id,
            repeat_key=asked.repeat_key,
            side_call=asked.face.is_side_call(asked.scope),
            raw=raw,
        )
        return replace(plan, streams=True) if self._streams(plan, endpoint, candidates) else plan

    async def _raw(
        self, face: Face, request: AgentRequest, grant: TurnGrant, facts: Facts, written: Sequence[bytes]
    ) -> tuple[RawTurn, Sequence[bytes]]:
        """Return how a turn is read here, and its prompt as JSON, which is rendered here if it is a root's.

        Raises:
            UnsupportedByEngine: it cannot be.
            BadRequest: a field is invalid, or the template refuses the messages.
        """
        parsers, fields = self._sampling.parsers, grant.fields
        check_fields(fields)
        if (reason := obstacle(request, fields, TextReader(fields, parsers, facts))) is not None:
            kind = facts.engine.kind if facts.engine is not None else "this engine"
            raise UnsupportedByEngine(f"the chat of {kind} has no ids, and a session cannot stand in for it: {reason}")
        decode = self._router.tokenizer.decode
        if request.prompt is not None:
            return RawTurn.behind(request.prompt.given.tokens, fields, parsers, facts, decode, root=False), written
        ids = await face.rendered(fields)
        return RawTurn.behind(ids, fields, parsers, facts, decode, root=True), written_ids(ids)

    def _settle_adapter(self, grant: TurnGrant, exchange: Exchange) -> None:
        """What the run or a contract puts into a turn counts more than the adapter that its agent has named."""
        served = self._router.fleet.model_names
        if exchange.adapter is not None and (adapter := adapter_in(grant.fields, (*served, DEFAULT))) is not None:
            exchange.adapter = adapter or None

    def _streams(self, plan: TurnPlan, endpoint: OpenAIEndpoint, candidates: Sequence[Facts]) -> bool:
        """Return whether the engine is asked for a stream; an agent's stream may be generated whole."""
        request = plan.request
        if not request.stream or endpoint.chunks is None:
            return request.stream
        # A stream of several choices tells the rows of one alone, those of some kinds it does not tell, and that of a
        # pair does not say whether they are right.
        paired = bool(self._router.pool.snapshot.prefill)
        untold = any(request.several or paired or not ROW_FIELDS[kind].in_chat_streams for kind in plan.deliveries)
        if self._whole_answers or untold or WHOLE in request.session.notes:
            return False
        return plan.raw is not None or not self._stream_facts.fall_short(candidates, endpoint)

    # Sampling and recording

    async def _sample(
        self, plan: TurnPlan, asked: TurnRequest, receive: Receive, running: RunningTurn, reply: ReplySender
    ) -> None:
        request = plan.request
        # Where the answer does not say whose rows are whose, none are asked for.
        unclear = request.stream and request.several and asked.face.endpoint.rows_missing is not None
        with nullcontext() if unclear else plan.deliveries.left_on(asked.exchange):
            sampled = (StreamedTurn if plan.streams else WholeTurn)(self._sampling, plan, asked)
            running.streamed_tokens = sampled.streamed_tokens
            await sampled.run(receive, reply, partial(self._end, plan, sampled, asked.exchange, reply))

    async def _end(self, plan: TurnPlan, sampled: TurnSampling, exchange: Exchange, reply: ReplySender) -> None:
        """Read what was sampled, record it, and end the reply once it is durable."""
        try:
            answer = await sampled.answer()
            if answer.choices is not None:
                self._record(plan, answer.choices, answer.prompt_tokens, exchange, reply)
        except UpstreamError as error:
            await reply.give(sampled.failed(error))
            raise
        if answer.error is not None:
            raise answer.error
        await reply.finish(sampled.end(), answer.start, stays_open=plan.streams)

    def _record(
        self,
        plan: TurnPlan,
        choices: Sequence[Choice],
        prompt_tokens: int | None,
        exchange: Exchange,
        reply: ReplySender,
    ) -> None:
        """Record the turn. Raises PromptNotRead, UnusableAnswer, SessionNotFound."""
        flight, request = exchange.flight, plan.request
        facts: Mapping[str, Any] = {
            "worker": flight.worker_url,
            "request_id": exchange.request_id,
            **({"waited_s": round(flight.waited, 6)} if flight.waited else {}),
            "cache_versions": flight.cache_versions,
            **self._facts_for_audits(plan, flight.worker_url),
        }
        try:
            self._check_prompt(plan, choices, prompt_tokens, exchange)
            recorded = self._recorder.record(plan, choices, facts, flight.cache)
        except UnusableAnswer as error:
            if plan.streams:  # the agent has its text, and goes on from it
                self._recorder.pass_by(request.path, request.session, str(error), exchange.request_id)
            raise
        aborted = any(choice.finish == ABORT for choice in choices)
        reply.recorded, reply.repeatable = recorded, recorded and not (reply.left and aborted)
        flight.mark("prompt", tokens=_prompt_tokens(request, choices))
        for each in choices:
            version = each.versions[-1].version if each.versions else None
            flight.mark("answer", tokens=len(each.ids), finish=each.finish, version=version)

    def _check_prompt(
        self, plan: TurnPlan, choices: Sequence[Choice], prompt_tokens: int | None, exchange: Exchange
    ) -> None:
        """Compare the number of tokens that the engine says it read with those that it was given.

        Raises:
            PromptNotRead: it read another number.
            UnusableAnswer: it tells other ids.
        """
        request, given = plan.request, _prompt_tokens(plan.request, choices)
        queued = any(not choice.ids and choice.finish == ABORT for choice in choices)  # which tells no prompt
        if prompt_tokens is None or queued or prompt_tokens == given or not given:
            return
        worker = exchange.flight.worker_url
        if not self._router.fleet.known_facts(worker or "").counts_prompts:
            return
        self._recorder.check_prompts(request, choices)
        error = PromptNotRead.of(worker, given, prompt_tokens)
        self._recorder.pass_by(request.path, request.session, str(error), exchange.request_id)
        raise error

    def _facts_for_audits(self, plan: TurnPlan, url: str | None) -> dict[str, Any]:
        """Return what an audit must know of the request, where there is something to know."""
        fields, served = plan.grant.fields, self._router.fleet.known_facts(url or "").served_model_name
        asked = AskedSampling.of_chat(fields, (served, DEFAULT) if served else ())
        rendered = plan.request.prompt is not None or plan.request.path == paths.COMPLETIONS
        facts = {
            SAMPLING: asked.said or None,
            RESHAPED_BY: asked.reshaped_by,
            UNRENDERED: None if rendered else ids_obstacle(fields),
        }
        own = {} if asked.adapter == "" else {ADAPTER: asked.adapter}
        return {**{name: value for name, value in facts.items() if value is not None}, **own}

    # Requests that are no turns

    async def pass_untraced(
        self, session: Session, why: str, body: bytes, scope: Scope, receive: Receive, send: Send
    ) -> None:
        """Have a request that generates answered as it came, but for the adapter of the run; the session notes it.

        Raises:
            OutsideContract: the session has a contract.
        """
        self._keeper.refuse_untraced(session, why)
        self._recorder.pass_by(scope["path"], session, why, Exchange.of(scope).request_id)
        await self.pass_on(body, scope, receive, send)

    async def pass_on(self, body: bytes, scope: Scope, receive: Receive, send: Send) -> None:
        """Have a request answered as it came, but for the adapter of the run."""
        if adapter := self._settings.lora_path:
            Exchange.of(scope).adapter = adapter
            body = models.only_with_adapter(body, adapter)
            scope = with_body(scope, body)
        await self._app(scope, replay(body, receive), send)


def _without_ids(candidates: Sequence[Facts]) -> Facts | None:
    """Return the facts of an engine whose chat takes or tells no ids; None where there is none."""
    for facts in candidates:
        if facts.engine is not None and not facts.engine.chats_by_ids:
            return facts
    return None


def _prompt_tokens(request: AgentRequest, choices: Sequence[Choice]) -> int:
    """Return the number of tokens of all prompts, each of which has as many choices."""
    if request.prompt is not None:
        return request.prompt.length
    one_each = choices[:: max(1, len(choices) // len(request.places))]
    return sum(len(each.prompt or ()) for each in one_each)
