"""One request's record: its id, its body, its parse."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

import orjson
import pytest

from miles_router.asgi.exchange import MAX_REQUEST_ID_LENGTH, Exchange, Message, Receive, replay, request_id, with_body
from miles_router.engines.client_json import MAX_BRACKETS, MAX_COMMAS, MAX_DEPTH
from miles_router.errors import BadRequest, BodyTooLarge, ClientDisconnected

GONE: Message = {"type": "http.disconnect"}


def part(body: bytes, *, more: bool = False) -> Message:
    return {"type": "http.request", "body": body, "more_body": more}


def receiving(*messages: Message) -> Receive:
    waiting = list(messages)

    async def receive() -> Message:
        return waiting.pop(0)

    return receive


def scope(*headers: tuple[bytes, bytes]) -> dict[str, Any]:
    return {"type": "http", "headers": list(headers)}


# The body


@pytest.mark.parametrize(
    ("messages", "body"),
    [
        ([part(b"")], b""),
        ([{"type": "http.request"}], b""),
        ([part(b"whole")], b"whole"),
        ([part(b"in ", more=True), part(b"", more=True), part(b"parts")], b"in parts"),
        ([part(b"all", more=True), part(b"")], b"all"),
    ],
)
async def test_the_whole_body_is_read(messages: list[Message], body: bytes) -> None:
    assert await Exchange("id").read(receiving(*messages)) == body


@pytest.mark.parametrize("messages", [[GONE], [part(b"half", more=True), GONE]])
async def test_a_client_that_leaves_while_it_sends_is_an_error(messages: list[Message]) -> None:
    with pytest.raises(ClientDisconnected):
        await Exchange("id").read(receiving(*messages))


@pytest.mark.parametrize(
    "messages", [[part(b"12345")], [part(b"123", more=True), part(b"45")], [part(b"12345", more=True)]]
)
async def test_a_body_over_the_limit_is_refused_at_the_byte_that_is_too_much(messages: list[Message]) -> None:
    with pytest.raises(BodyTooLarge, match="larger than 4 bytes"):
        await Exchange("id", max_body_bytes=4).read(receiving(*messages))
    assert await Exchange("id", max_body_bytes=5).read(receiving(*messages, part(b""))) == b"12345"


@pytest.mark.parametrize("announced", [b"5", b"0005", b"99999999999999999999"])
def test_an_announced_length_over_the_limit_is_refused(announced: bytes) -> None:
    with pytest.raises(BodyTooLarge):
        Exchange("id", max_body_bytes=4).check_announced_size(scope((b"content-length", announced)))


@pytest.mark.parametrize("headers", [[], [(b"content-length", b"4")], [(b"content-length", b"many")]])
def test_any_other_announcement_passes(headers: list[tuple[bytes, bytes]]) -> None:
    Exchange("id", max_body_bytes=4).check_announced_size(scope(*headers))


# The parse


def test_a_body_is_parsed_once() -> None:
    exchange, body = Exchange("id"), b'{"a": [1]}'
    assert exchange.loads(body) == {"a": [1]}
    assert exchange.loads(body) is exchange.loads(body)


def test_equal_bytes_of_another_body_are_parsed_anew() -> None:
    exchange, body = Exchange("id"), b'{"a": 1}'
    twin = bytes(bytearray(body))
    assert exchange.loads(twin) is not exchange.loads(body)


def test_a_parsed_object_cannot_be_changed_behind_the_bytes() -> None:
    parsed = cast(dict[str, int], Exchange("id").loads(b'{"a": 1}'))
    assert isinstance(parsed, Mapping)
    with pytest.raises(TypeError):
        parsed["a"] = 2


@pytest.mark.parametrize(("body", "value"), [(b"[1]", [1]), (b"null", None), (b'"a"', "a"), (b" 1 ", 1)])
def test_any_json_is_parsed(body: bytes, value: object) -> None:
    assert Exchange("id").loads(body) == value


@pytest.mark.parametrize("body", [b"", b"{", b"\xff", b"{'a': 1}", b'{"a": NaN}'])
def test_what_is_no_json_is_a_bad_request(body: bytes) -> None:
    with pytest.raises(BadRequest, match="not valid JSON"):
        Exchange("id").loads(body)


def test_only_the_last_few_bodies_are_remembered() -> None:
    exchange, bodies = Exchange("id"), [b"[%d]" % number for number in range(20)]
    parses = [exchange.loads(body) for body in bodies]
    assert exchange.loads(bodies[-1]) is parses[-1]
    assert exchange.loads(bodies[-8]) is parses[-8]
    assert exchange.loads(bodies[0]) is not parses[0]


# The record itself


def test_a_scope_has_one_record() -> None:
    carried = scope((b"x-request-id", b"mine"))
    exchange = Exchange.of(carried)
    assert exchange.request_id == "mine"
    assert Exchange.of(carried) is exchange
    assert Exchange.of({**carried}) is exchange, "a copy of the scope is still the same request"


def test_notes_belong_to_one_request() -> None:
    one, two = Exchange("1"), Exchange("2")
    one.notes["a.b"] = 1
    assert two.notes == {}


@pytest.mark.parametrize("given", [b"a", b"abc-123", b"x" * MAX_REQUEST_ID_LENGTH, b"with space"])
def test_a_clients_id_is_taken(given: bytes) -> None:
    assert request_id(scope((b"accept", b"*/*"), (b"x-request-id", given))) == given.decode()


@pytest.mark.parametrize("given", [b"", b"x" * (MAX_REQUEST_ID_LENGTH + 1), b"caf\xc3\xa9", b"tab\there", b"\x00"])
def test_an_id_that_cannot_be_logged_is_replaced(given: bytes) -> None:
    made = request_id(scope((b"x-request-id", given)))
    assert made.isascii()
    assert made.isprintable()
    assert made.encode() != given


def test_ids_that_are_made_differ() -> None:
    assert len({request_id({}) for _ in range(100)}) == 100


# Replays


async def test_a_replay_gives_the_body_once_and_then_what_the_client_says() -> None:
    replayed = replay(b"changed", receiving(GONE))
    assert await replayed() == part(b"changed")
    assert await replayed() == GONE


async def test_each_replay_starts_from_the_beginning() -> None:
    receive = receiving(GONE)
    for _ in range(3):
        assert await Exchange("id").read(replay(b"again", receive)) == b"again"


def test_a_changed_body_has_its_own_length() -> None:
    before = scope((b"content-length", b"3"), (b"x-a", b"1"))
    after = with_body(before, b"longer")
    assert after["headers"] == [(b"x-a", b"1"), (b"content-length", b"6")]
    assert before["headers"][0] == (b"content-length", b"3")


def test_a_parsed_object_can_be_dumped_again_and_not_be_changed() -> None:
    parsed = Exchange("r").loads(b'{"a": {"b": [1]}}')
    assert orjson.dumps(parsed) == b'{"a":{"b":[1]}}'
    for change in (
        lambda: parsed.update(a=1),
        lambda: parsed.pop("a"),
        lambda: parsed.__setitem__("c", 1),
        parsed.clear,
    ):
        with pytest.raises(TypeError):
            change()
    assert parsed == {"a": {"b": [1]}}


# Depth


@pytest.mark.parametrize(
    ("opens", "inner", "closes"), [(b"[", b"", b"]"), (b'{"a":', b"[]", b"}"), (b'{"a":[', b"1", b"]}")]
)
def test_json_that_could_not_be_written_again_is_refused(opens: bytes, inner: bytes, closes: bytes) -> None:
    levels = opens.count(b"[") + opens.count(b"{")
    fits = (MAX_DEPTH - inner.count(b"[")) // levels
    parsed = Exchange("id").loads(opens * fits + inner + closes * fits)
    orjson.dumps({"as": {"an": {"answer": [{"puts": [parsed]}]}}})
    for deeper in (fits + 1, 254, 10_000):
        with pytest.raises(BadRequest, match=r"nested deeper than 200 levels|not valid JSON"):
            Exchange("id").loads(opens * deeper + inner + closes * deeper)


def test_json_with_many_objects_that_is_not_deep_is_taken() -> None:
    assert len(Exchange("id").loads(b"[%b]" % b",".join([b'{"a":[1]}'] * 5000))) == 5000


@pytest.mark.parametrize("one", [b"[]", b"{}", b'"[{"'])
def test_json_with_millions_of_objects_is_refused_before_it_is_parsed(one: bytes) -> None:
    whole = b"[%b0]" % ((one + b",") * (MAX_BRACKETS + 1))
    with pytest.raises(BadRequest, match="2097152 brackets"):
        Exchange("id").loads(whole)


def test_json_with_very_many_values_is_refused_before_it_is_parsed() -> None:
    with pytest.raises(BadRequest, match="16777216 commas"):
        Exchange("id").loads(b"[%b7]" % (b"7," * (MAX_COMMAS + 1)))
