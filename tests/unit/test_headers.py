"""Header rules on raw pairs."""

from __future__ import annotations

import json

import pytest

from miles_router.asgi.headers import (
    HOP_BY_HOP,
    REQUEST_DROPPED,
    connection_named,
    end_to_end,
    first_header,
    header_texts,
    raw_headers,
)


def test_hop_by_hop_is_what_rfc_9110_section_7_6_1_lists() -> None:
    listed = {b"connection", b"proxy-connection", b"keep-alive", b"te", b"transfer-encoding", b"upgrade"}
    assert listed == HOP_BY_HOP


def test_a_request_drops_besides_what_the_router_makes_anew() -> None:
    assert {b"host", b"content-length", b"expect"} == REQUEST_DROPPED - HOP_BY_HOP


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ([], set()),
        ([b""], set()),
        ([b"close"], {b"close"}),
        ([b"Keep-Alive, X-A"], {b"keep-alive", b"x-a"}),
        ([b" X-A ,,\tX-B,", b"x-a"], {b"x-a", b"x-b"}),
    ],
)
def test_connection_names_fields_in_any_case_and_spacing(values: list[bytes], named: set[bytes]) -> None:
    assert connection_named(values) == named


def test_order_and_repeats_are_kept() -> None:
    pairs = [(b"b", b"2"), (b"a", b"1"), (b"b", b"1"), (b"a", b"")]
    assert end_to_end(pairs, HOP_BY_HOP) == pairs


def test_hop_by_hop_fields_and_those_named_are_dropped_wherever_connection_stands() -> None:
    pairs = [
        (b"x-mine", b"1"),
        (b"connection", b"X-Mine, close"),
        (b"x-kept", b"2"),
        (b"x-mine", b"3"),
        (b"te", b"trailers"),
        (b"connection", b"x-other"),
        (b"x-other", b"4"),
    ]
    assert end_to_end(pairs, HOP_BY_HOP) == [(b"x-kept", b"2")]


def test_connection_names_nothing_when_it_is_not_among_the_dropped() -> None:
    pairs = [(b"connection", b"x-a"), (b"x-a", b"1")]
    assert end_to_end(pairs, frozenset()) == pairs


def test_values_are_never_touched() -> None:
    pairs = [(b"x-latin", b"caf\xe9 \xff"), (b"x-spaces", b"a  b")]
    assert end_to_end(pairs, REQUEST_DROPPED) == pairs


def test_the_first_of_several_values_is_found_and_none_is_told() -> None:
    pairs = [(b"a", b"1"), (b"b", b"2"), (b"a", b"3")]
    assert (first_header(pairs, b"a"), first_header(pairs, b"c")) == (b"1", None)


def test_headers_become_text_and_headers_again_byte_for_byte() -> None:
    pairs = [(b"x-all", bytes(range(256))), (b"x-all", b"")]
    texts = header_texts(pairs)
    assert raw_headers(texts) == pairs
    assert raw_headers(json.loads(json.dumps(texts))) == pairs
    assert raw_headers([("X-Mine", "1")]) == [(b"x-mine", b"1")], "names are lower-cased, as servers give them"
