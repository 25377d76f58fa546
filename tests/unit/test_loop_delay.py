"""How long the event loop was held, as `/metrics` tells it."""

from __future__ import annotations

import asyncio
import time

from miles_router.metrics.loop_delay import KEPT, LoopDelay
from miles_router.tasks import HOLD, Pace, spawn
from tests.support.waiting import until


def told(delay: LoopDelay) -> float:
    value = delay.numbers()["worst"]
    assert isinstance(value, float)
    return value


async def test_the_worst_delay_is_told_and_remembered() -> None:
    delay = LoopDelay()
    assert told(delay) == 0.0
    async with delay.running():
        await asyncio.sleep(0.06)
        time.sleep(0.2)  # noqa: ASYNC251 - which is what must show
        assert told(delay) > 0.1, "at once, before its timer has come"
        await asyncio.sleep(0.1)
        assert told(delay) > 0.1


async def test_a_delay_is_forgotten_after_a_while() -> None:
    delay = LoopDelay()
    async with delay.running():
        delay._delays.extend([60.0, *[0.0] * KEPT])
        assert told(delay) < 60.0


async def test_long_work_in_steps_lets_others_go_on() -> None:
    others, ended = 0, False

    async def work() -> None:
        nonlocal ended
        pace = Pace()
        for _ in range(50):
            time.sleep(HOLD)  # noqa: ASYNC251
            await pace.step()
        ended = True

    task = spawn(work(), name="work")
    while not ended:
        others += 1
        await asyncio.sleep(0)
    assert others >= 25
    await task
    await until(task.done, "it is over")
