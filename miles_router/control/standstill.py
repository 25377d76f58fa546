"""Pause and continue, sleep and wake: what brings the fleet to a standstill, and what ends that."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Mapping, Sequence
from typing import Any

from miles_router.control.fan_out import Outcome, failed
from miles_router.control.row import Call
from miles_router.fleet.fleet import Order, Pause
from miles_router.fleet.workers import WorkerState

PAUSE_MODES = ("abort", "retract", "in_place")
#: What no generation can do without; released and resumed whole, or by the request's `tags`.
MEMORY = frozenset({"weights", "kv_cache"})


def check_pause(arguments: Mapping[str, Any]) -> str | None:
    """The mode is one that SGLang has."""
    mode = arguments.get("mode", "abort")
    return None if mode in PAUSE_MODES else f"mode must be one of {', '.join(PAUSE_MODES)}, got {mode!r}"


async def pause(call: Call) -> list[Outcome]:
    """All pause or none: where some worker refuses, those that did pause go on again."""
    workers, fleet, before = call.workers(), call.fleet, call.fleet.pause
    mode = call.arguments.get("mode", "abort")
    in_place = before is not None and before.mode == "in_place"
    kept = [worker for worker in workers if in_place or worker.state is WorkerState.PAUSED]
    fleet.begin_pause(Pause(mode, call.row.order(mode=mode)))
    if mode == "abort" and kept:
        # SGLang 0.5.23 waits, deaf to continue, for the end of what it keeps in place, which comes with continue. What
        # was retracted it aborts at once.
        await call.tell(kept, call.row, brief=True, mode="retract")
    outcomes = await call.ask(list(fleet.pool))
    if failed(outcomes):
        if before is None:
            await _take_back(call, outcomes)
        else:
            fleet.keep_pause(before)
    return outcomes


async def _take_back(call: Call, outcomes: Sequence[Outcome]) -> None:
    """Whoever paused goes on again, and so does whoever was silent, for it may have heard. Who then does not answer
    takes no traffic until it says that it is ready."""
    assert call.undo is not None
    did = [outcome.worker for outcome in outcomes if outcome.ok]
    silent = [outcome.worker for outcome in outcomes if not outcome.reachable]
    answers = await asyncio.gather(call.tell(did, call.undo), call.tell(silent, call.undo, brief=True))
    for outcome in itertools.chain(*answers):
        if not outcome.ok:
            call.fleet.pool.set_paused(outcome.worker, "may be paused, and could not be continued")
    call.fleet.end_pause()


async def go_on(call: Call) -> list[Outcome]:
    """Whoever does not go on takes no traffic. Where nobody is left who could refuse, the gate opens all the same."""
    outcomes = await call.ask(list(call.fleet.pool))
    for outcome in outcomes:
        if outcome.ok:
            call.fleet.pool.set_unpaused(outcome.worker)
    for outcome in failed(outcomes):
        call.fleet.pool.set_paused(outcome.worker, "could not be continued")
    call.fleet.end_pause()
    call.workers()
    return outcomes


async def sleep(call: Call) -> list[Outcome]:
    """The fleet sleeps as soon as one worker has released memory."""
    workers = call.workers()
    call.fleet.begin_sleep()
    outcomes = await call.ask(workers)
    if any(outcome.ok for outcome in outcomes):
        call.fleet.memory_released(_tags(call.arguments) or MEMORY, _as_order(call))
    call.fleet.wake_if_whole()
    return outcomes


async def wake(call: Call) -> list[Outcome]:
    """It wakes once all workers have every part again, or nobody is left who could refuse."""
    outcomes = await call.ask(list(call.fleet.pool))
    if not failed(outcomes):
        call.fleet.memory_resumed(_tags(call.arguments), _as_order(call))
    call.fleet.wake_if_whole()
    call.workers()
    return outcomes


def _tags(arguments: Mapping[str, Any]) -> frozenset[str]:
    """The parts of the memory that are meant; none: all."""
    tags = arguments.get("tags")
    return frozenset(map(str, tags)) if isinstance(tags, list) else frozenset()


def _as_order(call: Call) -> Order:
    return Order(call.request.method, call.request.target, call.request.body)
