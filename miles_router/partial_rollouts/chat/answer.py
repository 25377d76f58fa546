"""A turn of chat whose answer comes in one piece."""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from typing import Any

import orjson

from miles_router.asgi.exchange import Receive, Scope, Send
from miles_router.asgi.replies import Tap
from miles_router.engines.answers import ABORT, MALFORMED, UnreadableAnswer, finish_of
from miles_router.engines.generate import RID
from miles_router.engines.openai.legs import joined_answer, joined_choice, leg_of, rest_of, with_reasoning_tokens
from miles_router.engines.parsers import reasoning_marks
from miles_router.errors import RouterError, UpstreamBroken
from miles_router.middlewares.chat import ChatTurn
from miles_router.partial_rollouts.answer import ResumableAnswer
from miles_router.partial_rollouts.chat.generation import ChatGeneration
from miles_router.partial_rollouts.chat.message import MessageReader
from miles_router.partial_rollouts.generation import CannotResume, ResumableGeneration
from miles_router.partial_rollouts.leg import LAYER, Leg, ResumeContext

#: Of the model's `generation_config.json`, what would not be the same behind a cut.
ASSUMED = ("repetition_penalty",)
_ABORTED = b'"%b"' % ABORT.encode()


class ChatLegs(ResumableAnswer):
    """What whole answers and streams have in common: the rest of a choice that was cut comes in whole answers."""

    def __init__(
        self,
        context: ResumeContext,
        scope: Scope,
        receive: Receive,
        send: Send,
        turn: ChatTurn,
        fields: Mapping[str, Any],
    ) -> None:
        super().__init__(context, scope, receive, send, [])
        self.turn = turn
        # What the engine takes from the model's own settings counts like what the agent says.
        assumed = {name: context.router.generation_config.get(name) for name in ASSUMED if fields.get(name) is None}
        self.fields = {**fields, **{name: value for name, value in assumed.items() if value is not None}}
        self.reader = MessageReader(turn.parsers, fields)

    def renamed(self, body: bytes) -> bytes:
        """The request once more, by another name if it has one: a worker that was not lost but out of reach still has
        the last, and SGLang takes no name twice. An abort goes on to find it by what its client called it."""
        name, flight = self.fields.get(RID), self.exchange.flight
        if not isinstance(name, str):
            return body
        flight.rids.add(name)
        flight.inward = {name: uuid.uuid4().hex}
        return orjson.dumps({**orjson.loads(body), RID: flight.inward[name]})

    def read_leg(self, answer: Any) -> Any:
        """The rest of a choice."""
        return rest_of(answer)

    async def carried_on(self, generations: Sequence[ChatGeneration]) -> dict[int, Any]:
        """The whole of each choice, by its index, in the form of `/generate`. Raises as `carry_on`."""
        self.answers: Any = {}
        await self.carry_on(generations)
        marks = {each.index: reasoning_marks(each.facts.reasoning_parser or "") for each in generations}
        return {index: with_reasoning_tokens(answer, marks[index][1]) for index, answer in self.answers.items()}

    async def end(self, generation: ResumableGeneration, answer: dict[str, Any]) -> None:
        """It is the answer."""
        self.answers[generation.index] = answer


class ResumableChat(ChatLegs):
    """A turn whose answer comes in one piece. The agent has seen nothing of it: one that cannot be carried on is asked
    for again, as it was."""

    async def run(self, body: bytes) -> None:
        lost = 0
        while True:
            opening = _OpeningChat(self, Leg(self.context, self.exchange))
            try:
                with self.in_flight(self.exchange, body):
                    await opening.leg.ask(opening, self.scope, self.receive, body)
            except UpstreamBroken:
                lost += 1
                given = opening.passing or not self.context.resume_lost
                if given or lost > self.context.router.config.max_retries:
                    raise
                body = self.renamed(body)
                continue
            if not opening.cut:
                return
            answer = await self._joined(opening.parsed, opening.cut, opening.leg)
            if answer is not None:
                await opening.answer(orjson.dumps(answer))
                return

    async def _joined(self, first: Mapping[str, Any], places: Sequence[int], leg: Leg) -> dict[str, Any] | None:
        """The whole answer, of whose choices those in these places were cut; None where it has to be asked for
        again."""
        try:
            cut = [self._begun(first["choices"][place], leg) for place in places]
        except (CannotResume, UnreadableAnswer) as error:
            self.give_up(error)
            return None
        answers = await self.carried_on(cut)
        if any(each.given_up for each in cut):
            return None
        try:
            choices = [await self._choice(choice, answers.get(choice["index"]), leg) for choice in first["choices"]]
        except (CannotResume, UnreadableAnswer, RouterError) as error:
            self.give_up(error)
            return None
        return joined_answer(first, choices)

    def _begun(self, choice: Mapping[str, Any], leg: Leg) -> ChatGeneration:
        prompt = self.fields.get("input_ids") or choice.get("prompt_token_ids")
        if not prompt:
            raise CannotResume("the worker did not tell the ids of the prompt")
        generation = ChatGeneration(self.fields, choice["index"], prompt, leg.facts)
        generation.begin(leg_of(choice, ""))
        generation.abort = choice["meta_info"]["finish_reason"]
        return generation

    async def _choice(self, first: Mapping[str, Any], answer: Any, leg: Leg) -> Mapping[str, Any]:
        if answer is None:
            return first
        read = await self.reader.read(answer, first["message"], leg.facts, self.questions())
        return joined_choice(first, answer, read.message)


class _OpeningChat(Tap):
    """The first reply."""

    layer: str = LAYER

    def __init__(self, request: ResumableChat, leg: Leg) -> None:
        super().__init__(request.send, request.context.router.metrics)
        self.leg = leg
        #: The answer, if a pause has cut some of it, and the places of the choices that were.
        self.parsed: dict[str, Any] = {}
        self.cut: list[int] = []

    async def whole(self, body: bytes) -> bytes | None:
        if _ABORTED not in body:
            return body
        await self.leg.learn_engine()
        try:
            answer = orjson.loads(body)
            finishes = [finish_of(choice) for choice in answer["choices"]]
        except (*MALFORMED, orjson.JSONDecodeError):
            return body  # it is for the layer outside to refuse
        self.cut = [place for place, finish in enumerate(finishes) if await self.leg.was_cut(finish)]
        self.parsed = answer
        return None if self.cut else body
