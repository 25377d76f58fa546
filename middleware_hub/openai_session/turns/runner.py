"""A turn on its way through: the engine is asked, its answer is recorded, and then the agent gets it."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import orjson

from middleware_hub.openai_session.errors import AnswerCut, UnusableAnswer
from middleware_hub.openai_session.faces.face import Face, ReplyWriter, give_whole
from middleware_hub.openai_session.sessions.pending import PendingTurn
from middleware_hub.openai_session.sessions.turn import ADAPTER, RESHAPED_BY, SAMPLING, UNRENDERED
from middleware_hub.openai_session.turns.recorder import TurnRecorder
from middleware_hub.openai_session.turns.shortfalls import StreamFacts
from middleware_hub.openai_session.turns.stream import TurnStream, TurnTap
from middleware_hub.openai_session.turns.unfinished import ends_early, with_unfinished_calls
from middleware_hub.tokenizing.agreement import TokenizerAgreement
from middleware_hub.tokenizing.naming import TokenNames
from miles_router.engines import paths
from miles_router.engines.answers import INCOMPLETE, MALFORMED, UnreadableAnswer, in_words, token_count
from miles_router.engines.events import LAST_EVENT
from miles_router.engines.models import DEFAULT
from miles_router.engines.openai import raw
from miles_router.engines.openai.chat import ids_obstacle
from miles_router.engines.openai.choices import Choice, StreamShortfall
from miles_router.engines.openai.held_deltas import OWN_ENDS
from miles_router.engines.openai.legs import tools_of
from miles_router.engines.openai.unshown import unshown_calls
from miles_router.engines.parsers import Parsers
from miles_router.engines.recomputing import AskedSampling, adapter_in
from miles_router.engines.rows import ROW_FIELDS
from miles_router.errors import PromptNotRead, UpstreamBroken
from miles_router.middlewares import (
    ASGIApp,
    Collected,
    Event,
    Exchange,
    Receive,
    Router,
    Scope,
    Send,
    replay,
    with_body,
)
from miles_router.middlewares.generation import ChatTurn, flag_worker
from miles_router.middlewares.rows import Handovers

logger = logging.getLogger(__name__)

#: The fact of a turn whose agent was shown other tool calls than the model wrote: how they differ.
SHOWN_OTHERWISE = "shown_otherwise"
#: Noted of a session whose stream the engine ended with an error: its parser may fail at what the model writes. What
#: its agent asks next is generated whole, so that it can be asked for once more.
WHOLE = "turns.whole"
EVENT_STREAM = [(b"content-type", b"text/event-stream; charset=utf-8")]
JSON = [(b"content-type", b"application/json")]


class TurnReply(Collected):
    """The whole reply to a turn."""

    layer = "openai_sessions"


class TurnRunner:
    """Runs turns through the layers inside."""

    def __init__(
        self,
        app: ASGIApp,
        router: Router,
        recorder: TurnRecorder,
        parsers: Parsers,
        names: TokenNames,
        *,
        whole_answers: bool,
    ) -> None:
        self._app = app
        self._router = router
        self._recorder = recorder
        self._parsers = parsers
        self._names = names
        self._stream_facts = StreamFacts(router)
        self._whole_answers = whole_answers
        self._agreement = TokenizerAgreement.of(router)

    async def run(self, face: Face, turn: PendingTurn, scope: Scope, receive: Receive, send: Send) -> None:
        """Run one turn.

        Raises:
            UnusableAnswer: the worker's answer cannot be recorded, or not read; the agent gets none.
            TokenizerDiffers: a worker has another tokenizer than the router.
        """
        await self._agreement.require(scope)
        if self._router.traces is not None:
            self._router.traces.reads(Exchange.of(scope).flight, "session", session=turn.session.id)
        self._settle_adapter(turn, Exchange.of(scope))
        parent = turn.places[0].parent
        if turn.prompt is not None and parent is not None:
            Exchange.of(scope).flight.goes_on = parent.cache
        missing = face.endpoint.rows_missing if turn.several else None
        turn.handovers = Handovers.captured(
            self._router.rows, lambda kind: [turn.held_rows(kind)], per_prompt=sys.maxsize, missing=missing
        )
        if not turn.handovers or (missing is not None and turn.stream):  # which does not say whose they are
            await self._run(face, turn, scope, receive, send)
            return
        with turn.handovers.left_on(Exchange.of(scope)):
            await self._run(face, turn, scope, receive, send)

    def _settle_adapter(self, turn: PendingTurn, exchange: Exchange) -> None:
        """What the run or a contract puts into a turn counts more than the adapter that its agent has named."""
        served = self._router.fleet.model_names
        if exchange.adapter is not None and (adapter := adapter_in(turn.fields, (*served, DEFAULT))) is not None:
            exchange.adapter = adapter or None

    async def _run(self, face: Face, turn: PendingTurn, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            if turn.stream and not await self._buffered(face, turn):
                await self._streamed(face, turn, scope, receive, send)
            else:
                await self._whole(face, turn, scope, receive, send)
        except UnusableAnswer:
            flag_worker(self._recorder.statistics.invalid_answers, Exchange.of(scope).flight.worker_url)
            raise

    async def _buffered(self, face: Face, turn: PendingTurn) -> bool:
        """Whether a streamed turn is generated whole, and given as a stream afterwards."""
        if face.endpoint.chunks is None:
            return False
        # A stream of several choices tells the rows of one alone, those of some kinds it does not tell, and that of a
        # pair does not say whether they are right.
        paired = bool(self._router.pool.snapshot.prefill)
        untold = any(turn.several or paired or not ROW_FIELDS[kind].in_chat_streams for kind in turn.handovers)
        if self._whole_answers or untold or WHOLE in turn.session.notes:
            return True
        return await self._stream_facts.fall_short(turn, face.endpoint)

    # Streams

    async def _streamed(self, face: Face, turn: PendingTurn, scope: Scope, receive: Receive, send: Send) -> None:
        writer, exchange, chat_turn = face.writer(turn), Exchange.of(scope), ChatTurn(self._parsers, self._names.ids)
        stream = TurnStream(turn, face.endpoint, writer, self._version_of(scope), chat_turn)
        tap = TurnTap(
            send, self._router.metrics, stream, writer, lambda: self._end_of_stream(face, turn, stream, scope)
        )
        body = self._body(face, turn, stream=True)
        with chat_turn.left_on(exchange):
            await tap.call(self._app, _inner(face, scope, body), replay(body, receive))

    def _version_of(self, scope: Scope) -> Callable[[], str | None]:
        """The weight version of the worker that answers, as the router knows it at that moment."""
        flight, pool = Exchange.of(scope).flight, self._router.pool
        return lambda: pool.version_of(flight.worker_url)

    async def _end_of_stream(self, face: Face, turn: PendingTurn, stream: TurnStream, scope: Scope) -> None:
        if not stream.began:
            return  # the engine refused, and says so itself
        exchange = Exchange.of(scope)
        if len(stream.versions) == 1 and exchange.flight.worker_url is not None:
            said = await self._router.fleet.weight_version(exchange.flight.worker_url)
            stream.by_engine = stream.versions == {said}
        try:
            choices = stream.choices()
            if face.endpoint.path == paths.CHAT:
                await self._show_all_calls(turn, stream, choices, exchange)
            self._record(turn, choices, scope, stream.prompt_tokens)
        except UnusableAnswer as error:
            self._recorder.pass_by(turn.path, turn.session, str(error), exchange.request_id)
            raise
        except UnreadableAnswer as error:
            url = exchange.flight.worker_url
            if isinstance(error, StreamShortfall) and stream.is_open:
                raise UpstreamBroken(f"the worker's stream ended early: {error}") from None
            if isinstance(error, StreamShortfall) and url is not None:
                await self._stream_facts.learn(url, face.endpoint.path, str(error))
            reason = f"the worker's stream cannot be recorded: {error}"
            self._recorder.pass_by(turn.path, turn.session, reason, exchange.request_id)
            if stream.told_error and tools_of(turn.fields):
                turn.session.notes[WHOLE] = True
            if error.reason != INCOMPLETE:
                raise UnusableAnswer(reason) from None

    async def _show_all_calls(
        self, turn: PendingTurn, stream: TurnStream, choices: Sequence[Choice], exchange: Exchange
    ) -> None:
        """Show the tool calls that were sampled and not shown; where that cannot be, the turn says why."""
        url = exchange.flight.worker_url
        if url is None or not tools_of(turn.fields):
            return
        facts = await self._router.fleet.facts(url)
        for choice in choices:
            cut = choice.finish not in OWN_ENDS
            try:
                text = self._router.tokenizer.decode(self._recorder.said_ids(choice), skip_special_tokens=False)
                deltas = unshown_calls(choice.message, text, turn.fields, self._parsers, facts, cut=cut)
            except UnreadableAnswer as error:
                choice.facts[SHOWN_OTHERWISE] = str(error)
                fields = {"session_id": turn.session.id, "reason": str(error), "request_id": exchange.request_id}
                logger.warning("calls_shown_otherwise", extra={"fields": fields})
            else:
                if deltas:
                    stream.complete(choice, deltas, cut=cut)

    # Whole answers

    async def _whole(self, face: Face, turn: PendingTurn, scope: Scope, receive: Receive, send: Send) -> None:
        writer = face.writer(turn)
        body = self._body(face, turn, stream=False)
        collected = TurnReply(self._router.metrics)
        with ChatTurn(self._parsers).left_on(Exchange.of(scope)):
            await collected.call(self._app, _inner(face, scope, body), replay(body, receive))
        again = await self._raw(face, turn, scope, receive) if collected.status == raw.STATUS else None
        if collected.status != 200 and again is None:
            await collected.give_to(send, writer.refusal(collected.body, collected.status))
            return
        answer = again or _answer(collected, turn.choices)
        try:
            if face.shows_open_calls:
                answer = await self._with_unfinished(answer, turn, Exchange.of(scope))
            choices = face.endpoint.choices(answer)
        except MALFORMED as error:
            raise UnusableAnswer(f"the worker's answer cannot be recorded: {in_words(error)}") from None
        except UnreadableAnswer as error:
            raise UnusableAnswer(f"the worker's answer cannot be recorded: {error}") from None
        seen = face.endpoint.as_asked(answer, turn.fields)
        try:
            body = _as_stream(face, turn, seen, writer) if turn.stream else orjson.dumps(writer.whole(seen))
        except orjson.JSONEncodeError:  # before it is recorded: its agent would not get it
            raise UnusableAnswer("the worker's answer cannot be given: it is nested too deep") from None
        except AnswerCut:
            self._record(turn, choices, scope, token_count(answer.get("usage")))
            raise
        self._record(turn, choices, scope, token_count(answer.get("usage")))
        if turn.stream:
            await give_events(send, body)
        elif again is not None:
            await give_events(send, body, JSON)
        else:
            await collected.give_to(send, body)

    async def _raw(self, face: Face, turn: PendingTurn, scope: Scope, receive: Receive) -> dict[str, Any] | None:
        """Ask for the answer once more, as raw text, where the engine's parser may have failed at what was sampled, and
        read it here. None where that cannot be done, or fails as well."""
        url = Exchange.of(scope).flight.worker_url
        if url is None or turn.several or turn.handovers or face.endpoint.path != paths.CHAT:
            return None
        facts = await self._router.fleet.facts(url)
        if not raw.may_be_raw(turn.fields, self._parsers, facts):
            return None
        try:
            if turn.prompt is not None:
                prompt: Sequence[int] = turn.prompt.ids().tolist()
            else:
                prompt = raw.prompt_of(await self._json(face, scope, raw.prompt_request(turn.fields), receive))
            answer = await self._json(face, scope, raw.raw_request(turn.fields, prompt, facts), receive)
            read = raw.read_raw(answer, turn.fields, prompt, self._parsers, facts)
        except UnreadableAnswer:
            return None
        logger.warning("answer_parsed_locally", extra={"fields": {"session_id": turn.session.id, "worker": url}})
        return read

    async def _json(self, face: Face, scope: Scope, body: bytes, receive: Receive) -> Any:
        collected = TurnReply(self._router.metrics)
        await collected.call(self._app, _inner(face, scope, body), replay(body, receive))
        return collected.parse() if collected.is_json else None

    async def _with_unfinished(self, answer: dict[str, Any], turn: PendingTurn, exchange: Exchange) -> dict[str, Any]:
        """The answer with the tool calls that it ends within."""
        url = exchange.flight.worker_url
        if url is None or not ends_early(answer, turn.fields):
            return answer
        facts = await self._router.fleet.facts(url)
        return with_unfinished_calls(answer, turn.fields, self._parsers, facts, self._router.tokenizer.decode)

    def _body(self, face: Face, turn: PendingTurn, *, stream: bool) -> bytes:
        if turn.prompt is not None and face.endpoint.takes_ids:
            turn.written = self._recorder.written_ids.prompt(turn.session.id, turn.prompt)
        return face.endpoint.request(turn.fields, stream=stream, ids=turn.written or None)

    def _record(self, turn: PendingTurn, choices: Sequence[Choice], scope: Scope, read: int | None) -> None:
        """Record the turn. `read`: how many tokens of its prompts the engine says that it read.

        Raises:
            PromptNotRead: it was given others.
            UnusableAnswer: the answer cannot be recorded.
        """
        exchange = Exchange.of(scope)
        queued = any(not choice.ids and choice.finish == "abort" for choice in choices)  # which tells no prompt
        if read is not None and not queued:
            self._check_prompt(turn, choices, exchange, read)
        turn.cache = exchange.flight.cache
        facts: Mapping[str, Any] = {
            "worker": exchange.flight.worker_url,
            "request_id": exchange.request_id,
            **({"waited_s": round(exchange.flight.waited, 6)} if exchange.flight.waited else {}),
            "cache_versions": exchange.flight.cache_versions,
            **self._of_the_request(turn, exchange.flight.worker_url),
        }
        self._recorder.record(turn, choices, facts)
        if (traces := self._router.traces) is not None:
            traces.prompt(exchange.flight, _prompt_tokens(turn, choices))
            for each in choices:
                version = each.versions[-1].version if each.versions else None
                traces.answer(exchange.flight, len(each.ids), each.finish, version)

    def _check_prompt(self, turn: PendingTurn, choices: Sequence[Choice], exchange: Exchange, read: int) -> None:
        worker, given = exchange.flight.worker_url, _prompt_tokens(turn, choices)
        facts = self._router.fleet.known_facts(worker or "")
        if read == given or not given or not facts.counts_prompts:
            return
        self._recorder.check_prompts(turn, choices)
        error = PromptNotRead.of(worker, given, read)
        self._recorder.pass_by(turn.path, turn.session, str(error), exchange.request_id)
        raise error

    def _of_the_request(self, turn: PendingTurn, url: str | None) -> dict[str, Any]:
        """What an audit must know of it, where there is something to know."""
        fields, served = turn.fields, self._router.fleet.known_facts(url or "").served_model_name
        asked = AskedSampling.of_chat(fields, (served, DEFAULT) if served else ())
        facts = {
            SAMPLING: asked.said or None,
            RESHAPED_BY: asked.reshaped_by,
            UNRENDERED: None if turn.prompt is not None or turn.path == paths.COMPLETIONS else ids_obstacle(fields),
        }
        own = {} if asked.adapter == "" else {ADAPTER: asked.adapter}
        return {**{name: value for name, value in facts.items() if value is not None}, **own}


async def give_events(send: Send, body: bytes, headers: Sequence[tuple[bytes, bytes]] = EVENT_STREAM) -> None:
    """Give a stream whose events are there; with other headers, another answer that is."""
    await give_whole(send, body, headers)


def _prompt_tokens(turn: PendingTurn, choices: Sequence[Choice]) -> int:
    """Tokens of its prompts, each of which has as many choices."""
    if turn.prompt is not None:
        return turn.prompt.length
    one_each = choices[:: max(1, len(choices) // len(turn.places))]
    return sum(len(each.prompt or ()) for each in one_each)


def _inner(face: Face, scope: Scope, body: bytes) -> Scope:
    """The scope of the engine's request: a face that is translated asks another path than its agent."""
    inner = with_body(scope, body)
    if face.path != face.endpoint.path:
        path = face.endpoint.path
        inner = {**inner, "path": path, "raw_path": path.encode("ascii"), "query_string": b""}
    return inner


def _answer(collected: Collected, choices: int) -> dict[str, Any]:
    """The engine's answer, which has so many choices.

    Raises:
        UnusableAnswer: it is none.
    """
    answer = collected.parse() if collected.is_json else None
    if not isinstance(answer, dict):
        raise UnusableAnswer("the worker's answer is no JSON that can be read")
    if not isinstance(answer.get("choices"), list) or not answer["choices"]:
        raise UnusableAnswer("the worker's answer has no choices")
    if len(answer["choices"]) != choices:
        raise UnusableAnswer(f"the worker's answer has {len(answer['choices'])} of {choices} choices")
    return answer


def _as_stream(face: Face, turn: PendingTurn, answer: Mapping[str, Any], writer: ReplyWriter) -> bytes:
    """A whole answer as the stream that the agent asked for."""
    assert face.endpoint.chunks is not None
    events = [writer.chunk(chunk, b"") for chunk in face.endpoint.chunks(answer, turn.fields)]
    return b"".join([*events, writer.other(Event.read(LAST_EVENT))])
