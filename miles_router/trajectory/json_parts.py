"""Writers that yield JSON in small parts, so that a thread never holds the GIL for longer than one part takes.

`b"".join` of the parts releases the GIL.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy.typing as npt
import orjson

#: Numbers of an array per part: about a millisecond.
AT_ONCE = 1 << 15
_OPTIONS = orjson.OPT_SERIALIZE_NUMPY


def array_parts(array: npt.NDArray[Any]) -> Iterator[bytes]:
    """Yield an array as a JSON list, with several dimensions as a list of lists."""
    if array.size <= AT_ONCE:
        yield orjson.dumps(array, option=_OPTIONS)
        return
    step = max(1, AT_ONCE * len(array) // array.size)
    for at in range(0, len(array), step):
        yield b"," if at else b"["
        yield orjson.dumps(array[at : at + step], option=_OPTIONS)[1:-1]
    yield b"]"


def object_parts(arrays: Mapping[str, npt.NDArray[Any]], others: Mapping[str, Any]) -> Iterator[bytes]:
    """Yield a JSON object with at least one array and then other fields, without its closing bracket."""
    before = b"{"
    for name, array in arrays.items():
        yield b'%b"%b":' % (before, name.encode("ascii"))
        yield from array_parts(array)
        before = b","
    if others:
        yield b","
        yield orjson.dumps(others)[1:-1]


def list_parts(items: Iterable[Iterable[bytes]]) -> Iterator[bytes]:
    """Yield a JSON list of items that are already JSON."""
    yield b"["
    for place, item in enumerate(items):
        if place:
            yield b","
        yield from item
    yield b"]"
