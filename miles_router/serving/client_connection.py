"""One client connection over HTTP/1.1: requests are answered one at a time, in order of arrival.

uvicorn only hosts it: uvicorn calls the constructor, and `shutdown` at a graceful stop.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import struct
from collections import deque
from typing import TYPE_CHECKING, Any, cast

import orjson

from miles_router.asgi.backlog import MAX_BACKLOG
from miles_router.asgi.exchange import SINK, Scope, request_id
from miles_router.asgi.watch import Deadlines
from miles_router.asgi.wire import CONTINUE, reply_head
from miles_router.errors import RequestTimeout, RouterError, Unavailable
from miles_router.serving import client_states as states
from miles_router.serving.client_request import ClientRequest
from miles_router.serving.request_reader import BadMessage, RequestReader

if TYPE_CHECKING:
    from miles_router.serving.clients import Shared

logger = logging.getLogger(__name__)

#: Waiting pipelined requests at which reading from the client pauses.
MAX_PIPELINED = 16
#: Bytes of a body that must arrive in `head_timeout` seconds.
MIN_PROGRESS = 4096
#: For a half-closed client: number of checks between two `100 Continue` probes.
CHECKS_PER_PROBE = 10
#: TCP retransmissions of a probe after which a half-closed client counts as disconnected.
MAX_RETRANSMISSIONS = 3
#: Unsent reply bytes that the kernel buffers for one client, and for a client that has already read a backlog. Measured
#: on 16 MB replies: half of that costs 1.3 times the CPU.
UNSENT, UNSENT_FOR_READERS = 128 * 1024, 1024 * 1024
TCP_CLOSED = 7  # linux/tcp_states.h
#: Connections beyond the limit that get an error reply; further ones are only closed.
MAX_REFUSED = 64
RESET_ON_CLOSE = struct.pack("ii", 1, 0)  # SO_LINGER: on, 0 seconds
ASGI = {"version": "3.0", "spec_version": "2.3"}


class ClientConnection(asyncio.Protocol):
    """A client connection: passes requests to the app, and writes replies as fast as the client reads."""

    def __init__(self, shared: Shared, server_state: Any, app_state: dict[str, Any]) -> None:
        self._shared = shared
        self._loop = shared.loop
        self._server_state = server_state
        self._app_state = app_state
        self.transport: asyncio.Transport
        self._reader: RequestReader
        self.sent = shared.sent
        self.flush_soon = shared.flush_soon
        self.write_paused = False
        self._caught_up_before = False  # the client has caught up at least once
        self._backlog = 0  # this connection's share of `Backlog`
        self._writable: asyncio.Event | None = None
        self._reading_paused = False
        self._deadline: Deadlines[ClientConnection] | None = None  # the running timeout
        self._received = 0  # bytes received before the timeout started
        self._current: ClientRequest | None = None  # the request that is being answered
        self._waiting: deque[tuple[ClientRequest, Scope]] = deque()
        self._refusal: tuple[RouterError, str] | None = None  # the error to answer after all requests
        self._state = states.OPEN
        self._checks = 0

    def _on(self, event: states.ConnectionEvent) -> None:
        try:
            self._state = states.CONNECTION[self._state][event]
        except KeyError:
            raise states.InvalidTransition(self._state, event) from None

    # asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)  # uvloop's transports are not subclasses of it
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
        roomy = self._shared.make_room()
        self._shared.statistics.open += 1
        if roomy:
            self._start_timeout(self._shared.arriving)
        else:
            self._count("too_many")
            self.refuse(Unavailable("the router has reached its limit of client connections"), request_id({}))
            if self._shared.statistics.open > self._shared.limit + MAX_REFUSED:
                self.transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        self._server_state.connections.discard(self)
        self._shared.statistics.open -= 1
        self._start_timeout(None)
        self._on(states.CLOSE)
        if self._current is not None:
            self._current.lost()
        for request, _ in self._waiting:
            request.lost()
        self._caught_up()
        self._reader.close()
        del self._reader  # breaks a reference cycle

    def pause_writing(self) -> None:
        self.write_paused = True
        self.count_backlog()
        if self._current is not None:
            self._current.slowed(True)

    def resume_writing(self) -> None:
        if not self._caught_up_before and self._shared.statistics.backlog.size <= MAX_BACKLOG:
            self._caught_up_before = True
            sock = self.transport.get_extra_info("socket")
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, UNSENT_FOR_READERS)
        self._caught_up()

    def _caught_up(self) -> None:
        self.write_paused = False
        self._shared.statistics.backlog.size -= self._backlog
        self._backlog = 0
        if self._writable is not None:
            self._writable.set()
            self._writable = None
        if self._current is not None:
            self._current.slowed(False)

    def data_received(self, data: bytes) -> None:
        if self._state not in states.READING:
            return
        try:
            self._reader.feed(data)
        except RouterError as error:
            self._refuse_message(error)
        else:
            self._choose_timeout()

    def eof_received(self) -> bool:
        """Handle the client's FIN: return True to keep the connection open for the replies, False to close it.

        TCP does not show whether the client has gone or has only closed its sending side and waits for replies. While
        the reply has not begun, `check_client` probes with `100 Continue`: a waiting client ignores it (RFC 9110
        section 15.2), and the kernel of a client that has gone answers with a reset.
        """
        current = self._current
        cut = self._state in states.READING and self._reader.partial
        if current is None or current.http_1_0 or cut or (current.begun and not self._waiting):
            return False  # close
        self._on(states.CLIENT_FIN)
        self._start_timeout(self._shared.half_closed)
        return True

    def check_client(self) -> None:
        """Check a half-closed client: close the connection if the client has gone, else probe it from time to time."""
        state, _, retransmissions = self.transport.get_extra_info("socket").getsockopt(
            socket.IPPROTO_TCP, socket.TCP_INFO, 3
        )
        if state == TCP_CLOSED or retransmissions >= MAX_RETRANSMISSIONS:
            self.transport.abort()
            return
        current = self._current
        if self._checks % CHECKS_PER_PROBE == 0 and current is not None and not (current.begun or current.http_1_0):
            self.write_continue()
        self._checks += 1
        self._start_timeout(self._shared.half_closed)

    def _refuse_message(self, error: RouterError) -> None:
        if self._state not in states.READING:  # bytes after the last request do not stop its reply
            self._choose_timeout()
            return
        if isinstance(error, BadMessage):
            self._count(error.reason)
        current, reader = self._current, self._reader
        self._on(states.REFUSAL)
        self._refusal = error, request_id({"headers": reader.headers})
        self._start_timeout(None)
        self._drop_waiting(reader.request)
        if current is None and reader.request is not None:  # it is answered: another reply would be of no request
            self._linger()
        elif current is None:
            self.refuse(*self._refusal)
        elif current is reader.request:  # its body is invalid: `lost` makes the app's `receive` return a disconnect
            begun = current.begun
            current.lost()
            if begun:
                self.close()  # an error reply inside its reply would corrupt it
            else:
                self.refuse(*self._refusal)

    def _drop_waiting(self, request: ClientRequest | None) -> None:
        if self._waiting and self._waiting[-1][0] is request:
            self._waiting.pop()

    # Called by the request reader

    def _begin(self, scope: Scope, keep_alive: bool, awaits_continue: bool) -> ClientRequest | None:
        http_1_0 = scope["http_version"] == "1.0"
        request = ClientRequest(
            self,
            scope["method"],
            http_1_0=http_1_0,
            keep_alive=keep_alive and not http_1_0 and self._state is not states.STOPPING,
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
        # Not `tasks.spawn`: the request itself references its task, and two callbacks per request would be expensive.
        request.task = asyncio.Task(request.run(self._shared.app, scope), loop=self._loop, name="request")

    def _end(self, request: ClientRequest) -> None:
        if not request.keep_alive:
            self._on(states.LAST_REQUEST)

    # Called by requests

    async def writable(self) -> None:
        """Wait until the client has caught up, or has disconnected."""
        while self.write_paused:
            if self._writable is None:
                self._writable = asyncio.Event()
            await self._writable.wait()

    def pause_reading(self) -> None:
        """Stop reading from the socket, and stop parsing the bytes that were received already."""
        self._reader.full = True
        if not self._reading_paused:
            self._reading_paused = True
            self.transport.pause_reading()

    def resume_reading(self) -> None:
        """Parse the received bytes, then continue reading from the socket."""
        if not self._reading_paused and not self._reader.full:
            return
        self._reader.full = False
        if self._state in states.READING:
            try:
                self._reader.parse_stored()
            except RouterError as error:
                self._refuse_message(error)
            else:
                self._choose_timeout()
        if self._reading_paused and not self._reader.full and not self.transport.is_closing():
            self._reading_paused = False
            self.transport.resume_reading()
            self._restart_arrival_timeout()

    def write_continue(self) -> None:
        """Write `100 Continue`."""
        self.transport.write(CONTINUE)
        self._restart_arrival_timeout()

    def reply_ended(self, request: ClientRequest) -> None:
        """Start the next request, or close: the last byte of the reply to `request` was written."""
        self._current = None
        if not request.keep_alive:
            if request.whole:
                self.close()
            else:
                self._linger()
            return
        if self._waiting:
            self._start(*self._waiting.popleft())
        self.resume_reading()
        if self._current is not None or self._state is states.LINGERING:
            return
        if self._refusal is not None:
            self.refuse(*self._refusal)
        elif self._state is states.HALF_CLOSED:
            self.close()
        else:
            self._choose_timeout()

    def break_off(self, request: ClientRequest) -> None:
        """End an incomplete reply so that it cannot look complete: send the bytes so far, then close.

        If the end of the connection marks the end of the body, the connection is reset (RST) instead.
        """
        request.flush()
        request.lost()
        if request.ends_with_connection:
            sock = self.transport.get_extra_info("socket")
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET_ON_CLOSE)
        self.close()

    def refuse(self, error: RouterError, name: str) -> None:
        """Write `error` as the reply to the request with the id `name`, and close."""
        body = orjson.dumps(error.body(name))
        headers = [
            (b"content-type", b"application/json"),
            (b"content-length", b"%d" % len(body)),
            (b"x-request-id", name.encode("ascii")),
            *((key.lower().encode("ascii"), value.encode("ascii")) for key, value in error.headers.items()),
        ]
        head, _, _ = reply_head(error.status, headers, method="", http_1_0=False, keep_alive=False)
        if not self.transport.is_closing():
            self.transport.write(head + body)
            self._linger()

    def _linger(self) -> None:
        """Close in two steps, because the client may still be sending: send FIN, then read and drop for `LINGER` s."""
        self._on(states.OWN_FIN)
        self.resume_reading()
        self.transport.write_eof()
        self._start_timeout(self._shared.lingering)

    def close(self) -> None:
        """Close the connection after all written bytes were sent."""
        self._on(states.CLOSE)
        self._start_timeout(None)
        self.transport.close()

    # Called by uvicorn

    def shutdown(self) -> None:
        """Stop gracefully: finish the present request, or one that is arriving, and take no further ones."""
        current = self._current
        if current is not None:
            current.keep_alive = False
            if current.whole and self._state in states.READING:
                self._on(states.LAST_REQUEST)
                self._choose_timeout()
            if (task := current.task) is not None:  # uvicorn waits for these tasks, and cancels them at its timeout
                self._server_state.tasks.add(task)
                task.add_done_callback(self._server_state.tasks.discard)
        elif self._state in states.READING and self._reader.request is not None:  # it is answered, before its body
            self._linger()
        elif self._deadline is self._shared.arriving:  # a close now would leave the outcome of its request unknown
            self._on(states.STOP)
            self._start_timeout(self._shared.lingering)
        else:
            self.close()

    # Timeouts

    def _choose_timeout(self) -> None:
        """Choose the timeout for the present state: of an arriving request, of an idle connection, or none while a
        request is answered."""
        if self._state in states.READING:
            if not self._reader.partial:
                between = self._shared.idle if self._state is states.OPEN else self._shared.lingering
                self._start_timeout(between if self._current is None else None)
            elif self._deadline is not self._shared.arriving:
                self._start_timeout(self._shared.arriving)
        elif self._state is states.FINISHING:
            self._start_timeout(None)

    def _start_timeout(self, deadline: Deadlines[ClientConnection] | None) -> None:
        if self._deadline is not None:
            self._deadline.stop(self)
        self._deadline = deadline
        if deadline is not None:
            self._received = self._reader.received
            deadline.start(self)

    def _restart_arrival_timeout(self) -> None:
        """Restart the timeout of an arriving request, because the router itself had paused reading."""
        if self._deadline is self._shared.arriving:
            self._start_timeout(self._shared.arriving)

    @property
    def idle(self) -> bool:
        """True if no request is being answered and no body is arriving."""
        return self._current is None and self._reader.request is None

    def close_idle(self) -> None:
        """Close an idle connection: no request arrived in time, or the connection limit is reached."""
        self._count("idle")
        self.close()

    def handle_late_request(self) -> None:
        """Handle the timeout of an arriving request: refuse it, or wait on if its body makes progress."""
        reader, request = self._reader, self._reader.request
        if self._reading_paused:
            self._start_timeout(self._shared.arriving)
        elif request is None:
            self._count("late_head")
            if reader.partial:
                self._time_out("the request's head took too long (--head-timeout)")
            else:
                self.close()
        elif request.awaits_continue or reader.received - self._received >= MIN_PROGRESS:
            self._start_timeout(self._shared.arriving)
        else:
            self._count("late_body")
            self._time_out("the request's body took too long (--head-timeout)")

    def _time_out(self, message: str) -> None:
        self._refuse_message(RequestTimeout(message))
        assert self._refusal is not None
        fields = {"request_id": self._refusal[1], "reason": message, "bytes_received": self._reader.received}
        logger.warning("request_timed_out", extra={"fields": fields})

    def _count(self, reason: str) -> None:
        self._shared.statistics.ended[reason] += 1

    def count_backlog(self) -> None:
        """Update this connection's share of the backlog."""
        size = self.transport.get_write_buffer_size()
        self._shared.statistics.backlog.size += size - self._backlog
        self._backlog = size


def _address(address: object) -> tuple[str, int] | None:
    return (str(address[0]), int(address[1])) if isinstance(address, tuple) else None
