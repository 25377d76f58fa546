"""The objects of a list in JSON, one at a time: those that a whole parse finds, and nothing of a file that is cut."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from miles_router.trajectory import Malformed, json_items
from miles_router.trajectory.json_items import objects_of_list

VALUES = st.recursive(
    st.none() | st.integers(-5, 5) | st.text('{}[]"\\,:a\n', max_size=6),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text('{"samples', max_size=3), inner, max_size=3),
    max_leaves=8,
)
OBJECTS = st.lists(st.dictionaries(st.sampled_from(["samples", "b", '"{']), VALUES, max_size=3), max_size=4)


def read(data: bytes) -> list[dict[str, Any]]:
    return [each for each, _ in objects_of_list(data, "samples")]


@given(OBJECTS, VALUES, VALUES, st.booleans())
def test_the_objects_are_those_of_a_whole_parse(samples: list[Any], before: Any, behind: Any, indented: bool) -> None:
    options = orjson.OPT_INDENT_2 if indented else 0
    data = orjson.dumps({"before": before, "samples": samples, "behind": behind}, option=options)
    assert read(data) == samples


def test_a_place_is_told_behind_each_object() -> None:
    data = b'{"samples": [{"a": 1}, {}]}'
    assert [data[:end] for _, end in objects_of_list(data, "samples")] == [
        b'{"samples": [{"a": 1}',
        b'{"samples": [{"a": 1}, {}',
    ]


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"null",
        b"[{}]",
        b'{"other": [{}]}',
        b'{"samples": {}}',
        b'{"samples": [1]}',
        b'{"samples": [{}, 1]}',
        b'{"samples": [[{}]]}',
        b'{"samples": [{} {}]}',
        b'{"samples": [{}]} x',
        b'{"samples": [{"a": }]}',
        b'{"inner": {"samples": [{}]}}',
    ],
)
def test_what_is_no_list_of_objects_is_refused(data: bytes) -> None:
    with pytest.raises(Malformed):
        read(data)


def test_a_file_is_refused_wherever_it_is_cut() -> None:
    data = orjson.dumps({"samples": [{"a": '}]"', "b": [{"c": 1}]}, {}], "metadata": {"d": "}"}})
    for end in range(len(data)):
        with pytest.raises(Malformed):
            read(data[:end])


def test_each_byte_of_a_string_that_is_cut_is_looked_at_once() -> None:
    """Its escaped quotes begin no strings: there may be a million of them, and each would be looked for to the end."""
    with pytest.raises(Malformed):
        read(b'{"samples": [{"a": "' + b'\\"x' * 1_000_000)


def test_an_escape_takes_no_memory_beside_what_is_read() -> None:
    text = b'{"samples": [{"a": "' + b"\\n" * 500_000 + b'"}]}'

    def peak(read: Callable[[bytes], object]) -> int:
        tracemalloc.start()
        read(text)
        _, most = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        return most

    assert peak(read) < 2 * peak(orjson.loads)


def test_what_stands_around_the_objects_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(json_items, "MAX_BYTES_AROUND", 100)
    assert read(b'{"samples": [{"a": "%b"}]}' % (b"x" * 1000)) == [{"a": "x" * 1000}]
    for data in (b'{"samples": [{}], "b": "%b"}', b'{"b": "%b", "samples": [{}]}', b'{"%b": 1}'):
        with pytest.raises(Malformed, match="more than 100 bytes"):
            read(data % (b"x" * 1000))
