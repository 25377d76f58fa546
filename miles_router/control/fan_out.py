"""Fan-out: send one request to every worker at the same time, and merge the replies into one.

A worker that hangs is reported after a bounded time. A worker that was already out of the fleet and cannot be reached
does not fail the request: it takes no traffic, and `same-weights` keeps it out until it has the current weights.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Collection, Coroutine, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import orjson

from miles_router import tasks
from miles_router.asgi.wire import RawHeaders, first_header
from miles_router.engines.actions import Order
from miles_router.engines.control import QUICK
from miles_router.engines.json_bytes import is_too_deep
from miles_router.engines.known import may_come_twice
from miles_router.errors import PartlyFailed, UpstreamError, UpstreamTimeout
from miles_router.fleet.fleet import UNREACHED_PATIENCE
from miles_router.fleet.workers import Worker, WorkerState
from miles_router.forwarding.forwarded import Outgoing, send
from miles_router.forwarding.reply import Reply
from miles_router.forwarding.upstream import NotAdmitted, Upstream

logger = logging.getLogger(__name__)

MAX_ANSWER = 64 * 1024 * 1024
JSON = b"application/json"


@dataclass(frozen=True)
class Outcome:
    """The reply of one worker. Status 0 means no reply; the body is then the reason."""

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
        """Whether the worker takes no traffic anyway and cannot be reached, so that its failure does not count."""
        return not self.reachable and self.worker.state in (WorkerState.QUARANTINED, WorkerState.UNREACHED)

    def describe(self) -> dict[str, object]:
        """Return the worker's entry in the `workers` object of a reply. A body that is not JSON, or too deeply nested
        to be written again, becomes a string."""
        try:
            body: object = orjson.loads(self.body) if self.body else None
        except orjson.JSONDecodeError:
            readable = False
        else:
            readable = not is_too_deep(self.body, body)
        return {"status": self.status, "body": body if readable else self.body.decode("utf-8", "replace")}


@dataclass(frozen=True)
class FleetAnswer:
    """The merged reply to a fan-out."""

    status: int
    body: bytes
    content_type: bytes | None


class FanOut:
    """The sender of control requests. It bypasses the limit on connections, so that control works when all slots are in
    use.

    Args:
        confirm_leadership: waits until this process is known to be the leader, and returns False if it is not. None:
            there is only this process.
        is_sole_leader: checked at each write: returns False if the confirmation has expired, as after this process was
            suspended.
    """

    def __init__(
        self,
        upstream: Upstream,
        confirm_leadership: Callable[[], Awaitable[bool]] | None = None,
        is_sole_leader: Callable[[], bool] | None = None,
    ) -> None:
        self._upstream = upstream
        self._confirm_leadership = confirm_leadership
        self._is_sole_leader = is_sole_leader

    async def ask(self, workers: Collection[Worker], request: Outgoing, timeout: float) -> list[Outcome]:
        """Send a request to each worker, and return the outcomes in the order of the workers. Each may take `timeout`
        seconds."""
        return list(await asyncio.gather(*(self.ask_one(worker, request, timeout) for worker in workers)))

    async def ask_one(self, worker: Worker, request: Outgoing, timeout: float) -> Outcome:
        """Send a request to one worker, and return its outcome. No answer within `timeout` seconds is an outcome too,
        or within `UNREACHED_PATIENCE` by a worker that has answered nothing else either."""
        exchange = self._unless_silent(worker, self._exchange(worker, request))
        try:
            return await tasks.within(timeout, exchange, name=f"ask {worker.url}")
        except TimeoutError:
            error: UpstreamError = UpstreamTimeout(f"no answer within {timeout:g} s")
        except UpstreamError as caught:
            error = caught
        logger.warning("control_failed", extra={"fields": {"worker": worker.url, "reason": str(error)}})
        return Outcome(worker, 0, [], str(error).encode(), reachable=False)

    async def _unless_silent(self, worker: Worker, exchange: Coroutine[Any, Any, Outcome]) -> Outcome:
        if worker.state is not WorkerState.UNREACHED:
            return await exchange
        asking = asyncio.get_running_loop().create_task(exchange)
        try:
            if not await tasks.ends_within(UNREACHED_PATIENCE, asking) and worker.state is WorkerState.UNREACHED:
                raise UpstreamTimeout(f"no answer within {UNREACHED_PATIENCE:g} s, and it has never answered")
            return await asking
        finally:
            if not asking.done():
                await tasks.cancelled(asking)

    async def send_order(self, worker: Worker, order: Order) -> str | None:
        """Send one order to a worker. Return None if it succeeded, else the worker's answer."""
        outcome = await self.ask_one(worker, outgoing_order(order), QUICK)
        return None if outcome.ok else outcome.body.decode(errors="replace")

    def without_leadership(self) -> FanOut:
        """Return a fan-out for requests that change nothing at an engine: it does not need to be the leader."""
        return FanOut(self._upstream)

    async def _send(self, worker: Worker, request: Outgoing) -> Reply:
        fresh = not may_come_twice(request.method, request.target)
        if self._confirm_leadership is None:
            return await send(self._upstream, worker, request, slot=False, fresh=fresh)
        while await self._confirm_leadership():
            with suppress(NotAdmitted):
                return await send(self._upstream, worker, request, slot=False, admit=self._is_sole_leader, fresh=fresh)
        raise UpstreamError("nothing was sent: this process may no longer be the leader")

    async def _exchange(self, worker: Worker, request: Outgoing) -> Outcome:
        reply = await self._send(worker, request)
        try:
            return Outcome(worker, reply.status, reply.headers, await reply.read_all(MAX_ANSWER))
        finally:
            reply.close()


def outgoing_order(order: Order) -> Outgoing:
    """Return a control request of the router's own, ready to send."""
    return Outgoing(order.method, order.target, [(b"content-type", JSON)], order.body)


def failed(outcomes: Sequence[Outcome]) -> list[Outcome]:
    """Return the outcomes that make the request fail: the failures that are not excused, or all if no worker
    succeeded."""
    if not any(outcome.ok for outcome in outcomes):
        return list(outcomes)
    return [outcome for outcome in outcomes if not outcome.ok and not outcome.excused]


def merge_outcomes(outcomes: Sequence[Outcome], request_id: str) -> FleetAnswer:
    """Merge the outcomes: the workers' own answer if all are equal, else an answer that lists each worker."""
    answered = [outcome for outcome in outcomes if not outcome.excused]
    same = len({(outcome.status, outcome.body) for outcome in answered}) == 1
    if same and answered[0].status and answered[0].status < 500 and len(answered) == len(outcomes):
        return FleetAnswer(answered[0].status, answered[0].body, first_header(answered[0].headers, b"content-type"))
    workers = {outcome.worker.url: outcome.describe() for outcome in outcomes}
    if failures := failed(outcomes):
        error = PartlyFailed(f"these workers failed: {', '.join(outcome.worker.url for outcome in failures)}")
        return FleetAnswer(error.status, orjson.dumps({**error.body(request_id), "workers": workers}), JSON)
    return FleetAnswer(200, orjson.dumps({**_common_fields(answered), "workers": workers}), JSON)


def _common_fields(outcomes: Sequence[Outcome]) -> dict[str, object]:
    """Return the fields that are equal in all JSON answers, so that a client written for one worker finds them."""
    bodies = [outcome.describe()["body"] for outcome in outcomes]
    if not bodies or not all(isinstance(body, dict) for body in bodies):
        return {}
    dicts: list[dict[str, object]] = [body for body in bodies if isinstance(body, dict)]
    return {name: value for name, value in dicts[0].items() if all(name in d and d[name] == value for d in dicts)}
