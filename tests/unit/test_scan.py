"""Values found in JSON as bytes: what a full parse finds, for any spacing and any order of fields."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from contextlib import suppress
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from miles_router.engines.answers import Progress, finish_reasons, index_of, progress_of
from miles_router.engines.events import Event, EventReader
from miles_router.engines.scan import Field, Incomplete, value_at

NAMES = ("finish_reason", "index", "weight_version")
names = st.sampled_from(NAMES) | st.text(max_size=6) | st.sampled_from(["x" + name for name in NAMES]) | st.just('"')
leaves = (
    st.none()
    | st.booleans()
    | st.integers(-(10**20), 10**20)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=8)
    | st.sampled_from(['"finish_reason":', '\\"index": 1', "\\", *NAMES])
)
documents = st.recursive(
    leaves, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(names, inner, max_size=4), max_leaves=25
)
spacings = st.sampled_from([(",", ":"), (", ", ": "), (" ,\n", " :\t"), ("\r\n,", "  :  ")])


def written(document: object, spacing: tuple[str, str], *, escape: bool, indent: int | None) -> bytes:
    return json.dumps(document, separators=spacing, ensure_ascii=escape, indent=indent).encode()


def every_value(data: bytes, name: str) -> list[object]:
    """What a full parse says, in the order in which the values begin."""
    found: list[object] = []

    def walk(value: Any) -> None:
        if isinstance(value, tuple):
            for key, inner in value:
                if key == name:
                    found.append(plain(inner))
                walk(inner)
        elif isinstance(value, list):
            for inner in value:
                walk(inner)

    walk(json.loads(data, object_pairs_hook=tuple))
    return found


def plain(value: Any) -> Any:
    if isinstance(value, tuple):
        return {key: plain(inner) for key, inner in value}
    return [plain(inner) for inner in value] if isinstance(value, list) else value


@given(documents, spacings, st.booleans(), st.sampled_from([None, 1]))
def test_what_is_found_is_what_a_full_parse_finds(
    document: object, spacing: tuple[str, str], escape: bool, indent: int | None
) -> None:
    data = written({"document": document}, spacing, escape=escape, indent=indent)
    for name in NAMES:
        assert list(Field(name).values(data)) == every_value(data, name)


@given(documents, spacings, st.integers(0, 400))
def test_the_beginning_of_a_document_has_the_first_values_or_says_that_one_is_cut(
    document: object, spacing: tuple[str, str], end: int
) -> None:
    data = written({"document": document}, spacing, escape=False, indent=None)
    for name in NAMES:
        found: list[object] = []
        with suppress(Incomplete):
            found.extend(Field(name).values(data[:end]))
        assert found == every_value(data, name)[: len(found)]


@given(documents, spacings, st.booleans(), st.lists(st.integers(0, 400), max_size=8))
def test_it_does_not_matter_in_which_pieces_a_document_comes(
    document: object, spacing: tuple[str, str], escape: bool, cuts: list[int]
) -> None:
    data = written({"document": document}, spacing, escape=escape, indent=None)
    edges = [0, *sorted(cut for cut in cuts if cut < len(data)), len(data)]
    for name in NAMES:
        field = Field(name)
        found: list[int] = []
        withheld, passed = b"", 0
        for begin, end in pairwise(edges):
            piece, at = withheld + data[begin:end], 0
            while (place := field.find(piece, at, before=data[:passed])) is not None and place[1] < len(piece):
                assert piece.startswith(field.quoted, place[0])
                at = place[1]
                found.append(passed + at)
            rest = at + field.beginning(piece[at:])
            withheld, passed = piece[rest:], passed + rest
        assert found == list(field.places(data))


@pytest.mark.parametrize("tail", [b'"', b'"in', b'"index', b'"index"', b'"index" \n', b'"index":', b'"index" : \t'])
def test_a_name_may_begin_at_the_end_of_a_piece(tail: bytes) -> None:
    assert Field("index").beginning(b'{"a":1,' + tail) == 7


@pytest.mark.parametrize("piece", [b"", b"{", b'{"index":1', b'{"ind,', b'{"a":', b'{"indices":', b"::"])
def test_what_cannot_be_a_name_that_begins_is_none(piece: bytes) -> None:
    assert Field("index").beginning(piece) == len(piece)


def test_the_one_value_of_a_field_and_no_other() -> None:
    assert Field("index").only(b'{"index" : 3 }') == 3
    for data in (b"{}", b'{"index": 3', b'[{"index": 3}, {"index": 3}]', b'{"index": {"a": '):
        with pytest.raises(Incomplete):
            Field("index").only(data)


@given(st.dictionaries(names, documents, max_size=4), spacings, st.sampled_from([None, 1]))
def test_the_value_of_the_last_field_needs_no_look_at_the_others(
    document: dict[str, Any], spacing: tuple[str, str], indent: int | None
) -> None:
    data = written(document, spacing, escape=False, indent=indent)
    for name in NAMES:
        if next(reversed(document), None) == name and not isinstance(document[name], (str, list, dict)):
            assert Field(name).last(data) == document[name]
        else:
            with suppress(Incomplete):
                assert Field(name).last(data) == document[name]
                assert next(reversed(document)) == name


@pytest.mark.parametrize(
    ("event", "index"),
    [
        (b'{"meta_info": {"index": 7}, "index" : 3 }\n', 3),
        (b'{"index":3,"text":"x"}', 3),
        (b'{"index":3,"meta_info":{"index":7}}', None),
        (b'{"text":"\\"index\\":7","index":3', None),
        (b'{"text":"x"}', None),
        (b'{"index":"3"}', None),
        (b'{"index":true}', None),
    ],
)
def test_which_generation_an_event_is_about(event: bytes, index: int | None) -> None:
    assert index_of(event) == index


@pytest.mark.parametrize(
    ("event", "progress"),
    [
        (b'{"text":"\\"finish_reason\\":1","meta_info":{"finish_reason" : null,"weight_version": "1"}}', (None, "1")),
        (b'{"meta_info":{"weight_version":2,"finish_reason":{"type":"abort"}}}', ({"type": "abort"}, 2)),
        (b'{"meta_info":{"finish_reason":null}}', (None, None)),
        (b'{"meta_info":{"weight_version":"1"}}', None),
        (b'{"meta_info":{"finish_reason":{"type"', None),
        (b'{"meta_info":{"finish_reason":null,"weight_version":', None),
        (b'{"error":{}}', None),
    ],
)
def test_what_an_event_says_of_its_answer(event: bytes, progress: tuple[object, object] | None) -> None:
    assert progress_of(event) == (None if progress is None else Progress(*progress))


def test_a_long_value_is_read_to_its_end() -> None:
    text = "é" * 5000
    assert value_at(json.dumps({"a": text}, ensure_ascii=False).encode(), 6) == text
    assert value_at(b"[%b]" % (b"1" * 600), 1) == int("1" * 600)


@pytest.mark.parametrize(
    "value", [b'"abc', b"[" * 100_000, b'{"a":' * 100_000, b"1" * 5000 + b",", b"tru", b"-", b'"\n"', b""]
)
def test_what_cannot_be_read_is_said_to_be_incomplete(value: bytes) -> None:
    with pytest.raises(Incomplete):
        value_at(b'{"a":' + value, 5)


@pytest.mark.parametrize(
    ("data", "answers", "beginning", "found"),
    [
        (b'{"meta_info": {"finish_reason" : null}}', 1, False, [None]),
        (
            b'{"text": "\\"finish_reason\\":1", "meta_info":{"finish_reason":{"type":"stop"}}}',
            1,
            False,
            [{"type": "stop"}],
        ),
        (b'{"meta_info":{}}', 1, False, None),
        (b'[{"finish_reason":null},{"finish_reason":{"type":"abort"}}]', 2, False, [None, {"type": "abort"}]),
        (b'[{"finish_reason":null},{"finish_reason":null}]', 1, False, None),
        (b'[{"finish_reason":null},{"finish_reason":nu', 1, True, [None]),
        (b'{"finish_reason" : null, "text": "', 1, True, [None]),
        (b'[{"finish_reason":null},{"finish_reason":{"type":"ab', 2, True, None),
        (b'{"choices":[{"finish_reason": "abort"}]}', 1, False, ["abort"]),
    ],
)
def test_finish_reasons_are_seen_without_parsing_or_not_at_all(
    data: bytes, answers: int, beginning: bool, found: list[object] | None
) -> None:
    assert finish_reasons(data, answers, beginning=beginning) == found


ODD_BYTES = {
    "names without end": lambda size: b'"rid":' * (size // 6),
    "names and spaces": lambda size: (b'"rid"' + b" " * 95) * (size // 100),
    "spaces in front of a value": lambda size: b'"rid":' + b" " * size + b"1",
    "spaces behind a name": lambda size: b'"rid"' + b" " * size,
    "quotes": lambda size: b'"' * size,
    "backslashes": lambda size: b'"rid":"' + b"\\" * size,
    "names in a text": lambda size: b'\\"rid\\":' * (size // 8),
    "names behind an escape": lambda size: b'\\"rid":' * (size // 7),
    "deep lists": lambda size: b'"rid":' + b"[" * size,
    "lists that do not end": lambda size: b'"rid":[' * (size // 7),
    "texts that do not end": lambda size: b'"rid":"\\n' * (size // 9),
    "one long text": lambda size: b'"rid":"\\n' + b"a" * size + b'"',
    "digits": lambda size: b'"rid":' + b"1" * size,
    "numbers": lambda size: b'"rid":1e' * (size // 8),
}


def _growth(look: Callable[[bytes], object], make: Callable[[int], bytes], size: int) -> float:
    """How many times as long a look at 8 times as many bytes takes."""

    def seconds(size: int) -> float:
        data, best = make(size), 1.0
        for _ in range(3):
            began = time.process_time()
            look(data)
            best = min(best, time.process_time() - began)
        return max(best, 1e-4)  # what takes no time grows in no way

    return seconds(size) / seconds(size // 8)


@pytest.mark.parametrize("odd", ODD_BYTES)
def test_a_look_at_bytes_takes_time_that_grows_as_they_do(odd: str) -> None:
    field = Field("rid")

    def look(data: bytes) -> None:
        for each in (field.values, field.last, field.beginning):
            with suppress(Incomplete):
                list(each(data)) if each == field.values else each(data)

    assert _growth(look, ODD_BYTES[odd], 1 << 18) < 24, "8 times as long is in order, 64 times is not"


def test_a_value_takes_time_by_its_own_length_and_not_by_what_follows() -> None:
    values = b'"rid":"\\n' + b"a" * 1000 + b'",'
    assert _growth(lambda data: list(Field("rid").values(data)), lambda size: values * (size // 1000), 1 << 22) < 24


STREAMS = {
    "empty lines": b"\n",
    "lines": b"a\n",
    "carriage returns": b"\r",
    "letters": b"a",
    "ends that are none": b"\n\r",
    "events": b"data: {}\n\n",
}


@pytest.mark.parametrize("lets_go", [False, True])
@pytest.mark.parametrize("piece", [1, 1 << 16], ids=["byte by byte", "in pieces"])
@pytest.mark.parametrize("odd", STREAMS)
def test_cutting_a_stream_into_events_takes_time_that_grows_as_it_does(odd: str, piece: int, lets_go: bool) -> None:
    def cut(data: bytes) -> None:
        reader = EventReader()
        for at in range(0, len(data), piece):
            for raw in reader.feed(data[at : at + piece]):
                Event.read(raw)
            if lets_go and not reader.in_released_event:
                reader.release()

    assert _growth(cut, lambda size: STREAMS[odd] * (size // len(STREAMS[odd])), 1 << 15) < 24
