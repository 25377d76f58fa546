"""Many that wait equally long: each is told in its turn, and none that was stopped."""

from __future__ import annotations

import asyncio
import time

from miles_router.asgi.deadlines import Deadlines

SECONDS = 0.02


async def test_each_expires_in_its_turn_and_none_that_was_stopped() -> None:
    done = asyncio.Event()
    told: list[str] = []

    def expired(name: str) -> None:
        told.append(name)
        if name == "last":
            done.set()

    deadlines = Deadlines(SECONDS, expired)
    loop = asyncio.get_running_loop()
    began = loop.time()
    for name in ("first", "stopped", "second"):
        deadlines.start(name)
    deadlines.stop("stopped")
    deadlines.stop("never started")
    loop.call_later(SECONDS / 2, deadlines.start, "last")
    await done.wait()
    assert told == ["first", "second", "last"]
    assert loop.time() - began >= SECONDS


async def test_a_stop_of_this_process_lets_nothing_expire_that_is_about_to_be_stopped() -> None:
    told: list[str] = []
    deadlines = Deadlines(0.1, told.append)
    deadlines.start("item")
    time.sleep(0.2)  # noqa: ASYNC251
    for _ in range(5):
        await asyncio.sleep(0)
    deadlines.stop("item")
    assert told == []


async def test_one_that_expired_can_be_started_again() -> None:
    rounds = 3
    done = asyncio.Event()
    told: list[int] = []

    def expired(number: int) -> None:
        told.append(number)
        if number < rounds:
            deadlines.start(number + 1)
        else:
            done.set()

    deadlines = Deadlines(0.001, expired)
    deadlines.start(1)
    await done.wait()
    assert told == [1, 2, 3]


async def test_a_defect_in_one_call_leaves_the_timer_working() -> None:
    done = asyncio.Event()
    reported: list[BaseException] = []
    loop = asyncio.get_running_loop()
    before = loop.get_exception_handler()
    loop.set_exception_handler(lambda _, context: reported.append(context["exception"]))

    def expired(name: str) -> None:
        if name == "bad":
            raise ZeroDivisionError
        done.set()

    try:
        deadlines = Deadlines(0.001, expired)
        deadlines.start("bad")
        deadlines.start("good")
        await done.wait()
    finally:
        loop.set_exception_handler(before)
    assert [type(each) for each in reported] == [ZeroDivisionError]
