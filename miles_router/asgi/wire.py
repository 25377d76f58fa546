"""HTTP/1.1 on the wire, for connections to workers and to clients: header rules, paths and message framing. No I/O.

Headers are raw `(name, value)` byte pairs with lower-case names. Their rules are those of a proxy (RFC 9110 section
7.6.1).

The router decides on the decoded path; workers get the original bytes. Ambiguous paths are refused. The engine
(Starlette's routes), a proxy that merges `//` or resolves `..`, and the router could otherwise read different paths
from the same bytes (RFC 3986 sections 3.3 and 6.2.2).

Framing (RFC 9112): `httptools` parses messages that arrive. This module writes the heads of messages that are sent,
determines how a body ends, and limits the bytes around a chunked body. One integer describes a body: its length in
bytes, or one of the negative values `CHUNKED`, `UNTIL_CLOSE`, `NO_BODY`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from http import HTTPStatus
from urllib.parse import unquote_to_bytes

from miles_router.errors import BadRequest

RawHeaders = list[tuple[bytes, bytes]]
#: Fields about one connection, which never cross a proxy, whether or not `Connection` names them.
HOP_BY_HOP = frozenset({b"connection", b"keep-alive", b"proxy-connection", b"te", b"transfer-encoding", b"upgrade"})
#: Fields that the router does not forward to workers. It writes its own Host and Content-Length, and has already
#: answered `Expect` when it read the body.
REQUEST_DROPPED = HOP_BY_HOP | {b"host", b"content-length", b"expect"}
#: The group of a request; requests of one group can be aborted together.
GROUP = b"x-group-id"
#: The usual values of `Connection`; they name only fields that are dropped anyway.
NAMES_NOTHING = frozenset({b"keep-alive", b"close"})


def connection_named(values: Iterable[bytes]) -> frozenset[bytes]:
    """Return the lower-case field names that the values of `Connection` list."""
    return frozenset(token.strip().lower() for value in values for token in value.split(b",")) - {b""}


def end_to_end(headers: Iterable[tuple[bytes, bytes]], dropped: frozenset[bytes]) -> RawHeaders:
    """Return `headers` without the `dropped` fields and the fields that `Connection` names, in the same order."""
    kept = []
    named: list[bytes] = []
    for pair in headers:
        name = pair[0]
        if name not in dropped:
            kept.append(pair)
        elif name == b"connection" and pair[1].lower() not in NAMES_NOTHING:
            named.append(pair[1])
    if named:
        also_dropped = connection_named(named)
        kept = [pair for pair in kept if pair[0] not in also_dropped]
    return kept


def header_texts(headers: Iterable[tuple[bytes, bytes]]) -> list[tuple[str, str]]:
    """Decode `headers` as Latin-1 for JSON."""
    return [(name.decode("latin-1"), value.decode("latin-1")) for name, value in headers]


def raw_headers(texts: Iterable[tuple[str, str]]) -> RawHeaders:
    """Encode text headers as raw headers with lower-case names."""
    return [(name.lower().encode("latin-1"), value.encode("latin-1")) for name, value in texts]


def first_header(headers: Iterable[tuple[bytes, bytes]], wanted: bytes) -> bytes | None:
    """Return the value of the first header named `wanted` (lower-case), or None."""
    for name, value in headers:
        if name == wanted:
            return value
    return None


#: A path that is decoded already: its characters need no escape (RFC 3986 `pchar`), and no segment begins with a dot.
PLAIN = re.compile(rb"/|(?:/[A-Za-z0-9_~!$&'()*+,;=:@-][A-Za-z0-9._~!$&'()*+,;=:@-]*)+/?")
#: Parents of a last segment that may contain escaped slashes: a worker's URL, or a model name such as `org/model`.
BEFORE_NAMES = re.compile(rb"(/models/[^/]+)?(/workers|(/sessions/[^/]+)?/v1/models)")
BROKEN_ESCAPE = re.compile(rb"%(?![0-9A-Fa-f]{2})")


def decode_path(raw: bytes) -> str:
    """Return the decoded path.

    Raises:
        BadRequest: the path contains a control character, an escaped slash, a backslash, a dot-segment, an empty
            segment, or an escape that is malformed or not UTF-8.
    """
    return raw.decode("ascii") if PLAIN.fullmatch(raw) else _decode_unusual(raw)


def _decode_unusual(raw: bytes) -> str:
    if raw == b"*":  # `OPTIONS *` asks about the whole server
        return "*"
    spelled = raw.partition(b"?")[0]  # an empty query is kept with the path, so a `?` may end it
    if not spelled.startswith(b"/") or b"//" in spelled:
        raise BadRequest("the path must begin with one slash and have no empty segment")
    if not spelled.isascii() or BROKEN_ESCAPE.search(spelled):
        raise BadRequest("the path has a % that does not begin an escape, or a character that must be escaped")
    try:
        path = unquote_to_bytes(spelled).decode()
    except UnicodeDecodeError:
        raise BadRequest("the path's escapes are not UTF-8") from None
    if not path.isprintable() or "\\" in path:
        raise BadRequest("the path has a control character or a backslash")
    parent, _, name = spelled.rpartition(b"/")
    if b"%2f" in (parent if name and BEFORE_NAMES.fullmatch(parent) else spelled).lower():
        raise BadRequest("the path has an escaped slash")
    if any(segment.partition(";")[0] in (".", "..") for segment in path.split("/")):
        raise BadRequest("the path has a dot-segment")
    return path


#: A chunk of length zero ends the body.
CHUNKED = -1
#: The end of the connection ends the body.
UNTIL_CLOSE = -2
#: No body follows, even if the headers announce one, as in a reply to HEAD.
NO_BODY = -3

#: Maximum bytes of a request's and of a reply's head (first line and headers).
MAX_REQUEST_HEAD = 64 * 1024
MAX_REPLY_HEAD = 256 * 1024
#: Maximum bytes of chunk extensions, trailers and oversized chunk size lines in one body.
MAX_EXCESS = 64 * 1024
#: Bytes allowed in addition for each piece of a body: a size line and two line ends.
CHUNK_FRAME = 32
#: Bodies up to this size (bytes) are copied into one write with the head.
INLINE_BODY = 64 * 1024

MAX_STATUS = 599
MAX_LENGTH_DIGITS = 18
CRLF = b"\r\n"
LAST_CHUNK = b"0\r\n\r\n"
CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
#: Methods whose requests have no body unless the headers announce one (RFC 9110 section 9.3).
BODILESS_METHODS = frozenset({"GET", "HEAD", "OPTIONS", "DELETE", "TRACE"})
NO_CONTENT = 204
BODILESS_STATUSES = frozenset({NO_CONTENT, 304})
#: Header fields that determine where a message ends and whether the connection stays open.
FRAMING_FIELDS = frozenset({b"content-length", b"transfer-encoding", b"connection"})

_TOKEN = re.compile(rb"[!#$%&'*+\-.^_`|~0-9A-Za-z]+")  # RFC 9110 section 5.6.2
#: A table for `bytes.translate` that changes the bytes which field values must not contain (RFC 9110 section 5.5).
_CONTROLS_CHANGED = bytes(byte if byte == 9 or (byte >= 32 and byte != 127) else ord("?") for byte in range(256))
_NAMES_REMEMBERED = 1024


class InvalidFraming(ValueError):
    """A message whose end is ambiguous, or that cannot be written safely."""


# Messages that arrive


def request_body(headers: RawHeaders) -> int:
    """Return the length of a request's body, or CHUNKED or NO_BODY (RFC 9112 section 6.3).

    Raises:
        InvalidFraming: the Transfer-Encoding is not chunked, or Content-Length is not a number.
    """
    announced = _announced(headers)
    return NO_BODY if announced is None else announced


def reply_body(status: int, headers: RawHeaders, *, to_head: bool) -> int:
    """Return the length of a reply's body, or CHUNKED, UNTIL_CLOSE or NO_BODY (RFC 9112 section 6.3).

    Args:
        to_head: the request was HEAD.

    Raises:
        InvalidFraming: the Transfer-Encoding is not chunked, or Content-Length is not a number.
    """
    if to_head or status in BODILESS_STATUSES:
        return NO_BODY
    announced = _announced(headers)
    return UNTIL_CLOSE if announced is None else announced


def _announced(headers: RawHeaders) -> int | None:
    body = None
    for name, value in headers:
        if name not in FRAMING_FIELDS:
            continue
        if name == b"content-length":
            if body != CHUNKED:
                body = _length(value)
        elif name == b"transfer-encoding":
            if value.lower() != b"chunked":
                raise InvalidFraming(f"the transfer encoding {value.decode('latin-1')!r} is not supported")
            body = CHUNKED
    return body


def _length(value: bytes) -> int:
    if not value.isdigit() or len(value) > MAX_LENGTH_DIGITS:
        raise InvalidFraming(f"{value[:100].decode('latin-1')!r} is not a valid Content-Length")
    return int(value)


class TooMuchAround(InvalidFraming):
    """A peer sent too many bytes around a chunked body."""


class ChunkOverhead:
    """A counter of the bytes around one chunked body: size lines, extensions, trailers.

    The router drops them, but without a limit a peer could send them forever.
    """

    __slots__ = ("_bytes",)

    def __init__(self) -> None:
        self._bytes = 0

    def count_body(self, size: int) -> None:
        """Count `size` bytes of the body; call it before `count_received` for the bytes that contain them."""
        self._bytes -= size + CHUNK_FRAME

    def count_received(self, size: int) -> None:
        """Count `size` bytes that arrived; `count_body` was called for the body bytes among them.

        Raises:
            TooMuchAround: more than `MAX_EXCESS` bytes were not part of the body.
        """
        self._bytes += size
        if self._bytes > MAX_EXCESS:
            raise TooMuchAround(f"more than {MAX_EXCESS} bytes of chunk extensions or trailers came")
        if self._bytes < 0:
            self._bytes = 0


# Messages that are sent


def request_head(method: str, target: bytes, authority: bytes, headers: RawHeaders, body_length: int) -> bytes:
    """Return request line and headers. `headers` must not contain Host and Content-Length, which are added here.

    Raises:
        InvalidFraming: a header name is invalid, or a header contains a control character.
    """
    lines = [b"%b %b HTTP/1.1" % (method.encode("ascii"), target), b"host: " + authority]
    for name, value in headers:
        lines.append((_LINE_STARTS.get(name) or _line_start(name)) + value)
    if body_length or method not in BODILESS_METHODS:
        lines.append(b"content-length: %d" % body_length)
    return _joined(lines)


def reply_head(
    status: int, headers: Iterable[tuple[bytes, bytes]], *, method: str, http_1_0: bool, keep_alive: bool
) -> tuple[bytes, int, bool]:
    """Return the head of a reply, the framing of its body, and whether the connection stays open after it.

    A body without Content-Length is chunked; for an HTTP/1.0 client it ends with the connection.

    Args:
        method: of the request.
        keep_alive: whether the client and the server want to keep the connection. `Connection: close` in `headers`
            overrides it.

    Raises:
        InvalidFraming: the status or length is invalid, there are two lengths, a header name is invalid, or a header
            contains a control character.
    """
    line = _STATUS_LINES.get(status)
    if line is None:
        raise InvalidFraming(f"{status} is not a valid status of a reply")
    lines = [line]
    body = None
    for name, value in headers:
        start = _LINE_STARTS.get(name)
        if start is None:
            field = name.lower()
            if field == b"content-length":
                if status == NO_CONTENT:
                    continue  # RFC 9110 section 8.6
                if body is not None:
                    raise InvalidFraming("a reply has two Content-Length headers")
                body, start = _length(value), b"content-length: "
            elif field == b"connection":
                keep_alive = keep_alive and b"close" not in value.lower()
                continue
            elif field == b"transfer-encoding":
                continue  # the server chooses the transfer encoding, not the app
            else:
                start = _line_start(name)
        lines.append(start + value)
    if method == "HEAD" or status in BODILESS_STATUSES:
        body = NO_BODY
    elif body is None:
        body = UNTIL_CLOSE if http_1_0 else CHUNKED
        if body == CHUNKED:
            lines.append(b"transfer-encoding: chunked")
    if http_1_0 or not keep_alive:
        keep_alive = False
        lines.append(b"connection: close")
    return _joined(lines), body, keep_alive


def _reason(status: int) -> str:
    try:
        return HTTPStatus(status).phrase
    except ValueError:
        return ""


_STATUS_LINES = {
    status: f"HTTP/1.1 {status} {_reason(status)}".encode("ascii") for status in range(200, MAX_STATUS + 1)
}
#: Header name as given -> the beginning of its line. A cache, because names repeat and checking them is slow. Without
#: framing fields, which need a closer look.
_LINE_STARTS: dict[bytes, bytes] = {}


def _line_start(name: bytes) -> bytes:
    if not _TOKEN.fullmatch(name):
        raise InvalidFraming(f"{name[:100].decode('latin-1')!r} is not a valid header name")
    lower = name.lower()
    start = lower + b": "
    if lower not in FRAMING_FIELDS and len(_LINE_STARTS) < _NAMES_REMEMBERED:
        _LINE_STARTS[name] = start
    return start


def _joined(lines: list[bytes]) -> bytes:
    """Return the head with these lines, if none contains a control character, which could begin another line."""
    text = b"".join(lines)
    if text.translate(_CONTROLS_CHANGED) != text:
        raise InvalidFraming("a header contains a control character")
    lines += (b"", b"")  # the empty line at the end
    return CRLF.join(lines)
