"""A client's connection that another process goes on with: what the server asks of whoever brings it there."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

from miles_router.asgi.exchange import Scope
from miles_router.asgi.moving import Adopt
from miles_router.errors import RouterError

if TYPE_CHECKING:
    from miles_router.serving.movable_connection import MovableConnection


class Carrier(Protocol):
    """Knows whose a request is, and takes connections there."""

    #: Set by the server: what is done with connections of other processes.
    adopt: Adopt
    #: And the port on which this process alone listens.
    own_port: int | None

    def owner(self, scope: Scope) -> int:
        """The index of the process that a request with this head belongs to, or `HERE`, or `BY_BODY`."""
        ...

    def take(self, leaving: Leaving) -> None:
        """Bring a connection to its owner, or refuse it."""
        ...


class Leaving:
    """A connection on which nothing is answered, and that is read no more.

    Attributes:
        owner: the index of the process that goes on.
        note: what that is told about the request, by whoever found out whose it is.
        data: what was read of the request and behind it.
        begun: it was given to whoever takes it there.
        called_off: the connection has ended meanwhile.
    """

    __slots__ = ("_connection", "_name", "begun", "called_off", "data", "note", "owner")

    def __init__(
        self, connection: MovableConnection, owner: int, note: bytes, data: Sequence[bytes | memoryview], name: str
    ) -> None:
        self._connection = connection
        self._name = name
        self.owner = owner
        self.note = note
        self.data = data
        self.begun = False
        self.called_off = False

    def descriptor(self) -> tuple[int, int]:
        """Its kind of addresses (`AF_INET`, ...) and its descriptor."""
        sock = self._connection.transport.get_extra_info("socket")
        return int(sock.family), int(sock.fileno())

    def arrived(self) -> None:
        """The owner has it: this process lets go of it."""
        if not self.called_off:
            self._connection.transport.close()

    def refuse(self, error: RouterError) -> None:
        """No owner takes it."""
        if not self.called_off:
            self._connection.stay(error, self._name)


def with_body(head: bytes, body: bytes, *, chunked: bool) -> list[bytes]:
    """A request that was read whole, as bytes that say the same."""
    if not chunked:
        return [head, body]
    return [head, b"%x\r\n" % len(body), body, b"\r\n0\r\n\r\n"] if body else [head, b"0\r\n\r\n"]
