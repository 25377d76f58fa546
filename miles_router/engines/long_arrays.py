"""Takes long arrays out of JSON, to be parsed in pieces.

A JSON parser holds the interpreter's lock for a whole document: one with a million logprobs stops the event loop for a
second, also from a thread. Between pieces, other threads have their turn.
"""

from __future__ import annotations

import re

#: The bytes of a piece, which takes about a millisecond.
PIECE = 1 << 16

_PLAIN, _STRING = rb'[^\[\]{}"]*', rb'"[^"\\]*(?:\\.[^"\\]*)*"'
_INNER = rb"[\[{]%b(?:%b%b)*[\]}]" % (_PLAIN, _STRING, _PLAIN)
#: One element and what follows it: an array or an object with at most one more level of them, or null.
_ELEMENT = re.compile(
    rb"\s*(?:null|[\[{]%b(?:(?:%b|%b)%b)*[\]}])\s*([,\]])" % (_PLAIN, _STRING, _INNER, _PLAIN), re.DOTALL
)


def take_array(document: bytes, name: str) -> tuple[bytes, list[bytes] | None]:
    """Return a document with null in place of the array of a field, and the array in pieces, which are arrays as well.
    The document as it is, and None, if it has no such array, or one whose elements are neither null, nor arrays or
    objects of two levels."""
    begun = re.search(rb'"%b"\s*:\s*\[' % name.encode(), document)
    if begun is None:
        return document, None
    at = piece = begun.end()
    empty = re.compile(rb"\s*\]").match(document, at)
    if empty is not None:
        return document[: begun.end() - 1] + b"null" + document[empty.end() :], []
    pieces: list[bytes] = []
    while (element := _ELEMENT.match(document, at)) is not None:
        at, is_last = element.end(), element[1] == b"]"
        if is_last or at - piece >= PIECE:
            pieces.append(b"[%b]" % document[piece : at - 1])
            piece = at
        if is_last:
            return document[: begun.end() - 1] + b"null" + document[at:], pieces
    return document, None
