"""The answer to a request that moves: its worker aborts the generation, and another worker continues it.

The client did not ask for this abort and never sees it. If the continuation fails, it is tried again from the sampled
tokens; in the end the original request is sent once more.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import orjson

from miles_router.asgi.exchange import Exchange, Message, Receive, Scope, Send, replay
from miles_router.asgi.replies import Tap
from miles_router.asgi.watch import Watch
from miles_router.engines.answers import UnreadableAnswer, finish_of, is_abort
from miles_router.engines.generate import GenerateRequest
from miles_router.errors import RouterError, UpstreamBroken
from miles_router.generation.attempt import LAYER, Attempt, FollowingAnswer, ResumeServices, is_failure
from miles_router.generation.generation import CannotResume, ResumableGeneration
from miles_router.generation.questions import EngineQuestions
from miles_router.generation.seam import Seam
from miles_router.middlewares.contract import ASGIApp
from miles_router.partial_rollouts.answer import ResumableAnswer
from miles_router.tasks import cancelled

logger = logging.getLogger(__name__)

#: Limits of repeated attempts: all failures, and answers that do not continue the generation.
TRIES, REFUSALS = 8, 2
#: Seconds before the next attempt: at first (doubled each time), and at most.
FIRST_DELAY, LAST_DELAY = 0.1, 5.0
#: The exchange note of a request that was moved without success: it does not move again.
BEGUN_ANEW = "miles_router.begun_anew"
#: Seconds between checks for a pause.
PAUSE_CHECK_SECONDS = 0.25


@dataclass(eq=False)
class Relocation:
    """One request that is to move (`Routing.move`). Its present worker was asked to return the sampled tokens.

    Attributes:
        app: the innermost app.
        request: the request as its worker has it.
        body: the bytes of the request.
        source, target: the URLs of the worker that has it and of the worker that takes it over.
        cuts: the gate's count of cutting pauses when the abort was ordered.
        attempts: the exchanges of running continuations, shared by all moves.
    """

    services: ResumeServices
    app: ASGIApp
    request: GenerateRequest
    body: bytes
    source: str
    target: str
    cuts: int
    attempts: set[Exchange]

    def reply_receiver(self, scope: Scope, receive: Receive, send: Send) -> MovedAnswer | None:
        """Return the receiver of the worker's reply; None for a continuation, whose sender reads the reply itself."""
        return None if Exchange.of(scope) in self.attempts else MovedAnswer(self, scope, receive, send)


class MovedAttempt(Attempt):
    """An attempt whose generation may be cut for a move."""

    async def was_cut(self, finish: object) -> bool:
        """Return whether the router's own abort made this finish reason.

        An abort by a client, or by a pause in the meantime, ends the generation here; an outer layer may resume it.
        """
        routing, gate = self.exchange.routing, self._services.router.gate
        mine = routing.move is not None and routing.move.cuts == gate.aborting_pauses
        return mine and is_abort(finish) and not routing.aborted and not is_failure(finish)


class _FirstReply(FollowingAnswer):
    """The first worker's reply. If it is too large to keep, the request is sent again."""

    layer = LAYER

    def unread(self, reason: str) -> None:
        """Count the unreadable reply, without raising an error."""
        Tap.unread(self, reason)


class MovedAnswer(ResumableAnswer):
    """The answer to a request that moves. It takes the worker's reply in place of the client."""

    def __init__(self, relocation: Relocation, scope: Scope, receive: Receive, send: Send) -> None:
        generations = [ResumableGeneration(relocation.request, 0)]
        super().__init__(relocation.services, relocation.app, scope, receive, send, generations)
        self._body = relocation.body
        self._attempts = relocation.attempts
        #: The latest move of this request.
        self._relocation = relocation
        self._opening = self.attempt(self.exchange)
        self._reply = _FirstReply(self._opening)
        self._reply.max_collected = self.exchange.max_answer_bytes
        self._tries = self._refusals = 0

    async def receive_message(self, message: Message) -> None:
        await self._reply.send(message)

    async def finish(self) -> None:
        """Answer the client: with the first reply if it was not cut, else with the continued generation."""
        metrics = self.services.router.metrics
        try:
            answer = self._reply.read()
            if answer is None:
                raise CannotResume("the worker's answer was incomplete or not JSON")
            finish = finish_of(answer)
            if not await self._opening.was_cut(finish):
                metrics.unmoved_generations["aborted" if is_abort(finish) else "ended"] += 1
                await self._reply.give_to(self.send)
                return
            await self._carry_on_from(answer)
        except (CannotResume, UnreadableAnswer) as error:
            metrics.unmoved_generations["begun_anew"] += 1
            await self._send_again(error)
        else:
            await self._reply.give_to(self.send, orjson.dumps(self.answers[0]))

    async def _carry_on_from(self, answer: Any) -> None:
        (generation,) = self.generations
        generation.add(answer)
        generation.defaults = self._opening.facts.preferred_sampling_params
        with super().in_flight(self.exchange, self._body):
            facts = await self.services.router.fleet.facts(self._relocation.target)
        generation.cut(facts, answer["meta_info"]["finish_reason"])
        self.answers = [answer]
        await self.resume_generations([generation])

    async def _send_again(self, error: Exception) -> None:
        fields = {"request_id": self.exchange.request_id, "reason": str(error)}
        logger.warning("moved_generation_restarted", extra={"fields": fields})
        self.exchange.notes[BEGUN_ANEW] = True
        routing = self.exchange.routing
        if routing.aborted:
            raise UpstreamBroken("the request was aborted, and its worker did not return the sampled tokens") from error
        routing.preferred, routing.move, routing.first_byte_at = self._relocation.source, None, None
        await self.app(self.scope, replay(self._body, self.receive), self.send)

    # Overrides of ContinuedRequest

    def attempt(self, exchange: Exchange) -> Attempt:
        return MovedAttempt(self.services, self.app, exchange)

    @contextmanager
    def in_flight(self, exchange: Exchange, body: bytes) -> Iterator[None]:
        """Register the exchange inside this context, so that aborts and further moves find it."""
        self._attempts.add(exchange)
        self._send_to_target(exchange)
        try:
            with super().in_flight(exchange, body):
                yield
        finally:
            self._attempts.discard(exchange)

    async def sample(self, attempt: Attempt, generation: ResumableGeneration, seam: Seam, body: bytes) -> None:
        """Let a worker continue the generation; return early if a pause comes while no worker has the request."""
        routing = attempt.exchange.routing
        routing.move, routing.first_byte_at = None, None
        if not self._tries:
            self.services.router.metrics.moved_generations += 1
            where = {"source": self._relocation.source, "target": routing.preferred}
            fields = {"request_id": self.exchange.request_id, **where}
            logger.debug("generation_moved", extra={"fields": fields})
        if not await self._run_until_pause(
            super().sample(attempt, generation, seam, body), lambda: routing.stop is None
        ):
            return  # it waits at the gate
        self._tries = self._refusals = 0
        self.exchange.routing.worker_url = routing.worker_url

    async def note_end(self, attempt: Attempt, generation: ResumableGeneration, finish: Any) -> None:
        relocation = attempt.exchange.routing.move
        await super().note_end(attempt, generation, finish)
        if generation.is_cut and relocation is not None:
            self._relocation = relocation
            self._send_to_target(attempt.exchange)
            generation.facts = await self.services.router.fleet.facts(relocation.target)

    def _send_to_target(self, exchange: Exchange) -> None:
        """Address the next request, and questions about the engine, to the target: the source has a queue."""
        exchange.routing.worker_url = exchange.routing.preferred = self._relocation.target

    async def should_retry(self, generation: ResumableGeneration, exchange: Exchange, error: Exception) -> bool:
        """Wait, and prefer the source worker for the next attempt; return False if the client has aborted.

        Raises:
            CannotResume: the limit of attempts is reached.
        """
        if exchange.routing.aborted:
            return False
        self._tries += 1
        self._refusals += not isinstance(error, RouterError)
        if self._tries > TRIES or self._refusals > REFUSALS:
            raise CannotResume(str(error)) from error
        exchange.routing.preferred = self._relocation.source
        with Watch(self.receive, 0):
            await asyncio.sleep(min(LAST_DELAY, FIRST_DELAY * 2**self._tries))
        return True

    async def _next_request(
        self, generation: ResumableGeneration, questions: EngineQuestions, seam: Seam
    ) -> bytes | None:
        """Return the next request's body; None also if a cutting pause has come, which ends the continuation."""
        bodies: list[bytes | None] = [None]

        async def ask() -> None:
            bodies.append(await super(MovedAnswer, self)._next_request(generation, questions, seam))

        return bodies[-1] if await self._run_until_pause(ask(), lambda: True) else None

    async def _run_until_pause(self, work: Coroutine[Any, Any, None], waits: Callable[[], bool]) -> bool:
        """Run `work` and return True; cancel it and return False if a cutting pause comes while `waits()` is true."""
        gate, cuts = self.services.router.gate, self._relocation.cuts
        task = asyncio.get_running_loop().create_task(work, name="carry a moved generation on")
        try:
            while not task.done() and (gate.aborting_pauses == cuts or not waits()):
                await asyncio.wait({task}, timeout=PAUSE_CHECK_SECONDS)
        finally:
            if not task.done():
                await cancelled(task)
            elif not task.cancelled():
                task.exception()  # mark it as retrieved: after a disconnect it is not awaited
        if task.cancelled():
            return False
        task.result()
        return True
