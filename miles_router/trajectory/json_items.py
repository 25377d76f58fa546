"""A reader for the objects of a list in a JSON file, one at a time: a file of samples may exceed memory."""

from __future__ import annotations

import re
from collections.abc import Iterator
from mmap import mmap
from typing import Any

import orjson

from miles_router.trajectory.pieces import Malformed
from miles_router.trajectory.safetensors import MAX_HEADER_BYTES

#: Maximum bytes around the objects, which are parsed as a whole. The limit equals the limit of a safetensors header.
MAX_BYTES_AROUND = MAX_HEADER_BYTES
#: Brackets and the beginning of a string; inside a string, its end and escapes. A single pattern for whole strings
#: would try each quote of an unterminated one as a beginning, and remember each escape.
_MARKS, _WITHIN = re.compile(rb'["\[\]{}]'), re.compile(rb'\\.|"', re.DOTALL)
_QUOTE, _OPENING, _CLOSING = b'"', (b"{", b"["), (b"}", b"]")


def objects_of_list(data: bytes | mmap, name: str) -> Iterator[tuple[dict[str, Any], int]]:
    """Yield each object of the list in field `name`, with the position behind it.

    The rest of the file is checked only after the last object.

    Raises:
        Malformed: the file has another structure, is incomplete, or has too many bytes around the objects.
    """
    around, copied, count = bytearray(), 0, 0

    def keep(end: int) -> None:
        if len(around) + end - copied > MAX_BYTES_AROUND:
            raise Malformed(f"more than {MAX_BYTES_AROUND} bytes around the objects of {name!r}")
        around.extend(data[copied:end])

    for begin, end in _objects(data, b'"%b"' % name.encode("ascii")):
        keep(begin)
        around += b"null"
        copied, count = end, count + 1
        yield _parsed(data[begin:end]), end
    keep(len(data))
    whole = _parsed(bytes(around))
    if whole.get(name) != [None] * count:
        raise Malformed(f"the field {name!r} is not a list of objects")


def _objects(data: bytes | mmap, field: bytes) -> Iterator[tuple[int, int]]:
    """Yield the start and end of each object in a field's list."""
    depth, last, within, begin = 0, b"", False, 0
    place = 0
    while (mark := _MARKS.search(data, place)) is not None:
        found, place = mark[0], mark.end()
        if found in _OPENING:
            within = within or (depth == 1 and found == b"[" and last == field)
            if within and depth == 2 and found == b"{":
                begin = mark.start()
            depth += 1
        elif found in _CLOSING:
            depth -= 1
            if within and depth == 2 and found == b"}":
                yield begin, place
            within = within and depth > 1
        else:
            place = _end_of_string(data, place)
            if depth == 1:
                last = data[mark.start() : place]


def _end_of_string(data: bytes | mmap, place: int) -> int:
    """Return the position behind the string that begins in front of `place`; the end of the data if it is
    unterminated."""
    ends = (mark.end() for mark in _WITHIN.finditer(data, place) if mark[0] == _QUOTE)
    return next(ends, len(data))


def _parsed(text: bytes) -> dict[str, Any]:
    try:
        found = orjson.loads(text)
    except orjson.JSONDecodeError as error:
        raise Malformed(f"invalid or incomplete JSON: {error}") from None
    if not isinstance(found, dict):
        raise Malformed("the JSON is not an object")
    return found
