"""The outermost `send` of a request, and a fast path from a worker's connection to the client's connection.

An ASGI message for each event of a stream wakes a task, creates a dictionary and calls every layer. If no layer has
wrapped `send`, no code reads these messages, so the worker's bytes are written directly to the client's connection.
"""

from __future__ import annotations

from collections.abc import Awaitable
from typing import TYPE_CHECKING

from miles_router.asgi.exchange import Message, Scope, Send
from miles_router.asgi.headers import first_header

if TYPE_CHECKING:
    from miles_router.serving.client_request import ClientRequest

#: The key in the scope's `extensions` under which the router's own server offers its request, which writes body bytes
#: directly to the client's connection.
SINK = "miles_router.sink"
X_REQUEST_ID = b"x-request-id"


class Outlet:
    """The outermost `send`: adds `X-Request-Id` to the reply and records its status.

    A layer that wraps it sees every message; the wrapper has no `sink`, which turns the fast path off.
    """

    __slots__ = ("_request_id", "_send", "sink", "status")

    def __init__(self, send: Send, scope: Scope, request_id: str) -> None:
        self._send = send
        self._request_id = request_id.encode("ascii")
        #: 0 until a reply has begun.
        self.status = 0
        self.sink: ClientRequest | None = scope["extensions"].get(SINK) if "extensions" in scope else None

    def __call__(self, message: Message) -> Awaitable[None]:
        """Send one ASGI message. Not a coroutine, because it runs for every chunk."""
        if message["type"] != "http.response.start":
            return self._send(message)
        headers = [*message.get("headers", ())]
        if first_header(headers, X_REQUEST_ID) is not None:
            headers = [pair for pair in headers if pair[0] != X_REQUEST_ID]
        headers.append((X_REQUEST_ID, self._request_id))
        sent = self._send({**message, "headers": headers})
        self.status = message["status"]  # only now: if the server refuses the message, no reply has begun
        return sent
