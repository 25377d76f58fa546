"""The gate: when it is closed, who waits and in which order, what bounds them, and whom an abort means."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import cast

import orjson
import pytest

from miles_router.asgi.exchange import Exchange, Routing
from miles_router.errors import FleetPaused, Unavailable
from miles_router.fleet.gate import Gate
from miles_router.fleet.inflight import InFlight
from miles_router.fleet.pool import WorkerPool
from miles_router.shards.membership import Membership
from miles_router.tasks import spawn
from tests.support.waiting import at_once, settled, soon, until


class Who(Routing):
    """A request that came at this place."""

    def __init__(self, number: int = 0) -> None:
        super().__init__()
        self.number = number


def made(*, timeout: float = 0.0) -> Gate:
    clock = iter(range(100, 1000))
    return Gate(WorkerPool().admission, max_held=10, timeout=timeout, now=lambda: float(next(clock)))


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
    assert (gate.closed_by_router, gate.reason()) == (deliberate, reason)


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


class Lease:
    """What a gate asks of a membership."""

    def __init__(self) -> None:
        self.may_act = True

    def check(self) -> None:
        if not self.may_act:
            raise Unavailable("not fresh")


async def test_without_a_lease_no_generation_passes_and_none_waits() -> None:
    lease = Lease()
    gate = made()
    gate.lease = cast("Membership", lease)
    assert gate.is_open()
    lease.may_act = False
    assert gate.closed
    assert not gate.is_open()
    with pytest.raises(Unavailable):
        await gate.wait(Who())
    lease.may_act = True
    assert not gate.closed


def entered(in_flight: InFlight, body: object, *, at: str | None = "http://a") -> Exchange:
    exchange = Exchange("id")
    exchange.routing.worker_url = at
    in_flight.enter(exchange, body if isinstance(body, bytes) else orjson.dumps(body))
    return exchange


@pytest.mark.parametrize(
    "body",
    [
        b'{"rid": "caf\\u00e9/1"}',
        '{"rid": "café\\/1"}'.encode(),
        b'{"text": ["x", "y"], "rid" : [ "q]", "caf\\u00e9/1" ]}',
        b'{"text": "x", "rid": "caf\\u00e9/1", "sampling_params": {}}',
    ],
)
def test_an_abort_finds_an_id_however_it_is_spelled(body: bytes) -> None:
    in_flight = InFlight()
    entered(in_flight, b'{"text": "caf\\u00e9/1", "rid": "caf\\u00e9/2"}')
    meant = entered(in_flight, body)
    assert list(at_once(in_flight.abort("café/1"))) == [meant]


ODD_BODIES = {
    "lists that never end": lambda size: b'{"rid":[' * (size // 8),
    "texts that never end": lambda size: b'{"rid":"' * (size // 8),
    "objects in objects": lambda size: b'{"rid":' * (size // 7),
    "lists in lists": lambda size: b'{"rid":' + b"[" * size,
    "a long list": lambda size: b'{"rid":[' + b'"a",' * (size // 4),
    "a long text": lambda size: b'{"rid":"' + b'\\"' * (size // 2),
    "one number": lambda size: b'{"rid":' + b"1" * size,
    "names without values": lambda size: b'"rid" ' * (size // 6),
    "spaces": lambda size: b'{"rid"' + b" " * size,
    "an escape behind it all": lambda size: b'{"rid":["a"' * (size // 11) + b'"\\u0061"',
}


@pytest.mark.parametrize("odd", ODD_BODIES)
def test_the_time_of_an_abort_grows_no_faster_than_the_bodies_in_flight(odd: str) -> None:
    def seconds(size: int) -> float:
        in_flight, best = InFlight(), 1.0
        entered(in_flight, ODD_BODIES[odd](size))
        for _ in range(10):
            began = time.process_time()
            assert list(at_once(in_flight.abort("zz"))) == []
            best = min(best, time.process_time() - began)
        return best

    assert seconds(1 << 17) / seconds(1 << 14) < 24, "8 times as long is in order, 64 times is not"


@pytest.mark.parametrize("body", [b"", b"no json", b'["r"]', b'"r"', b'{"text": "\\"r\\""}', {"rid": None}, {"rid": 7}])
def test_an_abort_leaves_alone_what_only_looks_like_it(body: object) -> None:
    in_flight = InFlight()
    exchange = entered(in_flight, body)
    assert list(at_once(in_flight.abort("r"))) == []
    assert not exchange.routing.aborted


def test_ids_that_begin_alike_are_aborted_together_as_the_worker_does() -> None:
    in_flight = InFlight()
    one, ten = entered(in_flight, {"rid": "r1"}), entered(in_flight, {"rid": "r10"})
    elsewhere = entered(in_flight, {"rid": "r11"}, at="http://b")
    assert at_once(in_flight.abort("r1")) == {one: {"r1"}, ten: {"r10"}}
    assert not elsewhere.routing.aborted, "its worker has no r1, and there an abort of r1 does nothing"


async def test_others_go_on_while_an_abort_looks_through_many_bodies() -> None:
    in_flight, long = InFlight(), b'{"text": "%b"}' % (b"x" * (1 << 22))
    for _ in range(50):
        entered(in_flight, long)
    meant = entered(in_flight, {"rid": "r"})
    looking, others = spawn(in_flight.abort("r"), name="abort"), 0
    while not looking.done():
        others += 1
        await asyncio.sleep(0)
    assert list(looking.result()) == [meant]
    assert others > 10
