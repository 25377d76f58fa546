"""Conversion of values by type annotation, for router settings and middleware options. Pure.

Text (flags, environment) is parsed by the annotation. Values from YAML must already have the right type, so that `port:
"80"` is reported instead of guessed at.
"""

from __future__ import annotations

import re
import reprlib
import types
import typing
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Literal, Union

TRUE = frozenset({"1", "true", "yes", "on"})
FALSE = frozenset({"0", "false", "no", "off"})
SEQUENCES = (list, tuple, Sequence, Collection)
#: Integers are smaller than this. Python refuses to print one of more than 4,300 digits, so messages could not show it.
INTEGER_LIMIT = 2**63
#: Shows a value in one line, bounded: a few lines of YAML aliases can stand for more items than memory holds.
_SHORT = reprlib.Repr()
_SHORT.maxlevel, _SHORT.maxstring, _SHORT.maxother = 3, 200, 200
#: Characters that no file, host or JSON string can contain. An argument that is not UTF-8 arrives with lone surrogates.
_NO_TEXT = re.compile("[\0\ud800-\udfff]")


class WrongValue(ValueError):
    """A value that does not fit its annotation; the message contains what was expected."""


def show(value: object) -> str:
    """Return a short form of `value` for a message: one line, cut where it is long or deeply nested."""
    if isinstance(value, int) and abs(value) >= INTEGER_LIMIT:
        return "an integer of more than 64 bits"
    try:
        return _SHORT.repr(value)
    except ValueError:  # an integer too long to print stands inside
        return f"a {type(value).__name__} with an integer of more than 64 bits"


def describe(annotation: Any) -> str:
    """Return an annotation in the form that people write: `int`, `str | None`, `'a' | 'b'`."""
    origin = typing.get_origin(annotation)
    if annotation is type(None):
        return "none"
    if origin is Literal:
        return " | ".join(map(str, typing.get_args(annotation)))
    if origin in (Union, types.UnionType):
        return " | ".join(describe(choice) for choice in typing.get_args(annotation))
    if origin in SEQUENCES:
        return f"list of {describe(typing.get_args(annotation)[0])}"
    return getattr(annotation, "__name__", str(annotation)).replace("typing.", "")


def convert(value: object, annotation: Any, *, from_text: bool = False) -> Any:
    """Return `value` converted to `annotation`. An annotation that is not known here (a class of yours, say) accepts
    any value: its constructor is the better judge.

    Raises:
        WrongValue: the value does not fit.
    """
    origin = typing.get_origin(annotation)
    if origin in (Union, types.UnionType):
        return _one_of(value, typing.get_args(annotation), annotation, from_text)
    if origin is Literal:
        return _literal(value, annotation)
    if origin in SEQUENCES or annotation in SEQUENCES:
        return _sequence(value, annotation, from_text)
    if origin is not None and issubclass(origin, Mapping):
        return _checked(value, Mapping, annotation)
    if annotation in (bool, int, float, str):
        return _scalar(value, annotation, from_text)
    if annotation is type(None):
        return _none(value, from_text)
    return value


def _one_of(value: object, choices: tuple[Any, ...], annotation: Any, from_text: bool) -> Any:
    for choice in sorted(choices, key=lambda choice: choice is str):  # text fits `str` always: try the others first
        try:
            return convert(value, choice, from_text=from_text)
        except WrongValue:
            continue
    raise WrongValue(f"expected {describe(annotation)}, got {show(value)}")


def _literal(value: object, annotation: Any) -> object:
    for choice in typing.get_args(annotation):
        if value == choice or (isinstance(value, str) and value == str(choice)):
            return choice
    raise WrongValue(f"expected one of {describe(annotation)}, got {show(value)}")


def _sequence(value: object, annotation: Any, from_text: bool) -> tuple[Any, ...] | list[Any]:
    if from_text and isinstance(value, str):
        value = value.replace(",", " ").split()
    elif from_text and isinstance(value, list):  # a flag's arguments, each of which may be several
        value = [part.strip() for each in value for part in str(each).split(",") if part.strip()]
    if isinstance(value, (str, bytes)) or not isinstance(value, Sequence):
        raise WrongValue(f"expected {describe(annotation)}, got {show(value)}")
    arguments = typing.get_args(annotation)
    item = arguments[0] if arguments else Any
    items = [convert(each, item, from_text=from_text) for each in value]
    return tuple(items) if tuple in (typing.get_origin(annotation), annotation) else items


def _scalar(value: object, wanted: type, from_text: bool) -> object:
    if from_text and isinstance(value, str):
        value = _from_text(value, wanted)
    if isinstance(value, bool) and wanted is int:
        raise WrongValue(f"expected int, got {show(value)}")
    if isinstance(value, int) and abs(value) >= INTEGER_LIMIT:
        raise WrongValue(f"expected {wanted.__name__}, got {show(value)}")
    if isinstance(value, str) and _NO_TEXT.search(value):
        raise WrongValue(f"expected text without null characters and lone surrogates, got {show(value)}")
    if wanted is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    return _checked(value, wanted, wanted)


def _from_text(text: str, wanted: type) -> object:
    if wanted is str:
        return text
    if wanted is bool:
        if text.lower() in TRUE | FALSE:
            return text.lower() in TRUE
        raise WrongValue(f"expected true or false, got {show(text)}")
    try:
        return wanted(text)
    except ValueError:
        raise WrongValue(f"expected {wanted.__name__}, got {show(text)}") from None


def is_none(value: object) -> bool:
    """Return whether a value means "none": None, or the text "", "none" or "null"."""
    return value is None or (isinstance(value, str) and value.strip().lower() in ("", "none", "null"))


def _none(value: object, from_text: bool) -> None:
    if value is None or (from_text and is_none(value)):
        return
    raise WrongValue(f"expected none, got {show(value)}")


def _checked(value: object, wanted: type, annotation: Any) -> object:
    if not isinstance(value, wanted):
        raise WrongValue(f"expected {describe(annotation)}, got {show(value)}")
    return value
