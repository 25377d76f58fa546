"""Weight updates: run them on all workers, follow the fleet's weight version, and distrust probes that ran meanwhile.
Loading and unloading adapters does not change these versions."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import partial

from miles_router.control import standstill
from miles_router.control.call import Call, ask_all
from miles_router.control.fan_out import Outcome
from miles_router.engines.actions import ChangeAdapter, Flush, NameVersion, Update
from miles_router.fleet.workers import Worker

logger = logging.getLogger(__name__)

#: Longest adapter name that is remembered, in characters.
MAX_ADAPTER_NAME = 512
FLUSHED_LATER = b'{"success":true,"message":"The weights were updated, and the cache was flushed a moment later."}'


async def name_version(call: Call, version: str) -> list[Outcome]:
    """Set the name of the version of weights that the workers already have. No worker counts as outdated by it."""
    outcomes, _ = await _update(call, version, weights_changed=False)
    return outcomes


async def update(call: Call, action: Update) -> list[Outcome]:
    """Change the weights of all workers, after which an engine may flush its caches."""
    outcomes, changed = await _update(call, action.version, weights_changed=True)
    if action.flushes:
        outcomes = await _retry_flush(call, outcomes, changed)
        _record_flushes(outcomes)
    return outcomes


async def _update(call: Call, version: str | None, *, weights_changed: bool) -> tuple[list[Outcome], list[Worker]]:
    """Send an update to every worker, and record which workers applied it and under which version.

    An update without a version makes the fleet's version unknown: under `same-weights` only the workers that applied it
    stay routable.

    Args:
        weights_changed: whether the weights change; False if only the name of their version is set.

    Returns:
        The outcomes, and the workers that refused the update although they now sample with the new version.
    """
    pool, workers = call.fleet.pool, call.workers()
    changed: list[Worker] = []
    with pool.changing_weights():
        await call.fleet.wait_until_applied()
        outcomes = await call.ask(workers)
        if version is not None:
            refused = [outcome.worker for outcome in outcomes if outcome.reachable and not outcome.ok]
            others = [worker for worker in refused if worker.weight_version != version]
            changed = await _updated_despite_refusal(call, others, version)
    updated = [outcome.worker for outcome in outcomes if outcome.ok] + changed
    if version is not None:
        pool.record_update(updated, version, changed=weights_changed)
    elif updated:
        pool.record_update(updated, None)
        missed = [worker.url for worker in pool if worker.missed_update]
        logger.warning("weights_without_version", extra={"fields": {"path": call.order.path, "missed_by": missed}})
    call.health.check_all()
    return outcomes, changed


async def _updated_despite_refusal(call: Call, refused: Sequence[Worker], version: str) -> list[Worker]:
    """Return the workers that refused an update but sample with its version. SGLang 0.5.23 answers 400 if the weights
    have changed and the cache could not be flushed. It stamps the tokens with the new version, and reports the old one
    at `/model_info` until the version is set; that is done here."""
    versions = await asyncio.gather(*map(call.health.sampling_version, refused))
    changed = [worker for worker, sampling in zip(refused, versions, strict=True) if sampling == version]
    for worker in changed:
        logger.warning(
            "refused_update_took_effect", extra={"fields": {"worker": worker.url, "weight_version": version}}
        )
    replies = await call.send_action(changed, NameVersion(version), brief=True)
    return [outcome.worker for outcome in replies if outcome.ok]


async def _retry_flush(call: Call, outcomes: list[Outcome], changed: Sequence[Worker]) -> list[Outcome]:
    """Flush the caches of workers that applied an update but could not flush. Return the outcomes, with success for
    those that now flushed.

    In a pause with `abort`, SGLang 0.5.23 answers the pause while its scheduler still holds a request that was just
    aborted. It releases the request a step later.
    """
    pause = call.fleet.pause
    if not changed or pause is None or pause.mode == "in_place":  # requests held in place block every flush
        return outcomes
    replies = await standstill.ask_to_flush(call, changed, partial(call.send_action, action=Flush(), brief=True))
    updated = {outcome.worker for outcome in replies if outcome.ok}
    return [replace(each, status=200, body=FLUSHED_LATER) if each.worker in updated else each for each in outcomes]


async def change_adapter(call: Call, action: ChangeAdapter) -> list[Outcome]:
    """Load or unload an adapter on all workers. Note when, before and after, since evaluations must not mix its old and
    new weights. If the request has no readable name, any known adapter may change."""
    fleet = call.fleet
    names = [*fleet.adapter_names] if action.name is None else [action.name]
    known = [name for name in names if name in fleet.adapter_names]
    fleet.note_adapters(known, time.time())
    await fleet.wait_until_applied()
    outcomes = await ask_all(call)
    loaded = any(outcome.ok for outcome in outcomes)
    changed = [name for name in names if len(name) <= MAX_ADAPTER_NAME] if loaded else known
    fleet.note_adapters(changed, time.time())
    return outcomes


async def flush(call: Call) -> list[Outcome]:
    """Flush the workers' caches, and note which are empty: they hold no entries of older weights."""
    outcomes = await standstill.flush(call)
    _record_flushes(outcomes)
    return outcomes


def _record_flushes(outcomes: Iterable[Outcome]) -> None:
    for outcome in outcomes:
        if outcome.ok:
            outcome.worker.caches.record_flush()
