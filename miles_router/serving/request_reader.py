"""A client's bytes read as requests (RFC 9112), over `httptools`, with bounds on all that is no body. No I/O."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from typing import Any

import httptools

from miles_router.asgi.exchange import Scope
from miles_router.asgi.headers import RawHeaders, first_header
from miles_router.errors import BadRequest, RouterError
from miles_router.forwarding.framing import (
    CHUNKED,
    FRAMING_FIELDS,
    MAX_REQUEST_HEAD,
    NO_BODY,
    Excess,
    InvalidFraming,
    TooMuchAround,
    request_body,
)
from miles_router.serving.client_request import ClientRequest

logger = logging.getLogger(__name__)

TOO_LONG = f"the request head is longer than {MAX_REQUEST_HEAD} bytes"
#: Bytes that are parsed at once, but for a body whose length is known: many requests come at once when a client
#: pipelines, and each is a few thousand bytes of objects.
SLICE = 4096
VERSIONS = frozenset({"1.0", "1.1"})
NOTHING = memoryview(b"")
#: Gives the request that its scope describes; then whether the client wants the connection to stay open, and whether it
#: waits for `100 Continue`. None where nobody wants to read further.
Begin = Callable[[Scope, bool, bool], ClientRequest | None]
#: RFC 3986 section 3.2, without the user.
_HOST = re.compile(rb"[A-Za-z0-9._~!$&'()*+,;=:%\[\]-]*")

#: A target with scheme and authority (RFC 9112 section 3.2.2); the group is the authority, without the user.
_ABSOLUTE = re.compile(rb"[A-Za-z][A-Za-z0-9+.-]*://(?:[^/?#]*@)?([^/?#]*)")


class BadMessage(BadRequest):
    """What came is no request that can be read. `reason` is the label under which it is counted."""

    def __init__(self, message: str, reason: str = "invalid") -> None:
        super().__init__(message)
        self.reason = reason


class RequestReader:
    """Feeds each request its body; calls `begin` at the end of its head and `end` at the end of its body.

    `template` is what the scopes of one connection have in common.
    """

    def __init__(self, template: Scope, begin: Begin, end: Callable[[ClientRequest], None]) -> None:
        self._template = template
        self._begin = begin
        self._end = end
        self._parser: Any = httptools.HttpRequestParser(self)
        #: Whose body is being read.
        self.request: ClientRequest | None = None
        #: Of the request whose head or body is being read.
        self.headers: RawHeaders = []
        #: A request has begun to arrive and is not whole.
        self.partial = False
        #: Bytes are kept unread while this is set: enough requests wait.
        self.full = False
        #: All bytes that were given.
        self.received = 0
        self._unread: memoryview = NOTHING
        self._url = b""
        self._in_head = True
        self._head_bytes = 0
        self._head_is_split = False
        self._body_left = 0  # of a body with a length
        self._excess: Excess | None = None  # of a chunked body
        self._upgrade = False  # the request offers one, and the parser takes what follows for another protocol
        self._resumed = False  # a parser of our own making reads the head that stands for the one before
        self._message_ended = False  # in the bytes that are being parsed

    def feed(self, data: bytes) -> None:
        """The next bytes.

        Raises:
            BadMessage: they are no HTTP, or a head, or what stands around a body, is too long.
            RouterError: a defect of ours, which was logged.
        """
        self.received += len(data)
        if len(data) <= SLICE and not self.full:
            self._parse(data)
        else:
            self._unread = memoryview(bytes(self._unread) + data)
            self.go_on()

    def go_on(self) -> None:
        """Read what was kept unread, until enough requests wait. Raises as `feed`."""
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
            raise BadMessage("this is no valid HTTP request") from None
        except InvalidFraming as error:
            raise _refusal(error) from None

    @property
    def unread(self) -> memoryview:
        """What was given and is not read yet."""
        return self._unread

    def close(self) -> None:
        """Nothing more comes. The parser holds on to its reader."""
        self._parser = None
        self._unread = NOTHING

    def _count(self, received: int, excess: Excess | None) -> None:
        if self._message_ended:
            self._head_is_split = self.partial
        elif self._in_head:
            self._head_is_split = True
            self._head_bytes += received
            if self._head_bytes > MAX_REQUEST_HEAD:
                raise BadMessage(TOO_LONG, "head_too_long")
        elif excess is not None:
            excess.received(received)

    def _bound_whole_head(self) -> None:
        size = len(self._url) + sum(len(name) + len(value) + 4 for name, value in self.headers)
        if size > MAX_REQUEST_HEAD:
            raise BadMessage(TOO_LONG, "head_too_long")

    def _decline_upgrade(self) -> None:
        """We stay with HTTP/1.1, so the offer's own body follows, and then the next request."""
        lines = [b"%b: %b\r\n" % pair for pair in self.headers if pair[0] in FRAMING_FIELDS - {b"connection"}]
        self._parser = httptools.HttpRequestParser(self)
        self._upgrade, self._resumed = False, True
        self._parser.feed_data(b"POST / HTTP/1.1\r\n%b\r\n" % b"".join(lines))
        self._resumed = False

    # What the parser calls

    def on_message_begin(self) -> None:
        self.partial = True

    def on_url(self, url: bytes) -> None:
        if not self._resumed:
            self._url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._in_head:  # else it is a trailer, which is no header (RFC 9110 section 6.5.1)
            self.headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        if self._resumed:
            return
        self._in_head = False
        if self._head_is_split:
            self._bound_whole_head()
        headers, parser = self.headers, self._parser
        version = parser.get_http_version()
        _check_host(version, headers)
        body = request_body(headers)
        self._body_left = max(body, 0)
        self._excess = Excess() if body == CHUNKED else None
        raw_path, query, authority = _target(self._url)
        if authority:
            headers = self.headers = _with_host(headers, authority)
        scope = {
            **self._template,
            "http_version": version,
            "method": parser.get_method().decode("ascii"),
            "path": raw_path.decode("latin-1"),  # as it is spelled; the app decodes it
            "raw_path": raw_path,
            "query_string": query,
            "headers": headers,
        }
        self._upgrade = parser.should_upgrade()
        awaits_continue = body != NO_BODY and version != "1.0" and _expects_continue(headers)
        self.request = self._begin(scope, parser.should_keep_alive(), awaits_continue)

    def on_body(self, data: bytes) -> None:
        if self._excess is not None:
            self._excess.piece(len(data))
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
    """What a client is told about an error that the parser, or one of its callbacks, met."""
    if isinstance(error, BadMessage):
        return error
    if isinstance(error, InvalidFraming | httptools.HttpParserInvalidURLError):
        return BadMessage(str(error), "too_much_around_body" if isinstance(error, TooMuchAround) else "invalid")
    logger.error("internal_error", exc_info=error)
    return RouterError("the router failed; its log has the details")


def _check_host(version: str, headers: RawHeaders) -> None:
    """RFC 9112 section 3.2; section 2.3 for the version.

    Raises:
        BadMessage: another HTTP than 1.0 and 1.1, or not one valid Host, which HTTP/1.0 may lack.
    """
    if version not in VERSIONS:
        raise BadMessage(f"the router speaks HTTP/1.1 and HTTP/1.0, not HTTP/{version}")
    hosts = [value for name, value in headers if name == b"host"]
    if len(hosts) > 1 or (not hosts and version != "1.0"):
        raise BadMessage(f"a request has one Host header, not {len(hosts)}")
    if hosts and not _HOST.fullmatch(hosts[0]):
        raise BadMessage("the Host header names no host")


def _expects_continue(headers: RawHeaders) -> bool:
    expected = first_header(headers, b"expect")
    return expected is not None and expected.lower() == b"100-continue"


def _target(url: bytes) -> tuple[bytes, bytes, bytes]:
    """A request target's path as it was spelled, its query, and the authority that an absolute one names. An empty
    query is not the same as none: it stays with the path, since nothing else keeps it.

    Raises:
        httptools.HttpParserInvalidURLError: it has no path, or no possible authority.
    """
    authority = b""
    if url[:1] == b"/" and b"#" not in url:
        path, mark, query = url.partition(b"?")
    else:
        parsed = httptools.parse_url(url)
        path, query = parsed.path or b"/", parsed.query or b""
        mark = b"?" if url.endswith(b"?") else b""
        absolute = _ABSOLUTE.match(url)
        authority = absolute[1] if absolute else b""
    return (path, query, authority) if query or not mark else (path + b"?", b"", authority)


def _with_host(headers: RawHeaders, authority: bytes) -> RawHeaders:
    """An absolute target says which host is meant, whatever `Host` says (RFC 9112 section 3.2.2)."""
    return [(b"host", authority), *(pair for pair in headers if pair[0] != b"host")]
