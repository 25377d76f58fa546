"""JSON as clients and models write it: read leniently where it has halves of surrogate pairs or bytes that are no
UTF-8, and refused where it is too large to be looked at. Pure.

JavaScript cuts texts between the two halves of a pair, and models write single halves as escapes. No tokenizer takes
them and orjson refuses them, so each becomes U+FFFD: the same text gives the same tokens in every later turn.
"""

from __future__ import annotations

import codecs
import re
from typing import Any

import orjson

from miles_router.errors import BadRequest
from miles_router.trajectory.finite import non_finite_literal

_HIGH, _LOW = rb"\\u[dD][89abAB][0-9a-fA-F]{2}", rb"\\u[dD][c-fC-F][0-9a-fA-F]{2}"
_LONE_HIGH, _LONE_LOW = re.compile(rb"%b(?!%b)" % (_HIGH, _LOW)), re.compile(rb"(?<!%b)%b" % (_HIGH, _LOW))
_REPLACEMENT = rb"\\ufffd"
#: Half of a pair in UTF-8, which Python would replace three times.
_RAW = re.compile(rb"\xed[\xa0-\xbf][\x80-\xbf]")
_HALF = re.compile("[\ud800-\udfff]")
#: Stands for an escaped backslash meanwhile. JSON has no such bytes.
_BACKSLASHES = b"\0\0"
#: Escapes in JSON that is read leniently. Each takes a microsecond, on the event loop.
MAX_ESCAPES = 1 << 20
#: Levels of nesting in a JSON body. orjson writes 254 of them, and answers put a body's values a few levels deeper.
MAX_DEPTH = 200
_LEVELS_WRITTEN = 254
#: Brackets in a JSON body, those in its texts included: each may be an object, and ten million of them hold the event
#: loop for seconds and take a gigabyte.
MAX_BRACKETS = 1 << 21
#: Commas, those in its texts included: ids of a batch, which cost less.
MAX_COMMAS = 1 << 24
#: Values in a JSON body beside ids: layers look at each by itself, at a microsecond or more. A history of 2,000
#: messages with calls has some 20,000.
MAX_VALUES = 1 << 18
#: Bytes from which on JSON is written sooner than its brackets are counted.
LONG = 1 << 13
NUMBERS = frozenset({int, float})


def loads(data: bytes) -> Any:
    """Parse JSON leniently. JSON in order costs nothing more.

    Raises:
        orjson.JSONDecodeError: not JSON for another reason, or with more than `MAX_ESCAPES`.
    """
    try:
        return orjson.loads(data)
    except orjson.JSONDecodeError:
        if data.count(b"\\u") > MAX_ESCAPES:
            raise
        read = mended(data)
        if read == data:
            raise
        return orjson.loads(read)


def mended(data: bytes) -> bytes:
    """JSON with U+FFFD for each half of a surrogate pair, and for bytes that are no UTF-8."""
    if b"\0" in data:
        return data
    text = _RAW.sub("\ufffd".encode(), data).decode("utf-8", "replace").encode()
    apart = text.replace(rb"\\", _BACKSLASHES)  # what is escaped behind one begins no escape
    apart = _LONE_LOW.sub(_REPLACEMENT, _LONE_HIGH.sub(_REPLACEMENT, apart))
    return apart.replace(_BACKSLASHES, rb"\\")


def whole_text(text: str) -> str:
    """A text with U+FFFD for each half of a surrogate pair."""
    return text if text.isascii() else _HALF.sub("\ufffd", text)


def read_json(body: bytes) -> Any:
    """Parse a request's body. Halves of surrogate pairs, and bytes that are no UTF-8, are read as U+FFFD;
    a byte order mark is skipped.

    Raises:
        BadRequest: not JSON, deeper than `MAX_DEPTH`, or with more than `MAX_BRACKETS`, `MAX_COMMAS` or `MAX_VALUES`.
    """
    body = body.removeprefix(codecs.BOM_UTF8)
    if len(body) > MAX_BRACKETS and body.count(b"[") + body.count(b"{") > MAX_BRACKETS:
        raise BadRequest(f"the request body has more than {MAX_BRACKETS} brackets")
    if len(body) > MAX_COMMAS and body.count(b",") > MAX_COMMAS:
        raise BadRequest(f"the request body has more than {MAX_COMMAS} commas")
    try:
        parsed = loads(body)
    except orjson.JSONDecodeError as error:
        reason = non_finite_literal(body, error.pos, error.msg) or error
        raise BadRequest(f"the request body is not valid JSON: {reason}") from None
    refuse_many_values(body, parsed, MAX_VALUES)
    if is_too_deep(body, parsed):
        raise BadRequest(f"the request body is nested deeper than {MAX_DEPTH} levels")
    return parsed


def refuse_many_values(body: bytes, parsed: Any, most: int) -> None:
    """Refuse a body that has too many values beside ids: `most` of them are small enough to look at each.

    Raises:
        BadRequest: it has more.
    """
    if may_have_many_values(body, most) and _has_many_values(parsed, most):
        raise BadRequest(f"the request body has more than {most} values beside lists of ids")


def may_have_many_values(body: bytes, most: int) -> bool:
    """Return whether JSON may have more than `most` values, as its length, or else its commas, say."""
    return len(body) > most and body.count(b",") + body.count(b"[") + body.count(b"{") > most


def _has_many_values(parsed: Any, most: int) -> bool:
    """Return whether there are more than `most` values, without looking at many more. Ids count nothing: lists of
    numbers that a field of the body is, or that stand in a list which is one."""
    fields = list(parsed.values()) if isinstance(parsed, dict) else [parsed]
    lists = [value for value in fields if isinstance(value, list)]
    waiting = [value for value in fields if isinstance(value, dict)]
    count = len(fields)
    for each in lists:
        if not _are_numbers(each):
            count += len(each)
            if count > most:
                return True
            waiting += [value for value in each if not _are_numbers(value)]
    while waiting and count <= most:
        value = waiting.pop()
        if isinstance(value, (dict, list)):
            count += len(value)
            if count <= most:
                waiting += value.values() if isinstance(value, dict) else value
    return count > most


def _are_numbers(value: object) -> bool:
    return isinstance(value, list) and NUMBERS.issuperset(map(type, value))


def is_too_deep(body: bytes, parsed: Any) -> bool:
    """Whether JSON has more than `MAX_DEPTH` levels."""
    few = len(body) < LONG and body.count(b"[") + body.count(b"{") <= MAX_DEPTH
    return not few and nests_too_deep(parsed)


def nests_too_deep(parsed: Any) -> bool:
    """Whether a JSON value has more than `MAX_DEPTH` levels, as its writer finds out: it stops within so many more."""
    for _ in range(_LEVELS_WRITTEN - MAX_DEPTH):
        parsed = [parsed]
    try:
        orjson.dumps(parsed)
    except orjson.JSONEncodeError:
        return True
    return False
