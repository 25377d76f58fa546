"""One request to a worker: a generation that is cut is sampled in several."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from miles_router.asgi.exchange import SCOPE_KEY, Exchange, Receive, Scope, replay, with_body
from miles_router.asgi.replies import Tap
from miles_router.engines.answers import is_abort
from miles_router.engines.facts import Facts
from miles_router.errors import UpstreamUnreachable
from miles_router.fleet.inflight import InFlight
from miles_router.metrics import Statistics, counter
from miles_router.middlewares.contract import ASGIApp
from miles_router.middlewares.router import Router

LAYER = "partial_rollouts"


class ResumeStatistics(Statistics, prefix="miles_router_partial_rollouts"):
    """What became of generations that were cut."""

    resumed = counter("Generations that were carried on, each as often as it was.")
    returned = counter("Generations that could not be, and were returned as they were.")


@dataclass
class ResumeContext:
    """What all requests have in common.

    Attributes:
        app: the app inside.
        in_flight: where an abort finds requests.
        is_paused: whether the worker at a URL was paused by somebody else than the router.
        resume_cut: carry on what a pause cut.
        resume_lost: carry on streams whose worker was lost, and ask again for other answers.
    """

    app: ASGIApp
    router: Router
    in_flight: InFlight
    is_paused: Callable[[str], Awaitable[bool]]
    resume_cut: bool
    resume_lost: bool
    counts: ResumeStatistics = field(default_factory=ResumeStatistics, init=False)


def is_failure(finish: object) -> bool:
    """Whether a finish reason says that the engine itself has failed."""
    return isinstance(finish, dict) and (finish.get("status_code") is not None or finish.get("err_type") is not None)


class Leg:
    """A request that begins the generations of a client's request, or carries one of them on.

    Args:
        exchange: under which an abort finds it.
    """

    def __init__(self, context: ResumeContext, exchange: Exchange) -> None:
        self.exchange = exchange
        #: Those of the engine that answers, as far as they are known.
        self.facts = Facts()
        self._context = context
        self._cuts = 0

    async def ask(self, tap: Tap, scope: Scope, receive: Receive, body: bytes) -> None:
        """Send it through the layers inside. Under `resume_lost` it is sent again while no reply begins: of a small
        fleet every worker may have been tried once, and some be back."""
        context, lost = self._context, 0
        scope = with_body({**scope, SCOPE_KEY: self.exchange}, body)
        while True:
            self._cuts = context.router.gate.cuts
            try:
                await tap.call(context.app, scope, replay(body, receive))
                return
            except UpstreamUnreachable as error:
                lost += error.attempts
                if not context.resume_lost or lost > context.router.config.max_retries:
                    raise

    def note_engine(self) -> None:
        """The reply has begun: what is known of the engine now holds for this reply."""
        url = self.exchange.flight.worker_url
        self.facts = self._context.router.fleet.known_facts(url) if url is not None else Facts()

    async def learn_engine(self) -> None:
        """Know the engine, before its reply is closed: the reply's connection proves that it is still the same."""
        url = self.exchange.flight.worker_url
        self.facts = await self._context.router.fleet.facts(url) if url is not None else Facts()

    async def was_cut(self, finish: object) -> bool:
        """Whether a pause made this finish reason: the generation was aborted, by nobody's wish, and a pause came
        meanwhile."""
        context, flight = self._context, self.exchange.flight
        if not is_abort(finish) or flight.aborted or not context.resume_cut:
            return False
        if is_failure(finish):
            return False
        if context.router.gate.cuts != self._cuts:
            return True
        return flight.worker_url is not None and await context.is_paused(flight.worker_url)
