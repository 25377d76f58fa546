"""The gate: when it is closed, who waits, in which order they go, and what bounds them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from miles_router.asgi.flight import Flight
from miles_router.errors import FleetPaused
from miles_router.fleet.gate import REMEMBERED, Gate, endpoint, generates
from miles_router.fleet.pool import WorkerPool
from tests.support.waiting import soon, until


class Who(Flight):
    """A request that came at this place."""

    def __init__(self, number: int = 0) -> None:
        super().__init__()
        self.number = number


def made(*, max_held: int = 10, timeout: float = 0.0) -> Gate:
    clock = iter(range(100, 1000))
    return Gate(WorkerPool().admission, max_held=max_held, timeout=timeout, now=lambda: float(next(clock)))


async def settled() -> None:
    """Let everything that can run, run."""
    for _ in range(5):
        await asyncio.sleep(0)


@pytest.mark.parametrize(
    "path",
    [
        "/generate",
        "/v1/chat/completions",
        "/v1/completions",
        "/v1/messages",
        "/v1/responses",
        "/sessions/7/generate",
        "/sessions/a-b/v1/chat/completions",
        "/api/chat",
    ],
)
def test_paths_that_generate(path: str) -> None:
    assert generates(path)


@pytest.mark.parametrize(
    "path",
    [
        "/",
        "",
        "/generate/",
        "/generate/x",
        "/v1/models",
        "/model_info",
        "/sessions",
        "/sessions/7",
        "/sessions/generate",
        "/sessions/7/samples",
        "/abort_request",
        "/v1/tokenize",
    ],
)
def test_paths_that_do_not(path: str) -> None:
    assert not generates(path)


REASONS: dict[str, tuple[Callable[[Gate], None], Callable[[Gate], None]]] = {
    "paused": (lambda gate: gate.pause("abort"), Gate.resume),
    "asleep": (Gate.sleep, Gate.wake),
    "workers": (lambda gate: gate.workers_paused(True), lambda gate: gate.workers_paused(False)),
}


@pytest.mark.parametrize("first", REASONS)
@pytest.mark.parametrize("second", REASONS)
def test_it_is_open_when_no_reason_is_left(first: str, second: str) -> None:
    gate = made()
    REASONS[first][0](gate)
    REASONS[second][0](gate)
    REASONS[first][1](gate)
    assert gate.closed is (first != second)
    REASONS[second][1](gate)
    assert not gate.closed


@pytest.mark.parametrize(
    ("close", "deliberate", "reason"),
    [
        (lambda gate: gate.pause("retract"), True, "the fleet is paused (retract)"),
        (Gate.sleep, True, "the fleet is asleep"),
        (lambda gate: gate.workers_paused(True), False, "every worker is paused"),
    ],
)
def test_it_says_why_it_is_closed_and_whether_the_router_did_it(
    close: Callable[[Gate], None], deliberate: bool, reason: str
) -> None:
    gate = made()
    close(gate)
    assert (gate.deliberate, gate.reason()) == (deliberate, reason)


@pytest.mark.parametrize("reason", REASONS)
def test_asked_twice_it_is_closed_since_the_first_time(reason: str) -> None:
    gate = made()
    REASONS[reason][0](gate)
    since = gate.describe()
    REASONS[reason][0](gate)
    assert {**gate.describe(), "pauses": since["pauses"]} == since


def test_a_second_pause_has_the_second_mode_and_both_count() -> None:
    gate = made()
    gate.pause("abort")
    gate.pause("in_place")
    assert (gate.mode, gate.pauses) == ("in_place", 2)
    gate.resume()
    assert (gate.mode, gate.paused_since, gate.pauses) == (None, None, 2)


async def test_an_open_gate_makes_nobody_wait() -> None:
    await soon(made(max_held=0).wait(Who()))


async def test_those_who_wait_go_in_the_order_they_came() -> None:
    gate, went = made(), list[int]()

    async def one(number: int) -> None:
        await gate.wait(Who())
        went.append(number)

    gate.pause("abort")
    tasks = [asyncio.ensure_future(one(number)) for number in range(5)]
    await settled()
    assert (gate.held, went) == (5, [])
    gate.resume()
    await asyncio.gather(*tasks)
    assert (gate.held, went) == (0, [0, 1, 2, 3, 4])


async def test_who_comes_back_to_it_goes_before_those_who_came_later() -> None:
    gate, went = made(), list[int]()

    async def one(number: int) -> None:
        await gate.wait(Who(number))
        went.append(number)

    gate.pause("abort")
    tasks = [asyncio.ensure_future(one(number)) for number in (3, 1, 4, 2)]
    await settled()
    gate.resume()
    await asyncio.gather(*tasks)
    assert went == [1, 2, 3, 4]


async def test_one_request_may_wait_for_several_of_its_generations() -> None:
    gate, who = made(), Who()
    gate.pause("abort")
    tasks = [asyncio.ensure_future(gate.wait(who)) for _ in range(3)]
    await settled()
    assert gate.held == 3
    gate.resume()
    await soon(asyncio.gather(*tasks))


async def test_a_gate_that_closes_again_at_once_keeps_them() -> None:
    gate = made()
    gate.pause("abort")
    task = asyncio.ensure_future(gate.wait(Who()))
    await settled()
    gate.resume()
    gate.pause("abort")
    await settled()
    assert (task.done(), gate.held) == (False, 1)
    gate.resume()
    await soon(task)


async def test_whoever_is_over_the_bound_is_refused_at_once_with_the_reason() -> None:
    gate = made(max_held=1)
    gate.pause("abort")
    task = asyncio.ensure_future(gate.wait(Who()))
    await settled()
    with pytest.raises(
        FleetPaused, match=r"the fleet is paused \(abort\); 1 requests wait already \(--gate-max-held\)"
    ):
        await gate.wait(Who())
    gate.resume()
    await soon(task)


async def test_whoever_waits_too_long_is_refused_with_the_reason() -> None:
    gate = made(timeout=0.02)
    gate.sleep()
    with pytest.raises(FleetPaused, match=r"asleep, and this request has waited 0.02 s \(--gate-timeout\)"):
        await soon(gate.wait(Who()))
    assert gate.held == 0


async def test_a_gate_that_opens_and_closes_gives_nobody_more_time() -> None:
    gate = made(timeout=0.1)
    gate.pause("abort")
    task = asyncio.ensure_future(gate.wait(Who()))

    def reopened() -> bool:
        gate.resume()
        gate.pause("abort")
        return task.done()

    await until(reopened, "its time is up")
    with pytest.raises(FleetPaused):
        await task


async def test_whoever_leaves_waits_no_longer() -> None:
    gate = made()
    gate.pause("abort")
    task = asyncio.ensure_future(gate.wait(Who()))
    await settled()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert gate.held == 0
    gate.resume()


async def test_an_aborted_request_is_let_through_a_closed_gate_and_no_other() -> None:
    gate, aborted, other = made(), Who(), Who()
    gate.pause("abort")
    tasks = [asyncio.ensure_future(gate.wait(who)) for who in (aborted, aborted, other)]
    await settled()
    aborted.aborted = True
    gate.release(aborted)
    await soon(asyncio.gather(*tasks[:2]))
    await settled()
    assert (tasks[2].done(), gate.held) == (False, 1)
    gate.release(Who())
    gate.resume()
    await tasks[2]


def test_each_time_that_it_was_closed_is_remembered_by_its_reason() -> None:
    gate = made()
    assert gate.times() == []
    gate.pause("abort")
    gate.sleep()
    gate.pause("retract")  # the same standstill in another mode
    assert gate.times() == [(100.0, None, "paused", "retract"), (101.0, None, "asleep", None)]
    gate.resume()
    gate.resume()
    gate.workers_paused(True)
    gate.workers_paused(False)
    gate.workers_paused(False)
    assert gate.times() == [
        (100.0, 102.0, "paused", "retract"),
        (103.0, 104.0, "workers_paused", None),
        (101.0, None, "asleep", None),
    ]
    gate.wake()
    assert gate.times()[-1] == (101.0, 105.0, "asleep", None)


def test_of_many_pauses_the_last_ones_are_remembered() -> None:
    gate = made()
    for _ in range(REMEMBERED + 3):
        gate.pause("abort")
        gate.resume()
    times = gate.times()
    assert (len(times), times[0].start) == (REMEMBERED, 106.0)


@pytest.mark.parametrize(
    ("path", "engine_path"),
    [
        ("/generate", "/generate"),
        ("/sessions/a/v1/messages", "/v1/messages"),
        ("/sessions/abc", "/sessions/abc"),
        ("/sessions/", "/sessions/"),
    ],
)
def test_the_engine_path_of_a_session_request(path: str, engine_path: str) -> None:
    assert endpoint(path) == engine_path
