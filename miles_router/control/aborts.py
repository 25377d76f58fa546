"""Aborts: find the requests in flight that an abort names, and send it to the workers that run them."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from miles_router.control.call import Call
from miles_router.control.fan_out import Outcome
from miles_router.control.requests import Aborted, urls_of
from miles_router.engines.actions import Abort
from miles_router.fleet.workers import Worker


async def abort(call: Call, name: str | None) -> list[Outcome]:
    """Abort the generations with the id `name`, on the workers that run them; with None, abort all generations.

    An id that is not in flight in this router is sent to every worker, since a worker ignores an unknown id. Return one
    outcome for each worker that was asked.
    """
    concerned = await call.requests.abort(name)
    urls = urls_of(concerned) if name else set()
    workers = [worker for worker in call.fleet.pool if worker.url in urls] or call.workers()
    renamed = [_abort_renamed(call, worker, name, concerned) for worker in workers] if name else []
    outcomes, *others = await asyncio.gather(call.ask(workers), *renamed)
    failed = {outcome.worker: outcome for each in others for outcome in each if not outcome.ok}
    return [failed.get(outcome.worker, outcome) for outcome in outcomes]


async def _abort_renamed(call: Call, worker: Worker, name: str, concerned: Sequence[Aborted]) -> list[Outcome]:
    """Abort the generations that the router has renamed for this worker, each by its new id. The worker matches aborts
    by prefix, but does not know `name`, so that `name` alone would abort nothing."""
    there = [each for each in concerned if worker.url in each.urls]
    if not any(each.renamed for each in there):
        return []
    names = {renamed for each in there for renamed in each.names}
    return await asyncio.gather(*(_abort_one(call, worker, renamed) for renamed in sorted(names - {name})))


async def _abort_one(call: Call, worker: Worker, name: str) -> Outcome:
    (outcome,) = await call.send_action([worker], Abort(name))
    return outcome


async def end_group(call: Call, group: str | int) -> list[Outcome]:
    """End all requests and sessions of a group.

    Raises:
        StateError: everything has ended, but a part of that could not be made durable.
    """
    aborted, failures = await call.requests.end_group(group)
    orders = []
    for each in aborted:
        workers = [worker for url in each.urls if (worker := call.fleet.pool.find(url)) is not None]
        orders += [_abort_one(call, worker, name) for worker in workers for name in each.names]
    outcomes = await asyncio.gather(*orders)
    for failure in failures:
        raise failure
    return outcomes
