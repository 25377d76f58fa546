"""JSON written in parts, none of which takes long: who writes a large answer in a thread holds the interpreter's lock
for no longer than one part takes. `b"".join` of parts lets other threads run."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy.typing as npt
import orjson

#: Numbers of an array that are written at once: about a millisecond.
AT_ONCE = 1 << 15
_OPTIONS = orjson.OPT_SERIALIZE_NUMPY


def array_parts(array: npt.NDArray[Any]) -> Iterator[bytes]:
    """A flat array as a list of numbers."""
    if len(array) <= AT_ONCE:
        yield orjson.dumps(array, option=_OPTIONS)
        return
    for at in range(0, len(array), AT_ONCE):
        yield b"," if at else b"["
        yield orjson.dumps(array[at : at + AT_ONCE], option=_OPTIONS)[1:-1]
    yield b"]"


def object_parts(arrays: Mapping[str, npt.NDArray[Any]], others: Mapping[str, Any]) -> Iterator[bytes]:
    """An object with flat arrays, of which there is at least one, and other fields behind them; without the bracket
    that ends it."""
    before = b"{"
    for name, array in arrays.items():
        yield b'%b"%b":' % (before, name.encode("ascii"))
        yield from array_parts(array)
        before = b","
    if others:
        yield b","
        yield orjson.dumps(others)[1:-1]


def list_parts(items: Iterable[Iterable[bytes]]) -> Iterator[bytes]:
    """A list of what has been written."""
    yield b"["
    for place, item in enumerate(items):
        if place:
            yield b","
        yield from item
    yield b"]"
