"""Compare the workers' loads, and move running requests between them."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import NamedTuple

from miles_router import tasks
from miles_router.asgi.exchange import Exchange
from miles_router.control.call import BRIEF
from miles_router.control.fan_out import FanOut, outgoing_order
from miles_router.engines.actions import Abort
from miles_router.engines.facts import Facts
from miles_router.engines.generate import RID
from miles_router.engines.json_bytes import read_json
from miles_router.engines.known import USUAL
from miles_router.errors import BadRequest
from miles_router.fleet.workers import Role, Worker
from miles_router.generation.attempt import ResumeServices
from miles_router.middlewares.contract import ASGIApp
from miles_router.partial_rollouts.moves.balance import choose_move
from miles_router.partial_rollouts.moves.checks import Immovable, check_size, read_movable
from miles_router.partial_rollouts.moves.moved import BEGUN_ANEW, Relocation

logger = logging.getLogger(__name__)

#: Checks of running requests within the time that a request must have run.
CHECKS = 5
#: Limits for one check: moves, and bodies that are parsed.
AT_ONCE, READ_AT_ONCE = 4, 16


class UnitName(NamedTuple):
    """A unit: the URL of its worker, and its rank there."""

    url: str
    rank: int | None


@dataclass(slots=True)
class Stay:
    """The time for which a request has been at its unit; `immovable` if it cannot move."""

    place: UnitName
    since: float
    body: bytes
    immovable: bool = False


class Mover:
    """The mover of running requests; it works inside the context `running()`.

    Args:
        services: the services for continuing generations; they must not resume cuts of pauses.
        app: the innermost app.
        after: seconds that a request must have run since it was sent; 0 turns moves off.
        excused: returns whether a control request may be running.
    """

    def __init__(
        self, services: ResumeServices, app: ASGIApp, fan_out: FanOut, *, after: float, excused: Callable[[], bool]
    ) -> None:
        self._services = services
        self._app = app
        self._fan_out = fan_out
        self._after = after
        self._excused = excused
        self._fleet = services.router.fleet
        self._stays: dict[Exchange, Stay] = {}
        self._attempts: set[Exchange] = set()
        self._orders: set[asyncio.Task[None]] = set()

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Check loads in the background inside this context; at exit, end all abort orders."""
        if not self._after:
            yield
            return
        looking = tasks.spawn(self._check_periodically(), name="moves")
        try:
            yield
        finally:
            for task in (looking, *self._orders):
                await tasks.cancelled(task)

    async def _check_periodically(self) -> None:
        while True:
            await asyncio.sleep(self._after / CHECKS)
            await self.start_moves(time.monotonic())

    async def start_moves(self, now: float) -> None:
        """Start moves of requests that have been at a crowded unit for `after` seconds at the time `now`."""
        self._update_stays(now)
        loads = self._loads()
        if len(loads) < 2 or not self._is_undisturbed():
            return
        choice, begun, pace = self._candidates(loads, now), 0, tasks.Pace()
        for _ in range(READ_AT_ONCE):
            pair = choose_move(loads, choice)
            if pair is None or begun == AT_ONCE:
                return
            source, target = pair
            if await self._start_move(choice[source].pop(0), source, target):
                loads[source] -= 1
                loads[target] += 1
                begun += 1
            await pace.step()

    def _is_undisturbed(self) -> bool:
        """Return whether no pause, weight update or control request is in progress."""
        return not self._fleet.gate.closed and self._fleet.pool.weights_epoch % 2 == 0 and not self._excused()

    def _update_stays(self, now: float) -> None:
        before, self._stays = self._stays, {}
        for exchange, body in self._services.in_flight.requests():
            routing = exchange.routing
            if not routing.movable or routing.worker_url is None:
                continue
            place, stay = UnitName(routing.worker_url, routing.rank), before.get(exchange)
            if stay is None or stay.place != place or stay.body is not body:
                stay = Stay(place, now, body)
                routing.move = None  # the move from its earlier unit is over
            self._stays[exchange] = stay

    def _loads(self) -> dict[UnitName, int]:
        """Return, for each unit that can move requests, how many it will have after the moves in progress."""
        pool = self._fleet.pool
        loads = {
            UnitName(unit.worker.url, unit.rank): unit.in_flight
            for unit in self._fleet.snapshot.routable
            if self._supports_moves(unit.worker) and unit.worker.weight_version == pool.weight_version
        }
        for exchange, stay in self._stays.items():
            move = exchange.routing.move
            if move is not None and exchange.routing.stop is not None and stay.place in loads:
                loads[stay.place] -= 1
                _count_request(loads, move.target)
        for exchange in self._attempts:
            if exchange.routing.stop is None:  # not at a worker at the moment
                _count_request(loads, exchange.routing.preferred)
        return loads

    def _candidates(self, loads: dict[UnitName, int], now: float) -> dict[UnitName, list[Exchange]]:
        choice: dict[UnitName, list[Exchange]] = {place: [] for place in loads}
        for exchange, stay in self._stays.items():
            long = now - stay.since >= self._after
            if stay.place in choice and long and not stay.immovable and _awaits_reply(exchange):
                choice[stay.place].append(exchange)
        return choice

    async def _start_move(self, exchange: Exchange, source: UnitName, target: UnitName) -> bool:
        """Start one move; return False if the request cannot move. Check before the abort what could fail after it."""
        stay, engines = self._stays[exchange], [self._facts(source), self._facts(target)]
        with ExitStack() as order:
            try:
                check_size(stay.body, engines)
                request = read_movable(read_json(stay.body), engines)
                order.enter_context(self._services.in_flight.sending_abort(request.body[RID]))
                if await self._services.in_flight.matching(request.body[RID], source.url) != {exchange}:
                    raise Immovable("named_alike")
            except (BadRequest, Immovable) as refusal:
                reason = refusal.reason if isinstance(refusal, Immovable) else "unreadable"
                self._services.router.metrics.unmoved_generations[reason] += 1
                stay.immovable = True
                return False
            here = UnitName(exchange.routing.worker_url or "", exchange.routing.rank) == source and _awaits_reply(
                exchange
            )
            if not here or not self._is_undisturbed() or not {source, target} <= self._loads().keys():
                return False
            exchange.routing.move = Relocation(
                services=self._services,
                app=self._app,
                request=request,
                body=stay.body,
                source=source.url,
                target=target.url,
                cuts=self._fleet.gate.aborting_pauses,
                attempts=self._attempts,
            )
            *_, name = request.body[RID], *exchange.routing.names_inward(request.body[RID])
            self._order_abort(self._fleet.pool.get(source.url), name, order.pop_all())
        return True

    def _order_abort(self, worker: Worker, rid: str, until_then: ExitStack) -> None:
        """Order a worker to abort a generation. If the order is lost, the worker continues it."""
        order = tasks.spawn(self._send_abort(worker, rid), name=f"move from {worker.url}")
        self._orders.add(order)
        order.add_done_callback(self._orders.discard)
        order.add_done_callback(lambda _: until_then.close())

    async def _send_abort(self, worker: Worker, rid: str) -> None:
        order = (worker.engine or USUAL).order(Abort(rid))
        await self._fan_out.ask_one(worker, outgoing_order(order), BRIEF)

    def _supports_moves(self, worker: Worker) -> bool:
        """Return whether a worker's requests can move: its engine returns the tokens of aborted requests, its weight
        version and context length are known, and it is not half of a prefill/decode pair."""
        return (
            worker.role is Role.REGULAR
            and worker.weight_version is not None
            and worker.engine is not None
            and worker.engine.returns_aborted
            and self._fleet.known_facts(worker.url).context_length is not None
        )

    def _facts(self, place: UnitName) -> Facts:
        return self._fleet.known_facts(place.url)


def _count_request(loads: dict[UnitName, int], url: str | None) -> None:
    """Count one more request at the worker's unit with the fewest."""
    units = [unit for unit in loads if unit.url == url]
    if units:
        loads[min(units, key=loads.__getitem__)] += 1


def _awaits_reply(exchange: Exchange) -> bool:
    """Return whether a request waits for its worker's reply, and is neither aborted, nor moving, nor moved in vain."""
    routing = exchange.routing
    if BEGUN_ANEW in exchange.notes:
        return False
    return routing.first_byte_at is None and routing.move is None and not routing.aborted and routing.stop is not None
