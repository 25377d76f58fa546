"""Pause and continue, sleep and wake: what brings the fleet to a standstill, and what ends that."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable, Callable, Collection, Sequence
from dataclasses import replace

import orjson

from miles_router.control.call import REFUSED, Call
from miles_router.control.fan_out import Outcome, failed
from miles_router.engines.actions import Continue, Order, Pause, Sleep, Wake
from miles_router.errors import StateError, UnsupportedByEngine
from miles_router.fleet.standstill import stand_still, standstill
from miles_router.fleet.workers import Worker, WorkerState

#: Seconds for which a paused fleet is asked again to flush, and between two questions.
FLUSH_PATIENCE, FLUSH_AGAIN = 5.0, 0.25
MAX_NAMED = 8  # requests, in the answer to a flush


async def pause(call: Call, action: Pause) -> list[Outcome]:
    """All pause or none: where some worker refuses, those that did pause go on again."""
    workers, fleet, before = call.workers(), call.fleet, call.fleet.pause
    mode = action.mode
    in_place = before is not None and before.mode == "in_place"
    kept = [worker for worker in workers if in_place or worker.state is WorkerState.PAUSED]
    fleet.begin_pause(action)
    if before is None:  # else it is durable that the fleet is paused, and workers are in the mode that was asked for
        await _keep(call, fleet.end_pause)
    await fleet.everywhere()  # from here on nobody sends a generation, and cuts are known for what they are
    if mode == "abort" and kept:
        # SGLang 0.5.23 waits, deaf to continue, for the end of what it keeps in place, which comes with continue. What
        # was retracted it aborts at once.
        await call.tell(kept, Pause("retract"), brief=True)
    outcomes = await _tell_mode(call, list(fleet.pool), mode)
    if failed(outcomes):
        if before is None:
            await _take_back(call, outcomes)
        else:
            fleet.keep_pause(before)
    return outcomes


async def _keep(call: Call, undo: Callable[[], None]) -> None:
    """Make durable that the fleet stands still, before any worker is told.

    Raises:
        StateError: it cannot be made durable, and was undone.
    """
    try:
        await call.fleet.keep()
    except StateError:
        undo()
        raise


async def _tell_mode(call: Call, workers: Sequence[Worker], mode: str) -> list[Outcome]:
    """Pause each in this mode, or in the one that its engine has in place of it; the answer says so then."""
    told = [each.pause_told(Pause(mode)).mode for each in await call.fleet.engines(workers)]
    others = {each for each in told if each != mode}
    groups = {each: [worker for worker, its in zip(workers, told, strict=True) if its == each] for each in others}
    asked = call.ask([worker for worker, its in zip(workers, told, strict=True) if its == mode])
    outcomes = await asyncio.gather(asked, *(_tell_other(call, groups[each], mode, each) for each in groups))
    found = {outcome.worker: outcome for outcome in itertools.chain(*outcomes)}
    return [found[worker] for worker in workers]


async def _tell_other(call: Call, workers: Collection[Worker], mode: str, told: str) -> list[Outcome]:
    """Pause some in another mode than was asked for."""
    message = f"Paused with {told!r} in place of {mode!r}: generations stay, and go on with the engine."
    body = orjson.dumps({"message": message, "status": "ok", "mode": told, "in_place_of": mode})
    outcomes = await call.tell(workers, Pause(told))
    return [replace(outcome, body=body) if outcome.ok else outcome for outcome in outcomes]


async def _take_back(call: Call, outcomes: Sequence[Outcome]) -> None:
    """Whoever paused goes on again, and so does whoever was silent, for it may have heard. Who then does not answer
    takes no traffic until it says that it is ready."""
    did = [outcome.worker for outcome in outcomes if outcome.ok]
    silent = [outcome.worker for outcome in outcomes if not outcome.reachable]
    answers = await asyncio.gather(call.tell(did, Continue()), call.tell(silent, Continue(), brief=True))
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


async def sleep(call: Call, action: Sleep) -> list[Outcome]:
    """The fleet sleeps as soon as one worker has released memory.

    Raises:
        UnsupportedByEngine: an engine would end over it; none was asked.
    """
    workers = call.workers()
    await _check_sleep(call, workers)
    fleet, before = call.fleet, standstill(call.fleet)

    def undo() -> None:
        stand_still(fleet, before)
        fleet.wake_if_whole()

    fleet.begin_sleep()
    fleet.memory_released(action.parts, _as_order(call), workers)
    await _keep(call, undo)
    await fleet.everywhere()
    outcomes = await call.ask(workers)
    if any(outcome.ok for outcome in outcomes):
        fleet.slept -= {each.worker.url for each in outcomes if not each.ok} - {*before["slept"]}
    else:
        undo()
    return outcomes


async def wake(call: Call, action: Wake) -> list[Outcome]:
    """It wakes once all workers have every part again, or nobody is left who could refuse. Raises as `sleep`."""
    await _check_sleep(call, list(call.fleet.pool))
    outcomes = await call.ask(list(call.fleet.pool))
    if not failed(outcomes):
        call.fleet.memory_resumed(action.parts, _as_order(call))
    call.fleet.wake_if_whole()
    call.workers()
    return outcomes


async def _check_sleep(call: Call, workers: Sequence[Worker]) -> None:
    engines = await call.fleet.engines(workers)
    for worker, engine in zip(workers, engines, strict=True):
        if not engine.sleeps:
            raise UnsupportedByEngine(f"{call.order.path}: the engine of {worker.url} ({engine.kind}) ends over it")


async def flush(call: Call) -> list[Outcome]:
    """Ask every worker to empty its caches. A worker that refuses in the end says which requests the pause holds."""
    outcomes = await ask_to_flush(call, call.workers(), call.ask)
    if call.fleet.pause is None:
        return outcomes
    return [await _with_held(call, outcome) if outcome.status == REFUSED else outcome for outcome in outcomes]


async def ask_to_flush(
    call: Call, workers: Sequence[Worker], ask: Callable[[Sequence[Worker]], Awaitable[list[Outcome]]]
) -> list[Outcome]:
    """Ask workers to empty their caches, by `ask`. While the fleet is paused, a worker that refuses is asked again for
    `FLUSH_PATIENCE` seconds: its engine may not have let go yet of what it was told to abort."""
    outcomes = await ask(workers)
    loop = asyncio.get_running_loop()
    until = loop.time() + FLUSH_PATIENCE
    while call.fleet.pause is not None and (refused := _refused(outcomes)) and loop.time() < until:
        await asyncio.sleep(FLUSH_AGAIN)
        again = {outcome.worker: outcome for outcome in await ask([each.worker for each in refused])}
        outcomes = [again.get(outcome.worker, outcome) for outcome in outcomes]
    return outcomes


def _refused(outcomes: Sequence[Outcome]) -> list[Outcome]:
    return [outcome for outcome in outcomes if outcome.status == REFUSED]


async def _with_held(call: Call, outcome: Outcome) -> Outcome:
    ids = sorted(await call.requests.at(outcome.worker.url))
    named = ", ".join(ids[:MAX_NAMED]) + (", ..." if len(ids) > MAX_NAMED else "")
    held = f"The pause holds {len(ids)} requests there{': ' + named if ids else ''}.\n"
    return replace(outcome, body=outcome.body + held.encode())


def _as_order(call: Call) -> Order:
    return Order(call.request.method, call.request.target, call.request.body)
