"""The loop that carries cut generations on, whatever their answers look like to the client."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

from miles_router.asgi.exchange import Exchange, Message, Receive, Scope
from miles_router.asgi.replies import OK, Collected, Kind, Tap, drop
from miles_router.asgi.watch import Watch
from miles_router.engines.answers import UnreadableAnswer
from miles_router.errors import ClientDisconnected, RouterError, UpstreamBroken
from miles_router.generation.attempt import Attempt, ResumeServices
from miles_router.generation.continuation import continuation
from miles_router.generation.generation import CannotResume, ResumableGeneration
from miles_router.generation.joining import RESUMED
from miles_router.generation.questions import EngineQuestions
from miles_router.generation.seam import Seam
from miles_router.tasks import together

if TYPE_CHECKING:
    from miles_router.middlewares.contract import ASGIApp

logger = logging.getLogger(__name__)

ABORTED = {"type": "abort", "message": "Aborted"}


class ContinuedRequest:
    """One client's request, whose generations are carried on side by side.

    Args:
        app: the app inside, through which every attempt goes.
    """

    def __init__(self, services: ResumeServices, app: ASGIApp, scope: Scope, receive: Receive) -> None:
        self.services = services
        self.app = app
        self.scope = scope
        self.receive = receive
        self.exchange = Exchange.of(scope)
        #: By index, the answers of generations, in the form of `/generate`.
        self.answers: Any = {}

    async def sample(self, attempt: Attempt, generation: ResumableGeneration, seam: Seam, body: bytes) -> None:
        """Have a worker carry a generation on; afterwards it is `done`, or has been cut again. By default its answer
        comes in one piece, and stands in `answers` once it is done.

        Raises:
            CannotResume, UnreadableAnswer, RouterError: no worker carries it on, or the answer does not continue what
                came before. UpstreamBroken: the worker was lost on the way.
        """
        reply = FollowingAnswer(attempt)
        await attempt.ask(reply, self.scope, self.receive, body)
        meta = generation.add(self.read_attempt(reply.read()))
        self.came(generation)
        try:
            with Watch(self.receive, 0):
                joined, stopped = await seam.mend(finished=True)
            generation.verify(joined)
        except (CannotResume, UnreadableAnswer):
            generation.drop_attempt()
            raise
        if stopped:
            generation.end(joined)
        else:
            await self.note_end(attempt, generation, meta.get("finish_reason"))
        if generation.done:
            self.answers[generation.index] = joined

    def read_attempt(self, answer: Any) -> Any:
        """Return the answer to a request that carries one generation on, in the form of `/generate`.

        Raises:
            UnreadableAnswer: it is none.
        """
        return answer

    def came(self, generation: ResumableGeneration) -> None:
        """Note that an attempt has been answered: its tokens are in `generation.current`."""

    async def end(self, generation: ResumableGeneration, answer: dict[str, Any]) -> None:
        """Take the answer of a generation that no worker has ended. One that was never carried on stays as the engine
        gave it."""
        if generation.done or RESUMED in answer["meta_info"]:
            self.answers[generation.index] = answer

    def attempt(self, exchange: Exchange) -> Attempt:
        """Return a request to a worker, for one of the generations or all."""
        return Attempt(self.services, self.app, exchange)

    def rows_of(self, generation: ResumableGeneration, exchange: Exchange) -> AbstractContextManager[None]:
        """Have layers inside deliver the rows of a generation while it is carried on under this exchange."""
        return nullcontext()

    async def tries_again(self, generation: ResumableGeneration, exchange: Exchange, error: Exception) -> bool:
        """Whether a generation that could not be carried on is to be tried again, with what it has; returns when."""
        return False

    @contextmanager
    def in_flight(self, exchange: Exchange, body: bytes) -> Iterator[None]:
        """Within this an abort finds it."""
        self.services.in_flight.enter(exchange, body)
        try:
            yield
        finally:
            self.services.in_flight.leave(exchange)

    async def note_end(self, attempt: Attempt, generation: ResumableGeneration, finish: Any) -> None:
        """A worker has said that a generation ends: it is done, or was cut."""
        if await attempt.was_cut(finish):
            generation.abort, generation.facts = finish, attempt.facts
        else:
            generation.done = True

    def questions(self) -> EngineQuestions:
        """For what belongs to no one generation."""
        return EngineQuestions(self.services.router, self.exchange, self.scope["headers"])

    def give_up(self, error: Exception) -> None:
        """Say that a generation is returned as it is."""
        self.services.counts.returned += 1
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
                exchange.flight.marks = self.exchange.flight.marks
                exchange.flight.worker_headers = self.exchange.flight.worker_headers
                exchange.flight.barred = self.exchange.flight.barred
                exchange.flight.rids.update(generation.rids)
                stack.enter_context(self.in_flight(exchange, b""))
                stack.enter_context(self.rows_of(generation, exchange))
                questions = EngineQuestions(self.services.router, exchange, self.scope["headers"])
                works.append(self._carry_on(generation, questions))
            await together(works, name="carry on")

    async def _carry_on(self, generation: ResumableGeneration, questions: EngineQuestions) -> None:
        services, exchange, seam = self.services, questions.exchange, Seam(generation, questions)
        lost = 0  # in a row, without a token: what ends every worker it meets must not meet them all
        while not generation.done:
            try:
                generation.next_attempt()
                questions.ask(exchange.flight.worker_url, generation.facts)
                with Watch(self.receive, 0):
                    body = await self._next_request(generation, questions, seam)
                if body is None:
                    break
                exchange.flight.inward = dict.fromkeys(generation.rids, str(generation.attempt_rid))
                attempt = self.attempt(exchange)
                try:
                    await self.sample(attempt, generation, seam, body)
                except UpstreamBroken:
                    generation.facts = attempt.facts
                    lost = 0 if generation.tokens else lost + 1
                    if not services.resume_lost or lost >= services.router.config.max_retries:
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
            services.counts.resumed += 1
        else:
            return
        await self.end(generation, _left(generation, aborted=exchange.flight.aborted))

    async def _next_request(
        self, generation: ResumableGeneration, questions: EngineQuestions, seam: Seam
    ) -> bytes | None:
        """What carries it on, as soon as the fleet goes on; None if it has ended already, or was aborted."""
        gate, flight = self.services.router.gate, questions.exchange.flight
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


class FollowingAnswer(Collected):
    """A reply that carries one generation on."""

    def __init__(self, attempt: Attempt) -> None:
        super().__init__()
        self._attempt = attempt

    async def whole(self, body: bytes) -> None:
        await super().whole(body)
        await self._attempt.learn_engine()

    def read(self) -> Any:
        """Return its JSON.

        Raises:
            CannotResume: it is a refusal, or nothing that can be read.
        """
        if not self.is_json:
            raise CannotResume(f"the worker answered {self.status}, and no JSON that can be read")
        return self.parse()


class FollowingStream(Tap):
    """A stream that carries one generation on. Nothing of it is given to the client as it came."""

    def __init__(self, attempt: Attempt) -> None:
        super().__init__(drop)
        self.attempt = attempt

    def passes(self, start: Message) -> bool:
        """Let no reply pass.

        Raises:
            CannotResume: it is a refusal, or no stream of events.
        """
        if start["status"] != OK or self.kind is not Kind.EVENTS:
            raise CannotResume(f"the worker answered {start['status']}, and no stream")
        self.attempt.note_engine()
        return False

    def unread(self, reason: str) -> None:
        """Raise CannotResume: what cannot be read carries nothing on."""
        raise CannotResume(f"the worker's stream cannot be read: {reason}")
