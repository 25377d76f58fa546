"""JSON with halves of surrogate pairs, or with bytes that are no UTF-8, read leniently. Pure.

JavaScript cuts texts between the two halves of a pair, and models write single halves as escapes. No tokenizer takes
them and orjson refuses them, so each becomes U+FFFD: the same text gives the same tokens in every later turn.
"""

from __future__ import annotations

import re
from typing import Any

import orjson

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
