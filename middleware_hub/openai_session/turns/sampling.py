"""How the engine samples the answer to one turn: as a stream, or whole."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import orjson

from middleware_hub.openai_session.errors import AnswerCut, UnusableAnswer
from middleware_hub.openai_session.faces.face import Face, ReplyWriter, start_message
from middleware_hub.openai_session.turns.carried import CarriedAnswer, TurnReply
from middleware_hub.openai_session.turns.carried_stream import CarriedStream
from middleware_hub.openai_session.turns.plan import SampledAnswer, StreamFacts, TurnPlan, TurnRequest
from middleware_hub.openai_session.turns.raw_turn import RawStream, RawTurn, written_ids
from middleware_hub.openai_session.turns.recorder import TurnRecorder
from middleware_hub.openai_session.turns.reply import EVENT_STREAM, JSON, ReplySender
from middleware_hub.openai_session.turns.stream import SHOWN_OTHERWISE, TurnStream
from middleware_hub.openai_session.turns.turn_tap import TurnTap
from middleware_hub.openai_session.turns.unfinished import ends_early, with_unfinished_calls
from middleware_hub.tokenizing.naming import TokenNames
from miles_router.engines import paths
from miles_router.engines.answers import INCOMPLETE, MALFORMED, UnreadableAnswer, in_words, token_count
from miles_router.engines.events import LAST_EVENT
from miles_router.engines.facts import Facts
from miles_router.engines.openai.chat_parts import tools_of
from miles_router.engines.openai.choices import Choice, StreamShortfall
from miles_router.engines.openai.held_deltas import OWN_ENDS
from miles_router.engines.openai.raw import PARSER_FAILED, may_be_raw, prompt_of, prompt_request
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

#: Noted of a session whose stream the engine ended with an error: its parser may fail at what the model writes. What
#: its agent asks next is generated whole, so that it can be asked for once more.
WHOLE = "turns.whole"


@dataclass(frozen=True)
class SamplingServices:
    """What all turns have in common.

    Attributes:
        app: the app inside, which asks an engine.
        parsers: make a message of an answer that came in parts.
        names: give the ids of tokens whose stream has told none.
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
        self.face: Face = asked.face
        self.exchange: Exchange = asked.exchange
        self.fields: Mapping[str, Any] = plan.grant.fields
        self.writer: ReplyWriter = asked.face.writer(plan.request)
        #: Carries the turn on where it is cut; None where nothing does.
        self.resume = services.router.resume if self.face.endpoint.path == paths.CHAT else None

    @abstractmethod
    async def run(self, receive: Receive, reply: ReplySender, end: Callable[[], Awaitable[None]]) -> None:
        """Have the engine sample, and await `end` once the answer is there. Where the engine refuses, the agent is told
        so, and nothing ends.

        Raises:
            UnusableAnswer: it answers something that is none of its API. Others as `end`.
        """

    @abstractmethod
    async def answer(self) -> SampledAnswer:
        """Read what was sampled.

        Raises:
            UnusableAnswer: it cannot be read, and the agent must not have it.
            UpstreamBroken: it is not whole.
        """

    @abstractmethod
    def end(self) -> bytes:
        """Return what the agent gets once the turn is recorded: the end of a stream, or the whole reply."""

    def streamed_tokens(self) -> int | None:
        """Return how many tokens of a stream have come; None for a whole answer."""
        return None

    def failed(self, error: RouterError) -> bytes:
        """Return what the agent is shown of an error that comes in place of the end; b"" where its status tells."""
        return b""

    def inner_scope(self, body: bytes) -> Scope:
        """Return the scope of a request to the engine: an API that is translated asks another path than its agent."""
        inner = with_body(self.asked.scope, body)
        if self.face.path != self.face.endpoint.path:
            path = self.face.endpoint.path
            inner = {**inner, "path": path, "raw_path": path.encode("ascii"), "query_string": b""}
        return inner

    def body(self, *, stream: bool) -> bytes:
        """Return the engine's request."""
        fields = self.fields if self.plan.raw is None else self.plan.raw.asked
        return self.face.endpoint.request(fields, stream=stream, ids=self.plan.written or None)


class StreamedTurn(TurnSampling):
    """A turn whose answer is streamed: every chunk goes on as it comes, up to what ends the answer."""

    def __init__(self, services: SamplingServices, plan: TurnPlan, asked: TurnRequest) -> None:
        super().__init__(services, plan, asked)
        self.stream = self._new_stream()

    def _new_stream(self) -> TurnStream:
        flight, pool = self.exchange.flight, self.services.router.pool
        return TurnStream(
            self.plan.request,
            self.fields,
            self.face.endpoint,
            self.writer,
            lambda: pool.version_of(flight.worker_url),
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
        """Run a turn that is carried on where it is cut. Under `resume_lost` the engine is asked again where its stream
        had said nothing."""
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
            carried.carries(self.stream, attempt, reply, services.names.ids)
            try:
                with carried.in_flight(self.exchange, carried.body):
                    await attempt.ask(tap, carried.scope, receive, carried.body)
            except UpstreamBroken as error:
                if tap.refused:
                    await reply.give(self.failed(error))
                if tap.refused or tap.has_ended or not carried.may_go_on():
                    raise
                if self.stream.has_come or tap.passing:
                    await carried.lose()
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
        if (cut := stream.cut) is not None:
            raise UpstreamBroken(cut)
        choices: Sequence[Choice] | None = None
        if stream.began:
            await self._learn_version()
            try:
                choices = stream.choices()
                if self.face.endpoint.path == paths.CHAT and self.plan.raw is None:
                    await self._show_all_calls(choices)
            except UnusableAnswer as error:
                self._pass_by(str(error))
                raise
            except UnreadableAnswer as error:
                choices = None
                await self._note_unreadable(error)
        return SampledAnswer(choices, stream.growing.prompt_tokens)

    def end(self) -> bytes:
        return self.stream.release()

    def streamed_tokens(self) -> int:
        return self.stream.growing.tokens

    def failed(self, error: RouterError) -> bytes:
        return self.stream.failed(error)

    async def _learn_version(self) -> None:
        url = self.exchange.flight.worker_url
        if len(self.stream.growing.versions) == 1 and url is not None:
            said = await self.services.router.fleet.weight_version(url)
            self.stream.by_engine = self.stream.growing.versions == {said}

    async def _note_unreadable(self, error: UnreadableAnswer) -> None:
        """Note a stream that cannot be recorded. Where only something is missing, the agent keeps what it has.

        Raises:
            UpstreamBroken: the stream may have lost its end.
            UnusableAnswer: the stream contradicts itself.
        """
        url, request = self.exchange.flight.worker_url, self.plan.request
        if isinstance(error, StreamShortfall) and self.stream.is_open:
            raise UpstreamBroken(f"the worker's stream ended early: {error}") from None
        if isinstance(error, StreamShortfall) and url is not None:
            await self.services.stream_facts.learn(url, self.face.endpoint.path, str(error))
        reason = f"the worker's stream cannot be recorded: {error}"
        self._pass_by(reason)
        if self.stream.told_error and tools_of(self.fields):
            request.session.notes[WHOLE] = True
        if error.reason != INCOMPLETE:
            raise UnusableAnswer(reason) from None

    def _pass_by(self, reason: str) -> None:
        request = self.plan.request
        self.services.recorder.pass_by(request.path, request.session, reason, self.exchange.request_id)

    async def _show_all_calls(self, choices: Sequence[Choice]) -> None:
        """Show the tool calls that were sampled and not shown; where that cannot be, the turn says why."""
        url, services = self.exchange.flight.worker_url, self.services
        if url is None or not tools_of(self.fields):
            return
        facts = await services.router.fleet.facts(url)
        for choice in choices:
            cut = choice.finish not in OWN_ENDS
            try:
                text = services.router.tokenizer.decode(services.recorder.said_ids(choice), skip_special_tokens=False)
                deltas = unshown_calls(choice.message, text, self.fields, services.parsers, facts, cut=cut)
            except UnreadableAnswer as error:
                choice.facts[SHOWN_OTHERWISE] = str(error)
                session, request_id = self.plan.request.session, self.exchange.request_id
                fields = {"session_id": session.id, "reason": str(error), "request_id": request_id}
                logger.warning("calls_shown_otherwise", extra={"fields": fields})
            else:
                if deltas:
                    self.stream.complete(choice, deltas, cut=cut)


class WholeTurn(TurnSampling):
    """A turn whose answer comes in one piece; its agent may get it as a stream."""

    async def run(self, receive: Receive, reply: ReplySender, end: Callable[[], Awaitable[None]]) -> None:
        body, services = self.body(stream=False), self.services
        scope, self._joined = self.inner_scope(body), None
        if self.resume is not None:
            carried = CarriedAnswer(self.resume, services.app, scope, receive, body, self.plan, services.parsers)
            self._collected, self._joined = await carried.sampled()
        else:
            self._collected = TurnReply(services.router.metrics)
            await self._collected.call(services.app, scope, replay(body, receive))
        collected = self._collected
        self._raw = self.plan.raw
        self._again = await self._read_here(receive) if collected.status == PARSER_FAILED else None
        if collected.status == 200 or self._again is not None:
            await end()
        else:
            await collected.give_to(reply.send, self.writer.write_refusal(collected.body, collected.status))

    async def answer(self) -> SampledAnswer:
        answer = self._again or _whole_answer(self._joined or _parsed(self._collected), self.plan.request.choices)
        unread: dict[int, str] = {}
        try:
            if self.plan.raw is not None:
                answer, unread = self.plan.raw.whole(answer, shows_open_calls=self.face.shows_open_calls)
            elif self.face.shows_open_calls:
                answer = await self._with_unfinished(answer)
            choices = self.face.endpoint.choices(answer)
            if (raw := self._raw) is not None:
                for choice in choices:
                    choice.prompt = raw.prompt
                    choice.facts |= {SHOWN_OTHERWISE: unread[choice.index]} if choice.index in unread else {}
        except MALFORMED as error:
            raise UnusableAnswer(f"the worker's answer cannot be recorded: {in_words(error)}") from None
        except UnreadableAnswer as error:
            raise UnusableAnswer(f"the worker's answer cannot be recorded: {error}") from None
        seen, read = self.face.endpoint.as_asked(answer, self.fields), token_count(answer.get("usage"))
        try:
            stream = self.plan.request.stream
            self._end = body = self._as_stream(seen) if stream else orjson.dumps(self.writer.write_answer(seen))
        except orjson.JSONEncodeError:  # before it is recorded: its agent would not get it
            raise UnusableAnswer("the worker's answer cannot be given: it is nested too deep") from None
        except AnswerCut as error:
            return SampledAnswer(choices, read, error=error)
        headers = self._collected.start["headers"] if self._again is None else JSON
        return SampledAnswer(choices, read, start_message(body, EVENT_STREAM if stream else headers))

    def end(self) -> bytes:
        return self._end

    def _as_stream(self, answer: Mapping[str, Any]) -> bytes:
        """Return a whole answer as the stream that the agent asked for."""
        assert self.face.endpoint.chunks is not None
        events = [self.writer.write_chunk(chunk, b"") for chunk in self.face.endpoint.chunks(answer, self.fields)]
        return b"".join([*events, self.writer.write_other(Event.read(LAST_EVENT))])

    async def _with_unfinished(self, answer: dict[str, Any]) -> dict[str, Any]:
        """Return the answer with the tool calls that it ends within."""
        url, services = self.exchange.flight.worker_url, self.services
        if url is None or not ends_early(answer, self.fields):
            return answer
        facts = await services.router.fleet.facts(url)
        return with_unfinished_calls(answer, self.fields, services.parsers, facts, services.router.tokenizer.decode)

    async def _read_here(self, receive: Receive) -> dict[str, Any] | None:
        """Ask for the answer once more, as raw text, where the engine's parser may have failed at what was sampled, and
        read it here. None where that cannot be done, or fails as well."""
        url, plan, services = self.exchange.flight.worker_url, self.plan, self.services
        if url is None or plan.request.several or plan.deliveries or self.face.endpoint.path != paths.CHAT:
            return None
        if plan.raw is not None:  # the engine parsed nothing
            return None
        facts = await services.router.fleet.facts(url)
        if not may_be_raw(self.fields, services.parsers, facts):
            return None
        try:
            turn, written = await self._raw_turn(facts, receive)
            body = self.face.endpoint.request(turn.asked, stream=False, ids=written)
            answer = await self._json(body, receive)
            (_,) = answer["choices"]
            read, unread = turn.whole(answer, shows_open_calls=self.face.shows_open_calls)
        except (UnreadableAnswer, ValueError, *MALFORMED):
            return None
        if unread:
            return None
        self._raw = turn
        fields = {"session_id": plan.request.session.id, "worker": url}
        logger.warning("answer_parsed_locally", extra={"fields": fields})
        return read

    async def _raw_turn(self, facts: Facts, receive: Receive) -> tuple[RawTurn, Sequence[bytes]]:
        """Return the turn as it is parsed here, and its prompt in JSON; that of a root is told by the engine."""
        request, decode, parsers = self.plan.request, self.services.router.tokenizer.decode, self.services.parsers
        if request.prompt is not None:
            given = request.prompt.given.tokens
            return RawTurn.behind(given, self.fields, parsers, facts, decode, root=False), self.plan.written
        ids = np.asarray(prompt_of(await self._json(prompt_request(self.fields), receive)))
        return RawTurn.behind(ids, self.fields, parsers, facts, decode, root=True), written_ids(ids)

    async def _json(self, body: bytes, receive: Receive) -> Any:
        collected = TurnReply(self.services.router.metrics)
        await collected.call(self.services.app, self.inner_scope(body), replay(body, receive))
        return _parsed(collected)


def _parsed(collected: Collected) -> Any:
    return collected.parse() if collected.is_json else None


def _whole_answer(answer: Any, choices: int) -> dict[str, Any]:
    """Return the engine's answer, which has so many choices.

    Raises:
        UnusableAnswer: it is none.
    """
    if not isinstance(answer, dict):
        raise UnusableAnswer("the worker's answer is no JSON that can be read")
    if not isinstance(answer.get("choices"), list) or not answer["choices"]:
        raise UnusableAnswer("the worker's answer has no choices")
    if len(answer["choices"]) != choices:
        raise UnusableAnswer(f"the worker's answer has {len(answer['choices'])} of {choices} choices")
    return answer
