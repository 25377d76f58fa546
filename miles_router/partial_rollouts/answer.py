"""Resume the generations of a request that is not streamed."""

from __future__ import annotations

from typing import Any

import orjson

from miles_router.asgi.exchange import Message
from miles_router.asgi.replies import Kind, Tap
from miles_router.engines.answers import UnreadableAnswer, finish_of, finish_reasons, is_abort
from miles_router.errors import UpstreamBroken
from miles_router.generation.attempt import LAYER, Attempt
from miles_router.generation.generation import ResumableGeneration
from miles_router.partial_rollouts.request import ResumableRequest

#: While at most this many bytes of a reply have arrived, they are searched for its finish reasons.
SEARCHED_BYTES = 2 * 1024 * 1024


class ResumableAnswer(ResumableRequest):
    """A request whose reply is one JSON answer."""

    async def run(self, body: bytes) -> None:
        with self.in_flight(self.exchange, body):
            opening = await self._opened(body)
        cut = [generation for generation in self.generations if generation.is_cut]
        if not cut:
            return
        self.answers = opening.answers
        await self.resume_generations(cut)
        await opening.answer(orjson.dumps(self.answers if self.indexed else self.answers[0]))

    async def _opened(self, body: bytes) -> _OpeningAnswer:
        """Return the first reply; with `resume_lost`, repeat a request whose worker was lost during the reply."""
        lost = 0
        while True:
            opening = _OpeningAnswer(self, self.attempt(self.exchange))
            try:
                await opening.attempt.ask(opening, self.scope, self.receive, body)
                return opening
            except UpstreamBroken:
                lost += 1
                given = opening.passing or not self.services.resume_lost
                if given or lost > self.services.router.config.max_retries:
                    raise


class _OpeningAnswer(Tap):
    """The first reply. Once its finish reasons show that no generation was cut, it is relayed as it arrives.

    The expert ids of a long rollout can follow the finish reasons, so collecting the rest here is avoided.
    """

    layer: str = LAYER

    def __init__(self, request: ResumableAnswer, attempt: Attempt) -> None:
        super().__init__(request.send, request.services.router.metrics)
        self.attempt = attempt
        #: The parsed answers, if a generation was cut.
        self.answers: list[Any] = []
        self._request = request
        self._received = 0

    def passes(self, start: Message) -> bool:
        if self.kind is Kind.EVENTS and not super().passes(start):
            self.unread("content_type")
            return True
        return super().passes(start)

    async def send(self, message: Message) -> None:
        await super().send(message)
        self._received += len(message.get("body", b""))
        unclear = message.get("more_body", False) and not self.passing and not self._request.services.resume_lost
        if unclear and self._received <= SEARCHED_BYTES:
            ends = finish_reasons(self.collected, len(self._request.generations), beginning=True)
            if ends is not None and not any(map(is_abort, ends)):
                await self.let_go()

    async def whole(self, body: bytes) -> bytes | None:
        generations = self._request.generations
        ends = finish_reasons(body, len(generations))
        if ends is not None and not any(map(is_abort, ends)):
            return body
        await self.attempt.learn_engine()
        answers = self._parsed(body)
        if len(answers) != len(generations):
            self.unread("unknown_answer")
            return body
        for generation, answer in zip(generations, answers, strict=True):
            await self._read(generation, answer)
        self.answers = answers
        return body if all(generation.has_ended for generation in generations) else None

    def _parsed(self, body: bytes) -> list[Any]:
        try:
            parsed = orjson.loads(body)
        except orjson.JSONDecodeError:
            return []
        return parsed if isinstance(parsed, list) else [parsed]

    async def _read(self, generation: ResumableGeneration, answer: object) -> None:
        try:
            meta = generation.add(answer)
        except UnreadableAnswer as error:
            generation.end()
            if await self.attempt.was_cut(finish_of(answer)):
                self._request.give_up(error)
        else:
            await self._request.note_end(self.attempt, generation, meta.get("finish_reason"))
