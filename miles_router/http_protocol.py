"""uvicorn's HTTP/1.1 protocol with two things it lacks: a bound on request heads, and one write for a short reply.

uvicorn writes the head and the body of a reply one by one, and each write is a system call: a fifth of what a short
request costs here. The transport below holds a head back until the body that follows in the same step of the event
loop; a head that nothing follows goes out by itself at the end of the step, so no client waits for it.
"""

from __future__ import annotations

import asyncio
from typing import Any, cast

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

MAX_HEAD_BYTES = 64 * 1024
#: Bodies up to this size (bytes) are copied behind their head; longer ones are written by themselves.
JOINED_BODY = 64 * 1024
CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"


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


class RouterProtocol(HttpToolsProtocol):
    """One client connection. A request head beyond `MAX_HEAD_BYTES` is answered 400 and the connection closed."""

    _head_bytes = 0
    _in_head = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(cast(asyncio.Transport, transport))
        self._joining = HeadJoiningTransport(self.transport)
        self.transport = cast(asyncio.Transport, self._joining)

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._in_head, self._head_bytes = True, 0

    def on_headers_complete(self) -> None:
        self._in_head = False
        super().on_headers_complete()

    def on_response_complete(self) -> None:
        self._joining.next_reply()
        super().on_response_complete()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self._in_head:
            self._head_bytes += len(data)
            if self._head_bytes > MAX_HEAD_BYTES:
                self.send_400_response("Request head too large.")
