"""A reply's way to the client: the `send` that the edge gives inward, and the short cut behind it.

An ASGI message for each event of a stream wakes a task, makes a dictionary and calls every layer. Where no layer has
wrapped `send`, nobody looks at those messages, and the worker's bytes can go to the client's connection as they come.
"""

from __future__ import annotations

from collections.abc import Awaitable
from typing import Protocol

from miles_router.asgi.exchange import Message, Scope, Send

#: Under this name among the scope's `extensions` our own server offers the client's connection as a `Sink`.
SINK = "miles_router.sink"
#: Under this name what another process says that has handed the request over.
HANDED = "miles_router.handed"


class Source(Protocol):
    """Where bytes come from that a sink is given."""

    def pause(self) -> None:
        """The client reads slowly: give no more for now."""
        ...

    def resume(self) -> None:
        """It has caught up."""
        ...


class Sink(Protocol):
    """A client's connection that takes the body of a reply whose `http.response.start` was sent."""

    def write(self, data: bytes) -> None:
        """The next bytes of the body, never the last: the end is an ASGI message."""
        ...

    def fed_by(self, source: Source | None) -> None:
        """Who is told when the client reads slowly; None once nobody writes here any more."""
        ...


class Outlet:
    """The edge's `send`: each reply goes out with the request's id, and its status is known afterwards.

    A layer that wraps it sees every message, and hides `sink` by that.
    """

    __slots__ = ("_request_id", "_send", "sink", "status")

    def __init__(self, send: Send, scope: Scope, request_id: str) -> None:
        self._send = send
        self._request_id = request_id.encode("ascii")
        #: 0 until a reply has begun.
        self.status = 0
        self.sink: Sink | None = scope["extensions"].get(SINK) if "extensions" in scope else None

    def __call__(self, message: Message) -> Awaitable[None]:
        """Send one message. No coroutine of its own: it runs for every chunk."""
        if message["type"] != "http.response.start":
            return self._send(message)
        headers = [pair for pair in message.get("headers", ()) if pair[0] != b"x-request-id"]
        headers.append((b"x-request-id", self._request_id))
        sent = self._send({**message, "headers": headers})
        self.status = message["status"]  # not before: a start that the server refuses has begun nothing
        return sent
