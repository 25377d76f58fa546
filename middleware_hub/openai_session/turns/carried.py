"""Resumption of turns that a pause or a lost worker cut: each choice continues after exactly its sampled tokens."""

from __future__ import annotations

import uuid
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import cached_property
from typing import Any

import orjson

from middleware_hub.openai_session.turns.carried_rows import CarriedRows
from middleware_hub.openai_session.turns.plan import TurnPlan
from miles_router.engines.answers import ABORT, MALFORMED, UnreadableAnswer, finish_of
from miles_router.engines.generate import RID
from miles_router.engines.openai.chat_parts import (
    choice_as_generate,
    joined_answer,
    joined_choice,
    rest_as_generate,
    with_reasoning_tokens,
)
from miles_router.engines.parsers import Parsers, reasoning_marks
from miles_router.errors import RouterError, UpstreamBroken
from miles_router.middlewares import ASGIApp, Collected, Exchange, Receive, Scope
from miles_router.middlewares.generation import (
    Attempt,
    CannotResume,
    ChatGeneration,
    ContinuedRequest,
    MessageReader,
    ResumableGeneration,
    ResumeServices,
    Seam,
    UnreadCounter,
)

#: Returns the ids of tokens, given the bytes of each; None if the ids are ambiguous.
NameTokens = Callable[[Sequence[bytes]], Awaitable["list[int] | None"]]
#: Parameters of the model's `generation_config.json` that have another effect behind a cut.
ASSUMED = ("repetition_penalty",)
_ABORTED = b'"%b"' % ABORT.encode()


class TurnReply(Collected):
    """The engine's complete reply to a turn.

    Args:
        attempt: the attempt that the engine replies to; None if the turn cannot be resumed.
    """

    layer = "openai_sessions"

    def __init__(self, metrics: UnreadCounter, attempt: Attempt | None = None) -> None:
        super().__init__(metrics)
        #: The positions in `choices` that a pause has cut.
        self.cut: list[int] = []
        self._attempt = attempt

    async def whole(self, body: bytes) -> None:
        """Store the body and find the cut choices, while the open reply still tells which engine process answered."""
        await super().whole(body)
        if self._attempt is None or not self.is_json or _ABORTED not in body:
            return
        await self._attempt.learn_engine()
        try:
            choices = orjson.loads(body)["choices"]
            finishes = [finish_of(choice) for choice in choices]
            sound = all(type(each["index"]) is int and isinstance(each["message"], dict) for each in choices)
        except (*MALFORMED, orjson.JSONDecodeError):
            return  # not an answer: its reader raises
        if not sound:
            return
        self.cut = [place for place, finish in enumerate(finishes) if await self._attempt.was_cut(finish)]


class CarriedTurn(ContinuedRequest):
    """The choices of one turn, sampled in several attempts. By default each resumed attempt returns a whole answer.

    Args:
        app: the app inside the session middleware.
        scope: the scope of the request to the engine.
        body: the body of the request to the engine.
    """

    def __init__(
        self,
        services: ResumeServices,
        app: ASGIApp,
        scope: Scope,
        receive: Receive,
        body: bytes,
        plan: TurnPlan,
        parsers: Parsers,
    ) -> None:
        super().__init__(services, app, scope, receive)
        self.body = body
        self.lost = 0
        self._plan = plan
        self._parsers = parsers
        self._prompts: dict[int, Sequence[int]] = {}  # by choice; the generation of a queued choice knows no prompt
        self._rows: dict[int, CarriedRows] = {}
        self._ended_at_cut: set[int] = set()

    @cached_property
    def fields(self) -> Mapping[str, Any]:
        """The request's fields, with the parameters that the engine takes from the model's own settings."""
        fields, model = orjson.loads(self.body), self.services.router.generation_config
        assumed = {name: model.get(name) for name in ASSUMED if fields.get(name) is None}
        return {**fields, **{name: value for name, value in assumed.items() if value is not None}}

    @cached_property
    def reader(self) -> MessageReader:
        """The parser of whole texts."""
        return MessageReader(self._parsers, self.fields)

    def may_retry(self) -> bool:
        """Count a lost worker, and return whether the turn may try another one."""
        self.lost += 1
        return self.services.resume_lost and self.lost <= self.services.router.config.max_retries

    def rename(self) -> None:
        """Give the request a new rid before it is sent again. An abort still finds it by the client's rid.

        An unreachable worker may still run the request under the old rid, and SGLang refuses a rid that is in use.
        """
        name, routing = self.fields.get(RID), self.exchange.routing
        if isinstance(name, str):
            routing.rids.add(name)
            routing.inward = {name: uuid.uuid4().hex}
            self.body = orjson.dumps({**orjson.loads(self.body), RID: routing.inward[name]})

    def prompt(self, returned: object) -> Sequence[int]:
        """Return the prompt ids of a choice: the sent ids, or else `returned`, the ids in the worker's answer.

        Raises:
            CannotResume: the worker returned no prompt ids.
        """
        if sent := self.fields.get("input_ids"):
            return sent  # type: ignore[no-any-return]
        if not isinstance(returned, list) or not returned or not all(type(each) is int for each in returned):
            raise CannotResume("the worker did not return the ids of the prompt")
        return returned

    def begin(
        self, index: int, prompt: Sequence[int], attempt: Attempt, part: Mapping[str, Any], finish: Any
    ) -> ChatGeneration:
        """Return the generation that resumes a choice.

        Args:
            prompt: the prompt ids of the choice.
            part: the sampled part of the choice, in the form of `/generate`.
            finish: the finish reason of the cut; None if the worker was lost.

        Raises:
            CannotResume, UnreadableAnswer: the choice cannot be resumed.
        """
        generation = ChatGeneration(self.fields, index, prompt, attempt.facts)
        generation.begin(part)
        generation.cut(attempt.facts, finish)
        self._prompts[index] = prompt
        tokens, rid = len(prompt) + len(part["output_ids"]), part["meta_info"].get("id")
        self._rows[index] = CarriedRows(self._plan.deliveries, index, tokens, rid)
        return generation

    async def resume(self, generations: Sequence[ChatGeneration]) -> dict[int, Any]:
        """Resume choices until they end. Raises like `resume_generations`.

        Returns:
            The complete answers by choice index, in the form of `/generate`.
        """
        await self.resume_generations(generations)
        for each in generations:
            answer, rows = self.answers.get(each.index, each.answer), self._rows[each.index]
            tokens = [*self._prompts[each.index], *answer["output_ids"]]
            if each.index in self._ended_at_cut:
                await rows.ask(self.questions(), self.services.router.rows, tokens)
            rows.deliver(len(tokens))
            if each.index in self.answers:
                end = reasoning_marks(each.facts.reasoning_parser or "")[1]
                self.answers[each.index] = with_reasoning_tokens(answer, end)
        return dict(self.answers)

    async def end(self, generation: ResumableGeneration, answer: dict[str, Any]) -> None:
        """Store the answer of a choice whose last attempt did not end it."""
        self.answers[generation.index] = answer
        if generation.has_ended:
            self._ended_at_cut.add(generation.index)

    def read_attempt(self, answer: Any) -> Any:
        """Return the rest of a choice, in the form of `/generate`."""
        return rest_as_generate(answer)

    def rows_of(self, generation: ResumableGeneration, exchange: Exchange) -> AbstractContextManager[None]:
        """Inside the returned context, the layers that handle `exchange` deliver the rows of the choice (routed experts
        and the like) to its `CarriedRows`."""
        return self._rows[generation.index].attached_to(exchange)

    async def sample(self, attempt: Attempt, generation: ResumableGeneration, seam: Seam, body: bytes) -> None:
        """Resume a choice on a worker, and ask for the rows behind those received so far."""
        self._rows[generation.index].renew()
        await super().sample(attempt, generation, seam, body)

    def on_answer(self, generation: ResumableGeneration) -> None:
        """Take the rows of a finished attempt, so that the next attempt asks for the rows behind them."""
        before = generation.answer["output_ids"] if generation.answer is not None else ()
        self._rows[generation.index].take(len(self._prompts[generation.index]) + len(before) + generation.tokens)


class CarriedAnswer(CarriedTurn):
    """A cut turn whose answer is not streamed.

    The agent has not seen any of it, so that a turn that cannot be resumed is sampled again from the beginning.
    """

    async def sample_all(self) -> tuple[TurnReply, dict[str, Any] | None]:
        """Sample the whole answer, in as many attempts as it takes.

        Returns:
            The last reply to the original request, and the joined answer if there were several attempts, else None.
        """
        metrics = self.services.router.metrics
        while True:
            attempt = self.attempt(self.exchange)
            reply = TurnReply(metrics, attempt)
            try:
                with self.in_flight(self.exchange, self.body):
                    await attempt.ask(reply, self.scope, self.receive, self.body)
            except UpstreamBroken:
                if not self.may_retry():
                    raise
                self.rename()
                continue
            if not reply.cut:
                return reply, None
            joined = await self._joined(reply.parse(), reply.cut, attempt)
            if joined is not None:
                return reply, joined

    async def _joined(self, first: Mapping[str, Any], places: Sequence[int], attempt: Attempt) -> dict[str, Any] | None:
        """Resume the choices at these positions; return the joined answer, or None if the turn must start again."""
        self.answers = {}
        try:
            cut = [self._begun(first["choices"][place], attempt) for place in places]
        except (CannotResume, UnreadableAnswer) as error:
            self.give_up(error)
            return None
        answers = await self.resume(cut)
        if any(each.is_given_up for each in cut):
            return None
        try:
            choices = [await self._choice(each, answers.get(each["index"]), attempt) for each in first["choices"]]
        except (CannotResume, UnreadableAnswer, RouterError) as error:
            self.give_up(error)
            return None
        return joined_answer(first, choices)

    def _begun(self, choice: Mapping[str, Any], attempt: Attempt) -> ChatGeneration:
        prompt = self.prompt(choice.get("prompt_token_ids"))
        return self.begin(
            choice["index"], prompt, attempt, choice_as_generate(choice, ""), choice["meta_info"]["finish_reason"]
        )

    async def _choice(self, first: Mapping[str, Any], answer: Any, attempt: Attempt) -> Mapping[str, Any]:
        if answer is None:
            return first
        read = await self.reader.read(answer, first["message"], attempt.facts, self.questions())
        return joined_choice(first, answer, read.message)
