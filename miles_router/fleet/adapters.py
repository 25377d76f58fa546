"""The LoRA adapters of a worker: read from the worker, or remembered when the worker does not report them."""

from __future__ import annotations

from typing import Protocol

from miles_router.engines.facts import Facts
from miles_router.errors import Unauthorized
from miles_router.fleet.workers import Worker


class AdapterQuestion(Protocol):
    """A client of the workers' adapter lists; `control.probes.Probes` implements it."""

    async def adapters(self, worker: Worker, patience: float | None, key: bytes | None) -> frozenset[str] | None:
        """Return the names of the loaded adapters, or None if the worker does not report them.

        Args:
            patience: the timeout in seconds.
            key: the `Authorization` header to send.

        Raises:
            Unauthorized: the worker refuses this key.
        """
        ...


async def told_adapters(
    question: AdapterQuestion, worker: Worker, patience: float | None = None, key: bytes | None = None
) -> frozenset[str] | None:
    """Ask a worker for its adapters now, and return None if it does not report them within `patience` seconds.

    `key` is the `Authorization` header for a worker that was registered without a key.
    """
    try:
        return await question.adapters(worker, patience, key)
    except Unauthorized:
        worker.withholds = True
        return None


async def adapters_by(question: AdapterQuestion, facts: Facts, worker: Worker) -> frozenset[str] | None:
    """Return a worker's adapters: reported now, or else the last known ones if the engine process is the same."""
    if not facts.lora:
        return worker.adapters if facts.lora is None else frozenset()
    told, before = await told_adapters(question, worker), worker.facts
    same = before is not None and before.process is not None and before.process == facts.process
    return worker.adapters if told is None and same else told
