"""Aborts: whom they mean among the requests in flight, and which workers hear of them."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

from miles_router.control.fan_out import Outcome
from miles_router.control.requests import Aborted, urls_of
from miles_router.control.row import Call
from miles_router.engines.actions import Abort
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
    concerned = await call.requests.abort(rid)
    urls = urls_of(concerned) if rid else set()
    workers = [worker for worker in call.fleet.pool if worker.url in urls] or call.workers()
    inward = [_inward(call, worker, rid, concerned) for worker in workers] if rid else []
    outcomes, *others = await asyncio.gather(call.ask(workers), *inward)
    failed = {outcome.worker: outcome for each in others for outcome in each if not outcome.ok}
    return [failed.get(outcome.worker, outcome) for outcome in outcomes]


async def _inward(call: Call, worker: Worker, rid: str, concerned: Sequence[Aborted]) -> list[Outcome]:
    """Abort what one worker may know by other names than its client does. A worker that does not know `rid` itself
    aborts nothing that begins with it, so that it is told those names as well."""
    there = [each for each in concerned if worker.url in each.urls]
    if not any(each.renamed for each in there):
        return []
    names = {name for each in there for name in each.names}
    return await asyncio.gather(*(_one(call, worker, name) for name in sorted(names - {rid})))


async def _one(call: Call, worker: Worker, rid: str) -> Outcome:
    (outcome,) = await call.tell([worker], Abort(rid))
    return outcome


async def _end_group(call: Call, group: str | int) -> list[Outcome]:
    """End the work of a group.

    Raises:
        StateError: all of it has ended, and not all of that is durable.
    """
    aborted, failures = await call.requests.end_group(group)
    orders = []
    for each in aborted:
        workers = [worker for url in each.urls if (worker := call.fleet.pool.find(url)) is not None]
        orders += [_one(call, worker, name) for worker in workers for name in each.names]
    outcomes = await asyncio.gather(*orders)
    for failure in failures:
        raise failure
    return outcomes
