"""One request on its way: what its whole and its streamed form have in common."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

from miles_router.asgi.exchange import SCOPE_KEY, Exchange, Message, Receive, Scope, Send, replay, with_body
from miles_router.asgi.watch import Watch
from miles_router.errors import ClientDisconnected, RouterError, UpstreamBroken, UpstreamUnreachable
from miles_router.fleet.inflight import InFlight
from miles_router.middlewares.contract import ASGIApp
from miles_router.middlewares.router import Router
from miles_router.partial_rollouts.continuation import continuation
from miles_router.partial_rollouts.engine import Engine, Known
from miles_router.partial_rollouts.parts import Part
from miles_router.partial_rollouts.seam import ended, reveal
from miles_router.tasks import together

logger = logging.getLogger(__name__)

ABORTED = {"type": "abort", "message": "Aborted"}


@dataclass
class Shared:
    """What all requests have in common."""

    app: ASGIApp
    router: Router
    in_flight: InFlight
    is_paused: Callable[[str], Awaitable[bool]]  # whether a worker was paused by somebody else
    resume_cut: bool  # carry on what a pause cut
    resume_lost: bool  # carry on streams whose worker was lost
    known: Known = field(default_factory=Known)
    resumed: int = 0
    returned: int = 0


class Run(ABC):
    """One request; `parts` are its generations."""

    def __init__(
        self, shared: Shared, scope: Scope, receive: Receive, send: Send, exchange: Exchange, parts: list[Part]
    ) -> None:
        self.shared = shared
        self.gate = shared.router.gate
        self.scope = scope
        self.receive = receive
        self.send = send
        self.exchange = exchange
        self.parts = parts

    @contextmanager
    def in_flight(self, exchange: Exchange, body: bytes) -> Iterator[None]:
        """Within this an abort finds it."""
        self.shared.in_flight.enter(exchange, body)
        try:
            yield
        finally:
            self.shared.in_flight.leave(exchange)

    async def carry_on(self, parts: Sequence[Part]) -> None:
        """Carry generations on, side by side. Each has an exchange of its own from here on, so that an abort reaches
        the worker it has then, and it alone.

        Raises:
            UpstreamBroken: one was lost, and must not look complete.
            ClientDisconnected: nobody is there any more.
        """
        with ExitStack() as stack:
            engines = []
            for part in parts:
                exchange = Exchange(self.exchange.request_id)
                exchange.flight.aborted, exchange.flight.worker_url = (
                    self.exchange.flight.aborted,
                    self.exchange.flight.worker_url,
                )
                exchange.flight.rids.update(part.ids)
                stack.enter_context(self.in_flight(exchange, b""))
                headers = self.scope["headers"]
                engines.append(Engine(self.shared.router, self.shared.known, exchange, headers))
            works = [self._carry_on(part, engine) for part, engine in zip(parts, engines, strict=True)]
            await together(works, name="carry on")

    async def _carry_on(self, part: Part, engine: Engine) -> None:
        lost = 0  # in a row, without a token: what ends every worker it meets must not meet them all
        while not part.done:
            part.next_go()
            try:
                with Watch(self.receive, 0):
                    body = await self._next_request(part, engine)
                if body is None:
                    break
                try:
                    await self.go(part, engine, body)
                except UpstreamBroken:
                    lost = 0 if part.current is not None and part.current["output_ids"] else lost + 1
                    if not self.shared.resume_lost or lost >= self.shared.router.config.max_retries:
                        raise
            except ClientDisconnected:
                raise
            except RouterError as error:
                self._give_up(error)
                break
            self.shared.resumed += 1
        else:
            return
        await self.end(part, _left(part, aborted=engine.exchange.flight.aborted))

    async def _next_request(self, part: Part, engine: Engine) -> bytes | None:
        """What carries it on, as soon as the fleet goes on; None if it has ended already, or was aborted."""
        while True:
            await self.gate.wait(engine.exchange.flight)
            if engine.exchange.flight.aborted:
                return None
            part.defaults = await engine.defaults()
            await reveal(part, engine)
            if await ended(part, engine):
                return None
            body = await continuation(part, engine)
            if not self.gate.closed and not engine.exchange.flight.aborted:
                return body

    @abstractmethod
    async def go(self, part: Part, engine: Engine, body: bytes) -> None:
        """Ask a worker to carry it on; afterwards it is `done`, or has been cut again.

        Raises:
            UpstreamBroken: the worker was lost on the way. Other RouterErrors: it does not do it.
        """

    @abstractmethod
    async def end(self, part: Part, answer: dict[str, Any]) -> None:
        """It has ended without that a worker said so."""

    def _give_up(self, error: RouterError) -> None:
        """Say that a generation is returned as it is."""
        self.shared.returned += 1
        fields = {"request_id": self.exchange.request_id, "reason": str(error)}
        logger.warning("generation_not_resumed", extra={"fields": fields})


def _left(part: Part, *, aborted: bool) -> dict[str, Any]:
    """What a generation has that goes on no more.

    Raises:
        UpstreamBroken: its worker was lost; it must not look complete.
    """
    answer = part.so_far()
    finish = part.abort or (ABORTED if aborted else None)
    if answer is None or (finish is None and not part.done):
        raise UpstreamBroken("the worker was lost and the generation not carried on")
    return answer if part.done else {**answer, "meta_info": {**answer["meta_info"], "finish_reason": finish}}


class Go(ABC):
    """One request to a worker."""

    def __init__(self, run: Run, exchange: Exchange) -> None:
        self.run = run
        self.exchange = exchange
        self._cuts = 0

    async def ask(self, body: bytes) -> None:
        """Send it through the layers inside. Under `resume_lost` it is sent again while no reply begins: of a small
        fleet every worker may have been tried once, and some be back."""
        shared, lost = self.run.shared, 0
        scope = with_body({**self.run.scope, SCOPE_KEY: self.exchange}, body)
        while True:
            self._cuts = self.run.gate.cuts
            try:
                await shared.app(scope, replay(body, self.run.receive), self.send)
                return
            except UpstreamUnreachable as error:
                lost += error.attempts
                if not shared.resume_lost or lost > shared.router.config.max_retries:
                    raise

    @abstractmethod
    async def send(self, message: Message) -> None:
        """Take the reply."""

    async def note_end(self, part: Part) -> None:
        """A worker has said that it ends: it is done, or was cut."""
        assert part.current is not None
        if await self._was_cut(part.current):
            part.abort = part.current["meta_info"]["finish_reason"]
        else:
            part.done = True

    async def _was_cut(self, answer: Mapping[str, Any]) -> bool:
        """Whether a pause ended this generation: it was aborted, by nobody's wish, and a pause came meanwhile."""
        finish = answer["meta_info"].get("finish_reason") or {}
        if finish.get("type") != "abort" or self.exchange.flight.aborted or not self.run.shared.resume_cut:
            return False
        if finish.get("status_code") is not None or finish.get("err_type") is not None:
            return False  # the engine's own failure
        if self.run.gate.cuts != self._cuts:
            return True
        return self.exchange.flight.worker_url is not None and await self.run.shared.is_paused(
            self.exchange.flight.worker_url
        )
