"""Aborts: whom they mean among the requests in flight, and which workers hear of them."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

from miles_router.control.fan_out import Outcome
from miles_router.control.row import Call
from miles_router.errors import GroupAborted


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
    for exchange in concerned:
        call.fleet.gate.release(exchange.flight)
    urls = {exchange.flight.worker_url for exchange in concerned} if rid else set()
    workers = [worker for worker in call.fleet.pool if worker.url in urls] or call.workers()
    return await call.ask(workers)


async def _end_group(call: Call, group: str | int) -> list[Outcome]:
    """End the work of a group: what layers know of it, and its requests under way. One whose generations have no name
    that a worker knows is broken off, which ends it there too."""
    await asyncio.gather(*(listener(group) for listener in call.group_listeners))
    orders = []
    for exchange, rids in call.in_flight.of_group(str(group).encode()).items():
        flight = exchange.flight
        flight.aborted = True
        call.fleet.gate.release(flight)
        worker = call.fleet.pool.find(flight.worker_url or "")
        if worker is not None and rids:
            orders += [call.tell([worker], call.row, rid=rid) for rid in rids]
        elif flight.stop is not None:
            flight.stop(GroupAborted(f"group {group!r} was aborted"))
    return [outcome for outcomes in await asyncio.gather(*orders) for outcome in outcomes]
