"""A request whose answer comes in one piece."""

from __future__ import annotations

from typing import Any

import orjson

from miles_router.asgi.exchange import Message
from miles_router.asgi.replies import Collected, Kind, Tap
from miles_router.asgi.watch import Watch
from miles_router.engines.answers import UnreadableAnswer, finish_of, finish_reasons, is_abort
from miles_router.errors import UpstreamBroken
from miles_router.partial_rollouts.generation import CannotResume, ResumableGeneration
from miles_router.partial_rollouts.joining import RESUMED
from miles_router.partial_rollouts.leg import LAYER, Leg
from miles_router.partial_rollouts.request import ResumableRequest
from miles_router.partial_rollouts.seam import Seam

#: Bytes of a reply within which the end of its generations is looked for while it comes.
BEGINNING = 2 * 1024 * 1024


class ResumableAnswer(ResumableRequest):
    """A request whose answer comes in one piece."""

    async def run(self, body: bytes) -> None:
        with self.in_flight(self.exchange, body):
            opening = await self._opened(body)
        cut = [generation for generation in self.generations if generation.abort is not None]
        if not cut:
            return
        self.answers: list[Any] = opening.answers
        await self.carry_on(cut)
        await opening.answer(orjson.dumps(self.answers if self.indexed else self.answers[0]))

    async def _opened(self, body: bytes) -> _OpeningAnswer:
        """The first reply; under `resume_lost` one that was cut by the loss of its worker is asked for again."""
        lost = 0
        while True:
            opening = _OpeningAnswer(self, Leg(self.context, self.exchange))
            try:
                await opening.leg.ask(opening, self.scope, self.receive, body)
                return opening
            except UpstreamBroken:
                lost += 1
                given = opening.passing or not self.context.resume_lost
                if given or lost > self.context.router.config.max_retries:
                    raise

    async def sample(self, leg: Leg, generation: ResumableGeneration, seam: Seam, body: bytes) -> None:
        """One more piece."""
        reply = FollowingAnswer(leg)
        await leg.ask(reply, self.scope, self.receive, body)
        meta = generation.add(self.read_leg(reply.read()))
        try:
            with Watch(self.receive, 0):
                joined, stopped = await seam.mend(finished=True)
            generation.verify(joined)
        except (CannotResume, UnreadableAnswer):
            generation.drop_leg()
            raise
        if stopped:
            generation.end(joined)
        else:
            await self.note_end(leg, generation, meta.get("finish_reason"))
        if generation.done:
            self.answers[generation.index] = joined

    def read_leg(self, answer: Any) -> Any:
        """The answer to a request that carries one generation on, in the form of `/generate`.

        Raises:
            UnreadableAnswer: it is none.
        """
        return answer

    async def end(self, generation: ResumableGeneration, answer: dict[str, Any]) -> None:
        """It is part of the answer; one that was never carried on stays as the engine gave it."""
        if generation.done or RESUMED in answer["meta_info"]:
            self.answers[generation.index] = answer


class _OpeningAnswer(Tap):
    """The first reply. As soon as it is clear that no generation in it was cut, it goes on as it comes: behind its
    finish reasons may stand the expert ids of a long rollout, which nobody has to collect here."""

    layer: str = LAYER

    def __init__(self, request: ResumableAnswer, leg: Leg) -> None:
        super().__init__(request.send, request.context.router.metrics)
        self.leg = leg
        #: As they were parsed, where one was cut.
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
        unclear = message.get("more_body", False) and not self.passing and not self._request.context.resume_lost
        if unclear and self._received <= BEGINNING:
            ends = finish_reasons(self.collected, len(self._request.generations), beginning=True)
            if ends is not None and not any(map(is_abort, ends)):
                await self.let_go()

    async def whole(self, body: bytes) -> bytes | None:
        generations = self._request.generations
        ends = finish_reasons(body, len(generations))
        if ends is not None and not any(map(is_abort, ends)):
            return body
        await self.leg.learn_engine()
        answers = self._parsed(body)
        if len(answers) != len(generations):
            self.unread("unknown_answer")
            return body
        for generation, answer in zip(generations, answers, strict=True):
            await self._read(generation, answer)
        self.answers = answers
        return body if all(generation.done for generation in generations) else None

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
            generation.done = True
            if await self.leg.was_cut(finish_of(answer)):
                self._request.give_up(error)
        else:
            await self._request.note_end(self.leg, generation, meta.get("finish_reason"))


class FollowingAnswer(Collected):
    """A reply that carries one generation on."""

    def __init__(self, leg: Leg) -> None:
        super().__init__()
        self._leg = leg

    async def whole(self, body: bytes) -> None:
        await super().whole(body)
        await self._leg.learn_engine()

    def read(self) -> Any:
        """Its JSON.

        Raises:
            CannotResume: it is a refusal, or nothing that can be read.
        """
        if not self.is_json:
            raise CannotResume(f"the worker answered {self.status}, and no JSON that can be read")
        return self.parse()
