"""A turn on its way through: asked for, relayed, recorded, given to the agent."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from typing import Any

import orjson

from middleware_hub.openai_session.errors import UnusableAnswer
from middleware_hub.openai_session.faces import buffered, completions, whole
from middleware_hub.openai_session.faces.answers import Generated
from middleware_hub.openai_session.faces.completions import StreamedCompletion
from middleware_hub.openai_session.faces.streams import StreamedAnswer
from middleware_hub.openai_session.turns.asking import CHAT, Asked
from middleware_hub.openai_session.turns.engines import Engines
from middleware_hub.openai_session.turns.recording import Recorder
from miles_router import Exchange, Router, replay
from miles_router.asgi.exchange import Message, Receive, Scope, Send, with_body
from miles_router.engines.events import EventReader
from miles_router.middlewares.contract import ASGIApp
from miles_router.middlewares.rows import Handover
from miles_router.trajectory.rows import ROUTED_EXPERTS

OK = 200
FIRST_ALONE = "of several completions SGLang tells the routed experts of one alone"


class Turns:
    """Runs turns through the layers inside."""

    def __init__(self, app: ASGIApp, router: Router, recorder: Recorder, engines: Engines) -> None:
        self._app = app
        self._router = router
        self._recorder = recorder
        self._engines = engines

    async def run(self, asked: Asked, scope: Scope, receive: Receive, send: Send) -> None:
        """One turn.

        Raises:
            UnusableAnswer: the worker's whole answer cannot be recorded; the agent gets none.
        """
        # The engine's answer is read here, whatever encodings the agent could read.
        scope = {**scope, "headers": [pair for pair in scope["headers"] if pair[0] != b"accept-encoding"]}
        if not self._router.rows[ROUTED_EXPERTS].captures:
            await self._run(asked, scope, receive, send)
            return
        several = asked.several or bool(asked.batch)
        missing = FIRST_ALONE if several and asked.path != CHAT else None
        asked.experts = Handover(ROUTED_EXPERTS, [asked.held_experts], per_prompt=sys.maxsize, missing=missing)
        if missing is not None and asked.stream:  # it does not say whose they are
            await self._run(asked, scope, receive, send)
            return
        with asked.experts.left_on(Exchange.of(scope)):
            await self._run(asked, scope, receive, send)

    async def _run(self, asked: Asked, scope: Scope, receive: Receive, send: Send) -> None:
        # A stream of several choices tells the routed experts of one alone.
        partly_told = asked.several and asked.experts is not None
        if not asked.stream:
            await self._whole(asked, scope, receive, send)
        elif asked.path != CHAT:
            body = completions.body(asked)
            stream = StreamedCompletion(asked, self._version_of(scope))
            await self._streamed(asked, stream, body, scope, receive, send)
        elif not partly_told and await self._engines.stream_exactly():
            answer = StreamedAnswer(asked, self._version_of(scope))
            await self._streamed(asked, answer, asked.body(stream=True), scope, receive, send)
        else:
            await self._whole(asked, scope, receive, send)

    def _version_of(self, scope: Scope) -> Callable[[], str | None]:
        """The weight version of the worker that answers, as the router knows it at that moment."""
        exchange, pool = Exchange.of(scope), self._router.pool

        def version() -> str | None:
            return next((each.weight_version for each in pool if each.url == exchange.flight.worker_url), None)

        return version

    async def _whole(self, asked: Asked, scope: Scope, receive: Receive, send: Send) -> None:
        chat = asked.path == CHAT
        body = asked.body(stream=False) if chat else completions.body(asked)
        collected = await self._collected(body, scope, receive)
        assert collected.start is not None
        if not collected.is_answer:
            if collected.start["status"] == OK:
                raise UnusableAnswer("the worker's answer is no JSON")
            await _give(send, collected.start["status"], collected.start["headers"], collected.body)
            return
        answer = whole.read_answer(collected.body)
        self._record(asked, whole.generated(answer) if chat else completions.generated(answer), scope)
        shown = whole.shown(answer, asked) if chat else completions.shown(answer, asked)
        if asked.stream:
            data = buffered.chat_stream(shown, include_usage=asked.include_usage)
            await _give(send, OK, buffered.HEADERS, data)
        else:
            await _give(send, OK, collected.start["headers"], orjson.dumps(shown))

    async def _collected(self, body: bytes, scope: Scope, receive: Receive) -> whole.Collector:
        """A whole reply. Under `--partial-rollout resume` one that a pause cut off is asked for again: what parsers
        made of half an answer cannot be joined to the other half."""
        gate, again = self._router.gate, self._router.config.partial_rollout == "resume"
        while True:
            pauses = gate.pauses
            collected = whole.Collector()
            await self._app(with_body(scope, body), replay(body, receive), collected.send)
            cut = again and gate.pauses != pauses and not Exchange.of(scope).flight.aborted
            if not cut or not collected.is_answer or not whole.was_aborted(collected.body):
                return collected

    async def _streamed(
        self,
        asked: Asked,
        answer: StreamedAnswer | StreamedCompletion,
        body: bytes,
        scope: Scope,
        receive: Receive,
        send: Send,
    ) -> None:
        relay = _Relay(answer, send, lambda: self._end_of_stream(asked, answer, scope))
        await self._app(with_body(scope, body), replay(body, receive), relay.send)

    def _end_of_stream(self, asked: Asked, answer: StreamedAnswer | StreamedCompletion, scope: Scope) -> None:
        if not answer.began:
            return  # the engine refused, and says so itself
        try:
            self._record(asked, answer.generated(), scope)
        except UnusableAnswer as error:
            if isinstance(answer, StreamedAnswer) and answer.shortfall is not None:
                self._engines.streams_are_inexact(answer.shortfall)
            self._recorder.pass_by(asked.path, asked.session, str(error), Exchange.of(scope).request_id)

    def _record(self, asked: Asked, choices: list[Generated], scope: Scope) -> None:
        exchange = Exchange.of(scope)
        facts: Mapping[str, Any] = {"worker": exchange.flight.worker_url, "request_id": exchange.request_id}
        self._recorder.record(asked, choices, facts)


class _Relay:
    """Gives a stream on event by event; records the turn before its end is given on."""

    def __init__(self, answer: StreamedAnswer | StreamedCompletion, send: Send, end: Callable[[], None]) -> None:
        self._answer = answer
        self._send = send
        self._end = end
        self._events = EventReader()
        self._is_stream = False
        self._ended = False

    async def send(self, message: Message) -> None:
        """The `send` for the inner app."""
        if message["type"] == "http.response.start":
            kind = dict(message["headers"]).get(b"content-type", b"")
            self._is_stream = message["status"] == OK
            if self._is_stream and not kind.startswith(b"text/event-stream"):
                raise UnusableAnswer("the worker's answer is no stream of events")
            await self._send(message)
        elif not self._is_stream:
            await self._send(message)
        else:
            await self._body(message.get("body", b""), more=message.get("more_body", False))

    async def _body(self, data: bytes, *, more: bool) -> None:
        shown = [self._answer.feed(event) for event in self._events.feed(data)]
        if (self._answer.done or not more) and not self._ended:
            self._ended = True
            self._end()
            shown.append(self._answer.release())
        if not more:
            shown.append(self._events.rest)
        whole = b"".join(shown)
        if whole or not more:
            await self._send({"type": "http.response.body", "body": whole, "more_body": more})


async def _give(send: Send, status: int, headers: Any, body: bytes) -> None:
    kept = [pair for pair in headers if pair[0] not in (b"content-length", b"transfer-encoding")]
    kept.append((b"content-length", str(len(body)).encode("ascii")))
    await send({"type": "http.response.start", "status": status, "headers": kept})
    await send({"type": "http.response.body", "body": body})
