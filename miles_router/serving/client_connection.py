"""One connection of a client: requests are answered one after the other, in the order in which they came.

uvicorn is only the process around it: it calls the constructor, and `shutdown` at a graceful stop.
"""

from __future__ import annotations

import asyncio
import socket
import struct
from collections import deque
from typing import Any, cast

import orjson

from miles_router.asgi.deadlines import Deadlines
from miles_router.asgi.exchange import Scope, request_id
from miles_router.asgi.outlet import SINK
from miles_router.errors import RouterError
from miles_router.forwarding.framing import reply_head
from miles_router.middlewares.contract import ASGIApp
from miles_router.serving.client_request import ClientRequest
from miles_router.serving.request_reader import RequestReader

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
    """Lets the app answer a client's requests, each at the client's pace."""

    def __init__(self, shared: Shared, server_state: Any, app_state: dict[str, Any]) -> None:
        self._shared = shared
        self._loop = shared.loop
        self._server_state = server_state
        self._app_state = app_state
        self.transport: asyncio.Transport
        self._reader: RequestReader
        self.sent = shared.sent
        self.flush_soon = shared.flush_soon
        self.closing = False
        self.write_paused = False
        self._writable: asyncio.Event | None = None
        self._reading_paused = False
        self._idle = False
        # What is being answered, and what waits for that
        self._current: ClientRequest | None = None
        self._waiting: deque[tuple[ClientRequest, Scope]] = deque()
        self._deaf = False  # nothing that comes from now on is a request

    # asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)  # uvloop's are no subclass
        self._server_state.connections.add(self)
        template = {
            "type": "http",
            "asgi": ASGI,
            "server": _address(transport.get_extra_info("sockname")),
            "client": _address(transport.get_extra_info("peername")),
            "scheme": "http",
            "root_path": "",
        }
        self._reader = RequestReader(template, self._begin, self._end)
        # The time to a complete head has no bound. One would be another `Deadlines` in `Shared`, started here and at
        # the first byte behind a reply, and stopped in `_begin`.

    def connection_lost(self, exc: Exception | None) -> None:
        self._server_state.connections.discard(self)
        if self._idle:
            self._not_idle()
        self._shared.lingering.stop(self)
        self._deaf = True
        if self._current is not None:
            self._current.lost()
        for request, _ in self._waiting:
            request.lost()
        self.resume_writing()
        self._reader.close()
        del self._reader  # which holds on to us

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
        if self._idle:
            self._not_idle()
        try:
            self._reader.feed(data)
        except RouterError as error:
            if not self._deaf:  # else it came behind the last request
                self._refuse_message(error)

    def _refuse_message(self, error: RouterError) -> None:
        current, reader = self._current, self._reader
        if current is None or (current is reader.request and not current.begun):
            if current is not None:
                current.lost()  # whoever reads its body learns that no more will come
            self.refuse(error, request_id({"headers": reader.headers}))
        else:
            self.close()  # replies are owed: their bytes must not be mixed up

    # What the reader calls

    def _begin(self, scope: Scope, keep_alive: bool, awaits_continue: bool) -> ClientRequest:
        http_1_0 = scope["http_version"] == "1.0"
        request = ClientRequest(
            self,
            scope["method"],
            http_1_0=http_1_0,
            keep_alive=keep_alive and not http_1_0,
            awaits_continue=awaits_continue,
        )
        scope["state"] = self._app_state.copy()
        scope["extensions"] = {SINK: request}
        if self._current is None:
            self._start(request, scope)
        else:
            self._waiting.append((request, scope))
            if len(self._waiting) >= MAX_PIPELINED:
                self.pause_reading()
        return request

    def _start(self, request: ClientRequest, scope: Scope) -> None:
        self._current = request
        # Not `tasks.spawn`: the request holds its task, and two callbacks for each would be a cost of their own.
        request.task = asyncio.Task(request.run(self._shared.app, scope), loop=self._loop, name="request")

    def _end(self, request: ClientRequest) -> None:
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

    def _wait_for_request(self) -> None:
        self._idle = True
        self._shared.idle.start(self)

    def _not_idle(self) -> None:
        self._idle = False
        self._shared.idle.stop(self)


def _address(address: object) -> tuple[str, int] | None:
    return (str(address[0]), int(address[1])) if isinstance(address, tuple) else None
