"""JSON as bytes: a lenient parser for what clients and models write, limits on size and depth, and scanners that find
one field or estimate tokens without parsing. No I/O.

JavaScript cuts strings between the two halves of a surrogate pair, and models write single halves as escapes. Neither
tokenizers nor orjson accept them, so each becomes U+FFFD: the same text yields the same tokens in every later turn.

Cumulative events repeat the whole answer so far, and answers may contain megabytes of expert ids. Parsing all of it for
one short value is too slow. The scanner looks for the quoted name followed by a colon. That is always a field name:
inside a string the quotes would be escaped, and a string value is followed by a comma or bracket. Spacing and order of
fields do not matter. Names written with escapes (`\\u0066`) are not found; no engine writes them.
"""

from __future__ import annotations

import codecs
import re
import string
from collections.abc import Iterator
from contextlib import suppress
from json import JSONDecoder
from typing import Any

import orjson

from miles_router.errors import BadRequest

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
#: Bytes that are compared at once: the result is small enough for memory that the allocator keeps.
_PART = 1 << 16


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
    if len(body) > MAX_BRACKETS and _occurrences(body, b"[{") > MAX_BRACKETS:
        raise BadRequest(f"the request body has more than {MAX_BRACKETS} brackets")
    if len(body) > MAX_COMMAS and _occurrences(body, b",") > MAX_COMMAS:
        raise BadRequest(f"the request body has more than {MAX_COMMAS} commas")
    try:
        parsed = loads(body)
    except orjson.JSONDecodeError as error:
        from miles_router.trajectory.finite import non_finite_literal  # here: its package loads numpy, 60 ms

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
    return len(body) > 2 * most and _occurrences(body, b",[{") > most  # each value takes two bytes


def _occurrences(body: bytes, characters: bytes) -> int:
    """Return how often the characters occur. `bytes.count` takes four times as long."""
    import numpy as np  # here: it takes 60 ms to load, and short bodies are not counted

    values = np.frombuffer(body, np.uint8)
    parts = [values[at : at + _PART] for at in range(0, len(values), _PART)]
    return sum(int(np.count_nonzero(part == each)) for part in parts for each in characters)


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

    def only(self, data: bytes, start: int = 0) -> object:
        """Return the value of a field that occurs exactly once from `start` on.

        Raises:
            Incomplete: the field is missing or occurs several times, or the bytes end inside the value.
        """
        places = self.places(data, start)
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


_SAMPLE = 256
#: Ids have at most six digits: a sample with more commas than this contains ids.
_COMMAS = _SAMPLE // 8
_BYTES_OF_TEXT, _BYTES_OF_IMAGE = 4, 500
_BASE64 = (string.ascii_letters + string.digits + "+/=").encode("ascii")
#: A table for `bytes.translate` that changes all bytes except the base64 alphabet.
_OTHERS_CHANGED = bytes(byte if byte in _BASE64 else ord("A") for byte in range(256))
#: The field in `meta_info` and in the `usage` of OpenAI's routes. Inside a string its quotes would be escaped.
_COUNT = b'"completion_tokens"'
_COUNT_END = len(_COUNT) + 1
_DIGITS, _BEHIND = 10, b" \r\n]}"


def sampled_tokens(end: bytes) -> int:
    """Return the number of sampled tokens that the end of an answer reports, the last one if there are several. 0 if it
    is not there: the stream has no usage, or expert rows follow it."""
    at = end.rfind(_COUNT)
    if at < 0:
        return 0
    begin = at + _COUNT_END
    try:
        return max(0, int(end[begin : begin + _DIGITS].partition(b",")[0].rstrip(_BEHIND)))
    except ValueError:  # null
        return 0


def prompt_tokens(body: bytes) -> int:
    """Return about how many tokens the prompt has, in constant time.

    A prompt of ids is estimated by the commas in a sample of the body, a text by four bytes per token. The rest of the
    body counts as prompt too; it is small compared with a large prompt. The tokens of an image are unknown before it is
    decoded: a JPEG of a megapixel has about 1,300 tokens (Qwen2.5-VL) and 600 kB of base64. The error is some percent
    for ids, and about a third for non-Latin text.
    """
    size = len(body)
    if size <= _SAMPLE:
        return size // _BYTES_OF_TEXT
    begin = (size - _SAMPLE) // 2
    sample = body[begin : begin + _SAMPLE]
    commas = sample.count(b",")
    if commas > _COMMAS:
        return size * commas // _SAMPLE
    image = sample.translate(_OTHERS_CHANGED) == sample
    return size // (_BYTES_OF_IMAGE if image else _BYTES_OF_TEXT)
