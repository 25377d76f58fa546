"""Aborts: whom they mean among the requests in flight, and which workers hear of them."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Set
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
    urls = set[str]().union(*(exchange.flight.urls for exchange in concerned)) if rid else set()
    workers = [worker for worker in call.fleet.pool if worker.url in urls] or call.workers()
    inward = [_inward(call, worker, rid, concerned) for worker in workers] if rid else []
    outcomes, *others = await asyncio.gather(call.ask(workers), *inward)
    failed = {outcome.worker: outcome for each in others for outcome in each if not outcome.ok}
    return [failed.get(outcome.worker, outcome) for outcome in outcomes]


async def _inward(call: Call, worker: Worker, rid: str, concerned: Mapping[Exchange, Set[str]]) -> list[Outcome]:
    """Abort what one worker may know by other names than its client does. A worker that does not know `rid` itself
    aborts nothing that begins with it, so that it is told those names as well."""
    there = {exchange.flight: names for exchange, names in concerned.items() if worker.url in exchange.flight.urls}
    if not any(flight.inward for flight in there):
        return []
    names = {each for flight, own in there.items() for name in own for each in (name, *flight.names_inward(name))}
    return await asyncio.gather(*(_one(call, worker, name) for name in sorted(names - {rid})))


async def _one(call: Call, worker: Worker, rid: str) -> Outcome:
    (outcome,) = await call.tell([worker], call.row, rid=rid)
    return outcome
