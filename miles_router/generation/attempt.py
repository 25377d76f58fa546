"""One attempt: a request to a worker that samples a part of a generation."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from miles_router.asgi.exchange import SCOPE_KEY, Exchange, Receive, Scope, replay, with_body
from miles_router.asgi.replies import Tap
from miles_router.engines.answers import is_abort
from miles_router.engines.facts import Facts
from miles_router.errors import UpstreamUnreachable
from miles_router.fleet.inflight import InFlight
from miles_router.metrics import Statistics, counter

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
