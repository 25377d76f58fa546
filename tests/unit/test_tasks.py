"""Tasks that belong together end together, and a crash is never silent."""

from __future__ import annotations

import asyncio
import gc
import logging
import time

import pytest

from miles_router.tasks import cancelled, spawn, together, within
from tests.support.waiting import PATIENCE, soon


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


async def settled() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


@pytest.mark.parametrize("count", [0, 1, 2, 5])
async def test_it_ends_when_all_have(count: int) -> None:
    works = [Work() for _ in range(count)]
    all_of_them = asyncio.ensure_future(together([work.run() for work in works], name="works"))
    for work in works:
        await settled()
        assert not all_of_them.done()
        work.go.set()
    await soon(all_of_them)
    assert {work.ended for work in works} <= {"done"}


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


async def test_who_is_done_stays_done_when_another_fails() -> None:
    done, failing, waiting = Work(), Work(ValueError("second")), Work()
    all_of_them = asyncio.ensure_future(together([w.run() for w in (done, failing, waiting)], name="works"))
    done.go.set()
    await settled()
    failing.go.set()
    with pytest.raises(ValueError, match="second"):
        await soon(all_of_them)
    assert (done.ended, waiting.ended) == ("done", "cancelled")


async def test_two_that_fail_at_once_leave_no_failure_unlooked_at() -> None:
    complaints: list[object] = []

    async def fails(text: str) -> None:
        raise ValueError(text)

    async def both() -> None:
        with pytest.raises(ValueError, match=r"one|two"):
            await together([fails("one"), fails("two")], name="works")

    asyncio.get_running_loop().set_exception_handler(lambda _, context: complaints.append(context["message"]))
    await both()
    gc.collect()
    asyncio.get_running_loop().set_exception_handler(None)
    assert complaints == []


async def test_a_crash_of_a_background_task_is_logged_with_its_name(caplog: pytest.LogCaptureFixture) -> None:
    work = Work(ValueError("lost"))
    task = spawn(work.run(), name="in the background")
    work.go.set()
    with caplog.at_level(logging.ERROR), pytest.raises(ValueError, match="lost"):
        await task
    await settled()
    (record,) = [each for each in caplog.records if each.message == "task_crashed"]
    assert record.__dict__["fields"] == {"task": "in the background"}


async def test_cancelled_waits_until_the_task_has_ended() -> None:
    work = Work()
    task = spawn(work.run(), name="work")
    await settled()
    await cancelled(task)
    assert (task.done(), work.ended) == (True, "cancelled")


async def test_work_within_its_time_gives_its_result() -> None:
    assert await within(PATIENCE, asyncio.sleep(0, "done"), name="work") == "done"


async def test_work_beyond_its_time_is_cancelled_and_has_ended() -> None:
    work = Work()
    with pytest.raises(TimeoutError, match="work took longer"):
        await within(0.01, work.run(), name="work")
    assert work.ended == "cancelled"


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
