"""Values against annotations."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Optional, Union

import pytest

from miles_router.settings.values import WrongValue, convert, describe


class Own:
    """A class of a middleware's author."""


@pytest.mark.parametrize(
    ("annotation", "text"),
    [
        (int, "int"),
        (str | None, "str | none"),
        (Optional[int], "int | none"),  # noqa: UP045
        (Union[int, str], "int | str"),  # noqa: UP007
        (Literal["a", "b"], "a | b"),
        (tuple[str, ...], "list of str"),
        (list[int], "list of int"),
        (Sequence[float], "list of float"),
        (Mapping[str, int], "Mapping"),
        (Any, "Any"),
        (Own, "Own"),
        (list, "list"),
        ("a string", "a string"),
    ],
)
def test_annotations_are_described_as_people_write_them(annotation: Any, text: str) -> None:
    assert describe(annotation) == text


@pytest.mark.parametrize(
    ("text", "annotation", "value"),
    [
        ("7", int, 7),
        ("-7", int, -7),
        ("7", float, 7.0),
        ("1e3", float, 1000.0),
        ("seven", str, "seven"),
        ("", str, ""),
        ("true", bool, True),
        ("NO", bool, False),
        ("1", bool, True),
        ("off", bool, False),
        ("none", int | None, None),
        ("", int | None, None),
        ("7", int | None, 7),
        ("none", str | None, None),
        ("text", str | None, "text"),
        ("7", str | int, 7),
        ("a", Literal["a", "b"], "a"),
        ("2", Literal[1, 2], 2),
        ("a,b c", tuple[str, ...], ("a", "b", "c")),
        ("1 2", list[int], [1, 2]),
        ("", list[int], []),
        ("a b", list, ["a", "b"]),
        ("a b", tuple, ("a", "b")),
        ("x", Own, "x"),
        ("x", Any, "x"),
    ],
)
def test_text_is_read_as_the_annotation_asks(text: str, annotation: Any, value: object) -> None:
    got = convert(text, annotation, from_text=True)
    assert (got, type(got)) == (value, type(value))


@pytest.mark.parametrize(
    ("text", "annotation", "says"),
    [
        ("seven", int, "expected int, got 'seven'"),
        ("1.5", int, "expected int, got '1.5'"),
        ("", int, "expected int, got ''"),
        ("x", float, "expected float, got 'x'"),
        ("maybe", bool, "expected true or false, got 'maybe'"),
        ("x", int | None, "expected int | none, got 'x'"),
        ("c", Literal["a", "b"], "expected one of a | b, got 'c'"),
        ("1 x", list[int], "expected int, got 'x'"),
        ("x", Mapping[str, int], "expected Mapping"),
    ],
)
def test_text_that_does_not_fit_says_what_was_expected(text: str, annotation: Any, says: str) -> None:
    with pytest.raises(WrongValue) as wrong:
        convert(text, annotation, from_text=True)
    assert says in str(wrong.value)


@pytest.mark.parametrize(
    ("given", "annotation", "value"),
    [
        (7, int, 7),
        (7, float, 7.0),
        (7.5, float, 7.5),
        (True, bool, True),
        ("text", str, "text"),
        (None, int | None, None),
        (["a", "b"], tuple[str, ...], ("a", "b")),
        (("a",), list[str], ["a"]),
        ([1, 2], list[float], [1.0, 2.0]),
        ({"a": 1}, Mapping[str, int], {"a": 1}),
        ({"a": 1}, dict[str, int], {"a": 1}),
        ("a", Literal["a"], "a"),
        (1, Literal[1, 2], 1),
        (Path("x"), Own, Path("x")),
        ([1], Any, [1]),
    ],
)
def test_typed_values_are_taken_as_they_are(given: object, annotation: Any, value: object) -> None:
    got = convert(given, annotation)
    assert (got, type(got)) == (value, type(value))


@pytest.mark.parametrize(
    ("given", "annotation"),
    [
        ("80", int),
        (True, int),
        (1, bool),
        (True, float),
        (7, str),
        (None, int),
        (1.0, int),
        ("true", bool),
        ("none", int | None),
        ("a b", tuple[str, ...]),
        (b"ab", list[int]),
        (7, list[int]),
        (["a", 1], tuple[str, ...]),
        ([], Mapping[str, int]),
        ("c", Literal["a"]),
    ],
)
def test_typed_values_of_another_type_are_reported_and_not_guessed_at(given: object, annotation: Any) -> None:
    with pytest.raises(WrongValue, match="expected"):
        convert(given, annotation)
