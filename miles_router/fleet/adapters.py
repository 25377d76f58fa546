"""What a worker says of its adapters, and what holds where it says nothing."""

from __future__ import annotations

from typing import Protocol

from miles_router.engines.facts import Facts
from miles_router.errors import Unauthorized
from miles_router.fleet.workers import Worker


class AdapterQuestion(Protocol):
    """How one worker is asked: `control.probes.Probes`."""

    async def adapters(self, worker: Worker, patience: float | None, key: bytes | None) -> frozenset[str] | None:
        """The adapters that it has; None where it does not say, within so many seconds; raises Unauthorized where it
        says so to others than this `Authorization`."""
        ...


async def told_adapters(
    question: AdapterQuestion, worker: Worker, patience: float | None = None, key: bytes | None = None
) -> frozenset[str] | None:
    """The adapters that a worker has, asked now, with this `Authorization` where it has none of its own; None where it
    does not say, within so many seconds."""
    try:
        return await question.adapters(worker, patience, key)
    except Unauthorized:
        worker.withholds = True
        return None


async def adapters_by(question: AdapterQuestion, facts: Facts, worker: Worker) -> frozenset[str] | None:
    """Those of an engine with these facts: as it says now, or said before, if it is the same."""
    if not facts.lora:
        return worker.adapters if facts.lora is None else frozenset()
    told, before = await told_adapters(question, worker), worker.facts
    same = before is not None and before.process is not None and before.process == facts.process
    return worker.adapters if told is None and same else told
