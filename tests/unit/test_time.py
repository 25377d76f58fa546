"""Tasks, time limits and who waits: nothing is swallowed, and a stop of this process is nobody's fault."""

from __future__ import annotations

import asyncio
import logging
import time

import pytest

from miles_router.asgi.exchange import Message
from miles_router.asgi.watch import Deadlines, Watch
from miles_router.metrics.loop_delay import LoopDelay
from miles_router.tasks import spawn, together, within
from tests.support.waiting import PATIENCE, settled, soon


class Work:
    """Waits until it is told to end; notes how it ended."""

    def __init__(self, failure: Exception | None = None) -> None:
        self.go = asyncio.Event()
        self.ended = "not"
        self._failure = failure

    async def run(self) -> None:
        try:
            await self.go.wait()
        except asyncio.CancelledError:
            self.ended = "cancelled"
            raise
        if self._failure is not None:
            self.ended = "failed"
            raise self._failure
        self.ended = "done"


@pytest.mark.parametrize("count", [1, 2, 5])
async def test_the_first_failure_ends_the_others_and_is_raised(count: int) -> None:
    works = [Work() for _ in range(count - 1)] + [Work(ValueError("first"))]
    all_of_them = asyncio.ensure_future(together([work.run() for work in works], name="works"))
    await settled()
    works[-1].go.set()
    with pytest.raises(ValueError, match="first"):
        await soon(all_of_them)
    assert [work.ended for work in works] == ["cancelled"] * (count - 1) + ["failed"]


@pytest.mark.parametrize("count", [1, 2, 5])
async def test_cancellation_ends_all(count: int) -> None:
    works = [Work() for _ in range(count)]
    all_of_them = asyncio.ensure_future(together([work.run() for work in works], name="works"))
    await settled()
    all_of_them.cancel()
    with pytest.raises(asyncio.CancelledError):
        await soon(all_of_them)
    assert {work.ended for work in works} == {"cancelled"}


async def test_a_crash_of_a_background_task_is_logged_with_its_name(caplog: pytest.LogCaptureFixture) -> None:
    work = Work(ValueError("lost"))
    task = spawn(work.run(), name="in the background")
    work.go.set()
    with caplog.at_level(logging.ERROR), pytest.raises(ValueError, match="lost"):
        await task
    await settled()
    (record,) = [each for each in caplog.records if each.message == "task_crashed"]
    assert record.__dict__["fields"] == {"task": "in the background"}


async def test_a_stop_of_this_process_is_not_taken_for_work_that_is_late() -> None:
    work = Work()
    waiting = asyncio.ensure_future(within(0.1, work.run(), name="work"))
    await settled()
    time.sleep(0.2)  # noqa: ASYNC251
    await settled()  # what the system has kept for us meanwhile
    work.go.set()
    await soon(waiting)
    assert work.ended == "done"


async def test_a_cancellation_that_arrives_together_with_the_result_is_not_swallowed() -> None:
    """`asyncio.wait_for` of Python 3.10 and 3.11 swallows it."""
    work = Work()
    waiting = asyncio.ensure_future(within(PATIENCE, work.run(), name="work"))
    await settled()
    work.go.set()
    await asyncio.sleep(0)
    assert work.ended == "done"
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await soon(waiting)


async def test_a_stop_of_this_process_lets_nothing_expire_that_is_about_to_be_stopped() -> None:
    told: list[str] = []
    deadlines = Deadlines(0.1, told.append)
    deadlines.start("item")
    time.sleep(0.2)  # noqa: ASYNC251
    await settled()
    deadlines.stop("item")
    assert told == []


GONE: Message = {"type": "http.disconnect"}


async def test_a_stop_of_this_process_is_not_taken_for_a_worker_that_is_late() -> None:
    async def receive() -> Message:
        await asyncio.Event().wait()
        return GONE

    with Watch(receive, 0.1):
        time.sleep(0.2)  # noqa: ASYNC251
        await settled()


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
