"""Attempts: requests to a worker that each sample a part of a generation, and the loop that resumes cut generations,
independent of the form of the client's answer.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from miles_router.asgi.exchange import SCOPE_KEY, Exchange, Message, Receive, Scope, replay, with_body
from miles_router.asgi.replies import OK, Collected, Kind, Tap, drop
from miles_router.asgi.watch import Watch
from miles_router.engines.answers import UnreadableAnswer, is_abort
from miles_router.engines.facts import Facts
from miles_router.errors import ClientDisconnected, RouterError, UpstreamBroken, UpstreamUnreachable, WeightsChanged
from miles_router.fleet.inflight import InFlight
from miles_router.generation.continuation import continuation
from miles_router.generation.generation import CannotResume, ResumableGeneration
from miles_router.generation.joining import RESUMED
from miles_router.generation.questions import EngineQuestions
from miles_router.generation.seam import Seam
from miles_router.metrics import Statistics, counter
from miles_router.tasks import together

if TYPE_CHECKING:
    from miles_router.middlewares.contract import ASGIApp
    from miles_router.middlewares.router import Router

LAYER = "partial_rollouts"


class ResumeStatistics(Statistics, prefix="miles_router_partial_rollouts"):
    """Counters of cut generations: how many were resumed, and how many were returned incomplete."""

    resumed = counter("Resumptions of cut generations; one generation may be resumed several times.")
    returned = counter("Cut generations that could not be resumed and were returned incomplete.")


@dataclass
class ResumeServices:
    """The objects and settings that all resumable requests share.

    Attributes:
        in_flight: the registry in which an abort finds requests.
        is_paused: returns whether another client than the router has paused the worker at a URL.
        resume_cut: resume generations that a pause aborts.
        resume_lost: resume streams of lost workers, and repeat the requests of other lost answers.
    """

    router: Router
    in_flight: InFlight
    is_paused: Callable[[str], Awaitable[bool]]
    resume_cut: bool
    resume_lost: bool
    counts: ResumeStatistics = field(default_factory=ResumeStatistics, init=False)


def is_failure(finish: object) -> bool:
    """Return True if a finish reason reports a failure of the engine itself."""
    return isinstance(finish, dict) and (finish.get("status_code") is not None or finish.get("err_type") is not None)


class Attempt:
    """One request to a worker: it starts the generations of a client's request, or continues one of them.

    Args:
        app: the inner ASGI app.
        exchange: the exchange under which an abort finds the request.
    """

    def __init__(self, services: ResumeServices, app: ASGIApp, exchange: Exchange) -> None:
        self.exchange = exchange
        #: The facts of the engine that answers.
        self.facts = Facts()
        self._services = services
        self._app = app
        self._cuts = 0

    async def ask(self, tap: Tap, scope: Scope, receive: Receive, body: bytes) -> None:
        """Send the request through the inner layers. With `resume_lost` the request is repeated until a reply begins.
        In a small fleet every worker may have failed once, and some may be back."""
        services, lost = self._services, 0
        scope = with_body({**scope, SCOPE_KEY: self.exchange}, body)
        while True:
            self._cuts = services.router.gate.aborting_pauses
            try:
                await tap.call(self._app, scope, replay(body, receive))
                return
            except UpstreamUnreachable as error:
                lost += error.attempts
                if not services.resume_lost or lost > services.router.config.max_retries:
                    raise

    def note_engine(self) -> None:
        """Store the known facts of the worker when its reply begins; they stay valid for this reply."""
        url = self.exchange.routing.worker_url
        self.facts = self._services.router.fleet.known_facts(url) if url is not None else Facts()

    async def learn_engine(self) -> None:
        """Fetch the worker's facts before its reply is closed: the open connection proves that the process is the
        same."""
        url = self.exchange.routing.worker_url
        self.facts = await self._services.router.fleet.facts(url) if url is not None else Facts()

    async def was_cut(self, finish: object) -> bool:
        """Return whether a pause caused this finish reason. That is the case if the generation was aborted, no client
        asked for it, and the router or another client paused meanwhile."""
        services, routing = self._services, self.exchange.routing
        if not is_abort(finish) or routing.aborted or not services.resume_cut:
            return False
        if is_failure(finish):
            return False
        if services.router.gate.aborting_pauses != self._cuts:
            return True
        return routing.worker_url is not None and await services.is_paused(routing.worker_url)


logger = logging.getLogger(__name__)

ABORTED = {"type": "abort", "message": "Aborted"}


class ContinuedRequest:
    """One client request whose generations are resumed concurrently.

    Args:
        app: the inner ASGI app, through which every attempt goes.
    """

    def __init__(self, services: ResumeServices, app: ASGIApp, scope: Scope, receive: Receive) -> None:
        self.services = services
        self.app = app
        self.scope = scope
        self.receive = receive
        self.exchange = Exchange.of(scope)
        #: The finished answers by generation index, in the form of `/generate`.
        self.answers: Any = {}

    async def sample(self, attempt: Attempt, generation: ResumableGeneration, seam: Seam, body: bytes) -> None:
        """Send one attempt and add its answer. Afterwards the generation has ended, or was cut again.

        This implementation expects a complete answer, and stores it in `answers` once the generation has ended.

        Raises:
            CannotResume, UnreadableAnswer, RouterError: no worker continues it, or the answer does not fit the earlier
                tokens.
            UpstreamBroken: the worker was lost during the attempt.
        """
        reply = FollowingAnswer(attempt)
        await attempt.ask(reply, self.scope, self.receive, body)
        meta = generation.add(self.read_attempt(reply.read()))
        self.on_answer(generation)
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
        if generation.has_ended:
            self.answers[generation.index] = joined

    def read_attempt(self, answer: Any) -> Any:
        """Return the answer to an attempt, converted to the form of `/generate`.

        Raises:
            UnreadableAnswer: the answer cannot be converted.
        """
        return answer

    def on_answer(self, generation: ResumableGeneration) -> None:
        """Handle the answer of an attempt, whose tokens are in `generation.current`. Subclasses override this."""

    async def end(self, generation: ResumableGeneration, answer: dict[str, Any]) -> None:
        """Store the answer of a generation that ended without a worker. A generation that was never resumed keeps the
        engine's own answer."""
        if generation.has_ended or RESUMED in answer["meta_info"]:
            self.answers[generation.index] = answer

    def attempt(self, exchange: Exchange) -> Attempt:
        """Return an attempt for one generation, or for all of them."""
        return Attempt(self.services, self.app, exchange)

    def rows_of(self, generation: ResumableGeneration, exchange: Exchange) -> AbstractContextManager[None]:
        """Return a context in which inner layers deliver the rows of a generation that is resumed under this
        exchange."""
        return nullcontext()

    async def should_retry(self, generation: ResumableGeneration, exchange: Exchange, error: Exception) -> bool:
        """Return whether to retry a generation whose resumption failed, after any wait."""
        return False

    @contextmanager
    def in_flight(self, exchange: Exchange, body: bytes) -> Iterator[None]:
        """Register the request within the context, so that an abort finds it."""
        self.services.in_flight.enter(exchange, body)
        try:
            yield
        finally:
            self.services.in_flight.leave(exchange)

    async def note_end(self, attempt: Attempt, generation: ResumableGeneration, finish: Any) -> None:
        """Mark a generation as ended or as cut, after a worker reported its finish reason."""
        if await attempt.was_cut(finish):
            generation.cut(attempt.facts, finish)
        else:
            generation.end()

    def questions(self) -> EngineQuestions:
        """Return auxiliary requests that belong to no single generation."""
        return EngineQuestions(self.services.router, self.exchange, self.scope["headers"])

    def give_up(self, error: Exception) -> None:
        """Count and log that a generation is returned incomplete."""
        self.services.counts.returned += 1
        fields = {"request_id": self.exchange.request_id, "reason": str(error)}
        logger.warning("generation_not_resumed", extra={"fields": fields})

    async def resume_generations(self, generations: Sequence[ResumableGeneration]) -> None:
        """Resume generations concurrently. Each gets its own exchange, so that an abort reaches only its own current
        worker.

        Raises:
            UpstreamBroken: a worker was lost, and its generation must not look complete.
            ClientDisconnected: the client has disconnected.
            WeightsChanged: the evaluation began with other weights than the fleet has now.
        """
        with ExitStack() as stack:
            works = []
            for generation in generations:
                exchange = Exchange(self.exchange.request_id, max_answer_bytes=self.exchange.max_answer_bytes)
                exchange.pool, exchange.mount = self.exchange.pool, self.exchange.mount
                exchange.adapter = self.exchange.adapter
                exchange.routing.aborted = self.exchange.routing.aborted
                exchange.routing.group = self.exchange.routing.group
                exchange.routing.worker_url = self.exchange.routing.worker_url
                exchange.routing.evaluation = self.exchange.routing.evaluation
                exchange.routing.caches = self.exchange.routing.caches  # shared by all attempts
                exchange.routing.marks = self.exchange.routing.marks
                exchange.routing.worker_headers = self.exchange.routing.worker_headers
                exchange.routing.excluded_workers = self.exchange.routing.excluded_workers
                exchange.routing.rids.update(generation.rids)
                stack.enter_context(self.in_flight(exchange, b""))
                stack.enter_context(self.rows_of(generation, exchange))
                questions = EngineQuestions(self.services.router, exchange, self.scope["headers"])
                works.append(self._resume_generation(generation, questions))
            await together(works, name="carry on")

    async def _resume_generation(self, generation: ResumableGeneration, questions: EngineQuestions) -> None:
        services, exchange, seam = self.services, questions.exchange, Seam(generation, questions)
        lost = 0  # consecutive losses without a token: a request that crashes every worker must not reach them all
        while not generation.has_ended:
            try:
                generation.next_attempt()
                questions.ask(exchange.routing.worker_url, generation.facts)
                with Watch(self.receive, 0):
                    body = await self._next_request(generation, questions, seam)
                if body is None:
                    break
                exchange.routing.inward = dict.fromkeys(generation.rids, str(generation.attempt_rid))
                attempt = self.attempt(exchange)
                try:
                    await self.sample(attempt, generation, seam, body)
                except UpstreamBroken:
                    generation.cut(attempt.facts)
                    lost = 0 if generation.tokens else lost + 1
                    if not services.resume_lost or lost >= services.router.config.max_retries:
                        raise
            except (ClientDisconnected, WeightsChanged):
                raise
            except (CannotResume, UnreadableAnswer, RouterError) as error:
                if await self.should_retry(generation, exchange, error):
                    continue
                if not exchange.routing.aborted:
                    generation.give_up()
                    self.give_up(error)
                break
            services.counts.resumed += 1
        else:
            return
        await self.end(generation, _final_answer(generation, aborted=exchange.routing.aborted))

    async def _next_request(
        self, generation: ResumableGeneration, questions: EngineQuestions, seam: Seam
    ) -> bytes | None:
        """Wait at the gate, and return the body of the next attempt; None if the generation has already ended or was
        aborted."""
        gate, routing = self.services.router.gate, questions.exchange.routing
        while True:
            await gate.wait(routing)
            if routing.aborted:
                return None
            if generation.incremental is None:
                generation.incremental = await questions.incremental(generation.facts)
            if generation.defaults is None and generation.answer is not None and generation.answer["output_ids"]:
                generation.defaults = await questions.defaults(generation.facts)
            await seam.restore_held_back()
            if await seam.end_at_cut():
                return None
            body = await continuation(generation, questions)
            if not gate.closed and not routing.aborted:
                return body


def _final_answer(generation: ResumableGeneration, *, aborted: bool) -> dict[str, Any]:
    """Return the answer of a generation that is not resumed any further.

    Raises:
        UpstreamBroken: its worker was lost, or the client was shown tokens that do not fit; it must not look complete.
    """
    answer = generation.consistent_answer()
    finish = generation.abort or (ABORTED if aborted else None)
    if answer is None or (finish is None and not generation.has_ended):
        raise UpstreamBroken("the worker was lost and the generation could not be resumed")
    return answer if generation.has_ended else {**answer, "meta_info": {**answer["meta_info"], "finish_reason": finish}}


class FollowingAnswer(Collected):
    """A collector for the complete reply of an attempt that resumes one generation."""

    def __init__(self, attempt: Attempt) -> None:
        super().__init__()
        self._attempt = attempt

    async def whole(self, body: bytes) -> None:
        await super().whole(body)
        await self._attempt.learn_engine()

    def read(self) -> Any:
        """Return the reply's JSON.

        Raises:
            CannotResume: the reply is a refusal, or not valid JSON.
        """
        if not self.is_json:
            raise CannotResume(f"the worker answered {self.status} without readable JSON")
        return self.parse()


class FollowingStream(Tap):
    """A stream of an attempt that resumes one generation. None of its bytes go to the client unchanged."""

    def __init__(self, attempt: Attempt) -> None:
        super().__init__(drop)
        self.attempt = attempt

    def passes(self, start: Message) -> bool:
        """Reject the pass-through of the reply.

        Raises:
            CannotResume: the reply is a refusal, or not a stream of events.
        """
        if start["status"] != OK or self.kind is not Kind.EVENTS:
            raise CannotResume(f"the worker answered {start['status']} without a stream of events")
        self.attempt.note_engine()
        return False

    def unread(self, reason: str) -> None:
        """Raise CannotResume: an unreadable stream cannot continue a generation."""
        raise CannotResume(f"the worker's stream cannot be read: {reason}")
