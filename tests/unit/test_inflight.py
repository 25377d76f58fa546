"""Requests in flight, and which of them an abort means."""

from __future__ import annotations

import asyncio
import time

import orjson
import pytest

from miles_router.asgi.exchange import Exchange
from miles_router.fleet.inflight import InFlight
from miles_router.tasks import spawn
from tests.support.waiting import at_once


def entered(in_flight: InFlight, body: object, *, at: str | None = "http://a", rids: tuple[str, ...] = ()) -> Exchange:
    exchange = Exchange("id")
    exchange.flight.worker_url = at
    exchange.flight.rids.update(rids)
    in_flight.enter(exchange, body if isinstance(body, bytes) else orjson.dumps(body))
    return exchange


def test_a_request_is_there_until_every_layer_has_left_it() -> None:
    in_flight = InFlight()
    exchange = entered(in_flight, {})
    in_flight.enter(exchange, b"")
    in_flight.leave(exchange)
    assert len(in_flight) == 1
    in_flight.leave(exchange)
    assert len(in_flight) == 0
    assert list(at_once(in_flight.abort(None))) == []


def test_an_abort_of_all_means_all() -> None:
    in_flight = InFlight()
    all_of_them = [entered(in_flight, {"rid": "a"}), entered(in_flight, b"\x00"), entered(in_flight, {})]
    assert list(at_once(in_flight.abort(None))) == all_of_them
    assert all(exchange.flight.aborted for exchange in all_of_them)


@pytest.mark.parametrize(
    "body",
    [{"rid": "r"}, {"rid": ["q", "r"]}, b'{"text": "x",  "rid" : "r"}', {"rid": "r", "text": "é"}],
)
def test_an_abort_finds_the_request_by_the_id_in_its_body(body: object) -> None:
    in_flight = InFlight()
    other = entered(in_flight, {"rid": "other"})
    meant = entered(in_flight, body)
    assert list(at_once(in_flight.abort("r"))) == [meant]
    assert (meant.flight.aborted, other.flight.aborted) == (True, False)


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


def test_an_abort_finds_a_prompt_of_a_list_by_the_id_that_the_engine_gives_it() -> None:
    in_flight = InFlight()
    batch = entered(in_flight, {"input_tokens": [[1], [2]], "rid": "r"})
    samples = entered(in_flight, {"text": ["a", "b"], "rid": "r", "sampling_params": {"n": 2}})
    chat = entered(in_flight, {"messages": [], "rid": "chat"})
    assert list(at_once(in_flight.abort("r_1"))) == [batch]
    assert list(at_once(in_flight.abort("r"))) == list(at_once(in_flight.abort("r_2"))) == []
    assert list(at_once(in_flight.abort("chat"))) == [chat]
    assert not samples.flight.aborted


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


@pytest.mark.parametrize("text", ["Hi", "made"])
def test_an_abort_finds_the_request_by_an_id_the_worker_made(text: str) -> None:
    in_flight = InFlight()
    entered(in_flight, {"text": text})
    meant = entered(in_flight, {"text": text}, rids=("made",))
    assert list(at_once(in_flight.abort("made"))) == [meant]


@pytest.mark.parametrize("body", [b"", b"no json", b'["r"]', b'"r"', b'{"text": "\\"r\\""}', {"rid": None}, {"rid": 7}])
def test_an_abort_leaves_alone_what_only_looks_like_it(body: object) -> None:
    in_flight = InFlight()
    exchange = entered(in_flight, body)
    assert list(at_once(in_flight.abort("r"))) == []
    assert not exchange.flight.aborted


def test_ids_that_begin_alike_are_aborted_together_as_the_worker_does() -> None:
    in_flight = InFlight()
    one, ten = entered(in_flight, {"rid": "r1"}), entered(in_flight, {"rid": "r10"})
    elsewhere = entered(in_flight, {"rid": "r11"}, at="http://b")
    assert at_once(in_flight.abort("r1")) == {one: {"r1"}, ten: {"r10"}}
    assert not elsewhere.flight.aborted, "its worker has no r1, and there an abort of r1 does nothing"


def test_an_id_that_nobody_has_aborts_nobody() -> None:
    in_flight = InFlight()
    ten = entered(in_flight, {"rid": "r10"})
    assert list(at_once(in_flight.abort("r1"))) == []
    assert not ten.flight.aborted


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


async def test_a_request_that_ends_while_an_abort_looks_is_not_meant() -> None:
    in_flight = InFlight()
    ends, stays = entered(in_flight, {"rid": "r"}), entered(in_flight, {"rid": "r"})
    entered(in_flight, b"x" * (1 << 25))
    looking = spawn(in_flight.abort("r"), name="abort")
    await asyncio.sleep(0)
    assert not looking.done()
    in_flight.leave(ends)
    assert list(await looking) == [stays]
