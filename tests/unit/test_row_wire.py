"""Rows on an engine's wire: asked for in a request that else stays as its client wrote it, and told in an answer."""

from __future__ import annotations

import json
from typing import Any

import orjson
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from miles_router import Exchange
from miles_router.engines.answers import UnreadableAnswer
from miles_router.engines.events import LAST_EVENT, Event, write_event
from miles_router.engines.rows import EXPERT_FIELDS, ChatRows, GenerateRows, RowAnswer, RowReader, RowRequest
from miles_router.errors import BadRequest


def request(body: bytes, start: int = 7, *, client_may: bool = True, exchange: Exchange | None = None) -> RowRequest:
    parse = (exchange or Exchange("it")).loads
    return RowRequest.write(body, EXPERT_FIELDS, start, parse=parse, client_may=client_may)


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
@pytest.mark.parametrize("client_may", [True, False])
def test_the_fields_go_behind_those_of_the_client(body: bytes, expected: bytes, client_may: bool) -> None:
    assert request(body, client_may=client_may) == RowRequest(expected, 7, by_client=False)


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
    changed = request(body, start=12)
    expected = {**client, "return_routed_experts": True, "routed_experts_start_len": 12}
    assert json.loads(changed.body) == expected
    assert (changed.start, changed.by_client) == (12, False)
    if b'return_routed_experts"' not in body:
        assert changed.body.startswith(body.rstrip()[:-1]), "nothing that the client wrote was written anew"


def test_a_request_that_does_not_name_the_fields_is_not_parsed() -> None:
    exchange = Exchange("it")
    for body in (b'{"text":"long"}', b'{"text":"say \\"return_routed_experts\\""}', b'{"broken":}'):
        request(body, 3, exchange=exchange)
    assert exchange._parses == []


@pytest.mark.parametrize("body", [b"", b"  ", b"[]", b'[{"a":1}]', b'"text}"', b"7", b"null", b'{"a":1', b"}x"])
def test_what_is_no_object_goes_to_the_engine_as_it_is(body: bytes) -> None:
    assert request(body).body == body
    assert request(body).by_client is False


@pytest.mark.parametrize(
    "body", [b'["return_routed_experts"]', b'"return_routed_experts"', b'["routed_experts_start_len"]']
)
def test_what_names_the_fields_and_is_no_object_goes_to_the_engine_as_it_is(body: bytes) -> None:
    assert request(body) == RowRequest(body, 7, by_client=False)


def test_what_names_the_fields_and_is_no_json_is_refused() -> None:
    with pytest.raises(BadRequest, match="not valid JSON"):
        request(b'{"return_routed_experts":}')


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
    kept = request(body)
    assert kept == RowRequest(body, start, by_client=True)
    assert kept.body is body


def test_where_clients_may_not_want_them_their_fields_give_way() -> None:
    body = b'{"return_routed_experts": true, "a": [1], "routed_experts_start_len": 2}'
    changed = request(body, client_may=False)
    assert (orjson.loads(changed.body), changed.start, changed.by_client) == ({"a": [1], **ADDED}, 7, False)


@pytest.mark.parametrize("value", [False, None, 0])
@pytest.mark.parametrize("client_may", [True, False])
def test_a_client_that_says_it_does_not_want_them_is_asked_for_and_not_told(value: Any, client_may: bool) -> None:
    body = json.dumps({"return_routed_experts": value, "routed_experts_start_len": 2, "a": 1}).encode()
    changed = request(body, client_may=client_may)
    assert (orjson.loads(changed.body), changed.start, changed.by_client) == ({"a": 1, **ADDED}, 7, False)


def test_a_start_alone_is_no_wish_for_rows() -> None:
    changed = request(b'{"routed_experts_start_len": 2, "a": 1}')
    assert (orjson.loads(changed.body), changed.start, changed.by_client) == ({"a": 1, **ADDED}, 7, False)


def test_names_further_inside_are_none_of_the_request() -> None:
    body = b'{"a": {"return_routed_experts": true, "routed_experts_start_len": 2}}'
    changed = request(body)
    expected = {"a": {"return_routed_experts": True, "routed_experts_start_len": 2}, **ADDED}
    assert (orjson.loads(changed.body), changed.by_client) == (expected, False)


# What answers tell


def meta(*, rows: Any = None, finish: Any = "stop", **fields: Any) -> dict[str, Any]:
    reason = {"type": finish} if isinstance(finish, str) else finish
    return {"id": "r", "finish_reason": reason, **({} if rows is None else {"routed_experts": rows}), **fields}


def event(content: Any) -> Event:
    return Event.read(write_event(content))


def test_each_answer_of_generate_tells_its_own() -> None:
    reader = GenerateRows()
    one, cut = meta(rows="A"), meta(finish="abort")
    assert reader.answers({"meta_info": one}) == [RowAnswer(0, one, ended=True)]
    assert reader.answers([{"meta_info": one}, {"meta_info": cut}]) == [
        RowAnswer(0, one, ended=True),
        RowAnswer(1, cut, ended=True, aborted=True),
    ]
    assert [EXPERT_FIELDS.of(each) for each in (one, cut, meta(rows=7), meta(rows=["A"]))] == ["A", None, None, None]


def test_each_choice_of_a_chat_has_its_rows_or_the_extension_those_of_the_first() -> None:
    reader = ChatRows()
    one, cut = meta(rows="A"), meta(finish="abort")
    choices = [{"index": 1, "meta_info": one}, {"index": 0, "meta_info": cut}]
    assert reader.answers({"choices": choices}) == [
        RowAnswer(1, one, ended=True),
        RowAnswer(0, cut, ended=True, aborted=True),
    ]
    bare = [{"index": 0, "finish_reason": "stop"}]
    told = {"routed_experts": "A"}
    assert reader.answers({"choices": bare, "sglext": told}) == [RowAnswer(0, told, ended=True)]
    for nothing in ({}, {"sglext": None}):
        assert reader.answers({"choices": bare, **nothing}) == [RowAnswer(0, {}, ended=True)]
    assert reader.answers({"choices": [{"finish_reason": "abort"}]}) == [RowAnswer(0, {}, ended=True, aborted=True)]


@pytest.mark.parametrize("parsed", [None, 7, "x", {}, [7], {"meta_info": 7}, {"choices": 7}, {"choices": []}])
@pytest.mark.parametrize("reader", [GenerateRows(), ChatRows()])
def test_what_is_none_of_the_engine_s_answers_is_refused(parsed: Any, reader: RowReader) -> None:
    with pytest.raises(UnreadableAnswer, match="incomplete"):
        reader.answers(parsed)


SPACINGS = st.sampled_from([(",", ":"), (", ", ": "), (" ,\t", " :  ")])


@given(
    st.sampled_from([None, {"type": "stop"}, {"type": "length", "length": 3}, {"type": "abort", "message": "x"}]),
    st.sampled_from([None, "0", 7]),
    st.permutations(["text", "meta_info", "index"]),
    st.permutations(["id", "finish_reason", "routed_experts", "completion_tokens"]),
    SPACINGS,
)
def test_an_event_of_generate_says_what_a_full_parse_says_however_it_is_written(
    finish: Any, rows: Any, order: list[str], inner: list[str], spacing: tuple[str, str]
) -> None:
    said = meta(rows=rows, finish=finish, completion_tokens=3)
    said = {name: said[name] for name in inner if name in said}
    whole = {"text": 'a "finish_reason":{}', "meta_info": said, "index": 2}
    data = json.dumps({name: whole[name] for name in order}, separators=spacing).encode()
    answer = GenerateRows().event(Event.read(b"data: " + data + b"\n\n"), has_rows=rows is not None)
    if finish is None and rows is None:
        assert answer is None
    else:
        assert answer == RowAnswer(2, said, finish is not None, finish is not None and finish["type"] == "abort")


@pytest.mark.parametrize("null", ["null", " null ", "\tnull"])
def test_an_event_of_a_generation_that_goes_on_is_not_parsed(null: str) -> None:
    """It says again all that has come before, and there is one for each token."""
    no_json = b'data: {"output_ids": [, "meta_info": {"finish_reason":%b, "id": 7}}\n\n' % null.encode()
    assert GenerateRows().event(Event.read(no_json), has_rows=False) is None


def test_the_end_of_a_stream_and_a_comment_are_no_answers_of_generate() -> None:
    reader = GenerateRows()
    assert reader.event(Event.read(LAST_EVENT), has_rows=False) is None
    for odd in (b": ping\n\n", b"data: 7\n\n", b"data: {\n\n", b'data: {"error": {}}\n\n'):
        with pytest.raises(UnreadableAnswer):
            reader.event(Event.read(odd), has_rows=False)


def chunk(finish: str | None = None, **fields: Any) -> Event:
    return event({"choices": [{"index": 0, "delta": {"content": "x"}, "finish_reason": finish}], **fields})


def said(*events: Event) -> list[RowAnswer | None]:
    """What a chat's reader says of each event and of the end."""
    reader = ChatRows()
    return [
        reader.event(each, has_rows=b'"routed_experts":"' in each.data) for each in (*events, Event.read(LAST_EVENT))
    ]


def test_a_chat_s_stream_tells_rows_in_its_extension_or_has_an_answer_without() -> None:
    told = {"routed_experts": "0", "output_ids": [1]}
    assert said(chunk(), chunk("stop"), event({"choices": [], "sglext": told})) == [
        None,
        None,
        RowAnswer(0, told, ended=True),
        None,
    ]
    without = RowAnswer(0, {}, ended=True)
    for nothing in (chunk("stop"), event({"sglext": {"routed_experts": None}}), event({"sglext": {}})):
        assert said(nothing) == [None, without]


@pytest.mark.parametrize("odd", [[7], {"choices": [{"meta_info": {"routed_experts": "0"}}]}, {"sglext": ["0"]}])
def test_rows_that_a_chat_s_stream_tells_elsewhere_are_refused(odd: Any) -> None:
    with pytest.raises(UnreadableAnswer, match="not in the extension"):
        ChatRows().event(event(odd), has_rows=True)


@pytest.mark.parametrize("separators", [(",", ":"), (", ", ": ")])
def test_a_chat_s_stream_that_was_aborted_or_told_of_an_error_says_so(separators: tuple[str, str]) -> None:
    def spelled(content: Any) -> Event:
        return Event.read(b"data: " + json.dumps(content, separators=separators).encode() + b"\n\n")

    aborted = spelled({"choices": [{"finish_reason": "abort", "index": 0}]})
    assert said(chunk(), aborted) == [None, None, RowAnswer(0, {}, ended=True, aborted=True)]
    for error in ({"error": {"message": "no"}}, {"object": "x", "error": {"param": "routed_experts"}}):
        assert said(chunk(), spelled(error)) == [None, None, None]
    quoted = chunk(note='{"error"', deep={"error": 1})
    assert said(quoted) == [None, RowAnswer(0, {}, ended=True)], "an error is the event's own"
