"""Aborts: whom they mean among the requests in flight, and which workers hear of them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from miles_router.control.fan_out import Outcome
from miles_router.control.row import Call


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
    return await call.ask(workers)
