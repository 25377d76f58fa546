"""The request for the engine: rows are asked for, and everything else stays as the client wrote it."""

from __future__ import annotations

import json
from typing import Any

import orjson
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from middleware_hub.routed_experts.asking import Asked, ask
from miles_router import Exchange
from miles_router.errors import BadRequest


def asked(body: bytes, start: int = 7, *, may_want: bool = True) -> Asked:
    return ask(Exchange("it"), body, start, may_want=may_want)


ADDED = {"return_routed_experts": True, "routed_experts_start_len": 7}


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        (b"{}", b'{"return_routed_experts":true,"routed_experts_start_len":7}'),
        (b" { } ", b' { "return_routed_experts":true,"routed_experts_start_len":7}'),
        (b"{\n}\n", b'{\n"return_routed_experts":true,"routed_experts_start_len":7}'),
        (b'{"a":1}', b'{"a":1,"return_routed_experts":true,"routed_experts_start_len":7}'),
        (b'{"a": 1 }\r\n\t ', b'{"a": 1 ,"return_routed_experts":true,"routed_experts_start_len":7}'),
        (b'{"a":{}}', b'{"a":{},"return_routed_experts":true,"routed_experts_start_len":7}'),
        (b'{"a":"{"}', b'{"a":"{","return_routed_experts":true,"routed_experts_start_len":7}'),
        (b'{"a":"{}"}', b'{"a":"{}","return_routed_experts":true,"routed_experts_start_len":7}'),
        ('{"a":"世}"}'.encode(), '{"a":"世}","return_routed_experts":true,"routed_experts_start_len":7}'.encode()),
    ],
)
@pytest.mark.parametrize("may_want", [True, False])
def test_the_fields_go_behind_those_of_the_client(body: bytes, expected: bytes, may_want: bool) -> None:
    assert asked(body, may_want=may_want) == Asked(expected, 7, wanted=False)


keys = st.text(max_size=6) | st.sampled_from(["{", "}", '"', "return_routed", '"return_routed_experts', "text"])
values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | keys,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(keys, inner, max_size=3),
    max_leaves=8,
)


@given(st.dictionaries(keys, values, max_size=4), st.sampled_from([None, 0, 1]), st.sampled_from(["", " ", "\n\t "]))
@example({'"return_routed_experts"': '"return_routed_experts":true'}, None, "")
def test_any_object_has_its_fields_and_the_two(client: dict[str, Any], indent: int | None, behind: str) -> None:
    body = (json.dumps(client, indent=indent) + behind).encode()
    changed = asked(body, start=12)
    expected = {**client, "return_routed_experts": True, "routed_experts_start_len": 12}
    assert json.loads(changed.body) == expected
    assert (changed.start, changed.wanted) == (12, False)
    if b'return_routed_experts"' not in body:
        assert changed.body.startswith(body.rstrip()[:-1]), "nothing that the client wrote was written anew"


def test_a_request_that_does_not_name_the_fields_is_not_parsed() -> None:
    exchange = Exchange("it")
    for body in (b'{"text":"long"}', b'{"text":"say \\"return_routed_experts\\""}', b'{"broken":}'):
        ask(exchange, body, 3, may_want=True)
    assert exchange._parses == []


@pytest.mark.parametrize("body", [b"", b"  ", b"[]", b'[{"a":1}]', b'"text}"', b"7", b"null", b'{"a":1', b"}x"])
def test_what_is_no_object_goes_to_the_engine_as_it_is(body: bytes) -> None:
    assert asked(body).body == body
    assert asked(body).wanted is False


@pytest.mark.parametrize(
    "body", [b'["return_routed_experts"]', b'"return_routed_experts"', b'["routed_experts_start_len"]']
)
def test_what_names_the_fields_and_is_no_object_goes_to_the_engine_as_it_is(body: bytes) -> None:
    assert asked(body) == Asked(body, 7, wanted=False)


def test_what_names_the_fields_and_is_no_json_is_refused() -> None:
    with pytest.raises(BadRequest, match="not valid JSON"):
        asked(b'{"return_routed_experts":}')


@pytest.mark.parametrize(
    ("own", "start"),
    [
        ({}, 0),
        ({"routed_experts_start_len": 0}, 0),
        ({"routed_experts_start_len": 3}, 3),
        ({"routed_experts_start_len": 30}, 30),
        ({"routed_experts_start_len": None}, 0),
        ({"routed_experts_start_len": "3"}, 0),
    ],
)
def test_what_a_client_asks_for_itself_stays_as_it_is(own: dict[str, Any], start: int) -> None:
    body = json.dumps({"text": "Hi", "return_routed_experts": True, **own}).encode()
    kept = asked(body)
    assert kept == Asked(body, start, wanted=True)
    assert kept.body is body


def test_where_clients_may_not_want_them_their_fields_give_way() -> None:
    body = b'{"return_routed_experts": true, "a": [1], "routed_experts_start_len": 2}'
    changed = asked(body, may_want=False)
    assert (orjson.loads(changed.body), changed.start, changed.wanted) == ({"a": [1], **ADDED}, 7, False)


@pytest.mark.parametrize("value", [False, None, 0])
@pytest.mark.parametrize("may_want", [True, False])
def test_a_client_that_says_it_does_not_want_them_is_asked_for_and_not_told(value: Any, may_want: bool) -> None:
    body = json.dumps({"return_routed_experts": value, "routed_experts_start_len": 2, "a": 1}).encode()
    changed = asked(body, may_want=may_want)
    assert (orjson.loads(changed.body), changed.start, changed.wanted) == ({"a": 1, **ADDED}, 7, False)


def test_a_start_alone_is_no_wish_for_rows() -> None:
    changed = asked(b'{"routed_experts_start_len": 2, "a": 1}')
    assert (orjson.loads(changed.body), changed.start, changed.wanted) == ({"a": 1, **ADDED}, 7, False)


def test_names_further_inside_are_none_of_the_request() -> None:
    body = b'{"a": {"return_routed_experts": true, "routed_experts_start_len": 2}}'
    changed = asked(body)
    expected = {"a": {"return_routed_experts": True, "routed_experts_start_len": 2}, **ADDED}
    assert (orjson.loads(changed.body), changed.wanted) == (expected, False)
