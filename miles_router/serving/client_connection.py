"""One connection of a client: HTTP/1.1 (RFC 9112) over `httptools`, one request after the other.

uvicorn is only the process around it: it calls the constructor, and `shutdown` at a graceful stop.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import struct
import urllib.parse
from collections import deque
from typing import Any, cast

import httptools
import orjson

from miles_router.asgi.deadlines import Deadlines
from miles_router.asgi.exchange import Scope, request_id
from miles_router.asgi.headers import RawHeaders, first
from miles_router.asgi.outlet import SINK
from miles_router.errors import BadRequest, RouterError
from miles_router.forwarding.framing import (
    CHUNKED,
    FRAMING_FIELDS,
    MAX_REQUEST_HEAD,
    NO_BODY,
    Excess,
    InvalidFraming,
    reply_head,
    request_body,
)
from miles_router.middlewares.contract import ASGIApp
from miles_router.serving.client_request import ClientRequest

logger = logging.getLogger(__name__)

#: Requests that wait behind the one that is answered before the client is held back.
MAX_PIPELINED = 16
#: Seconds for which what a client still sends behind its last answer is read and dropped. A connection that is closed
#: with bytes unread is reset, and the reset would destroy the answer on its way.
LINGER = 2.0
RESET_ON_CLOSE = struct.pack("ii", 1, 0)  # SO_LINGER: on, 0 seconds
ASGI = {"version": "3.0", "spec_version": "2.3"}


class ClientConnections:
    """What uvicorn calls for each new connection."""

    def __init__(self, app: ASGIApp, *, idle_seconds: float) -> None:
        self._app = app
        self._idle_seconds = idle_seconds
        self._shared: Shared | None = None

    def __call__(self, *, server_state: Any, app_state: dict[str, Any], **_: Any) -> ClientConnection:
        """A connection's protocol; `server_state` and `app_state` are uvicorn's."""
        if self._shared is None:
            self._shared = Shared(self._app, self._idle_seconds)
        return ClientConnection(self._shared, server_state, app_state)


class Shared:
    """What the connections of one server have in common."""

    def __init__(self, app: ASGIApp, idle_seconds: float) -> None:
        self.app = app
        self.loop = asyncio.get_running_loop()
        #: Connections between two requests; one on which no request comes in time is closed.
        self.idle: Deadlines[ClientConnection] = Deadlines(idle_seconds, ClientConnection.close, self.loop)
        #: Connections that wait for their client to stop sending.
        self.lingering: Deadlines[ClientConnection] = Deadlines(LINGER, ClientConnection.close, self.loop)
        self.sent: asyncio.Future[None] = self.loop.create_future()
        self.sent.set_result(None)
        self._held: list[ClientRequest] = []

    def flush_soon(self, request: ClientRequest) -> None:
        """Call `request.flush` at the end of this step of the event loop."""
        if not self._held:
            self.loop.call_soon(self._flush)
        self._held.append(request)

    def _flush(self) -> None:
        held, self._held = self._held, []
        for request in held:
            request.flush()


class ClientConnection(asyncio.Protocol):
    """Parses requests, lets the app answer them in their order, and bounds what the client can make us keep."""

    def __init__(self, shared: Shared, server_state: Any, app_state: dict[str, Any]) -> None:
        self._shared = shared
        self._loop = shared.loop
        self._server_state = server_state
        self._app_state = app_state
        self.transport: asyncio.Transport
        self._parser: Any = httptools.HttpRequestParser(self)
        self.sent = shared.sent
        self.closing = False
        self.write_paused = False
        self._writable: asyncio.Event | None = None
        self._reading_paused = False
        self._idle = False
        # What is being answered, and what waits for that
        self._current: ClientRequest | None = None
        self._waiting: deque[tuple[ClientRequest, Scope]] = deque()
        # What is being read
        self._receiving: ClientRequest | None = None
        self._deaf = False  # nothing that comes from now on is a request
        self._received = 0  # bytes in the data that is being parsed
        self._in_head = True
        self._head_bytes = 0
        self._head_is_split = False
        self._message_ended = False  # in the data that is being parsed
        self._url = b""
        self._headers: RawHeaders = []
        self._excess: Excess | None = None  # of a chunked body
        self._upgrade = False  # the request offers one, and the parser takes what follows for another protocol
        self._resumed = False  # a parser of our own making reads the head that stands for the one before

    # asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)  # uvloop's are no subclass
        self._server_state.connections.add(self)
        self._template = {
            "type": "http",
            "asgi": ASGI,
            "http_version": "1.1",
            "server": _address(transport.get_extra_info("sockname")),
            "client": _address(transport.get_extra_info("peername")),
            "scheme": "http",
            "root_path": "",
        }
        # A bound on the time to a complete head belongs here and to `reply_ended`, beside `idle`.

    def connection_lost(self, exc: Exception | None) -> None:
        self._server_state.connections.discard(self)
        self._not_idle()
        self._shared.lingering.stop(self)
        self._deaf = True
        if self._current is not None:
            self._current.lost()
        for request, _ in self._waiting:
            request.lost()
        self.resume_writing()
        self._parser = None  # it holds on to us

    def pause_writing(self) -> None:
        self.write_paused = True
        if self._current is not None:
            self._current.slowed(True)

    def resume_writing(self) -> None:
        self.write_paused = False
        if self._writable is not None:
            self._writable.set()
            self._writable = None
        if self._current is not None:
            self._current.slowed(False)

    def data_received(self, data: bytes) -> None:
        if self._deaf:
            return
        self._not_idle()
        self._received = len(data)
        self._message_ended = False
        excess = self._excess
        try:
            self._parser.feed_data(data)
            if self._message_ended:
                self._head_is_split = bool(self._url)
            elif self._in_head:
                self._bound_head(len(data))
            elif excess is not None:
                excess.received(len(data))
        except httptools.HttpParserUpgrade as upgrade:
            self._decline_upgrade(data[upgrade.args[0] :])
        except httptools.HttpParserCallbackError as error:
            self._refuse_message(error.__context__)
        except httptools.HttpParserError:
            self._refuse_message(BadRequest("this is no valid HTTP request"))
        except (BadRequest, InvalidFraming) as error:
            self._refuse_message(error)

    def _bound_head(self, received: int) -> None:
        self._head_is_split = True
        self._head_bytes += received
        if self._head_bytes > MAX_REQUEST_HEAD:
            raise BadRequest(f"the request head is longer than {MAX_REQUEST_HEAD} bytes")

    def _refuse_message(self, error: BaseException | None) -> None:
        if self._deaf:  # it came behind the last request
            return
        if isinstance(error, InvalidFraming | httptools.HttpParserInvalidURLError):
            error = BadRequest(str(error))
        elif not isinstance(error, BadRequest):
            logger.error("internal_error", exc_info=error)
            error = RouterError("the router failed; its log has the details")
        if self._current is None:
            self.refuse(error, request_id({"headers": self._headers}))
        elif self._current is self._receiving and not self._current.begun:
            self._current.lost()  # whoever reads its body learns that no more will come
            self.refuse(error, request_id({"headers": self._headers}))
        else:
            self.close()  # replies are owed: their bytes must not be mixed up

    def _decline_upgrade(self, rest: bytes) -> None:
        """We stay with HTTP/1.1, so the offer's own body follows, and then the next request."""
        lines = [b"%b: %b\r\n" % pair for pair in self._headers if pair[0] in FRAMING_FIELDS - {b"connection"}]
        self._parser = httptools.HttpRequestParser(self)
        self._upgrade, self._resumed = False, True
        self._parser.feed_data(b"POST / HTTP/1.1\r\n%b\r\n" % b"".join(lines))
        self._resumed = False
        if rest:
            self.data_received(rest)

    # What the parser calls

    def on_url(self, url: bytes) -> None:
        if not self._resumed:
            self._url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._in_head:  # else it is a trailer, which is no header (RFC 9110 section 6.5.1)
            self._headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        if self._resumed:
            return
        self._in_head = False
        headers, parser = self._headers, self._parser
        if self._head_is_split or self._received > MAX_REQUEST_HEAD:
            _bound_whole_head(self._url, headers)
        body = request_body(headers)
        self._excess = Excess() if body == CHUNKED else None
        method = parser.get_method().decode("ascii")
        version = parser.get_http_version()
        http_1_0 = version == "1.0"
        request = ClientRequest(
            self,
            method,
            http_1_0=http_1_0,
            keep_alive=parser.should_keep_alive() and not http_1_0,
            awaits_continue=body != NO_BODY and not http_1_0 and _expects_continue(headers),
        )
        raw_path, query = _target(self._url)
        path = raw_path.decode("ascii")
        scope = {
            **self._template,
            "method": method,
            "path": urllib.parse.unquote(path) if "%" in path else path,
            "raw_path": raw_path,
            "query_string": query,
            "headers": headers,
            "state": self._app_state.copy(),
            "extensions": {SINK: request},
        }
        if version != "1.1":
            scope["http_version"] = version
        self._upgrade = parser.should_upgrade()
        self._receiving = request
        if self._current is None:
            self._start(request, scope)
        else:
            self._waiting.append((request, scope))
            if len(self._waiting) >= MAX_PIPELINED:
                self.pause_reading()

    def on_body(self, data: bytes) -> None:
        if self._excess is not None:
            self._excess.piece(len(data))
        if self._receiving is not None:
            self._receiving.feed(data)

    def on_message_complete(self) -> None:
        request = self._receiving
        if self._upgrade or request is None:
            return
        self._receiving = None
        self._message_ended = self._in_head = True
        self._head_bytes = 0
        self._url, self._headers = b"", []
        request.complete()
        if not request.keep_alive:
            self._deaf = True
        elif request.ended:
            self._wait_for_request()

    # What requests call

    async def writable(self) -> None:
        """Wait until the client has caught up, or is gone."""
        while self.write_paused:
            if self._writable is None:
                self._writable = asyncio.Event()
            await self._writable.wait()

    def pause_reading(self) -> None:
        """Hold the client back."""
        if not self._reading_paused:
            self._reading_paused = True
            self.transport.pause_reading()

    def resume_reading(self) -> None:
        """Let it go on."""
        if self._reading_paused:
            self._reading_paused = False
            self.transport.resume_reading()

    def flush_soon(self, request: ClientRequest) -> None:
        """Call its `flush` at the end of this step of the event loop."""
        self._shared.flush_soon(request)

    def reply_ended(self, request: ClientRequest) -> None:
        """The last byte of its reply was written: the next one's turn."""
        self._current = None
        if not request.keep_alive or self.closing:
            if request.whole:
                self.close()
            else:
                self._linger()
            return
        self.resume_reading()
        if self._waiting:
            self._start(*self._waiting.popleft())
        elif request.whole:
            self._wait_for_request()

    def break_off(self, request: ClientRequest) -> None:
        """Its reply will never be complete. What came is sent; then the connection ends as no complete reply does."""
        request.flush()
        if request.ends_with_connection:
            sock = self.transport.get_extra_info("socket")
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET_ON_CLOSE)
        self.close()

    def refuse(self, error: RouterError, name: str) -> None:
        """Answer the request whose id is `name` with `error`, and close."""
        body = orjson.dumps(error.body(name))
        headers = [
            (b"content-type", b"application/json"),
            (b"content-length", b"%d" % len(body)),
            (b"x-request-id", name.encode("ascii")),
        ]
        head, _, _ = reply_head(error.status, headers, method="", http_1_0=False, keep_alive=False)
        if not self.transport.is_closing():
            self.transport.write(head + body)
            self._linger()

    def _linger(self) -> None:
        """The last reply was written, and the client may be sending still."""
        self.closing = self._deaf = True
        self.resume_reading()
        self.transport.write_eof()
        self._shared.lingering.start(self)

    def close(self) -> None:
        """Close once everything that was written has gone out."""
        self.closing = self._deaf = True
        self.transport.close()

    # What uvicorn calls

    def shutdown(self) -> None:
        """A graceful stop: finish what is being answered, and nothing else."""
        if self._current is None:
            self.close()
            return
        self.closing = True
        if (task := self._current.task) is not None:  # uvicorn waits for these, and cancels them when the time is up
            self._server_state.tasks.add(task)
            task.add_done_callback(self._server_state.tasks.discard)

    def _start(self, request: ClientRequest, scope: Scope) -> None:
        self._current = request
        # Not `tasks.spawn`: the request holds its task, and two callbacks for each would be a cost of their own.
        request.task = asyncio.Task(request.run(self._shared.app, scope), loop=self._loop, name="request")

    def _wait_for_request(self) -> None:
        self._idle = True
        self._shared.idle.start(self)

    def _not_idle(self) -> None:
        if self._idle:
            self._idle = False
            self._shared.idle.stop(self)


def _address(address: object) -> tuple[str, int] | None:
    return (str(address[0]), int(address[1])) if isinstance(address, tuple) else None


def _bound_whole_head(url: bytes, headers: RawHeaders) -> None:
    size = len(url) + sum(len(name) + len(value) + 4 for name, value in headers)
    if size > MAX_REQUEST_HEAD:
        raise BadRequest(f"the request head is longer than {MAX_REQUEST_HEAD} bytes")


def _expects_continue(headers: RawHeaders) -> bool:
    expected = first(headers, b"expect")
    return expected is not None and expected.lower() == b"100-continue"


def _target(url: bytes) -> tuple[bytes, bytes]:
    """A request target's path as it was spelled, and its query. An empty query is not the same as none: it stays with
    the path, since nothing else keeps it.

    Raises:
        httptools.HttpParserInvalidURLError: it has no path.
    """
    if url[:1] == b"/" and b"#" not in url:
        path, mark, query = url.partition(b"?")
    else:
        parsed = httptools.parse_url(url)
        path, query = parsed.path or b"/", parsed.query or b""
        mark = b"?" if url.endswith(b"?") else b""
    return (path, query) if query or not mark else (path + b"?", b"")
