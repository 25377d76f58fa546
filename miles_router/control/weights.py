"""Weight updates: the fleet's version follows them, and no probe that ran meanwhile is believed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from miles_router.control.fan_out import Outcome
from miles_router.control.row import Call


def check_version(arguments: Mapping[str, Any]) -> str | None:
    """SGLang takes only texts."""
    return None if isinstance(arguments.get("new_version"), str) else "new_version must be a string"


def check_model_path(arguments: Mapping[str, Any]) -> str | None:
    """SGLang takes only texts."""
    return None if isinstance(arguments.get("model_path"), str) else "model_path must be a string"


async def update(call: Call) -> list[Outcome]:
    """Whoever did it has the version that the request names; then every worker is asked for its own."""
    pool, workers = call.fleet.pool, call.workers()
    with pool.changing_weights():
        outcomes = await call.ask(workers)
    version = call.arguments.get("new_version", call.arguments.get("weight_version"))
    if version is not None:
        pool.updated([outcome.worker for outcome in outcomes if outcome.ok], str(version))
    call.health.check_all()
    return outcomes
