"""Aborts: whom they mean among the requests in flight, and which workers hear of them."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Mapping
from typing import Any

from miles_router.asgi.exchange import Exchange
from miles_router.control.fan_out import Outcome
from miles_router.control.row import Call
from miles_router.fleet.workers import Worker


def check(arguments: Mapping[str, Any]) -> str | None:
    """SGLang ignores an abort that names nothing."""
    named = arguments.get("abort_all") or isinstance(arguments.get("rid"), str)
    return None if named else "rid (a string) or abort_all is required"


async def abort(call: Call) -> list[Outcome]:
    """`rid`: only where it runs; one the router cannot place is asked of everybody, which harms nobody."""
    rid = None if call.arguments.get("abort_all") else call.arguments.get("rid")
    concerned = await call.in_flight.abort(rid)
    for exchange in concerned:
        call.fleet.gate.release(exchange.flight)
    urls = {exchange.flight.worker_url for exchange in concerned} if rid else set()
    workers = [worker for worker in call.fleet.pool if worker.url in urls] or call.workers()
    inward = [_inward(call, worker, rid, concerned) for worker in workers] if rid else []
    outcomes, *others = await asyncio.gather(call.ask(workers), *inward)
    failed = {outcome.worker: outcome for each in others for outcome in each if not outcome.ok}
    return [failed.get(outcome.worker, outcome) for outcome in outcomes]


async def _inward(call: Call, worker: Worker, rid: str, concerned: Collection[Exchange]) -> list[Outcome]:
    """Abort what one worker knows by other names than its client does."""
    flights = [exchange.flight for exchange in concerned if exchange.flight.worker_url == worker.url]
    names = [name for each in flights for own, name in each.inward.items() if own.startswith(rid)]
    outcomes = await asyncio.gather(*(call.tell([worker], call.row, rid=name) for name in names))
    return [outcome for each in outcomes for outcome in each]
