"""Aborts: whom they mean among the requests in flight, and which workers hear of them."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Set
from typing import Any

from miles_router.asgi.exchange import Exchange
from miles_router.asgi.flight import Flight
from miles_router.control.fan_out import Outcome
from miles_router.control.row import Call
from miles_router.errors import GroupAborted
from miles_router.fleet.workers import Worker


def check(arguments: Mapping[str, Any]) -> str | None:
    """SGLang ignores an abort that names nothing."""
    group = arguments.get("group")
    if group is not None:
        named = isinstance(group, (str, int)) and not isinstance(group, bool) and group != ""
        return None if named and len(arguments) == 1 else "group must be a string or a whole number, and stand alone"
    named = arguments.get("abort_all") or isinstance(arguments.get("rid"), str)
    return None if named else "rid (a string), group or abort_all is required"


async def abort(call: Call) -> list[Outcome]:
    """`rid`: only where it runs; one the router cannot place is asked of everybody, which harms nobody."""
    if call.arguments.get("group") is not None:
        return await _end_group(call, call.arguments["group"])
    rid = None if call.arguments.get("abort_all") else call.arguments.get("rid")
    concerned = await call.in_flight.abort(rid)
    call.fleet.gate.release(*(exchange.flight for exchange in concerned))
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
    names = {each for flight, own in there.items() for each in _names(flight, own)}
    return await asyncio.gather(*(_one(call, worker, name) for name in sorted(names - {rid})))


def _names(flight: Flight, own: Set[str]) -> set[str]:
    """All that a worker may know these generations by."""
    return {each for name in own for each in (name, *flight.names_inward(name))}


async def _one(call: Call, worker: Worker, rid: str) -> Outcome:
    (outcome,) = await call.tell([worker], call.row, rid=rid)
    return outcome


async def _end_group(call: Call, group: str | int) -> list[Outcome]:
    """End the work of a group: what layers know of it, and its requests under way. One whose generations have no name
    that a worker knows is broken off, which ends it there too."""
    heard = await asyncio.gather(*(listener(group) for listener in call.group_listeners), return_exceptions=True)
    orders = []
    members = call.in_flight.of_group(str(group).encode())
    call.fleet.gate.release(*(exchange.flight for exchange in members))
    for exchange, rids in members.items():
        flight = exchange.flight
        flight.aborted = True
        workers = [worker for url in flight.urls if (worker := call.fleet.pool.find(url)) is not None]
        if workers and rids:
            names = sorted(_names(flight, rids))
            orders += [_one(call, worker, name) for worker in workers for name in names]
        elif flight.stop is not None:
            flight.stop(GroupAborted(f"group {group!r} was aborted"))
    outcomes = await asyncio.gather(*orders)
    for failure in (each for each in heard if each is not None):  # once all else has ended
        raise failure
    return outcomes
