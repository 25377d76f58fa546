"""A scanner that finds the values of one field in JSON bytes without parsing the rest. No I/O.

Cumulative events repeat the whole answer so far, and answers may contain megabytes of expert ids. Parsing all of it for
one short value is too slow.

The scanner looks for the quoted name followed by a colon. That is always a field name: inside a string the quotes would
be escaped, and a string value is followed by a comma or bracket. Spacing and order of fields do not matter. Names
written with escapes (`\\u0066`) are not found; no engine writes them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import suppress
from json import JSONDecoder

_SPACE = b" \t\r\n"
_COLON = re.compile(rb"[ \t\r\n]*:[ \t\r\n]*")
_PLAIN_TEXT = re.compile(rb'"([\w./: -]*)"')  # versions and most other values match this
_NUMBER = re.compile(rb"-?\d[-+.\deE]*")
_LITERALS = ((b"null", None), (b"true", True), (b"false", False))
_ESCAPE = ord("\\")
_decode = JSONDecoder().raw_decode
#: Most values end within this many bytes; longer ones are tried with a window that grows by this factor.
_NEAR, _FURTHER = 512, 8


class Incomplete(ValueError):
    """An error: the bytes end inside the value, or are not valid JSON."""


class Field:
    """A field, identified by its name: ASCII without quotes and escapes."""

    __slots__ = ("name", "quoted")

    def __init__(self, name: str) -> None:
        self.name = name
        self.quoted = b'"%b"' % name.encode("ascii")

    def find(
        self, data: bytes, start: int = 0, stop: int | None = None, *, before: bytes = b""
    ) -> tuple[int, int] | None:
        """Return the next position of the name, at any depth, and the position of its value, which may be the end of
        `data`.

        Args:
            stop: the name begins before this position.
            before: the bytes in front of `data` if it is a piece of a stream, at least the last one.
        """
        at, end = start, len(data) if stop is None else stop + len(self.quoted) - 1
        while (name := data.find(self.quoted, at, end)) >= 0:
            at = name + len(self.quoted)
            colon = _COLON.match(data, at)
            if colon is not None and not (data[name - 1] == _ESCAPE if name else before.endswith(b"\\")):
                return name, colon.end()
        return None

    def beginning(self, data: bytes) -> int:
        """Return the position at the end of a piece where an incomplete name, or a name without its value, may begin.
        The length of the piece if there is none."""
        end = _end_before_space(data, len(data))
        last = data[end - 1 : end]
        if last == b":":
            end = _end_before_space(data, end - 1)
        if last in b':"' and data.endswith(self.quoted, 0, end):
            return end - len(self.quoted)
        if end == len(data):  # a name contains no whitespace
            quote = data.rfind(b'"', max(0, end - len(self.quoted) + 1))
            if quote >= 0 and self.quoted.startswith(data[quote:]):
                return quote
        return len(data)

    def places(self, data: bytes, start: int = 0, stop: int | None = None) -> Iterator[int]:
        """Yield the positions of the field's values, in order and at any depth, for names that begin before `stop`."""
        found = self.find(data, start, stop)
        while found is not None:
            yield found[1]
            found = self.find(data, found[1], stop)

    def values(self, data: bytes, start: int = 0) -> Iterator[object]:
        """Yield the field's values, parsed.

        Raises:
            Incomplete: the bytes end inside a value.
        """
        return (value_at(data, at) for at in self.places(data, start))

    def only(self, data: bytes) -> object:
        """Return the value of a field that occurs exactly once.

        Raises:
            Incomplete: the field is missing or occurs several times, or the bytes end inside the value.
        """
        places = self.places(data)
        at = next(places, None)
        if at is None or next(places, None) is not None:
            raise Incomplete(f"{self.quoted.decode()} does not stand exactly once")
        return value_at(data, at)

    def last(self, data: bytes) -> object:
        """Return the field's value if it is the last field of the object in `data`. The bytes in front of it are not
        scanned.

        Raises:
            Incomplete: another field is the last one, or the object does not end there.
        """
        name = data.rfind(self.quoted, -_NEAR)
        colon = _COLON.match(data, name + len(self.quoted)) if name > 0 and data[name - 1] != _ESCAPE else None
        if colon is not None:
            text = data[colon.end() :].decode("utf-8", "ignore")
            value, end = _decoded(text)
            if text[end:].strip() == "}":
                return value
        raise Incomplete(f"{self.quoted.decode()} is not the last field")


def _end_before_space(data: bytes, end: int) -> int:
    """Return the position where the whitespace in front of `end` begins."""
    return len(data[:end].rstrip(_SPACE))


def value_at(data: bytes, at: int) -> object:
    """Return the JSON value that begins at `at`.

    Raises:
        Incomplete: the value does not end within `data`, or is not valid JSON.
    """
    for spelled, value in _LITERALS:
        if data.startswith(spelled, at):
            return value
    plain = _PLAIN_TEXT.match(data, at)
    if plain is not None:
        return plain[1].decode("ascii")
    number = _NUMBER.match(data, at)
    if number is not None and number.end() == len(data):
        raise Incomplete("the bytes end with a number, which may go on")
    if number is not None:
        return _decoded(data[at : number.end()].decode("ascii"))[0]
    length = _NEAR
    while True:  # the cost depends on the value's length, not on the bytes behind it
        with suppress(Incomplete):
            return _decoded(data[at : at + length].decode("utf-8", "ignore"))[0]
        if at + length >= len(data):
            raise Incomplete("the bytes end within a value")
        length *= _FURTHER


def _decoded(text: str) -> tuple[object, int]:
    """Return the JSON value at the beginning of a text, and the position behind it."""
    try:
        return _decode(text)
    except (ValueError, RecursionError) as error:  # invalid JSON, a number with too many digits, or too deep
        raise Incomplete(str(error)) from error
