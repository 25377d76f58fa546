"""A parser of a client's bytes into requests (RFC 9112), based on `httptools`, with limits on everything but bodies.

It does no I/O.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from typing import Any

import httptools

from miles_router.asgi.exchange import Scope
from miles_router.asgi.wire import (
    CHUNKED,
    FRAMING_FIELDS,
    MAX_REQUEST_HEAD,
    NO_BODY,
    ChunkOverhead,
    InvalidFraming,
    RawHeaders,
    TooMuchAround,
    request_body,
)
from miles_router.errors import BadRequest, InternalError, RouterError
from miles_router.serving.client_request import ClientRequest

logger = logging.getLogger(__name__)

TOO_LONG = f"the request head is longer than {MAX_REQUEST_HEAD} bytes"
#: Bytes to parse at once, except in a body of known length. A pipelining client may send many requests in one read,
#: and each parsed request takes a few thousand bytes of memory.
SLICE = 4096
VERSIONS = frozenset({"1.0", "1.1"})
NOTHING = memoryview(b"")
#: Creates the request for a scope. Further arguments: the client wants to keep the connection open; the client waits
#: for `100 Continue`. Returns None if no further requests are wanted.
Begin = Callable[[Scope, bool, bool], ClientRequest | None]
#: RFC 3986 section 3.2, without user information.
_HOST = re.compile(rb"[A-Za-z0-9._~!$&'()*+,;=:%\[\]-]*")

#: A target with scheme and authority (RFC 9112 section 3.2.2); the group is the authority without user information.
_ABSOLUTE = re.compile(rb"[A-Za-z][A-Za-z0-9+.-]*://(?:[^/?#]*@)?([^/?#]*)")


class BadMessage(BadRequest):
    """The bytes are not a valid request. `reason` is the label of the metric that counts it."""

    def __init__(self, message: str, reason: str = "invalid") -> None:
        super().__init__(message)
        self.reason = reason


class RequestReader:
    """A parser for one connection: passes body bytes to the present request.

    Args:
        template: the entries that the scopes of all requests on the connection share.
        begin: called at the end of each head.
        end: called at the end of each body.
    """

    def __init__(self, template: Scope, begin: Begin, end: Callable[[ClientRequest], None]) -> None:
        self._template = template
        self._begin = begin
        self._end = end
        self._parser: Any = httptools.HttpRequestParser(self)
        #: The request whose body is being read.
        self.request: ClientRequest | None = None
        #: The headers of the request whose head or body is being read.
        self.headers: RawHeaders = []
        #: True while a request has begun to arrive and is incomplete.
        self.partial = False
        #: While True, bytes are stored unparsed, because enough requests wait.
        self.full = False
        #: The count of all bytes passed to `feed`.
        self.received = 0
        self._unread: memoryview = NOTHING
        self._url = b""
        self._in_head = True
        self._head_bytes = 0
        self._head_is_split = False
        self._body_left = 0  # bytes left of a body with a length
        self._excess: ChunkOverhead | None = None  # for a chunked body
        self._upgrade = False  # the request offers an upgrade, so the parser treats the next bytes as another protocol
        self._resumed = False  # a new parser reads the replacement head after a declined upgrade
        self._message_ended = False  # a message ended in the bytes that are being parsed

    def feed(self, data: bytes) -> None:
        """Parse the next bytes.

        Raises:
            BadMessage: the bytes are not valid HTTP, or a head, or the bytes around a chunked body, are too long.
            RouterError: a bug in the router, which was logged.
        """
        self.received += len(data)
        if len(data) <= SLICE and not self.full:
            self._parse(data)
        else:
            self._unread = memoryview(bytes(self._unread) + data)
            self.parse_stored()

    def parse_stored(self) -> None:
        """Parse the stored bytes until enough requests wait. Raises the errors of `feed`."""
        while self._unread and not self.full:
            size = max(SLICE, self._body_left)
            data, self._unread = self._unread[:size], self._unread[size:]
            self._parse(data)

    def _parse(self, data: bytes | memoryview) -> None:
        try:
            while data:
                self._message_ended = False
                excess = self._excess
                try:
                    self._parser.feed_data(data)
                except httptools.HttpParserUpgrade as upgrade:
                    self._decline_upgrade()
                    data = data[upgrade.args[0] :]
                else:
                    self._count(len(data), excess)
                    return
        except httptools.HttpParserCallbackError as error:
            raise _refusal(error.__context__) from error
        except httptools.HttpParserError:
            raise BadMessage("the received bytes are not a valid HTTP request") from None
        except InvalidFraming as error:
            raise _refusal(error) from None

    def close(self) -> None:
        """Drop the parser, which breaks a reference cycle, and the stored bytes."""
        self._parser = None
        self._unread = NOTHING

    def _count(self, received: int, excess: ChunkOverhead | None) -> None:
        if self._message_ended:
            self._head_is_split = self.partial
        elif self._in_head:
            self._head_is_split = True
            self._head_bytes += received
            if self._head_bytes > MAX_REQUEST_HEAD:
                raise BadMessage(TOO_LONG, "head_too_long")
        elif excess is not None:
            excess.count_received(received)

    def _bound_whole_head(self) -> None:
        size = len(self._url) + sum(len(name) + len(value) + 4 for name, value in self.headers)
        if size > MAX_REQUEST_HEAD:
            raise BadMessage(TOO_LONG, "head_too_long")

    def _decline_upgrade(self) -> None:
        """Continue with HTTP/1.1 after an `Upgrade` header: the request's body follows, then the next request.

        `httptools` stops parsing at an upgrade, so a new parser gets a replacement head with the same framing headers.
        """
        lines = [b"%b: %b\r\n" % pair for pair in self.headers if pair[0] in FRAMING_FIELDS - {b"connection"}]
        self._parser = httptools.HttpRequestParser(self)
        self._upgrade, self._resumed = False, True
        self._parser.feed_data(b"POST / HTTP/1.1\r\n%b\r\n" % b"".join(lines))
        self._resumed = False

    # Called by the parser

    def on_message_begin(self) -> None:
        self.partial = True

    def on_url(self, url: bytes) -> None:
        if not self._resumed:
            self._url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._in_head:  # else it is a trailer, which must not be merged into the headers (RFC 9110 section 6.5.1)
            self.headers.append((name.lower(), value.rstrip()))  # the parser leaves whitespace behind it

    def on_headers_complete(self) -> None:
        if self._resumed:
            return
        self._in_head = False
        if self._head_is_split:
            self._bound_whole_head()
        headers, parser = self.headers, self._parser
        version, method = parser.get_http_version(), parser.get_method().decode("ascii")
        if method == "CONNECT":  # a proxy in front would take a good reply for the beginning of a tunnel
            raise BadMessage("the router opens no tunnels")
        body, awaits_continue = _examine(version, headers)
        self._body_left = max(body, 0)
        self._excess = ChunkOverhead() if body == CHUNKED else None
        raw_path, query, authority = _target(self._url)
        if authority:
            headers = self.headers = _with_host(headers, authority)
        scope = {
            **self._template,
            "http_version": version,
            "method": method,
            "path": raw_path.decode("latin-1"),  # not unquoted; the app does that
            "raw_path": raw_path,
            "query_string": query,
            "headers": headers,
        }
        self._upgrade = parser.should_upgrade()
        self.request = self._begin(scope, parser.should_keep_alive(), awaits_continue)

    def on_body(self, data: bytes) -> None:
        if self._excess is not None:
            self._excess.count_body(len(data))
        else:
            self._body_left -= len(data)
        if self.request is not None:
            self.request.feed(data)

    def on_message_complete(self) -> None:
        request = self.request
        if self._upgrade or request is None:
            return
        self.request = None
        self._message_ended = self._in_head = True
        self.partial = False
        self._head_bytes = self._body_left = 0
        self._url, self.headers = b"", []
        request.complete()
        self._end(request)


def _refusal(error: BaseException | None) -> RouterError:
    """Return the error to answer for an exception of the parser or of one of its callbacks."""
    if isinstance(error, BadMessage):
        return error
    if isinstance(error, InvalidFraming | httptools.HttpParserInvalidURLError):
        return BadMessage(str(error), "too_much_around_body" if isinstance(error, TooMuchAround) else "invalid")
    logger.error("internal_error", exc_info=error)
    return InternalError("the router failed; its log has the details")


def _examine(version: str, headers: RawHeaders) -> tuple[int, bool]:
    """Return the length of the body as `request_body` does, and whether the client waits for `100 Continue`.

    Check the HTTP version and the Host header (RFC 9112 sections 2.3 and 3.2).

    Raises:
        InvalidFraming: raised by `request_body`.
        BadMessage: the version is not 1.0 or 1.1, or there is not exactly one valid Host (HTTP/1.0 may omit it).
    """
    if version not in VERSIONS:
        raise BadMessage(f"the router speaks HTTP/1.1 and HTTP/1.0, not HTTP/{version}")
    hosts: list[bytes] = []
    framing: RawHeaders = []
    expected = None
    for pair in headers:  # once for all of them, because this is a part of each request's cost
        name = pair[0]
        if name in FRAMING_FIELDS:
            framing.append(pair)
        elif name == b"host":
            hosts.append(pair[1])
        elif name == b"expect" and expected is None:
            expected = pair[1].lower()
    if len(hosts) > 1 or (not hosts and version != "1.0"):
        raise BadMessage(f"a request must have exactly one Host header, not {len(hosts)}")
    if hosts and not _HOST.fullmatch(hosts[0]):
        raise BadMessage("the Host header is not a valid host")
    body = request_body(framing)
    return body, expected == b"100-continue" and body != NO_BODY and version != "1.0"


def _target(url: bytes) -> tuple[bytes, bytes, bytes]:
    """Return path (not unquoted), query and authority of a request target; the authority only of an absolute one.

    An empty query (`/a?`) differs from no query. ASGI's `query_string` cannot express it, so the `?` stays in the path.

    Raises:
        httptools.HttpParserInvalidURLError: the target has no path, or an invalid authority.
    """
    authority = b""
    if url.startswith(b"/") and url.find(b"#") < 0:
        path, mark, query = url.partition(b"?")
    else:
        parsed = httptools.parse_url(url)
        path, query = parsed.path or b"/", parsed.query or b""
        mark = b"?" if url.endswith(b"?") else b""
        absolute = _ABSOLUTE.match(url)
        authority = absolute[1] if absolute else b""
    return (path, query, authority) if query or not mark else (path + b"?", b"", authority)


def _with_host(headers: RawHeaders, authority: bytes) -> RawHeaders:
    """Replace Host by the authority of an absolute target, which has precedence (RFC 9112 section 3.2.2)."""
    return [(b"host", authority), *(pair for pair in headers if pair[0] != b"host")]
