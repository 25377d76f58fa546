"""RadixTreeMiddleware: text rollouts with exact tokens. `/generate` as always, `/retrieve_from_text` for the trainer.

A client sends and receives plain text. The engine is given ids: those it was given and those it sampled before, where
the text continues an earlier generation, and the encoding of what is new. Every generation is recorded with its ids,
logprobs, loss mask and weight versions under the text that the client saw.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import orjson
from starlette.routing import BaseRoute, Route

from middleware_hub.radix_tree.cache import RadixTreeCache
from middleware_hub.radix_tree.recording import Given, Recorder
from middleware_hub.radix_tree.replies import Growing, Unusable, stripped
from middleware_hub.radix_tree.retrieval import Retrieval
from middleware_hub.radix_tree.shapes import NotUnderstood, Shape, rewritten, understand
from middleware_hub.tokenizing.encoding import TextEncoder
from miles_router import Exchange, Router, replay
from miles_router.asgi.exchange import Message, Receive, Scope, Send, with_body
from miles_router.engines.events import EventReader, event, payload
from miles_router.errors import ConfigError
from miles_router.middlewares.contract import ASGIApp, HasRoutes
from miles_router.middlewares.experts import Handover, Source
from miles_router.trajectory import InvalidTrajectory

logger = logging.getLogger(__name__)

PATH = "/generate"
RETRIEVE = "/retrieve_from_text"
NAME = "radix_tree"
OK = 200


@dataclass(frozen=True)
class _Asked:
    """One request: what its prompts became, and where its routed experts come in, if they are captured."""

    shape: Shape
    given: Sequence[Given]
    experts: Handover | None


class RadixTreeMiddleware:
    """The text-keyed token cache.

    Args:
        max_tokens: tokens held; a prefix that trajectories share is counted once. At most 12 bytes each and text.
        keep_versions: how many weight versions before the newest are kept when room is needed; older ones go first.
    """

    def __init__(self, app: ASGIApp, *, router: Router, max_tokens: int = 16_000_000, keep_versions: int = 2) -> None:
        if max_tokens < 1:
            raise ConfigError(f"radix_tree_middleware.max_tokens: must be at least 1, not {max_tokens}")
        if keep_versions < 0:
            raise ConfigError(f"radix_tree_middleware.keep_versions: must be at least 0, not {keep_versions}")
        self.app = app
        self.cache = RadixTreeCache(max_tokens=max_tokens, keep_versions=keep_versions)
        self._recorder = Recorder(self.cache, TextEncoder(router.tokenizer))
        self._retrieval = Retrieval(self._recorder)
        router.publish(NAME, self.cache.statistics)
        self._experts = router.experts
        router.experts.sources["text"] = Source(self._retrieval.experts)

    def routes(self) -> Sequence[BaseRoute]:
        """`POST /retrieve_from_text`."""
        return [Route(RETRIEVE, self._retrieval.answer, methods=["POST"])]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Give ids for text on the way in, record on the way out; every other path is none of our business."""
        if scope["type"] != "http" or scope["path"] != PATH or scope["method"] not in ("POST", "PUT"):
            await self.app(scope, receive, send)
            return
        exchange = Exchange.of(scope)
        body = await exchange.read(receive)
        parsed = exchange.loads(body)
        try:
            if not isinstance(parsed, Mapping):
                raise NotUnderstood("no_object")
            shape = understand(parsed)
        except NotUnderstood as reason:
            self.pass_by(str(reason))
            await self.app(scope, replay(body, receive), send)
            return
        given = [await self._recorder.give(prompt) for prompt in shape.prompts]
        changed = orjson.dumps(rewritten(parsed, shape, [each.ids for each in given]))
        experts = None
        with ExitStack() as held:
            held.enter_context(self.cache.pinned(*(each.match.entry for each in given)))
            if self._experts.captured:
                experts = Handover([each.held_experts for each in given], shape.samples)
                held.enter_context(experts.left_on(exchange))
            relay = (_StreamRelay if shape.stream else _WholeRelay)(self, _Asked(shape, given, experts), send)
            await self.app(with_body(scope, changed), replay(changed, receive), relay.send)

    def pass_by(self, reason: str) -> None:
        """Count a request or an answer that is left alone."""
        self.cache.statistics.passed_through[reason] += 1

    async def record(self, asked: _Asked, place: int, answer: Mapping[str, Any]) -> None:
        """Hold one complete answer; one that cannot be held is counted, and said in the log."""
        prompt = asked.shape.prompt_of(place)
        try:
            await self._recorder.record(asked.given[prompt], answer, asked.shape.prompts[prompt], asked.experts, place)
        except (Unusable, InvalidTrajectory) as error:
            self.pass_by("unusable_answer")
            logger.warning("answer_not_recorded", extra={"fields": {"reason": str(error)}})


class _Relay:
    """Stands between the worker's reply and the client; what is no good answer passes untouched."""

    def __init__(self, middleware: RadixTreeMiddleware, asked: _Asked, send: Send) -> None:
        self._middleware = middleware
        self._asked = asked
        self._send = send
        self._start: Message | None = None
        self._untouched = False

    async def send(self, message: Message) -> None:
        """The `send` that the inner app is given."""
        if message["type"] == "http.response.start":
            headers = {
                name: value for name, value in message["headers"] if name in (b"content-type", b"content-encoding")
            }
            self._untouched = message["status"] != OK or b"content-encoding" in headers or not self._expects(headers)
            self._start = message
            if self._untouched:
                await self._send(message)
        elif self._untouched:
            await self._send(message)
        else:
            await self._body(message.get("body", b""), more=message.get("more_body", False))

    def _expects(self, headers: Mapping[bytes, bytes]) -> bool:
        raise NotImplementedError

    async def _body(self, data: bytes, *, more: bool) -> None:
        raise NotImplementedError

    async def _record(self, place: int, answer: Mapping[str, Any]) -> None:
        await self._middleware.record(self._asked, place, answer)

    def _wanted(self, place: int) -> bool:
        """Whether the client asked for logprobs itself."""
        return self._asked.shape.prompts[self._asked.shape.prompt_of(place)].logprobs_wanted


class _WholeRelay(_Relay):
    """One JSON answer: recorded before the client has it, so that it can be retrieved as soon as it is there."""

    def __init__(self, middleware: RadixTreeMiddleware, asked: _Asked, send: Send) -> None:
        super().__init__(middleware, asked, send)
        self._parts: list[bytes] = []

    def _expects(self, headers: Mapping[bytes, bytes]) -> bool:
        return headers.get(b"content-type", b"").startswith(b"application/json")

    async def _body(self, data: bytes, *, more: bool) -> None:
        self._parts.append(data)
        if more:
            return
        assert self._start is not None
        body = await self._recorded(b"".join(self._parts))
        headers = [pair for pair in self._start["headers"] if pair[0] != b"content-length"]
        headers.append((b"content-length", str(len(body)).encode("ascii")))
        await self._send({**self._start, "headers": headers})
        await self._send({"type": "http.response.body", "body": body})

    async def _recorded(self, body: bytes) -> bytes:
        """Record what is in `body`; give it as the client asked for it."""
        try:
            parsed = orjson.loads(body)
        except orjson.JSONDecodeError:
            return body
        answers = parsed if isinstance(parsed, list) else [parsed]
        if len(answers) != self._asked.shape.answers:
            self._middleware.pass_by("unusable_answer")
            return body
        for place, answer in enumerate(answers):
            await self._record(place, answer)
        if all(prompt.logprobs_wanted for prompt in self._asked.shape.prompts):
            return body
        shown = [each if self._wanted(place) else stripped(each) for place, each in enumerate(answers)]
        return orjson.dumps(shown if isinstance(parsed, list) else shown[0])


class _StreamRelay(_Relay):
    """Server-sent events: each is given on as it comes; an answer is recorded before its last event is given on."""

    def __init__(self, middleware: RadixTreeMiddleware, asked: _Asked, send: Send) -> None:
        super().__init__(middleware, asked, send)
        self._events = EventReader()
        self._growing: dict[int, Growing] = {}

    def _expects(self, headers: Mapping[bytes, bytes]) -> bool:
        return headers.get(b"content-type", b"").startswith(b"text/event-stream")

    async def _body(self, data: bytes, *, more: bool) -> None:
        if self._start is not None:
            await self._send(self._start)
            self._start = None
        shown = [await self._event(raw) for raw in self._events.feed(data)]
        if not more:
            shown.append(self._events.rest)
        if shown or not more:
            await self._send({"type": "http.response.body", "body": b"".join(shown), "more_body": more})

    async def _event(self, raw: bytes) -> bytes:
        answer = payload(raw)
        if answer is None:
            return raw
        place = answer.get("index", 0)
        if place not in range(self._asked.shape.answers):
            self._middleware.pass_by("unusable_answer")
            return raw
        try:
            whole = self._growing.setdefault(place, Growing()).take(answer)
        except Unusable:
            whole = None
        if whole is not None:
            await self._record(place, whole)
        if self._wanted(place):
            return raw
        return event(stripped(answer))


_routes: type[HasRoutes] = RadixTreeMiddleware
