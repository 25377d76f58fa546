"""One client's request on its way: what whole answers and streams have in common."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

from miles_router.asgi.exchange import Exchange, Receive, Scope, Send
from miles_router.asgi.watch import Watch
from miles_router.engines.answers import UnreadableAnswer
from miles_router.errors import ClientDisconnected, RouterError, UpstreamBroken
from miles_router.partial_rollouts.continuation import continuation
from miles_router.partial_rollouts.generation import CannotResume, ResumableGeneration
from miles_router.partial_rollouts.leg import Leg, ResumeContext
from miles_router.partial_rollouts.questions import EngineQuestions
from miles_router.partial_rollouts.seam import Seam
from miles_router.tasks import together

logger = logging.getLogger(__name__)

ABORTED = {"type": "abort", "message": "Aborted"}


class ResumableRequest(ABC):
    """A request and its generations, which are carried on side by side."""

    def __init__(
        self,
        context: ResumeContext,
        scope: Scope,
        receive: Receive,
        send: Send,
        generations: list[ResumableGeneration],
    ) -> None:
        self.context = context
        self.scope = scope
        self.receive = receive
        self.send = send
        self.exchange = Exchange.of(scope)
        self.generations = generations
        #: Whether its answers come as a list, or as events that have an `index`.
        self.indexed = bool(generations) and generations[0].client_request.indexed

    @abstractmethod
    async def run(self, body: bytes) -> None:
        """Answer it."""

    @abstractmethod
    async def sample(self, leg: Leg, generation: ResumableGeneration, seam: Seam, body: bytes) -> None:
        """Have a worker carry a generation on; afterwards it is `done`, or has been cut again.

        Raises:
            CannotResume, UnreadableAnswer, RouterError: no worker does, or what it answers is nothing that continues
                what came before. UpstreamBroken: the worker was lost on the way.
        """

    @abstractmethod
    async def end(self, generation: ResumableGeneration, answer: dict[str, Any]) -> None:
        """A generation has ended without that a worker said so."""

    def leg(self, exchange: Exchange) -> Leg:
        """A request to a worker, for one of its generations or all."""
        return Leg(self.context, exchange)

    async def tries_again(self, generation: ResumableGeneration, exchange: Exchange, error: Exception) -> bool:
        """Whether a generation that could not be carried on is to be tried again, with what it has; returns when."""
        return False

    @contextmanager
    def in_flight(self, exchange: Exchange, body: bytes) -> Iterator[None]:
        """Within this an abort finds it."""
        self.context.in_flight.enter(exchange, body)
        try:
            yield
        finally:
            self.context.in_flight.leave(exchange)

    async def note_end(self, leg: Leg, generation: ResumableGeneration, finish: Any) -> None:
        """A worker has said that a generation ends: it is done, or was cut."""
        if await leg.was_cut(finish):
            generation.abort, generation.facts = finish, leg.facts
        else:
            generation.done = True

    def questions(self) -> EngineQuestions:
        """For what belongs to no one generation."""
        return EngineQuestions(self.context.router, self.exchange, self.scope["headers"])

    def give_up(self, error: Exception) -> None:
        """Say that a generation is returned as it is."""
        self.context.counts.returned += 1
        fields = {"request_id": self.exchange.request_id, "reason": str(error)}
        logger.warning("generation_not_resumed", extra={"fields": fields})

    async def carry_on(self, generations: Sequence[ResumableGeneration]) -> None:
        """Carry generations on, side by side. Each has an exchange of its own from here on, so that an abort reaches
        the worker it has then, and it alone.

        Raises:
            UpstreamBroken: one was lost, and must not look complete.
            ClientDisconnected: nobody is there any more.
        """
        with ExitStack() as stack:
            works = []
            for generation in generations:
                exchange = Exchange(self.exchange.request_id, max_answer_bytes=self.exchange.max_answer_bytes)
                exchange.adapter = self.exchange.adapter
                exchange.flight.aborted = self.exchange.flight.aborted
                exchange.flight.group = self.exchange.flight.group
                exchange.flight.worker_url = self.exchange.flight.worker_url
                exchange.flight.caches = self.exchange.flight.caches  # of all parts
                exchange.flight.trace = self.exchange.flight.trace
                exchange.flight.barred = self.exchange.flight.barred
                exchange.flight.rids.update(generation.rids)
                stack.enter_context(self.in_flight(exchange, b""))
                questions = EngineQuestions(self.context.router, exchange, self.scope["headers"])
                works.append(self._carry_on(generation, questions))
            await together(works, name="carry on")

    async def _carry_on(self, generation: ResumableGeneration, questions: EngineQuestions) -> None:
        context, exchange, seam = self.context, questions.exchange, Seam(generation, questions)
        lost = 0  # in a row, without a token: what ends every worker it meets must not meet them all
        while not generation.done:
            try:
                generation.next_leg()
                questions.ask(exchange.flight.worker_url, generation.facts)
                with Watch(self.receive, 0):
                    body = await self._next_request(generation, questions, seam)
                if body is None:
                    break
                exchange.flight.inward = dict.fromkeys(generation.rids, str(generation.leg_rid))
                leg = self.leg(exchange)
                try:
                    await self.sample(leg, generation, seam, body)
                except UpstreamBroken:
                    generation.facts = leg.facts
                    lost = 0 if generation.tokens else lost + 1
                    if not context.resume_lost or lost >= context.router.config.max_retries:
                        raise
            except ClientDisconnected:
                raise
            except (CannotResume, UnreadableAnswer, RouterError) as error:
                if await self.tries_again(generation, exchange, error):
                    continue
                if not exchange.flight.aborted:
                    generation.given_up = True
                    self.give_up(error)
                break
            context.counts.resumed += 1
        else:
            return
        await self.end(generation, _left(generation, aborted=exchange.flight.aborted))

    async def _next_request(
        self, generation: ResumableGeneration, questions: EngineQuestions, seam: Seam
    ) -> bytes | None:
        """What carries it on, as soon as the fleet goes on; None if it has ended already, or was aborted."""
        gate, flight = self.context.router.gate, questions.exchange.flight
        while True:
            await gate.wait(flight)
            if flight.aborted:
                return None
            if generation.incremental is None:
                generation.incremental = await questions.incremental(generation.facts)
            if generation.defaults is None and generation.answer is not None and generation.answer["output_ids"]:
                generation.defaults = await questions.defaults(generation.facts)
            await seam.reveal()
            if await seam.end_at_cut():
                return None
            body = await continuation(generation, questions)
            if not gate.closed and not flight.aborted:
                return body


def _left(generation: ResumableGeneration, *, aborted: bool) -> dict[str, Any]:
    """What a generation has that goes on no more.

    Raises:
        UpstreamBroken: its worker was lost, or what its client was shown does not fit together; it must not look
            complete.
    """
    answer = generation.left()
    finish = generation.abort or (ABORTED if aborted else None)
    if answer is None or (finish is None and not generation.done):
        raise UpstreamBroken("the worker was lost and the generation not carried on")
    return answer if generation.done else {**answer, "meta_info": {**answer["meta_info"], "finish_reason": finish}}
