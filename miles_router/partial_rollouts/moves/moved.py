"""The answer to a request that moves: its worker was told to abort it, and another carries it on.

Nobody asked for this abort, so its client never sees it: what cannot be carried on after all is tried again, with what
it has, and in the end asked anew as it was.
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
from miles_router.generation.attempt import LAYER, Attempt, ResumeServices, is_failure
from miles_router.generation.continued_request import FollowingAnswer
from miles_router.generation.generation import CannotResume, ResumableGeneration
from miles_router.generation.questions import EngineQuestions
from miles_router.generation.seam import Seam
from miles_router.middlewares.contract import ASGIApp
from miles_router.partial_rollouts.answer import ResumableAnswer
from miles_router.tasks import cancelled

logger = logging.getLogger(__name__)

#: As often it is tried again where no worker takes it, and where what one says does not continue it.
TRIES, REFUSALS = 8, 2
#: Seconds before the first of these; then twice as many, and so on, up to the last.
SOON, LATE = 0.1, 5.0
#: The note of an exchange that was chosen once and could not go on: it does not move again.
BEGUN_ANEW = "miles_router.begun_anew"
#: Seconds between two looks whether a pause has come in between.
LOOK = 0.25


@dataclass(eq=False)
class Relocation:
    """One request that is to move: the `Move` of its flight.

    Attributes:
        app: the innermost app.
        request: as its worker has it.
        body: the same, as it was sent.
        source, target: the URLs of the workers that have it and that take it.
        cuts: of the gate, when its worker was told.
        attempts: the requests that carry moved generations on: whoever sent them reads their replies.
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
        """Who takes the reply."""
        return None if Exchange.of(scope) in self.attempts else MovedAnswer(self, scope, receive, send)


class MovedAttempt(Attempt):
    """A request whose generation may be cut for a move."""

    async def was_cut(self, finish: object) -> bool:
        """Whether the router's own abort made this finish reason. One by a client's wish, or by a pause that came
        meanwhile, is an end: who carries that on stands around this."""
        flight, gate = self.exchange.flight, self._services.router.gate
        mine = isinstance(flight.move, Relocation) and flight.move.cuts == gate.cuts
        return mine and is_abort(finish) and not flight.aborted and not is_failure(finish)


class _FirstReply(FollowingAnswer):
    """One that is too large to be held is asked for anew: without a move it would pass."""

    layer = LAYER

    def unread(self, reason: str) -> None:
        """Nothing of it is kept."""
        Tap.unread(self, reason)


class MovedAnswer(ResumableAnswer):
    """The `ReplyReceiver` of a request that moves."""

    def __init__(self, relocation: Relocation, scope: Scope, receive: Receive, send: Send) -> None:
        generations = [ResumableGeneration(relocation.request, 0)]
        super().__init__(relocation.services, relocation.app, scope, receive, send, generations)
        self._body = relocation.body
        self._attempts = relocation.attempts
        #: The last one.
        self._relocation = relocation
        self._opening = self.attempt(self.exchange)
        self._reply = _FirstReply(self._opening)
        self._reply.max_collected = self.exchange.max_answer_bytes
        self._tries = self._refusals = 0

    async def receive_message(self, message: Message) -> None:
        """A message of the first worker's reply."""
        await self._reply.send(message)

    async def finish(self) -> None:
        """Answer: with the reply as it came where it is no cut one, else with what it becomes."""
        metrics = self.services.router.metrics
        try:
            answer = self._reply.read()
            if answer is None:
                raise CannotResume("the worker's answer was broken off, or is no JSON")
            finish = finish_of(answer)
            if not await self._opening.was_cut(finish):
                metrics.unmoved_generations["aborted" if is_abort(finish) else "ended"] += 1
                await self._reply.give_to(self.send)
                return
            await self._carry_on_from(answer)
        except (CannotResume, UnreadableAnswer) as error:
            metrics.unmoved_generations["begun_anew"] += 1
            await self._begin_anew(error)
        else:
            await self._reply.give_to(self.send, orjson.dumps(self.answers[0]))

    async def _carry_on_from(self, answer: Any) -> None:
        (generation,) = self.generations
        generation.add(answer)
        generation.abort = answer["meta_info"]["finish_reason"]
        generation.defaults = self._opening.facts.preferred_sampling_params
        with super().in_flight(self.exchange, self._body):
            generation.facts = await self.services.router.fleet.facts(self._relocation.target)
        self.answers = [answer]
        await self.carry_on([generation])

    async def _begin_anew(self, error: Exception) -> None:
        fields = {"request_id": self.exchange.request_id, "reason": str(error)}
        logger.warning("moved_generation_begun_anew", extra={"fields": fields})
        self.exchange.notes[BEGUN_ANEW] = True
        flight = self.exchange.flight
        if flight.aborted:
            raise UpstreamBroken("it was aborted, and its worker has not said what it had sampled") from error
        flight.preferred, flight.move, flight.first_byte_at = self._relocation.source, None, None
        await self.app(self.scope, replay(self._body, self.receive), self.send)

    # What carrying on does otherwise here

    def attempt(self, exchange: Exchange) -> Attempt:
        return MovedAttempt(self.services, self.app, exchange)

    @contextmanager
    def in_flight(self, exchange: Exchange, body: bytes) -> Iterator[None]:
        """Within this an abort finds it, and so does the next move."""
        self._attempts.add(exchange)
        self._send_to_target(exchange)
        try:
            with super().in_flight(exchange, body):
                yield
        finally:
            self._attempts.discard(exchange)

    async def sample(self, attempt: Attempt, generation: ResumableGeneration, seam: Seam, body: bytes) -> None:
        """One more piece, of the worker that takes it over."""
        flight = attempt.exchange.flight
        flight.move, flight.first_byte_at = None, None
        if not self._tries:
            self.services.router.metrics.moved_generations += 1
            where = {"source": self._relocation.source, "target": flight.preferred}
            fields = {"request_id": self.exchange.request_id, **where}
            logger.debug("generation_moved", extra={"fields": fields})
        if not await self._before_a_pause(super().sample(attempt, generation, seam, body), lambda: flight.stop is None):
            return  # it waits at the gate
        self._tries = self._refusals = 0
        self.exchange.flight.worker_url = flight.worker_url

    async def note_end(self, attempt: Attempt, generation: ResumableGeneration, finish: Any) -> None:
        relocation = attempt.exchange.flight.move
        await super().note_end(attempt, generation, finish)
        if not generation.done and isinstance(relocation, Relocation):
            self._relocation = relocation
            self._send_to_target(attempt.exchange)
            generation.facts = await self.services.router.fleet.facts(relocation.target)

    def _send_to_target(self, exchange: Exchange) -> None:
        """Have the worker that takes it over be asked for what comes next, questions about it among that: the one that
        had it has a queue."""
        exchange.flight.worker_url = exchange.flight.preferred = self._relocation.target

    async def tries_again(self, generation: ResumableGeneration, exchange: Exchange, error: Exception) -> bool:
        """At the worker that had it, if that one still takes requests.

        Raises:
            CannotResume: as often as that makes sense, it was.
        """
        if exchange.flight.aborted:
            return False
        self._tries += 1
        self._refusals += not isinstance(error, RouterError)
        if self._tries > TRIES or self._refusals > REFUSALS:
            raise CannotResume(str(error)) from error
        exchange.flight.preferred = self._relocation.source
        with Watch(self.receive, 0):
            await asyncio.sleep(min(LATE, SOON * 2**self._tries))
        return True

    async def _next_request(
        self, generation: ResumableGeneration, questions: EngineQuestions, seam: Seam
    ) -> bytes | None:
        """None as well where a pause has come that cuts what runs: then it was cut like all the others."""
        bodies: list[bytes | None] = [None]

        async def ask() -> None:
            bodies.append(await super(MovedAnswer, self)._next_request(generation, questions, seam))

        return bodies[-1] if await self._before_a_pause(ask(), lambda: True) else None

    async def _before_a_pause(self, work: Coroutine[Any, Any, None], waits: Callable[[], bool]) -> bool:
        """Do this, unless a pause comes that cuts what runs, while it `waits`. Raises what it raises."""
        gate, cuts = self.services.router.gate, self._relocation.cuts
        task = asyncio.get_running_loop().create_task(work, name="carry a moved generation on")
        try:
            while not task.done() and (gate.cuts == cuts or not waits()):
                await asyncio.wait({task}, timeout=LOOK)
        finally:
            if not task.done():
                await cancelled(task)
            elif not task.cancelled():
                task.exception()  # nobody looks at it where the client has left
        if task.cancelled():
            return False
        task.result()
        return True
