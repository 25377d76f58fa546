"""One turn as one coroutine: the agent's request, the engine's answer, and the record."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

from middleware_hub.openai_session.agent_apis.agent_api import AgentApi, RunSettings, StreamForm, start_message
from middleware_hub.openai_session.archive.archive import SessionArchive
from middleware_hub.openai_session.errors import ContextOverflow, UnusableAnswer
from middleware_hub.openai_session.sessions.messages import refuse_long_turn
from middleware_hub.openai_session.sessions.session import AgentRequest, Session
from middleware_hub.openai_session.sessions.store import SessionStore
from middleware_hub.openai_session.sessions.turn import ADAPTER, RESHAPED_BY, SAMPLING, UNRENDERED
from middleware_hub.openai_session.turns.keeper import EpisodeKeeper, RunningTurn, check_evaluated
from middleware_hub.openai_session.turns.leaving import RunToEnd
from middleware_hub.openai_session.turns.plan import TurnGrant, TurnPlan, TurnRequest
from middleware_hub.openai_session.turns.raw_turn import RawTurn, check_fields, obstacle, written_ids
from middleware_hub.openai_session.turns.recorder import TurnRecorder
from middleware_hub.openai_session.turns.reply import EVENT_STREAM, ReplySender, run_or_repeat
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
from miles_router.errors import (
    PromptNotRead,
    RouterError,
    StateError,
    UnsupportedByEngine,
    UpstreamError,
    WeightsChanged,
)
from miles_router.middlewares import ASGIApp, Exchange, Receive, Router, Scope, Send, Watch, replay, with_body
from miles_router.middlewares.generation import Heartbeat, flag_worker
from miles_router.middlewares.rows import RowDeliveries


class TurnRunner:
    """The runner of all sessions' turns.

    Args:
        app: the app inside the session middleware, which asks an engine.
        now: returns Unix seconds.
        whole_answers: whether every chat turn is sampled as a whole answer, and streamed to the agent afterwards.
        heartbeat: seconds of silence after which a stream sends a heartbeat; 0 for never.
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

    async def run_turn(self, api: AgentApi, session: Session, scope: Scope, receive: Receive, send: Send) -> None:
        """Run one turn: read, place, grant, plan, sample, record, save, and end the reply.

        Raises:
            BadRequest: the request is invalid, the session is full or finalized, or its contract forbids the turn.
            UnusableAnswer: the worker's answer cannot be read or recorded.
            UpstreamError: a worker has another tokenizer than the router.
            StateError: the session cannot be saved.
        """
        exchange = Exchange.of(scope)
        exchange.error_body, exchange.routing.private = api.error_body, True
        body = await exchange.read(receive)
        parsed = exchange.loads(body)
        refuse_long_turn(body, parsed)
        form = api.stream_form(session, parsed)
        streams = isinstance(parsed, Mapping) and parsed.get("stream") is True
        async with Heartbeat(send, exchange, form, self._heartbeat if streams else 0.0) as heartbeat:
            reply = ReplySender(heartbeat.send, partial(self._archive.save, session))
            try:
                asked = TurnRequest.read(api, scope, receive, body, parsed)
                with self._store.in_use(session):
                    await self._run_once(session, asked, form, reply)
            except StateError:
                raise
            except RouterError:  # the error may have ended the episode: save that too
                await self._archive.save(session)
                raise
            except asyncio.CancelledError:
                self._archive.save_soon(session)
                raise

    async def _run_once(self, session: Session, asked: TurnRequest, form: StreamForm, reply: ReplySender) -> None:
        api = asked.api
        if (reason := api.untraced_reason(asked.parsed)) is not None:
            await self.pass_untraced(session, reason, asked.body, asked.scope, asked.receive, reply.send)
            return
        account = partial(self._store.account, session)
        async with run_or_repeat(session, asked.repeat_key, asked.receive, reply, account) as is_first:
            if not is_first:
                return
            try:
                await self._run(session, asked, form, reply)
            except ContextOverflow as error:
                # Harnesses of some APIs look for a full context in the stream. If a heartbeat has begun the stream, the
                # error is written there anyway.
                events = None if form.began else api.overflow_stream(session, asked.parsed, error)
                if events is None:
                    raise
                await reply.finish(events, start_message(events, EVENT_STREAM))

    async def _run(self, session: Session, asked: TurnRequest, form: StreamForm, reply: ReplySender) -> None:
        # Checked only here: a recorded answer is repeated even if the session takes no further turn.
        self._keeper.check(session)
        self._store.check_room(session)
        if not self._archive.is_saved(session):  # earlier turns must be durable before the session grows
            await self._archive.save(session)
            self._keeper.check(session)  # again: the session may have ended meanwhile
        with self._keeper.running(session, asked.exchange) as running:
            with Watch(asked.receive):  # encoding a long text takes time: stop if the agent disconnects
                request = await asked.api.turn(session, asked.parsed, now=self._now())
                form.set_turn(request)
                grant = await self._keeper.grant(asked.api, request, asked.repeat_key, running)
            async with self._run_to_end(request, grant, asked, running, reply) as receive:
                plan = await self._plan(asked, request, grant)
                try:
                    await self._sample(plan, asked, receive, running, reply)
                except UnusableAnswer:
                    flag_worker(self._recorder.statistics.invalid_answers, asked.exchange.routing.worker_url)
                    raise

    def _run_to_end(
        self, request: AgentRequest, grant: TurnGrant, asked: TurnRequest, running: RunningTurn, reply: ReplySender
    ) -> AbstractAsyncContextManager[Receive]:
        if not request.session.episode.contract.budget.limits_usage:
            return nullcontext(asked.receive)
        return RunToEnd(request, grant, asked.repeat_key, running, asked.receive, reply)

    # Plan

    async def _plan(self, asked: TurnRequest, request: AgentRequest, grant: TurnGrant) -> TurnPlan:
        await self._agreement.require(asked.scope)
        asked.exchange.routing.mark("read", mode="session", session=request.session.id)
        self._set_adapter(grant, asked.exchange)
        endpoint, parent = asked.api.endpoint, request.parents[0].parent
        if request.prompt is not None and parent is not None:
            asked.exchange.routing.continued_cache = parent.cache
        missing = endpoint.rows_missing if request.has_several_choices else None
        deliveries = RowDeliveries.captured(
            {} if request.session.is_evaluation else self._router.rows,
            lambda kind: [request.held_rows(kind)],
            per_prompt=sys.maxsize,
            missing=missing,
        )
        written: Sequence[bytes] = ()
        if request.prompt is not None and endpoint.takes_ids:
            written = self._recorder.written_ids.prompt(request.session.id, request.prompt)
        candidates = await self._stream_facts.candidates(request)
        raw = None
        if endpoint.takes_ids and (facts := _without_ids(candidates)) is not None:
            raw, written = await self._plan_raw(asked.api, request, grant, facts, written)
        plan = TurnPlan(
            request,
            grant,
            deliveries=deliveries,
            written=written,
            turn_id=asked.turn_id,
            repeat_key=asked.repeat_key,
            side_call=asked.api.is_side_call(asked.scope),
            raw=raw,
        )
        return replace(plan, streams=True) if self._streams(plan, endpoint, candidates) else plan

    async def _plan_raw(
        self, api: AgentApi, request: AgentRequest, grant: TurnGrant, facts: Facts, written: Sequence[bytes]
    ) -> tuple[RawTurn, Sequence[bytes]]:
        """Return how the router parses the turn's answer, and the prompt ids as JSON; a root's prompt is rendered here.

        Raises:
            UnsupportedByEngine: the router cannot render the prompt or parse the answer.
            BadRequest: a field is invalid, or the template refuses the messages.
        """
        parsers, fields = self._sampling.parsers, grant.fields
        check_fields(fields)
        if (reason := obstacle(request, fields, TextReader(fields, parsers, facts))) is not None:
            kind = facts.engine.kind if facts.engine is not None else "this engine"
            why = f"the chat endpoint of {kind} has no token ids, and the router cannot add them"
            raise UnsupportedByEngine(f"{why}: {reason}")
        decode = self._router.tokenizer.decode
        if request.prompt is not None:
            return RawTurn.from_prompt(request.prompt.given.tokens, fields, parsers, facts, decode, root=False), written
        ids = await api.render_ids(fields)
        return RawTurn.from_prompt(ids, fields, parsers, facts, decode, root=True), written_ids(ids)

    def _set_adapter(self, grant: TurnGrant, exchange: Exchange) -> None:
        """Set the adapter of the request. An adapter from the run or the contract overrides the agent's."""
        adapter = adapter_in(grant.fields, (*self._router.fleet.model_names, DEFAULT))
        if exchange.adapter is not None and adapter is not None:
            exchange.adapter = adapter or None
        if exchange.routing.evaluation is not None and adapter:
            exchange.routing.evaluation.adapters = [adapter]

    def _streams(self, plan: TurnPlan, endpoint: OpenAIEndpoint, candidates: Sequence[Facts]) -> bool:
        """Return whether the engine is asked for a stream; an agent's stream may come from a whole answer."""
        request = plan.request
        if not request.stream or endpoint.chunks is None:
            return request.stream
        # A stream lacks rows in three cases: with several choices it has the rows of one, it has no rows of some kinds,
        # and the stream of a prefill/decode pair does not tell whether its rows are right.
        paired = bool(self._router.pool.snapshot.prefill)
        lacks_rows = any(
            request.has_several_choices or paired or not ROW_FIELDS[kind].in_chat_streams for kind in plan.deliveries
        )
        if self._whole_answers or lacks_rows or WHOLE in request.session.notes:
            return False
        if any(plan.grant.fields.get(name) for name in endpoint.whole_only):
            return False
        return plan.raw is not None or not self._stream_facts.fall_short(candidates, endpoint)

    # Sampling and recording

    async def _sample(
        self, plan: TurnPlan, asked: TurnRequest, receive: Receive, running: RunningTurn, reply: ReplySender
    ) -> None:
        request = plan.request
        # No rows are requested if the answer does not tell which choice they belong to.
        unclear = request.stream and request.has_several_choices and asked.api.endpoint.rows_missing is not None
        with nullcontext() if unclear else plan.deliveries.attached_to(asked.exchange):
            sampled = (StreamedTurn if plan.streams else WholeTurn)(self._sampling, plan, asked)
            running.streamed_tokens = sampled.streamed_tokens
            try:
                await sampled.run(receive, reply, partial(self._end, plan, sampled, asked.exchange, reply))
            except WeightsChanged as error:  # a stream that has begun ends with the reason
                await reply.send_part(sampled.error_part(error) if reply.headers is not None else b"")
                raise

    async def _end(self, plan: TurnPlan, sampled: TurnSampling, exchange: Exchange, reply: ReplySender) -> None:
        """Read the sampled answer, record it, and end the reply once the session is saved."""
        try:
            answer = await sampled.answer()
            if answer.choices is not None:
                self._record(plan, answer.choices, answer.prompt_tokens, exchange, reply)
        except UpstreamError as error:
            await reply.send_part(sampled.error_part(error))
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
        """Record the turn. Raises PromptNotRead, UnusableAnswer, NotFound, WeightsChanged."""
        routing, request = exchange.routing, plan.request
        facts: Mapping[str, Any] = {
            "worker": routing.worker_url,
            "request_id": exchange.request_id,
            **({"waited_s": round(routing.waited, 6)} if routing.waited else {}),
            "cache_versions": routing.cache_versions,
            **self._facts_for_audits(plan, routing.worker_url),
        }
        try:
            self._check_prompt(plan, choices, prompt_tokens, exchange)
            check_evaluated(request.session, exchange, choices)
            recorded = self._recorder.record(plan, choices, facts, routing.cache)
        except UnusableAnswer as error:
            if plan.streams:  # the agent has the text already and may go on from it
                self._recorder.note_untraced(request.path, request.session, str(error), exchange.request_id)
            raise
        aborted = any(choice.finish == ABORT for choice in choices)
        reply.recorded, reply.repeatable = recorded, recorded and not (reply.client_left and aborted)
        routing.mark("prompt", tokens=_prompt_tokens(request, choices))
        for each in choices:
            version = each.versions[-1].version if each.versions else None
            routing.mark("answer", tokens=len(each.ids), finish=each.finish, version=version)

    def _check_prompt(
        self, plan: TurnPlan, choices: Sequence[Choice], prompt_tokens: int | None, exchange: Exchange
    ) -> None:
        """Compare the number of prompt tokens that the engine reports with the number sent.

        Raises:
            PromptNotRead: the engine read another number of tokens.
            UnusableAnswer: the engine reports other prompt ids.
        """
        request, given = plan.request, _prompt_tokens(plan.request, choices)
        queued = any(not choice.ids and choice.finish == ABORT for choice in choices)  # reports no prompt
        if prompt_tokens is None or queued or prompt_tokens == given or not given:
            return
        worker = exchange.routing.worker_url
        if not self._router.fleet.known_facts(worker or "").counts_prompts:
            return
        self._recorder.check_prompts(request, choices)
        error = PromptNotRead.of(worker, given, prompt_tokens)
        self._recorder.note_untraced(request.path, request.session, str(error), exchange.request_id)
        raise error

    def _facts_for_audits(self, plan: TurnPlan, url: str | None) -> dict[str, Any]:
        """Return the facts of the request that an audit needs, without null values."""
        fields, served = plan.grant.fields, self._router.fleet.known_facts(url or "").served_model_name
        asked = AskedSampling.of_chat(fields, (served, DEFAULT) if served else ())
        rendered = plan.request.prompt is not None or plan.request.path == paths.COMPLETIONS
        facts = {
            SAMPLING: asked.requested or None,
            RESHAPED_BY: asked.reshaped_by,
            UNRENDERED: None if rendered else ids_obstacle(fields),
        }
        own = {} if asked.adapter == "" else {ADAPTER: asked.adapter}
        return {**{name: value for name, value in facts.items() if value is not None}, **own}

    # Requests that are not turns

    async def pass_untraced(
        self, session: Session, why: str, body: bytes, scope: Scope, receive: Receive, send: Send
    ) -> None:
        """Forward a generating request like `pass_on`, and list it in the session as not recorded.

        Raises:
            BadRequest: the session has a contract.
        """
        self._keeper.refuse_untraced(session, why)
        self._recorder.note_untraced(scope["path"], session, why, Exchange.of(scope).request_id)
        await self.pass_on(body, scope, receive, send)

    async def pass_on(self, body: bytes, scope: Scope, receive: Receive, send: Send) -> None:
        """Forward a request unchanged, except for the adapter of the run."""
        if adapter := self._settings.lora_path:
            Exchange.of(scope).adapter = adapter
            body = models.force_adapter(body, adapter)
            scope = with_body(scope, body)
        await self._app(scope, replay(body, receive), send)


def _without_ids(candidates: Sequence[Facts]) -> Facts | None:
    """Return the facts of the first engine whose chat endpoint takes or returns no ids; None if all do."""
    for facts in candidates:
        if facts.engine is not None and not facts.engine.chats_by_ids:
            return facts
    return None


def _prompt_tokens(request: AgentRequest, choices: Sequence[Choice]) -> int:
    """Return the number of tokens in all prompts; every prompt must have the same number of choices."""
    if request.prompt is not None:
        return request.prompt.length
    one_per_prompt = choices[:: max(1, len(choices) // len(request.parents))]
    return sum(len(each.prompt or ()) for each in one_per_prompt)
