"""The LoRA adapters of a worker: read from the worker, or remembered when the worker does not report them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from miles_router.engines.facts import Facts
from miles_router.errors import Unauthorized
from miles_router.fleet.workers import Worker

if TYPE_CHECKING:
    from miles_router.control.probes import Probes


async def ask_for_adapters(
    probes: Probes, worker: Worker, patience: float | None = None, key: bytes | None = None
) -> frozenset[str] | None:
    """Ask a worker for its adapters now, and return None if it does not report them within `patience` seconds.

    `key` is the `Authorization` header for a worker that was registered without a key.
    """
    try:
        return await probes.adapters(worker, patience, key)
    except Unauthorized:
        worker.withholds_adapters = True
        return None


async def current_adapters(probes: Probes, facts: Facts, worker: Worker) -> frozenset[str] | None:
    """Return a worker's adapters: reported now, or else the last known ones if the engine process is the same."""
    if not facts.lora:
        return worker.adapters if facts.lora is None else frozenset()
    reported, before = await ask_for_adapters(probes, worker), worker.facts
    same = before is not None and before.process is not None and before.process == facts.process
    return worker.adapters if reported is None and same else reported
