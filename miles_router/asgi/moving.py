"""What the server and the processes of a router agree on about connections that go from one to another."""

from __future__ import annotations

import socket
from collections.abc import Awaitable, Callable

from miles_router.asgi.exchange import Scope
from miles_router.asgi.outlet import HANDED
from miles_router.errors import RouterError

#: In place of the index of a process: this one answers, or nobody knows before the request's body was read.
HERE, BY_BODY = -1, -2
#: The note about what one process asks of another for a client: it is answered wherever it lands, and no key is asked
#: for. The process where the client's request came in has seen to that.
ASKED = b"asked"
#: Goes on with a connection: its socket, the note about its request, and the bytes that were read.
Adopt = Callable[[socket.socket, bytes, bytes], Awaitable[None]]


class Elsewhere(RouterError):
    """Another process answers the request, all of which was read and nothing of which was answered: its connection is
    handed over. Attributes: owner: the index of that process. note: what it is told about the request."""

    def __init__(self, owner: int, note: bytes = b"") -> None:
        super().__init__(f"process {owner} answers this")
        self.owner = owner
        self.note = note


def note_of(scope: Scope) -> bytes:
    """What another process says of a request that it has handed over. No client can say it."""
    note: bytes = scope.get("extensions", {}).get(HANDED, b"")
    return note
