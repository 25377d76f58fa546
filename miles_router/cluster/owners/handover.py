"""A client's connection goes to the process that has what its request is about: the connection, not the request.

The other process is sent the socket itself and the bytes that were read of it, and goes on as if it had accepted it. So
a stream or an answer of any size costs nothing more, and neither does the next request for the same session.
"""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

from miles_router import tasks
from miles_router.asgi.exchange import Scope
from miles_router.asgi.moving import BY_BODY, HERE, Adopt
from miles_router.asgi.path import decoded
from miles_router.cluster.owners.links import MAX_PACKET, Links
from miles_router.errors import BadRequest, OwnerUnavailable, RouterError
from miles_router.metrics import Statistics, counter
from miles_router.middlewares.contract import HasOwners

logger = logging.getLogger(__name__)

#: What a packet begins with: a connection and all that was read of it, or one beside which a file has that.
INLINE, FILED = b"c", b"C"


class Whereabouts(Protocol):
    """Knows who has what."""

    #: Those that know by a request's head what it is about.
    layers: Sequence[HasOwners]

    def elsewhere(self, name: str) -> int | None:
        """The other process that has what is named so."""
        ...


class Departing(Protocol):
    """A connection that goes to another process. Attributes as of `serving.leaving.Leaving`."""

    owner: int
    note: bytes
    data: Sequence[bytes | memoryview]
    called_off: bool

    def descriptor(self) -> tuple[int, int]:
        """Its kind of addresses and its descriptor."""
        ...

    def arrived(self) -> None:
        """The owner has it."""
        ...

    def refuse(self, error: RouterError) -> None:
        """No owner takes it."""
        ...


class HandoverStatistics(Statistics, prefix="miles_router_handover"):
    """Connections of clients that go from one process to another."""

    given = counter("Connections that another process went on with.")
    taken = counter("Connections of other processes that this one went on with.")
    refused = counter("Connections whose owner did not take them.")


class ConnectionCarrier:
    """Brings connections to their owners, and goes on with those that others bring."""

    def __init__(self, links: Links, owners: Whereabouts) -> None:
        self.statistics = HandoverStatistics()
        self._links = links
        self._owners = owners
        self.adopt: Adopt
        self.own_port: int | None = None

    def owner(self, scope: Scope) -> int:
        """As `serving.leaving.Carrier.owner`."""
        if not self._owners.layers:
            return HERE
        try:
            scope["path"] = decoded(scope["raw_path"])
        except BadRequest:  # which is answered where it is found again
            return HERE
        for layer in self._owners.layers:
            name = layer.owner_name(scope)
            if name is not None:
                owner = self._owners.elsewhere(name) if name else BY_BODY
                return HERE if owner is None else owner
        return HERE

    def take(self, leaving: Departing) -> None:
        """As `serving.leaving.Carrier.take`."""
        self._links.send(leaving.owner, ConnectionParcel(leaving, self.statistics))

    def receive(self, data: bytes, descriptors: Sequence[int]) -> Callable[[], None]:
        """Take a connection that another process sends; gives what begins it, once that is answered."""
        kind, family, length = data[:1], data[1], data[2]
        note, read = data[3 : 3 + length], data[3 + length :]
        if kind == FILED:
            read = _read_file(descriptors[1])
            os.close(descriptors[1])
        sock = socket.socket(family, socket.SOCK_STREAM, 0, descriptors[0])
        self.statistics.taken += 1
        return lambda: self._begin(sock, note, read)

    def _begin(self, sock: socket.socket, note: bytes, read: bytes) -> None:
        tasks.spawn(self._go_on(sock, note, read), name="go on with a connection")

    async def _go_on(self, sock: socket.socket, note: bytes, read: bytes) -> None:
        await self.adopt(sock, note, read)


class ConnectionParcel:
    """A connection on its way, as a parcel."""

    __slots__ = ("_file", "_leaving", "_statistics")

    answered = True

    def __init__(self, leaving: Departing, statistics: HandoverStatistics) -> None:
        self._leaving = leaving
        self._statistics = statistics
        self._file = -1

    def is_called_off(self) -> bool:
        return self._leaving.called_off

    def packet(self) -> tuple[bytes, Sequence[int]]:
        leaving = self._leaving
        family, descriptor = leaving.descriptor()
        begin = bytes([family, len(leaving.note)]) + leaving.note
        if sum(map(len, leaving.data)) + len(begin) < MAX_PACKET:
            return b"".join((INLINE, begin, *leaving.data)), [descriptor]
        self._file = _file_of(leaving.data)
        return FILED + begin, [descriptor, self._file]

    def sent(self) -> None:
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def done(self, taken: bool) -> None:
        if taken:
            self._statistics.given += 1
            self._leaving.arrived()
            return
        self._statistics.refused += 1
        error: RouterError = OwnerUnavailable("the process that has this does not take it now; ask again")
        if not self._leaving.called_off:
            logger.warning("owner_unavailable", extra={"fields": {"process": self._leaving.owner}})
        self._leaving.refuse(error)


def _file_of(data: Iterable[bytes | memoryview]) -> int:
    """A file in memory."""
    file = os.memfd_create("miles-router-handover", os.MFD_CLOEXEC)
    for part in data:
        view = memoryview(part)
        while view:
            view = view[os.write(file, view) :]
    return file


def _read_file(file: int) -> bytes:
    return os.pread(file, os.fstat(file).st_size, 0)
