"""A request that one process asks of another: on a connection of its own, which is handed over like a client's."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Mapping, Sequence

from miles_router.asgi.exchange import Exchange, Scope
from miles_router.asgi.headers import raw_headers
from miles_router.asgi.moving import ASKED
from miles_router.cluster.owners.handover import ConnectionCarrier
from miles_router.errors import OwnerUnavailable, RouterError

#: Headers that go along.
KEPT = frozenset({b"host", b"accept", b"content-type"})
READ = 1 << 18


async def ask(
    handover: ConnectionCarrier, owner: int, scope: Scope, body: bytes, headers: Mapping[str, str]
) -> tuple[int, Mapping[str, str], bytes]:
    """Have another process answer the same request with this body.

    Raises:
        OwnerUnavailable: it cannot be reached, or ended before it had answered.
    """
    ours, theirs = socket.socketpair()
    with ours:
        ours.setblocking(False)
        handover.take(Question(theirs, owner, _request(scope, body, headers)))
        loop, read = asyncio.get_running_loop(), bytearray()
        while part := await loop.sock_recv(ours, READ):
            read += part
    return _reply(bytes(read))


def _request(scope: Scope, body: bytes, headers: Mapping[str, str]) -> bytes:
    """HTTP/1.0, so that the reply ends with the connection and is in one piece."""
    own = dict(raw_headers(headers.items()))
    pairs = [(name, value) for name, value in scope["headers"] if name in KEPT and name not in own]
    named = Exchange.of(scope).request_id.encode("ascii")
    pairs += [*own.items(), (b"x-request-id", named), (b"content-length", b"%d" % len(body))]
    query = scope["query_string"]
    target = scope["raw_path"] + (b"?" + query if query else b"")
    lines = b"".join(b"%b: %b\r\n" % pair for pair in pairs)
    return b"%b %b HTTP/1.0\r\n%b\r\n%b" % (scope["method"].encode("ascii"), target, lines, body)


def _reply(read: bytes) -> tuple[int, Mapping[str, str], bytes]:
    head, blank, body = read.partition(b"\r\n\r\n")
    first, *lines = head.decode("latin-1").split("\r\n")
    headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    length = headers.get("content-length")
    if not blank or (length is not None and int(length) != len(body)):
        raise OwnerUnavailable("the process that has this ended before it had answered; ask again")
    return int(first.split(" ", 2)[1]), headers, body


class Question:
    """The other end of the connection, on its way like a client's. Attributes as of `Departing`."""

    called_off = False
    note = ASKED

    def __init__(self, sock: socket.socket, owner: int, request: bytes) -> None:
        self._sock = sock
        self.owner = owner
        self.data: Sequence[bytes | memoryview] = [request]

    def descriptor(self) -> tuple[int, int]:
        """As of `Departing`."""
        return int(socket.AF_UNIX), self._sock.fileno()

    def arrived(self) -> None:
        """The other process has it."""
        self._sock.close()

    def refuse(self, error: RouterError) -> None:
        """Nobody takes it: who asks reads that there is no answer."""
        self._sock.close()
