"""Pause and continue, sleep and wake, and cache flushes: the control requests about a fleet that stands still."""

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
from miles_router.fleet.standstill import dump_standstill, restore_standstill
from miles_router.fleet.workers import Worker, WorkerState

#: Seconds for which a flush is repeated while the fleet is paused, and seconds between two attempts.
FLUSH_PATIENCE, FLUSH_AGAIN = 5.0, 0.25
MAX_NAMED = 8  # request ids listed in the answer to a flush


async def pause(call: Call, action: Pause) -> list[Outcome]:
    """Pause all workers or none: if a worker refuses, the workers that paused are continued."""
    workers, fleet, before = call.workers(), call.fleet, call.fleet.pause
    mode = action.mode
    in_place = before is not None and before.mode == "in_place"
    kept = [worker for worker in workers if in_place or worker.state is WorkerState.PAUSED]
    fleet.begin_pause(action)
    if before is None:  # a second pause needs no new record: the fleet is recorded as paused already
        await _save(call, fleet.end_pause)
    # From here on no process sends a generation, and all know why generations end early.
    await fleet.wait_until_applied()
    if mode == "abort" and kept:
        # SGLang 0.5.23 deadlocks here: it waits for the generations that it holds in place, which end only after a
        # continue, and ignores the continue. Retracted generations are aborted at once, so they are retracted first.
        await call.send_action(kept, Pause("retract"), brief=True)
    outcomes = await _pause_in_mode(call, list(fleet.pool), mode)
    if failed(outcomes):
        if before is None:
            await _undo_pause(call, outcomes)
        else:
            fleet.restore_pause(before)
    return outcomes


async def _save(call: Call, undo: Callable[[], None]) -> None:
    """Make the pause or sleep durable before any worker is asked.

    Raises:
        StateError: it cannot be made durable, and was undone.
    """
    try:
        await call.fleet.save_standstill()
    except StateError:
        undo()
        raise


async def _pause_in_mode(call: Call, workers: Sequence[Worker], mode: str) -> list[Outcome]:
    """Pause each worker in this mode, or in the mode that its engine has instead; its answer then contains both
    modes."""
    modes = [each.supported_pause(Pause(mode)).mode for each in await call.fleet.engines(workers)]
    others = {each for each in modes if each != mode}
    groups = {each: [worker for worker, its in zip(workers, modes, strict=True) if its == each] for each in others}
    asked = call.ask([worker for worker, its in zip(workers, modes, strict=True) if its == mode])
    outcomes = await asyncio.gather(asked, *(_pause_in_other_mode(call, groups[each], mode, each) for each in groups))
    found = {outcome.worker: outcome for outcome in itertools.chain(*outcomes)}
    return [found[worker] for worker in workers]


async def _pause_in_other_mode(call: Call, workers: Collection[Worker], mode: str, used_mode: str) -> list[Outcome]:
    """Pause these workers in mode `used_mode` instead of the requested `mode`."""
    message = (
        f"Paused with {used_mode!r}: this engine has no {mode!r}. Generations stay in it, and go on after a continue."
    )
    body = orjson.dumps({"message": message, "status": "ok", "mode": used_mode, "in_place_of": mode})
    outcomes = await call.send_action(workers, Pause(used_mode))
    return [replace(outcome, body=body) if outcome.ok else outcome for outcome in outcomes]


async def _undo_pause(call: Call, outcomes: Sequence[Outcome]) -> None:
    """Continue the workers that paused, and those that did not answer: they may have received the pause. A worker that
    refuses or does not answer the continue gets no traffic until it reports that it is ready."""
    did = [outcome.worker for outcome in outcomes if outcome.ok]
    silent = [outcome.worker for outcome in outcomes if not outcome.reachable]
    answers = await asyncio.gather(call.send_action(did, Continue()), call.send_action(silent, Continue(), brief=True))
    for outcome in itertools.chain(*answers):
        if not outcome.ok:
            call.fleet.pool.set_paused(outcome.worker, "may be paused, and could not be continued")
    call.fleet.end_pause()


async def continue_generation(call: Call) -> list[Outcome]:
    """Continue all workers. A worker that fails gets no traffic, but the gate opens in any case, even without any
    worker."""
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
    """Release the workers' memory. The fleet sleeps as soon as one worker has released some.

    Raises:
        UnsupportedByEngine: an engine cannot release its memory; no worker was asked.
    """
    workers = call.workers()
    await _check_sleep(call, workers)
    fleet, before = call.fleet, dump_standstill(call.fleet)

    def undo() -> None:
        restore_standstill(fleet, before)
        fleet.wake_if_all_resumed()

    fleet.begin_sleep()
    fleet.memory_released(action.parts, _as_order(call), workers)
    await _save(call, undo)
    await fleet.wait_until_applied()
    outcomes = await call.ask(workers)
    if any(outcome.ok for outcome in outcomes):
        fleet.slept -= {each.worker.url for each in outcomes if not each.ok} - {*before["slept"]}
    else:
        undo()
    return outcomes


async def wake(call: Call, action: Wake) -> list[Outcome]:
    """Resume the workers' memory. The fleet is awake once all workers have every part again, or no worker is left.
    Raises as `sleep` does."""
    await _check_sleep(call, list(call.fleet.pool))
    outcomes = await call.ask(list(call.fleet.pool))
    if not failed(outcomes):
        call.fleet.memory_resumed(action.parts, _as_order(call))
    call.fleet.wake_if_all_resumed()
    call.workers()
    return outcomes


async def _check_sleep(call: Call, workers: Sequence[Worker]) -> None:
    engines = await call.fleet.engines(workers)
    for worker, engine in zip(workers, engines, strict=True):
        if not engine.sleeps:
            raise UnsupportedByEngine(
                f"{call.order.path}: the engine of {worker.url} ({engine.kind}) cannot release memory"
            )


async def flush(call: Call) -> list[Outcome]:
    """Ask every worker to empty its caches. The answer of a worker that still refuses lists the requests that the pause
    holds."""
    outcomes = await ask_to_flush(call, call.workers(), call.ask)
    if call.fleet.pause is None:
        return outcomes
    return [await _with_held_requests(call, outcome) if outcome.status == REFUSED else outcome for outcome in outcomes]


async def ask_to_flush(
    call: Call, workers: Sequence[Worker], ask: Callable[[Sequence[Worker]], Awaitable[list[Outcome]]]
) -> list[Outcome]:
    """Ask workers to empty their caches, by `ask`. While the fleet is paused, repeat it for `FLUSH_PATIENCE` seconds
    for those that refuse: an engine may not have released the aborted generations yet."""
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


async def _with_held_requests(call: Call, outcome: Outcome) -> Outcome:
    ids = sorted(await call.requests.ids_at(outcome.worker.url))
    named = ", ".join(ids[:MAX_NAMED]) + (", ..." if len(ids) > MAX_NAMED else "")
    held = f"The pause holds {len(ids)} requests on this worker{': ' + named if ids else ''}.\n"
    return replace(outcome, body=outcome.body + held.encode())


def _as_order(call: Call) -> Order:
    return Order(call.request.method, call.request.target, call.request.body)
