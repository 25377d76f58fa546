"""How HTTP/1.1 messages are framed (RFC 9112), as tables and functions without I/O.

Both ends of the router use it: the connections to workers, and the server towards clients. `httptools` finds the ends
of messages that arrive; here stands what a message that goes out looks like, which bodies there can be at all, and how
many bytes a peer may send that are no body.

A body is described by one integer: its length in bytes, or `CHUNKED`, `UNTIL_CLOSE` or `NO_BODY`, which are negative.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from http import HTTPStatus

from miles_router.asgi.headers import RawHeaders

#: The body ends with a chunk of length zero.
CHUNKED = -1
#: The body ends with the connection.
UNTIL_CLOSE = -2
#: No body follows, whatever the headers say: the reply to a HEAD request announces one that is not sent.
NO_BODY = -3

#: Bytes of a request's line and headers, and of a reply's. A longer head is refused.
MAX_REQUEST_HEAD = 64 * 1024
MAX_REPLY_HEAD = 256 * 1024
#: Bytes of chunk sizes, chunk extensions and trailers that may come without a body beside them.
MAX_EXCESS = 64 * 1024
#: What is allowed for each piece of a body on top of that: a size line and two line ends.
CHUNK_FRAME = 32
#: Bodies up to this size (bytes) share one write, and one copy, with the head before them.
INLINE_BODY = 64 * 1024

MAX_STATUS = 599
MAX_LENGTH_DIGITS = 18
CRLF = b"\r\n"
LAST_CHUNK = b"0\r\n\r\n"
CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
#: Methods whose requests have no body unless they say so (RFC 9110 section 9.3).
BODILESS_METHODS = frozenset({"GET", "HEAD", "OPTIONS", "DELETE", "TRACE"})
NO_CONTENT = 204
BODILESS_STATUSES = frozenset({NO_CONTENT, 304})
#: Header fields that say where a message ends, and whether the connection outlives it.
FRAMING_FIELDS = frozenset({b"content-length", b"transfer-encoding", b"connection"})

_TOKEN = re.compile(rb"[!#$%&'*+\-.^_`|~0-9A-Za-z]+")  # RFC 9110 section 5.6.2
#: Every byte that a field value may have (RFC 9110 section 5.5); what is left of a head without them is its line ends.
_TEXT = bytes(byte for byte in range(256) if byte == 9 or (byte >= 32 and byte != 127))
_NAMES_REMEMBERED = 1024


class InvalidFraming(ValueError):
    """A message that cannot be sent, or understood, without doubt about where it ends."""


# Messages that arrive


def request_body(headers: RawHeaders) -> int:
    """The body of a request with `headers` (RFC 9112 section 6.3).

    Raises:
        InvalidFraming: it is encoded for its transfer in another way than chunked.
    """
    announced = _announced(headers)
    return NO_BODY if announced is None else announced


def reply_body(status: int, headers: RawHeaders, *, to_head: bool) -> int:
    """The body of a reply; `to_head`: it answers a HEAD request (RFC 9112 section 6.3).

    Raises:
        InvalidFraming: it is encoded for its transfer in another way than chunked.
    """
    if to_head or status in BODILESS_STATUSES:
        return NO_BODY
    announced = _announced(headers)
    return UNTIL_CLOSE if announced is None else announced


def _announced(headers: RawHeaders) -> int | None:
    body = None
    for name, value in headers:
        if name == b"content-length":
            if body != CHUNKED:
                body = _length(value)
        elif name == b"transfer-encoding":
            if value.lower() != b"chunked":
                raise InvalidFraming(f"the transfer encoding {value.decode('latin-1')!r} is not understood")
            body = CHUNKED
    return body


def _length(value: bytes) -> int:
    if not value.isdigit() or len(value) > MAX_LENGTH_DIGITS:
        raise InvalidFraming(f"{value[:100].decode('latin-1')!r} is no length")
    return int(value)


class TooMuchAround(InvalidFraming):
    """A peer sent more around a body than anybody needs."""


class Excess:
    """Counts what a peer sends around a chunked body: sizes, extensions, trailers. None of it is kept or passed on, and
    without a bound one could send it for ever."""

    __slots__ = ("_bytes",)

    def __init__(self) -> None:
        self._bytes = 0

    def piece(self, size: int) -> None:
        """Of what comes next, `size` bytes are a piece of the body."""
        self._bytes -= size + CHUNK_FRAME

    def received(self, size: int) -> None:
        """`size` bytes came, and all pieces in them were told.

        Raises:
            TooMuchAround: more than `MAX_EXCESS` of what came so far was no body.
        """
        self._bytes += size
        if self._bytes > MAX_EXCESS:
            raise TooMuchAround(f"more than {MAX_EXCESS} bytes of chunk extensions or trailers came")
        if self._bytes < 0:
            self._bytes = 0


# Messages that go out


def request_head(method: str, target: bytes, authority: bytes, headers: RawHeaders, body_length: int) -> bytes:
    """Request line and headers. `headers` are without Host and Content-Length, which are made here.

    Raises:
        InvalidFraming: a header that would end the line it stands in.
    """
    parts = [method.encode("ascii"), b" ", target, b" HTTP/1.1\r\nhost: ", authority, CRLF]
    lines = len(headers) + 3
    for name, value in headers:
        parts += (_LINE_STARTS.get(name) or _line_start(name), value, CRLF)
    if body_length or method not in BODILESS_METHODS:
        parts.append(b"content-length: %d\r\n" % body_length)
        lines += 1
    parts.append(CRLF)
    return _checked(b"".join(parts), lines)


def reply_head(
    status: int, headers: Iterable[tuple[bytes, bytes]], *, method: str, http_1_0: bool, keep_alive: bool
) -> tuple[bytes, int, bool]:
    """The reply to a request with `method`: its head as it is written, with names in lower case, its body, and whether
    the connection stays open behind it.

    Without a length the body is chunked, or ends with the connection where the client speaks HTTP/1.0. `keep_alive`:
    client and server want the connection to stay open; `Connection: close` in `headers` says that the app does not.

    Raises:
        InvalidFraming: a status or a length that is none, or a header that would end the line it stands in.
    """
    line = _STATUS_LINES.get(status)
    if line is None:
        raise InvalidFraming(f"{status} is no status of a reply")
    parts = [line]
    lines = 2
    body = None
    for name, value in headers:
        start = _LINE_STARTS.get(name) or _line_start(name)
        if start is _LENGTH:
            if status == NO_CONTENT:
                continue  # RFC 9110 section 8.6
            if body is not None:
                raise InvalidFraming("a reply has two lengths")
            body = _length(value)
        elif start is _CONNECTION:
            keep_alive = keep_alive and b"close" not in value.lower()
            continue
        elif start is _ENCODING:
            continue  # how the bytes travel from here is not for the app to say
        parts += (start, value, CRLF)
        lines += 1
    if method == "HEAD" or status in BODILESS_STATUSES:
        body = NO_BODY
    elif body is None:
        body = UNTIL_CLOSE if http_1_0 else CHUNKED
        if body == CHUNKED:
            parts.append(b"transfer-encoding: chunked\r\n")
            lines += 1
    if http_1_0 or not keep_alive:
        keep_alive = False
        parts.append(b"connection: close\r\n")
        lines += 1
    parts.append(CRLF)
    return _checked(b"".join(parts), lines), body, keep_alive


def _reason(status: int) -> str:
    try:
        return HTTPStatus(status).phrase
    except ValueError:
        return ""


_STATUS_LINES = {
    status: f"HTTP/1.1 {status} {_reason(status)}\r\n".encode("ascii") for status in range(200, MAX_STATUS + 1)
}
_LENGTH, _CONNECTION, _ENCODING = b"content-length: ", b"connection: ", b"transfer-encoding: "
#: Names of headers, as they were given -> the beginning of their line. Names repeat, and checking them costs.
_LINE_STARTS = {start[:-2]: start for start in (_LENGTH, _CONNECTION, _ENCODING)}


def _line_start(name: bytes) -> bytes:
    if not _TOKEN.fullmatch(name):
        raise InvalidFraming(f"{name[:100].decode('latin-1')!r} is no name of a header")
    lower = name.lower()
    start = _LINE_STARTS.get(lower) or lower + b": "
    if len(_LINE_STARTS) < _NAMES_REMEMBERED:
        _LINE_STARTS[name] = start
    return start


def _checked(head: bytes, lines: int) -> bytes:
    """`head`, if its only control characters are the ends of its `lines`, so that nobody has smuggled another one in.

    The empty line at its end counts.
    """
    if head.translate(None, _TEXT) != CRLF * lines:
        raise InvalidFraming("a control character stands in a header")
    return head
