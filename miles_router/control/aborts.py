"""Aborts: whom they mean among the requests in flight, and which workers hear of them."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from miles_router.control.call import Call
from miles_router.control.fan_out import Outcome
from miles_router.control.requests import Aborted, urls_of
from miles_router.engines.actions import Abort
from miles_router.fleet.workers import Worker


async def abort(call: Call, name: str | None) -> list[Outcome]:
    """Abort a generation only where it runs, all for None. A worker that is asked in vain for one is not harmed, so all
    are asked for one that the router cannot place."""
    concerned = await call.requests.abort(name)
    urls = urls_of(concerned) if name else set()
    workers = [worker for worker in call.fleet.pool if worker.url in urls] or call.workers()
    inward = [_inward(call, worker, name, concerned) for worker in workers] if name else []
    outcomes, *others = await asyncio.gather(call.ask(workers), *inward)
    failed = {outcome.worker: outcome for each in others for outcome in each if not outcome.ok}
    return [failed.get(outcome.worker, outcome) for outcome in outcomes]


async def _inward(call: Call, worker: Worker, name: str, concerned: Sequence[Aborted]) -> list[Outcome]:
    """Abort what one worker may know by other names than its client does. A worker that does not know `name` itself
    aborts nothing that begins with it, so that it is told those names as well."""
    there = [each for each in concerned if worker.url in each.urls]
    if not any(each.renamed for each in there):
        return []
    names = {inward for each in there for inward in each.names}
    return await asyncio.gather(*(_one(call, worker, inward) for inward in sorted(names - {name})))


async def _one(call: Call, worker: Worker, name: str) -> Outcome:
    (outcome,) = await call.tell([worker], Abort(name))
    return outcome


async def end_group(call: Call, group: str | int) -> list[Outcome]:
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
