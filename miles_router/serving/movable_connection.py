"""A client's connection that may be another process's to answer: read one request at a time, and handed over where
nothing is being answered on it."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from miles_router.asgi.exchange import Scope, request_id
from miles_router.asgi.moving import BY_BODY, Elsewhere
from miles_router.asgi.outlet import HANDED
from miles_router.errors import RouterError
from miles_router.serving.client_connection import ClientConnection
from miles_router.serving.client_request import ClientRequest
from miles_router.serving.leaving import Carrier, Leaving, with_body
from miles_router.serving.step_reader import StepReader

if TYPE_CHECKING:
    from miles_router.serving.clients import Shared

#: Bytes behind the request that is answered before the client is held back.
MAX_UNREAD = 32 * 1024


class MovableConnection(ClientConnection):
    """A connection of a router of several processes.

    Args:
        handed: of one that comes from another process: the note about its first request, and what was read of it.
    """

    reads_with = StepReader

    def __init__(
        self,
        shared: Shared,
        server_state: Any,
        app_state: dict[str, Any],
        handover: Carrier,
        handed: tuple[bytes, bytes] | None = None,
    ) -> None:
        super().__init__(shared, server_state, app_state)
        self._reader: StepReader
        self._handover = handover
        self._handed = handed
        self._reads = handed is not None  # its sender knew; and what asks from within this machine is no TCP
        self._owner: int | None = None  # of the request whose head was read last, where that is another process
        self._departure: Leaving | None = None

    # asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """What another process had read comes before all that the transport reads."""
        super().connection_made(transport)
        if self._handed is not None:
            self.data_received(self._handed[1])

    def adopted(self) -> None:
        """The transport reads: a pause before that had no effect."""
        if self._reading_paused and not self.transport.is_closing():
            self.transport.pause_reading()

    def connection_lost(self, exc: Exception | None) -> None:
        """Nobody can go on with it any more, unless somebody does already."""
        if self._departure is not None:
            self._departure.called_off = True
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Read until a request is whole, and no further."""
        super().data_received(data)
        self._leave()
        if self._reader.full and len(self._reader.unread) > MAX_UNREAD:
            self.pause_reading()

    def _caught_up(self) -> None:
        super()._caught_up()
        self._go()

    # What the reader calls

    def _begin(self, scope: Scope, keep_alive: bool, awaits_continue: bool) -> ClientRequest | None:
        owner = self._handover.owner(scope)
        if owner >= 0 and self._handed is None:  # whoever handed it over knew whose it is
            self._owner, self._reader.full = owner, True
            return None
        request = super()._begin(scope, keep_alive, awaits_continue)
        if request is not None and owner == BY_BODY:
            request.keep_body(chunked=any(name == b"transfer-encoding" for name, _ in scope["headers"]))
        if self._handed is not None:
            scope["extensions"][HANDED], self._handed = self._handed[0], None
        return request

    def _end(self, request: ClientRequest) -> None:
        super()._end(request)
        self._reader.full = not request.ended  # until it is answered

    # What requests call

    def resume_reading(self) -> None:
        """Let the client go on, within the request that is answered."""
        if self._deaf or self._current is None or not self._current.whole:
            super().resume_reading()
            self._leave()
        self._listen()

    def _listen(self) -> None:
        """Hear whether a client leaves whose request is answered."""
        current = self._current
        if not self._reading_paused or self._deaf or current is None or not current.whole:
            return
        if len(self._reader.unread) <= MAX_UNREAD and not self.transport.is_closing():
            self._reading_paused = False
            self.transport.resume_reading()

    def hand_over(self, request: ClientRequest, elsewhere: Elsewhere) -> None:
        """Another process answers this request, all of which was read, and goes on with the connection."""
        data = with_body(self._reader.head, request.whole_body(), chunked=request.chunked)
        self._current = None
        self._set_out(elsewhere.owner, elsewhere.note, [*data, self._reader.unread], request_id({}))

    def stay(self, error: RouterError, name: str) -> None:
        """Nobody takes the request whose id is `name`."""
        self._departure = None
        self.refuse(error, name)

    # Leaving

    def _leave(self) -> None:
        """Hand the connection over, if the request whose head was read is another process's."""
        if self._owner is not None and not self.leaving:
            reader = self._reader
            self._set_out(self._owner, b"", [reader.head, reader.unread], request_id({"headers": reader.headers}))

    def _set_out(self, owner: int, note: bytes, data: list[bytes | memoryview], name: str) -> None:
        self.leaving = self._deaf = True
        self._wait(None)
        self.pause_reading()
        self._departure = Leaving(self, owner, note, data, name)
        if self.transport.get_write_buffer_size():
            self.transport.set_write_buffer_limits(0)  # so that we hear when all replies are out
        else:
            self._go()

    def _go(self) -> None:
        """All that was written has gone out."""
        departure = self._departure
        if departure is not None and not departure.begun and not self.transport.is_closing():
            departure.begun = True
            self._handover.take(departure)

    def shutdown(self) -> None:
        """As for any; one that leaves is let go of by whoever takes it."""
        if self._departure is None:
            super().shutdown()
