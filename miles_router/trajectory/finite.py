"""A search for NaN and infinity in values that become JSON. JSON has neither; orjson silently writes null for both."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Set
from dataclasses import fields, is_dataclass
from decimal import Decimal
from enum import Enum
from typing import Any

#: JSON longer than this is not parsed a second time to locate the number.
LONGEST_NAMED = 1 << 20
_MARKS = (b"NaN", b"Infinity", b"-Infinity")
_PLAIN = (str, bytes, int, type(None))


def find_non_finite(value: Any, name: str = "") -> str | None:
    """Return the path and value of the first number that is NaN or infinite, at any depth; None without one. Numbers
    are those of Python and numpy, Decimal, and every object with `__float__`. Arrays are searched too."""
    open_values, seen = [(name, value)], dict[int, Any]()
    while open_values:
        place, each = open_values.pop()
        each = each.value if isinstance(each, Enum) else each
        if isinstance(each, _PLAIN) or id(each) in seen:
            continue
        if _is_non_finite(each):
            return f"{place or 'the value'} is {each}"
        parts = _parts(place, each)
        if parts is not None:
            seen[id(each)] = each  # kept alive, so that no other object gets its id
            open_values += [*parts][::-1]
    return None


def require_finite(value: Any) -> None:
    """Check that a value contains neither NaN nor infinity.

    Raises:
        ValueError: it does; the message contains the path.
    """
    if (found := find_non_finite(value)) is not None:
        raise ValueError(f"{found}; JSON has no such number")


def non_finite_literal(data: bytes, position: int, reason: str) -> str | None:
    """Return the path of the NaN or infinity that made a JSON parser fail; None if the cause was something else.

    Args:
        position: the position of the failure in characters.
        reason: the parser's message.
    """
    at = len(data.decode("utf-8", "replace")[:position].encode()) if not data.isascii() else position
    if not (data.startswith(_MARKS, at) or "infinity" in reason):
        return None
    found = None
    if len(data) <= LONGEST_NAMED:
        try:
            found = find_non_finite(json.loads(data))
        except (ValueError, RecursionError):
            found = None
    return found or f"the number at character {position} is not finite"


def _is_non_finite(value: Any) -> bool:
    if isinstance(value, Decimal):
        return not value.is_finite()
    if not hasattr(type(value), "__float__") or getattr(value, "shape", ()) != ():
        return False
    try:
        return not math.isfinite(value)
    except (TypeError, ValueError, OverflowError):  # numpy's complex numbers, fractions too large for a float
        return False


def _parts(place: str, value: Any) -> Iterator[tuple[str, Any]] | None:
    """Return the (path, value) pairs in a container; None for anything else."""
    if isinstance(value, Mapping):
        return ((f"{place}.{key}" if place else str(key), each) for key, each in value.items())
    if is_dataclass(value) and not isinstance(value, type):
        return ((f"{place}.{each.name}" if place else each.name, getattr(value, each.name)) for each in fields(value))
    if getattr(value, "shape", ()) != () and hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, (list, tuple, Set)):
        return ((f"{place}[{number}]", each) for number, each in enumerate(value))
    return None
