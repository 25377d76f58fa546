"""The sampling of one turn at the engine: as a stream, or as a whole answer."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import orjson

from middleware_hub.openai_session.agent_apis.agent_api import AgentApi, ReplyWriter, start_message
from middleware_hub.openai_session.errors import AnswerCut, UnusableAnswer
from middleware_hub.openai_session.turns.carried import CarriedAnswer, TurnReply
from middleware_hub.openai_session.turns.carried_stream import CarriedStream
from middleware_hub.openai_session.turns.plan import SampledAnswer, StreamFacts, TurnPlan, TurnRequest
from middleware_hub.openai_session.turns.raw_turn import RawStream, RawTurn, written_ids
from middleware_hub.openai_session.turns.recorder import TurnRecorder
from middleware_hub.openai_session.turns.reply import EVENT_STREAM, JSON, ReplySender, TurnTap
from middleware_hub.openai_session.turns.stream import SHOWN_OTHERWISE, TurnStream
from middleware_hub.openai_session.turns.unfinished import ends_early, with_unfinished_calls
from middleware_hub.tokenizing.naming import TokenNames
from miles_router.engines import paths
from miles_router.engines.answers import (
    ASKS_FOR_MASK,
    INCOMPLETE,
    MALFORMED,
    UnreadableAnswer,
    in_words,
    require_sampling_mask,
    token_count,
)
from miles_router.engines.events import LAST_EVENT
from miles_router.engines.facts import Facts
from miles_router.engines.openai.chat import tools_of
from miles_router.engines.openai.choices import Choice, StreamShortfall
from miles_router.engines.openai.held_deltas import OWN_ENDS
from miles_router.engines.openai.raw import PARSER_FAILED, can_parse_locally, prompt_of, prompt_request
from miles_router.engines.openai.unshown import unshown_calls
from miles_router.engines.parsers import Parsers
from miles_router.errors import RouterError, UpstreamBroken
from miles_router.middlewares import (
    ASGIApp,
    Collected,
    Event,
    Exchange,
    Receive,
    Router,
    Scope,
    replay,
    with_body,
)
from miles_router.middlewares.generation import ResumeServices

logger = logging.getLogger(__name__)

#: A note of a session whose stream the engine ended with an error, perhaps because its parser failed at the model's
#: text. Later turns are sampled as whole answers, which can be requested again as raw text.
WHOLE = "turns.whole"


@dataclass(frozen=True)
class SamplingServices:
    """The services that all turns share.

    Attributes:
        app: the app inside the session middleware, which asks an engine.
        parsers: the router's own parsers of reasoning and tool calls.
        names: finds the ids of tokens by their bytes, for streams without ids.
    """

    app: ASGIApp
    router: Router
    recorder: TurnRecorder
    parsers: Parsers
    names: TokenNames
    stream_facts: StreamFacts


class TurnSampling(ABC):
    """The sampling of one turn."""

    def __init__(self, services: SamplingServices, plan: TurnPlan, asked: TurnRequest) -> None:
        self.services = services
        self.plan = plan
        self.asked = asked
        self.api: AgentApi = asked.api
        self.exchange: Exchange = asked.exchange
        self.fields: Mapping[str, Any] = plan.grant.fields
        self.writer: ReplyWriter = asked.api.writer(plan.request)
        #: The services that resume a cut turn; None if the turn cannot be resumed.
        self.resume = services.router.resume if self.api.endpoint.path == paths.CHAT else None

    @abstractmethod
    async def run(self, receive: Receive, reply: ReplySender, end: Callable[[], Awaitable[None]]) -> None:
        """Ask the engine, and await `end` when the answer is complete. An error of the engine is sent to the agent
        without awaiting `end`.

        Raises:
            UnusableAnswer: the engine's answer does not follow its API. Other errors come from `end`.
        """

    @abstractmethod
    async def answer(self) -> SampledAnswer:
        """Return the sampled answer.

        Raises:
            UnusableAnswer: the answer cannot be read, and the agent must not get it.
            UpstreamBroken: the answer is incomplete.
        """

    @abstractmethod
    def end(self) -> bytes:
        """Return the bytes that the agent gets once the turn is recorded: the end of a stream, or the whole reply."""

    def streamed_tokens(self) -> int | None:
        """Return the number of tokens that have streamed; None for a whole answer."""
        return None

    def error_part(self, error: RouterError) -> bytes:
        """Return the bytes of an error in place of the stream's end; b"" if an HTTP status reports the error."""
        return b""

    def inner_scope(self, body: bytes) -> Scope:
        """Return the scope of a request to the engine, whose path may differ from the agent's."""
        inner = with_body(self.asked.scope, body)
        if self.api.path != self.api.endpoint.path:
            path = self.api.endpoint.path
            inner = {**inner, "path": path, "raw_path": path.encode("ascii"), "query_string": b""}
        return inner

    def body(self, *, stream: bool) -> bytes:
        """Return the body of the request to the engine."""
        fields = self.fields if self.plan.raw is None else self.plan.raw.engine_fields
        return self.api.endpoint.request(fields, stream=stream, ids=self.plan.written or None)


class StreamedTurn(TurnSampling):
    """A turn that the engine streams: each chunk is relayed at once, except the end of the answer."""

    def __init__(self, services: SamplingServices, plan: TurnPlan, asked: TurnRequest) -> None:
        super().__init__(services, plan, asked)
        self.stream = self._new_stream()

    def _new_stream(self) -> TurnStream:
        routing, pool = self.exchange.routing, self.services.router.pool
        return TurnStream(
            self.plan.request,
            self.fields,
            self.api.endpoint,
            self.writer,
            lambda: pool.version_of(routing.worker_url),
            None if self.plan.raw is None else RawStream(self.plan.raw),
            self.resume,
        )

    async def run(self, receive: Receive, reply: ReplySender, end: Callable[[], Awaitable[None]]) -> None:
        body = self.body(stream=True)
        if self.resume is not None:
            await self._run_in_attempts(self.resume, body, receive, reply, end)
        else:
            tap = TurnTap(reply.send, self.services.router.metrics, self.stream, self.writer, end)
            await tap.call(self.services.app, self.inner_scope(body), replay(body, receive))
        await reply.close()

    async def _run_in_attempts(
        self,
        resume: ResumeServices,
        body: bytes,
        receive: Receive,
        reply: ReplySender,
        end: Callable[[], Awaitable[None]],
    ) -> None:
        """Run a turn that can be resumed.

        Under `resume_lost`, a turn whose worker is lost before the stream has content starts again.
        """
        services = self.services
        carried = CarriedStream(
            resume, services.app, self.inner_scope(body), receive, body, self.plan, services.parsers
        )
        while True:
            attempt = carried.attempt(self.exchange)
            tap = TurnTap(
                reply.send_once_begun,
                services.router.metrics,
                self.stream,
                self.writer,
                end,
                attempt,
                begun=reply.headers is not None,
            )
            carried.start_from(self.stream, attempt, reply, services.names.ids)
            try:
                with carried.in_flight(self.exchange, carried.body):
                    await attempt.ask(tap, carried.scope, receive, carried.body)
            except UpstreamBroken as error:
                if tap.refused:
                    await reply.send_part(self.error_part(error))
                if tap.refused or tap.has_ended or not carried.may_retry():
                    raise
                if self.stream.has_content or tap.passing:
                    await carried.recover_lost()
                else:
                    self.stream = self._new_stream()
                    carried.rename()
                    continue
            if self.stream.cut_choices:
                await carried.run()
                await end()
            return

    async def answer(self) -> SampledAnswer:
        stream = self.stream
        if (cut := stream.cut_reason) is not None:
            raise UpstreamBroken(cut)
        choices: Sequence[Choice] | None = None
        if stream.began:
            await self._learn_version()
            try:
                choices = stream.choices()
                if self.api.endpoint.path == paths.CHAT and self.plan.raw is None:
                    await self._show_all_calls(choices)
            except UnusableAnswer as error:
                self._note_untraced(str(error))
                raise
            except UnreadableAnswer as error:
                choices = None
                await self._note_unreadable(error)
        return SampledAnswer(choices, stream.growing.prompt_tokens)

    def end(self) -> bytes:
        return self.stream.release()

    def streamed_tokens(self) -> int:
        return self.stream.growing.tokens

    def error_part(self, error: RouterError) -> bytes:
        return self.stream.error_part(error)

    async def _learn_version(self) -> None:
        url = self.exchange.routing.worker_url
        if len(self.stream.growing.versions) == 1 and url is not None:
            version = await self.services.router.fleet.weight_version(url)
            self.stream.version_confirmed = self.stream.growing.versions == {version}

    async def _note_unreadable(self, error: UnreadableAnswer) -> None:
        """List a stream that cannot be recorded. If it only lacks data, the agent keeps its answer.

        Raises:
            UpstreamBroken: the end of the stream may be lost.
            UnusableAnswer: the stream contradicts itself.
        """
        url, request = self.exchange.routing.worker_url, self.plan.request
        if isinstance(error, StreamShortfall) and self.stream.is_open:
            raise UpstreamBroken(f"the worker's stream ended early: {error}") from None
        if isinstance(error, StreamShortfall) and url is not None:
            await self.services.stream_facts.learn(url, self.api.endpoint.path, str(error))
        reason = f"the worker's stream cannot be recorded: {error}"
        self._note_untraced(reason)
        if self.stream.ended_with_error and tools_of(self.fields):
            request.session.notes[WHOLE] = True
        if error.reason != INCOMPLETE:
            raise UnusableAnswer(reason) from None

    def _note_untraced(self, reason: str) -> None:
        request = self.plan.request
        self.services.recorder.note_untraced(request.path, request.session, reason, self.exchange.request_id)

    async def _show_all_calls(self, choices: Sequence[Choice]) -> None:
        """Show the sampled tool calls that the stream left out; if that fails, put the reason into the turn's facts."""
        url, services = self.exchange.routing.worker_url, self.services
        if url is None or not tools_of(self.fields):
            return
        facts = await services.router.fleet.facts(url)
        for choice in choices:
            cut = choice.finish not in OWN_ENDS
            try:
                text = services.recorder.text_of(choice)
                deltas = unshown_calls(choice.message, text, self.fields, services.parsers, facts, cut=cut)
            except UnreadableAnswer as error:
                choice.facts[SHOWN_OTHERWISE] = str(error)
                session, request_id = self.plan.request.session, self.exchange.request_id
                fields = {"session_id": session.id, "reason": str(error), "request_id": request_id}
                logger.warning("streamed_tool_calls_differ", extra={"fields": fields})
            else:
                if deltas:
                    self.stream.add_calls(choice, deltas, cut=cut)


class WholeTurn(TurnSampling):
    """A turn that the engine answers as a whole; the agent may get the answer as a stream."""

    async def run(self, receive: Receive, reply: ReplySender, end: Callable[[], Awaitable[None]]) -> None:
        body, services = self.body(stream=False), self.services
        scope, self._joined = self.inner_scope(body), None
        if self.resume is not None:
            carried = CarriedAnswer(self.resume, services.app, scope, receive, body, self.plan, services.parsers)
            self._collected, self._joined = await carried.sample_all()
        else:
            self._collected = TurnReply(services.router.metrics)
            await self._collected.call(services.app, scope, replay(body, receive))
        collected = self._collected
        self._raw = self.plan.raw
        self._reparsed = await self._retry_as_raw(receive) if collected.status == PARSER_FAILED else None
        if collected.status == 200 or self._reparsed is not None:
            await end()
        else:
            await collected.give_to(reply.send, self.writer.write_refusal(collected.body, collected.status))

    async def answer(self) -> SampledAnswer:
        answer = self._reparsed or _whole_answer(self._joined or _parsed(self._collected), self.plan.request.choices)
        unread: dict[int, str] = {}
        try:
            if self.plan.raw is not None:
                answer, unread = self.plan.raw.parse_answer(answer, shows_open_calls=self.api.shows_open_calls)
            elif self.api.shows_open_calls:
                answer = await self._with_unfinished(answer)
            choices = self.api.endpoint.choices(answer)
            for choice in choices if self.fields.get(ASKS_FOR_MASK) else ():
                require_sampling_mask(choice.sampling_mask, choice.ids)
            if (raw := self._raw) is not None:
                for choice in choices:
                    choice.prompt = raw.prompt
                    choice.facts |= {SHOWN_OTHERWISE: unread[choice.index]} if choice.index in unread else {}
        except MALFORMED as error:
            raise UnusableAnswer(f"the worker's answer cannot be recorded: {in_words(error)}") from None
        except UnreadableAnswer as error:
            raise UnusableAnswer(f"the worker's answer cannot be recorded: {error}") from None
        seen, read = self.api.endpoint.for_client(answer, self.fields), token_count(answer.get("usage"))
        try:
            stream = self.plan.request.stream
            self._end = body = self._as_stream(seen) if stream else orjson.dumps(self.writer.write_answer(seen))
        except orjson.JSONEncodeError:  # raise before recording, because the agent cannot get the answer
            raise UnusableAnswer("the worker's answer cannot be sent to the agent: it is nested too deep") from None
        except AnswerCut as error:
            return SampledAnswer(choices, read, error=error)
        headers = self._collected.start["headers"] if self._reparsed is None else JSON
        return SampledAnswer(choices, read, start_message(body, EVENT_STREAM if stream else headers))

    def end(self) -> bytes:
        return self._end

    def _as_stream(self, answer: Mapping[str, Any]) -> bytes:
        """Return a whole answer as the bytes of a stream."""
        assert self.api.endpoint.chunks is not None
        events = [self.writer.write_chunk(chunk, b"") for chunk in self.api.endpoint.chunks(answer, self.fields)]
        return b"".join([*events, self.writer.write_other(Event.read(LAST_EVENT))])

    async def _with_unfinished(self, answer: dict[str, Any]) -> dict[str, Any]:
        """Return the answer with the incomplete tool calls at its end."""
        url, services = self.exchange.routing.worker_url, self.services
        if url is None or not ends_early(answer, self.fields):
            return answer
        facts = await services.router.fleet.facts(url)
        return with_unfinished_calls(answer, self.fields, services.parsers, facts, services.router.tokenizer.decode)

    async def _retry_as_raw(self, receive: Receive) -> dict[str, Any] | None:
        """Ask for the answer again as raw text and parse it here, because the engine's parser may have failed at it.

        Return None if that is not possible or fails too.
        """
        url, plan, services = self.exchange.routing.worker_url, self.plan, self.services
        if url is None or plan.request.has_several_choices or plan.deliveries or self.api.endpoint.path != paths.CHAT:
            return None
        if plan.raw is not None:  # the engine parsed nothing
            return None
        facts = await services.router.fleet.facts(url)
        if not can_parse_locally(self.fields, services.parsers, facts):
            return None
        try:
            turn, written = await self._raw_turn(facts, receive)
            body = self.api.endpoint.request(turn.engine_fields, stream=False, ids=written)
            answer = await self._json(body, receive)
            (_,) = answer["choices"]
            read, unread = turn.parse_answer(answer, shows_open_calls=self.api.shows_open_calls)
        except (UnreadableAnswer, ValueError, *MALFORMED):
            return None
        if unread:
            return None
        self._raw = turn
        fields = {"session_id": plan.request.session.id, "worker": url}
        logger.warning("answer_parsed_locally", extra={"fields": fields})
        return read

    async def _raw_turn(self, facts: Facts, receive: Receive) -> tuple[RawTurn, Sequence[bytes]]:
        """Return the turn for the router's parsers, and its prompt ids as JSON; the engine renders a root's prompt."""
        request, decode, parsers = self.plan.request, self.services.router.tokenizer.decode, self.services.parsers
        if request.prompt is not None:
            given = request.prompt.given.tokens
            return RawTurn.from_prompt(given, self.fields, parsers, facts, decode, root=False), self.plan.written
        ids = np.asarray(prompt_of(await self._json(prompt_request(self.fields), receive)))
        return RawTurn.from_prompt(ids, self.fields, parsers, facts, decode, root=True), written_ids(ids)

    async def _json(self, body: bytes, receive: Receive) -> Any:
        collected = TurnReply(self.services.router.metrics)
        await collected.call(self.services.app, self.inner_scope(body), replay(body, receive))
        return _parsed(collected)


def _parsed(collected: Collected) -> Any:
    return collected.parse() if collected.is_json else None


def _whole_answer(answer: Any, choices: int) -> dict[str, Any]:
    """Return the engine's answer, after checking its form.

    Raises:
        UnusableAnswer: the answer is not an object, or does not have `choices` choices.
    """
    if not isinstance(answer, dict):
        raise UnusableAnswer("the worker's answer is not a JSON object")
    if not isinstance(answer.get("choices"), list) or not answer["choices"]:
        raise UnusableAnswer("the worker's answer has no choices")
    if len(answer["choices"]) != choices:
        raise UnusableAnswer(f"the worker's answer has {len(answer['choices'])} of {choices} choices")
    return answer
