"""JSON from clients and models: a lenient parser for invalid Unicode, and limits on size and depth. No I/O.

JavaScript cuts strings between the two halves of a surrogate pair, and models write single halves as escapes. Neither
tokenizers nor orjson accept them, so each becomes U+FFFD: the same text yields the same tokens in every later turn.
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
#: Half of a surrogate pair encoded as UTF-8, which Python would replace by three U+FFFD.
_RAW = re.compile(rb"\xed[\xa0-\xbf][\x80-\xbf]")
_HALF = re.compile("[\ud800-\udfff]")
#: Placeholder of an escaped backslash. JSON contains no such bytes.
_BACKSLASHES = b"\0\0"
#: Maximum number of escapes in JSON that is parsed leniently. Each takes a microsecond on the event loop.
MAX_ESCAPES = 1 << 20
#: Maximum nesting of a JSON body. orjson writes 254 levels, and answers nest a body's values a few levels deeper.
MAX_DEPTH = 200
_LEVELS_WRITTEN = 254
#: Maximum number of brackets in a JSON body, including those in strings. Each may be an object: ten million objects
#: block the event loop for seconds and take a gigabyte.
MAX_BRACKETS = 1 << 21
#: Maximum number of commas, including those in strings. Most separate the ids of a batch, which cost less.
MAX_COMMAS = 1 << 24
#: Maximum number of values besides ids. Layers look at each value, at a microsecond or more. A history of 2,000
#: messages with tool calls has about 20,000.
MAX_VALUES = 1 << 18
#: Above this size in bytes, writing the JSON is faster than counting its brackets.
LONG = 1 << 13
NUMBERS = frozenset({int, float})


def loads(data: bytes) -> Any:
    """Parse JSON leniently. Valid JSON has no extra cost.

    Raises:
        orjson.JSONDecodeError: not JSON for another reason, or with more than `MAX_ESCAPES`.
    """
    try:
        return orjson.loads(data)
    except orjson.JSONDecodeError:
        if data.count(b"\\u") > MAX_ESCAPES:
            raise
        read = replace_invalid_unicode(data)
        if read == data:
            raise
        return orjson.loads(read)


def replace_invalid_unicode(data: bytes) -> bytes:
    """Return the JSON with U+FFFD for each half of a surrogate pair and for bytes that are not UTF-8."""
    if b"\0" in data:
        return data
    text = _RAW.sub("\ufffd".encode(), data).decode("utf-8", "replace").encode()
    apart = text.replace(rb"\\", _BACKSLASHES)  # `\\\\ud800` is an escaped backslash, not a half
    apart = _LONE_LOW.sub(_REPLACEMENT, _LONE_HIGH.sub(_REPLACEMENT, apart))
    return apart.replace(_BACKSLASHES, rb"\\")


def replace_half_surrogates(text: str) -> str:
    """Return the text with U+FFFD for each half of a surrogate pair."""
    return text if text.isascii() else _HALF.sub("\ufffd", text)


def read_json(body: bytes) -> Any:
    """Parse a request body leniently. A byte order mark is skipped.

    Halves of surrogate pairs, and bytes that are not UTF-8, become U+FFFD.

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
    """Check that a body has at most `most` values besides lists of ids, so that each value can be looked at.

    Raises:
        BadRequest: the body has more values.
    """
    if may_have_many_values(body, most) and _has_many_values(parsed, most):
        raise BadRequest(f"the request body has more than {most} values besides lists of ids")


def may_have_many_values(body: bytes, most: int) -> bool:
    """Return whether JSON may have more than `most` values, judged by its length and its commas and brackets."""
    return len(body) > most and body.count(b",") + body.count(b"[") + body.count(b"{") > most


def _has_many_values(parsed: Any, most: int) -> bool:
    """Return whether there are more than `most` values, without visiting many more. Lists of numbers (ids) count
    nothing if they are a field of the body, or an element of a list that is a field."""
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
    """Return whether JSON has more than `MAX_DEPTH` levels."""
    few = len(body) < LONG and body.count(b"[") + body.count(b"{") <= MAX_DEPTH
    return not few and nests_too_deep(parsed)


def nests_too_deep(parsed: Any) -> bool:
    """Return whether a JSON value has more than `MAX_DEPTH` levels. orjson refuses to write more than 254 levels. The
    value is wrapped in lists so that orjson fails just above `MAX_DEPTH`."""
    for _ in range(_LEVELS_WRITTEN - MAX_DEPTH):
        parsed = [parsed]
    try:
        orjson.dumps(parsed)
    except orjson.JSONEncodeError:
        return True
    return False
