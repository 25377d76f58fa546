"""The objects of a list in a JSON file, one at a time: a file of samples may be larger than memory."""

from __future__ import annotations

import re
from collections.abc import Iterator
from mmap import mmap
from typing import Any

import orjson

from miles_router.trajectory.pieces import Malformed

#: Strings, which may hold brackets, and brackets.
_MARKS = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"|[\[\]{}]', re.DOTALL)
_OPENING, _CLOSING = (b"{", b"["), (b"}", b"]")


def objects_of_list(data: bytes | mmap, name: str) -> Iterator[tuple[dict[str, Any], int]]:
    """The objects of the list that is the field `name` of the file's object, each with the place behind it. What stands
    around them is looked at behind the last: until then nobody knows whether the file is whole.

    Raises:
        Malformed: the file has another form, or is cut.
    """
    around, copied, count = bytearray(), 0, 0
    for begin, end in _objects(data, b'"%b"' % name.encode("ascii")):
        around += data[copied:begin] + b"null"
        copied, count = end, count + 1
        yield _parsed(data[begin:end]), end
    around += data[copied:]
    whole = _parsed(bytes(around))
    if whole.get(name) != [None] * count:
        raise Malformed(f"the field {name!r} is no list of objects")


def _objects(data: bytes | mmap, field: bytes) -> Iterator[tuple[int, int]]:
    """Where each object of a field's list begins and ends."""
    depth, last, within, begin = 0, b"", False, 0
    for mark in _MARKS.finditer(data):
        found = mark[0]
        if found in _OPENING:
            within = within or (depth == 1 and found == b"[" and last == field)
            if within and depth == 2 and found == b"{":
                begin = mark.start()
            depth += 1
        elif found in _CLOSING:
            depth -= 1
            if within and depth == 2 and found == b"}":
                yield begin, mark.end()
            within = within and depth > 1
        elif depth == 1:
            last = found


def _parsed(text: bytes) -> dict[str, Any]:
    try:
        found = orjson.loads(text)
    except orjson.JSONDecodeError as error:
        raise Malformed(f"no JSON, or cut: {error}") from None
    if not isinstance(found, dict):
        raise Malformed("no object in JSON")
    return found
