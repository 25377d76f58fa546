"""uvicorn's HTTP/1.1 protocol with what it lacks: a bound on request heads, one write for a short reply, and care for
trailers, declined upgrades, HTTP/1.0 and clients that pipeline and leave.

uvicorn writes the head and the body of a reply one by one, and each write is a system call: a fifth of what a short
request costs here. The transport below holds a head back until the body that follows in the same step of the event
loop; a head that nothing follows goes out by itself at the end of the step, so no client waits for it.
"""

from __future__ import annotations

import asyncio
import socket
import struct
from collections import deque
from typing import Any, cast

import httptools
import orjson
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from miles_router.asgi.exchange import request_id
from miles_router.errors import BadRequest

MAX_HEAD_BYTES = 64 * 1024
#: Bodies up to this size (bytes) are copied behind their head; longer ones are written by themselves.
JOINED_BODY = 64 * 1024
CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
BAD_REQUEST = (
    b"HTTP/1.1 400 Bad Request\r\ncontent-type: application/json\r\ncontent-length: %d\r\nconnection: close\r\n"
    b"x-request-id: %b\r\n\r\n%b"
)
RESET_ON_CLOSE = struct.pack("ii", 1, 0)  # SO_LINGER: on, 0 seconds


class HeadJoiningTransport:
    """What a uvicorn request cycle writes to. The first write of each reply is its head."""

    __slots__ = ("_call_soon", "_expects_head", "_head", "_transport")

    def __init__(self, transport: asyncio.Transport) -> None:
        self._transport = transport
        self._call_soon = asyncio.get_running_loop().call_soon
        self._expects_head = True
        self._head: bytes | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def write(self, data: bytes) -> None:
        """Hold a head back, or write what came together with the head that waits."""
        if self._expects_head and data != CONTINUE:
            self._expects_head = False
            self._head = data
            self._call_soon(self._flush)
        elif self._head is None:
            self._transport.write(data)
        elif len(data) <= JOINED_BODY:
            head, self._head = self._head, None
            self._transport.write(head + data)
        else:
            self._flush()
            self._transport.write(data)

    def close(self) -> None:
        """Close after everything that was written has gone out."""
        self._flush()
        self._transport.close()

    def is_closing(self) -> bool:
        """As the transport itself says."""
        return self._transport.is_closing()

    def next_reply(self) -> None:
        """The reply is complete: the next write is a head again."""
        self._expects_head = True

    def _flush(self) -> None:
        head, self._head = self._head, None
        if head is not None and not self._transport.is_closing():
            self._transport.write(head)


class EndingTransport:
    """What a reply to an HTTP/1.0 client is written to. Its end is the connection's, so a cut one ends with a reset."""

    def __init__(self, transport: HeadJoiningTransport, cycle: RequestResponseCycle) -> None:
        self._transport = transport
        self._cycle = cycle

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def close(self) -> None:
        """Close in order if the reply is complete, else as nobody could mistake for an end."""
        if not self._cycle.response_complete:
            sock = self._transport.get_extra_info("socket")
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET_ON_CLOSE)
        self._transport.close()


class AnyLength(int):
    """How much body uvicorn expects of a reply without a length: whatever comes."""

    def __lt__(self, other: object) -> bool:
        return False

    def __ne__(self, other: object) -> bool:
        return False

    def __sub__(self, other: object) -> AnyLength:
        return self

    __hash__ = int.__hash__


class RouterProtocol(HttpToolsProtocol):
    """One client connection. A request head beyond `MAX_HEAD_BYTES` is answered 400 and the connection closed."""

    _head_bytes = 0
    _in_head = False
    _message_ended = False  # in the data that is being parsed
    _upgrade = False  # the request offers one, and the parser takes what follows for another protocol
    _resumed = False  # a parser of our own making reads the head that stands for the one before

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(cast(asyncio.Transport, transport))
        self._joining = HeadJoiningTransport(self.transport)
        self.transport = cast(asyncio.Transport, self._joining)
        self._unanswered: deque[RequestResponseCycle] = deque()

    def connection_lost(self, exc: Exception | None) -> None:
        for cycle in self._unanswered:  # uvicorn tells only the last of those that were pipelined
            cycle.disconnected = True
            cycle.message_event.set()
        super().connection_lost(exc)

    # What the parser calls

    def on_message_begin(self) -> None:
        if not self._resumed:
            super().on_message_begin()
            self._in_head, self._head_bytes = True, 0

    def on_headers_complete(self) -> None:
        if self._resumed:
            return
        self._in_head = False
        super().on_headers_complete()
        self._unanswered.append(self.cycle)
        self._upgrade = self.parser.should_upgrade()
        self.headers = []  # trailers go here, and are no headers (RFC 9110 section 6.5.1)
        if self.url.endswith(b"?") and not self.scope["query_string"]:
            self.scope["raw_path"] += b"?"  # an empty query is not the same as none, and nothing else keeps it
        if self.scope["http_version"] == "1.0":
            self.cycle.chunked_encoding, self.cycle.expected_content_length = False, AnyLength()
            self.cycle.transport = cast(asyncio.Transport, EndingTransport(self._joining, self.cycle))

    def on_message_complete(self) -> None:
        self._message_ended = True
        if not self._upgrade:
            super().on_message_complete()

    def on_response_complete(self) -> None:
        self._joining.next_reply()
        self._unanswered.popleft()
        super().on_response_complete()

    # What the event loop calls

    def data_received(self, data: bytes) -> None:
        self._unset_keepalive_if_required()
        self._message_ended = False
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            self._decline_upgrade(data[upgrade.args[0] :])
        except httptools.HttpParserError:
            self.send_400_response("this is no valid HTTP request")
        else:
            if self._in_head and not self._message_ended:
                self._head_bytes += len(data)
                if self._head_bytes > MAX_HEAD_BYTES:
                    self.send_400_response(f"the request head is longer than {MAX_HEAD_BYTES} bytes")

    def _decline_upgrade(self, rest: bytes) -> None:
        """We stay with HTTP/1.1, so the offer's own body follows, and then the next request."""
        framing = (b"content-length", b"transfer-encoding")
        lines = [b"%b: %b\r\n" % pair for pair in self.scope["headers"] if pair[0] in framing]
        self.parser = httptools.HttpRequestParser(self)
        self._upgrade, self._resumed = False, True
        self.parser.feed_data(b"POST / HTTP/1.1\r\n%b\r\n" % b"".join(lines))
        self._resumed = False
        if rest:
            self.data_received(rest)

    def send_400_response(self, msg: str) -> None:
        """Answer in the shape of all our errors, unless replies are still owed: their bytes must not be mixed up."""
        if not self._unanswered:
            name = request_id({"headers": self.headers or ()})
            body = orjson.dumps(BadRequest(msg).body(name))
            self._joining.write(BAD_REQUEST % (len(body), name.encode("ascii"), body))
        self.transport.close()
