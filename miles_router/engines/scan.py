"""JSON looked at as bytes: the values of a field, found without parsing what stands around them. Pure.

A stream's events say again all that came before, and an answer may hold megabytes of expert ids: who wants to know one
short value must not parse the rest. A field's name between unescaped quotes before a colon is always a name: inside a
string its quotes would be escaped, and a string that ends in front of it would need a comma. So the spacing and the
order of fields do not matter. Names that are spelled with escapes (`\\u0066`) are not found; no engine writes them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import suppress
from json import JSONDecoder

_SPACE = b" \t\r\n"
_COLON = re.compile(rb"[ \t\r\n]*:[ \t\r\n]*")
_PLAIN_TEXT = re.compile(rb'"([\w./: -]*)"')  # which is what versions and most others are
_NUMBER = re.compile(rb"-?\d[-+.\deE]*")
_LITERALS = ((b"null", None), (b"true", True), (b"false", False))
_ESCAPE = ord("\\")
_decode = JSONDecoder().raw_decode
#: Bytes within which most values end; then so many times as many, and so on.
_NEAR, _FURTHER = 512, 8


class Incomplete(ValueError):
    """The bytes end within the value, or are no JSON that can be read."""


class Field:
    """A field by its name, which is ASCII without quotes and escapes."""

    __slots__ = ("name", "quoted")

    def __init__(self, name: str) -> None:
        self.name = name
        self.quoted = b'"%b"' % name.encode("ascii")

    def find(
        self, data: bytes, start: int = 0, stop: int | None = None, *, before: bytes = b""
    ) -> tuple[int, int] | None:
        """Where its name stands next, at any depth, and where its value begins, which may be behind the end of `data`.

        Args:
            stop: the name begins before this.
            before: what stands in front of `data` where that is a piece of something, at least the last byte of it.
        """
        at, end = start, len(data) if stop is None else stop + len(self.quoted) - 1
        while (name := data.find(self.quoted, at, end)) >= 0:
            at = name + len(self.quoted)
            colon = _COLON.match(data, at)
            if colon is not None and not (data[name - 1] == _ESCAPE if name else before.endswith(b"\\")):
                return name, colon.end()
        return None

    def beginning(self, data: bytes) -> int:
        """Where, at the end of a piece, its name may begin with a value that is not in the piece; the piece's length if
        it does not."""
        end = _without_space(data, len(data))
        last = data[end - 1 : end]
        if last == b":":
            end = _without_space(data, end - 1)
        if last in b':"' and data.endswith(self.quoted, 0, end):
            return end - len(self.quoted)
        if end == len(data):  # there is no space within a name
            quote = data.rfind(b'"', max(0, end - len(self.quoted) + 1))
            if quote >= 0 and self.quoted.startswith(data[quote:]):
                return quote
        return len(data)

    def places(self, data: bytes, start: int = 0, stop: int | None = None) -> Iterator[int]:
        """Where each of its values begins, in the order in which they stand, at any depth; of those whose names begin
        before `stop`."""
        found = self.find(data, start, stop)
        while found is not None:
            yield found[1]
            found = self.find(data, found[1], stop)

    def values(self, data: bytes, start: int = 0) -> Iterator[object]:
        """Its values, parsed.

        Raises:
            Incomplete: the bytes end within one.
        """
        return (value_at(data, at) for at in self.places(data, start))

    def only(self, data: bytes) -> object:
        """Its value, where it stands exactly once.

        Raises:
            Incomplete: it stands nowhere or several times, or the bytes end within it.
        """
        places = self.places(data)
        at = next(places, None)
        if at is None or next(places, None) is not None:
            raise Incomplete(f"{self.quoted.decode()} does not stand exactly once")
        return value_at(data, at)

    def last(self, data: bytes) -> object:
        """Its value, where it is the last field of the object that the bytes are. What stands before it is not looked
        at.

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


def _without_space(data: bytes, end: int) -> int:
    """Where the whitespace in front of a place begins."""
    return len(data[:end].rstrip(_SPACE))


def value_at(data: bytes, at: int) -> object:
    """The JSON value that begins at a place.

    Raises:
        Incomplete: it does not end within `data`, or is none.
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
    while True:  # so that a value costs what it is long, and not what stands behind it
        with suppress(Incomplete):
            return _decoded(data[at : at + length].decode("utf-8", "ignore"))[0]
        if at + length >= len(data):
            raise Incomplete("the bytes end within a value")
        length *= _FURTHER


def _decoded(text: str) -> tuple[object, int]:
    """The value that a text begins with, and where it ends."""
    try:
        return _decode(text)
    except (ValueError, RecursionError) as error:  # no JSON, a number of too many digits, or too deep
        raise Incomplete(str(error)) from error
