"""Fan-out: one request to every worker at the same time, and one answer.

A worker that hangs is named after a bounded time. A worker that was out of the fleet before and cannot be reached does
not make the request fail: it takes no traffic, and `same-weights` keeps it out until it has what it missed.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass

import orjson

from miles_router import tasks
from miles_router.asgi.headers import RawHeaders, first_header
from miles_router.engines.actions import Order
from miles_router.engines.client_json import is_too_deep
from miles_router.engines.control import QUICK
from miles_router.engines.known import may_come_twice
from miles_router.errors import PartlyFailed, UpstreamError, UpstreamTimeout
from miles_router.fleet.workers import Worker, WorkerState
from miles_router.forwarding.outgoing import Outgoing, send
from miles_router.forwarding.reply import Reply
from miles_router.forwarding.upstream import NotAdmitted, Upstream

logger = logging.getLogger(__name__)

MAX_ANSWER = 64 * 1024 * 1024
JSON = b"application/json"


@dataclass(frozen=True)
class Outcome:
    """What one worker said, or why it said nothing (`status` 0)."""

    worker: Worker
    status: int
    headers: RawHeaders
    body: bytes
    reachable: bool = True

    @property
    def ok(self) -> bool:
        return 200 <= self.status < 300

    @property
    def excused(self) -> bool:
        """Of a worker that takes no traffic anyway and cannot be reached."""
        return not self.reachable and self.worker.state in (WorkerState.QUARANTINED, WorkerState.UNREACHED)

    def describe(self) -> dict[str, object]:
        """For the `workers` part of an answer. What is no JSON, or nested too deep to be written again, is a text."""
        try:
            body: object = orjson.loads(self.body) if self.body else None
        except orjson.JSONDecodeError:
            readable = False
        else:
            readable = not is_too_deep(self.body, body)
        return {"status": self.status, "body": body if readable else self.body.decode("utf-8", "replace")}


@dataclass(frozen=True)
class FleetAnswer:
    """The one answer to a fan-out."""

    status: int
    body: bytes
    content_type: bytes | None


class FanOut:
    """Asks workers, beside the bound on connections: it must get through while all are taken.

    Args:
        confirmed: makes sure that this process alone decides; None: it always does.
        is_certain: whether it has been so since, asked at each write: this process may have stood still in between.
    """

    def __init__(
        self,
        upstream: Upstream,
        confirmed: Callable[[], Awaitable[bool]] | None = None,
        is_certain: Callable[[], bool] | None = None,
    ) -> None:
        self._upstream = upstream
        self._confirmed = confirmed
        self._is_certain = is_certain

    async def ask(self, workers: Collection[Worker], request: Outgoing, timeout: float) -> list[Outcome]:
        """What each worker answers within `timeout` seconds."""
        return list(await asyncio.gather(*(self.ask_one(worker, request, timeout) for worker in workers)))

    async def ask_one(self, worker: Worker, request: Outgoing, timeout: float) -> Outcome:
        """What one worker answers within `timeout` seconds."""
        try:
            return await tasks.within(timeout, self._exchange(worker, request), name=f"ask {worker.url}")
        except TimeoutError:
            error: UpstreamError = UpstreamTimeout(f"no answer within {timeout:g} s")
        except UpstreamError as caught:
            error = caught
        logger.warning("control_failed", extra={"fields": {"worker": worker.url, "reason": str(error)}})
        return Outcome(worker, 0, [], str(error).encode(), reachable=False)

    async def obey(self, worker: Worker, order: Order) -> str | None:
        """Give one worker an order; None where it did it, else what it said."""
        outcome = await self.ask_one(worker, outgoing_order(order), QUICK)
        return None if outcome.ok else outcome.body.decode(errors="replace")

    def reading(self) -> FanOut:
        """For what changes nothing at an engine: whoever decides, it may be asked."""
        return FanOut(self._upstream)

    async def _send(self, worker: Worker, request: Outgoing) -> Reply:
        fresh = not may_come_twice(request.method, request.target)
        if self._confirmed is None:
            return await send(self._upstream, worker, request, slot=False, fresh=fresh)
        while await self._confirmed():
            with suppress(NotAdmitted):
                return await send(self._upstream, worker, request, slot=False, admit=self._is_certain, fresh=fresh)
        raise UpstreamError("nothing was sent: another leader may decide by now")

    async def _exchange(self, worker: Worker, request: Outgoing) -> Outcome:
        reply = await self._send(worker, request)
        try:
            return Outcome(worker, reply.status, reply.headers, await reply.read_all(MAX_ANSWER))
        finally:
            reply.close()


def outgoing_order(order: Order) -> Outgoing:
    """A control request of the router's own."""
    return Outgoing(order.method, order.target, [(b"content-type", JSON)], order.body)


def failed(outcomes: Sequence[Outcome]) -> list[Outcome]:
    """Whose failure makes the request fail; everybody's, where nobody did it."""
    if not any(outcome.ok for outcome in outcomes):
        return list(outcomes)
    return [outcome for outcome in outcomes if not outcome.ok and not outcome.excused]


def one_answer(outcomes: Sequence[Outcome], request_id: str) -> FleetAnswer:
    """The workers' own answer where they agree, else one that names each."""
    answered = [outcome for outcome in outcomes if not outcome.excused]
    same = len({(outcome.status, outcome.body) for outcome in answered}) == 1
    if same and answered[0].status and answered[0].status < 500 and len(answered) == len(outcomes):
        return FleetAnswer(answered[0].status, answered[0].body, first_header(answered[0].headers, b"content-type"))
    workers = {outcome.worker.url: outcome.describe() for outcome in outcomes}
    if failures := failed(outcomes):
        error = PartlyFailed(f"not every worker did it: {', '.join(outcome.worker.url for outcome in failures)}")
        return FleetAnswer(error.status, orjson.dumps({**error.body(request_id), "workers": workers}), JSON)
    return FleetAnswer(200, orjson.dumps({**_agreed(answered), "workers": workers}), JSON)


def _agreed(outcomes: Sequence[Outcome]) -> dict[str, object]:
    """The fields in which JSON answers agree, so that a client of a single worker finds what it looks for."""
    bodies = [outcome.describe()["body"] for outcome in outcomes]
    if not bodies or not all(isinstance(body, dict) for body in bodies):
        return {}
    dicts: list[dict[str, object]] = [body for body in bodies if isinstance(body, dict)]
    return {name: value for name, value in dicts[0].items() if all(name in d and d[name] == value for d in dicts)}
