"""One connection of a client: requests are answered one after the other, in the order in which they came.

uvicorn is only the process around it: it calls the constructor, and `shutdown` at a graceful stop.
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
from miles_router.asgi.deadlines import Deadlines
from miles_router.asgi.exchange import Scope, request_id
from miles_router.asgi.outlet import SINK
from miles_router.errors import RequestTimeout, RouterError, TooManyConnections
from miles_router.forwarding.framing import CONTINUE, reply_head
from miles_router.serving.client_request import ClientRequest
from miles_router.serving.request_reader import BadMessage, RequestReader

if TYPE_CHECKING:
    from miles_router.serving.clients import Shared

logger = logging.getLogger(__name__)

#: Requests that wait behind the one that is answered before the client is held back.
MAX_PIPELINED = 16
#: Bytes of a body that must come in `head_timeout` seconds.
MIN_PROGRESS = 4096
#: How many looks at a client that has closed its own side go by between two questions.
LOOKS_PER_QUESTION = 10
#: Retransmissions after which a client that should have answered the question is gone.
MAX_RETRANSMISSIONS = 3
#: Bytes of a reply that the system may hold unsent for one client, and for one that was seen to read. Measured on 16 MB
#: replies: half of that costs 1.3 times the CPU.
UNSENT, UNSENT_FOR_READERS = 128 * 1024, 1024 * 1024
TCP_CLOSED = 7  # linux/tcp_states.h
#: Connections beyond the limit that are told so; more are only closed.
MAX_REFUSED = 64
RESET_ON_CLOSE = struct.pack("ii", 1, 0)  # SO_LINGER: on, 0 seconds
ASGI = {"version": "3.0", "spec_version": "2.3"}


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
        self._reads = False  # it was seen to catch up
        self._backlog = 0  # what of `Backlog` is ours
        self._writable: asyncio.Event | None = None
        self._reading_paused = False
        self._deadline: Deadlines[ClientConnection] | None = None  # that runs
        self._received = 0  # bytes, when it was started
        # What is being answered, what waits for that, and what is said behind all of it
        self._current: ClientRequest | None = None
        self._waiting: deque[tuple[ClientRequest, Scope]] = deque()
        self._refusal: tuple[RouterError, str] | None = None
        self._half_closed = False
        self._looks = 0
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
        roomy = self._shared.make_room()
        self._shared.statistics.open += 1
        if roomy:
            self._wait(self._shared.arriving)
        else:
            self._count("too_many")
            self.refuse(TooManyConnections("all connections of the router are taken"), request_id({}))
            if self._shared.statistics.open > self._shared.limit + MAX_REFUSED:
                self.transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        self._server_state.connections.discard(self)
        self._shared.statistics.open -= 1
        self._wait(None)
        self._deaf = True
        if self._current is not None:
            self._current.lost()
        for request, _ in self._waiting:
            request.lost()
        self._caught_up()
        self._reader.close()
        del self._reader  # which holds on to us

    def pause_writing(self) -> None:
        self.write_paused = True
        self.count_backlog()
        if self._current is not None:
            self._current.slowed(True)

    def resume_writing(self) -> None:
        if not self._reads and self._shared.statistics.backlog.size <= MAX_BACKLOG:
            self._reads = True
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
        if self._deaf:
            return
        try:
            self._reader.feed(data)
        except RouterError as error:
            self._refuse_message(error)
        else:
            self._settle()

    def eof_received(self) -> bool:
        """The client sends nothing more. It has left, or it has closed its own side only and waits for its replies:
        TCP says the same for both. So it is asked, as long as the first reply has not begun: `100 Continue` means
        nothing to one that waits (RFC 9110 section 15.2), and the system of one that has left answers with a reset."""
        current = self._current
        cut = self._reader.partial and self._refusal is None
        if current is None or current.http_1_0 or cut or (current.begun and not self._has_more):
            return False  # close
        self._half_closed = True
        self._wait(self._shared.half_closed)
        return True

    @property
    def _has_more(self) -> bool:
        """Whether something waits behind the request that is answered."""
        return bool(self._waiting or self._reader.unread)

    def look(self) -> None:
        """Break off what a client has left that had closed its own side; ask whether it has."""
        state, _, retransmissions = self.transport.get_extra_info("socket").getsockopt(
            socket.IPPROTO_TCP, socket.TCP_INFO, 3
        )
        if state == TCP_CLOSED or retransmissions >= MAX_RETRANSMISSIONS:
            self.transport.abort()
            return
        if self._looks % LOOKS_PER_QUESTION == 0 and self._current is not None and not self._current.begun:
            self.write_continue()
        self._looks += 1
        self._wait(self._shared.half_closed)

    def _refuse_message(self, error: RouterError) -> None:
        if self._deaf:  # it came behind the last request, which is answered all the same
            self._settle()
            return
        if isinstance(error, BadMessage):
            self._count(error.reason)
        current, reader = self._current, self._reader
        self._deaf = True
        self._refusal = error, request_id({"headers": reader.headers})
        self._wait(None)
        self._drop_waiting(reader.request)
        if current is None:
            self.refuse(*self._refusal)
        elif current is reader.request:  # whoever reads its body learns that no more will come
            current.lost()
            if current.begun:
                self.close()  # its reply is owed: its bytes must not be mixed up
            else:
                self.refuse(*self._refusal)

    def _drop_waiting(self, request: ClientRequest | None) -> None:
        if self._waiting and self._waiting[-1][0] is request:
            self._waiting.pop()

    # What the reader calls

    def _begin(self, scope: Scope, keep_alive: bool, awaits_continue: bool) -> ClientRequest | None:
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

    # What requests call

    async def writable(self) -> None:
        """Wait until the client has caught up, or is gone."""
        while self.write_paused:
            if self._writable is None:
                self._writable = asyncio.Event()
            await self._writable.wait()

    def pause_reading(self) -> None:
        """Hold the client back, and what of it was received and not read yet."""
        self._reader.full = True
        if not self._reading_paused:
            self._reading_paused = True
            self.transport.pause_reading()

    def resume_reading(self) -> None:
        """Let it go on."""
        if not self._reading_paused and not self._reader.full:
            return
        self._reader.full = False
        if not self._deaf:
            try:
                self._reader.go_on()
            except RouterError as error:
                self._refuse_message(error)
            else:
                self._settle()
        if self._reading_paused and not self._reader.full and not self.transport.is_closing():
            self._reading_paused = False
            self.transport.resume_reading()
            self._restart()

    def write_continue(self) -> None:
        """Tell the client to send its body."""
        self.transport.write(CONTINUE)
        self._restart()

    def reply_ended(self, request: ClientRequest) -> None:
        """The last byte of its reply was written: the next one's turn."""
        self._current = None
        if not request.keep_alive or self.closing:
            if request.whole:
                self.close()
            else:
                self._linger()
            return
        if self._waiting:
            self._start(*self._waiting.popleft())
        self.resume_reading()
        if self._current is not None or self.closing:
            return
        if self._refusal is not None:
            self.refuse(*self._refusal)
        elif self._half_closed:
            self.close()
        else:
            self._settle()

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
            *((key.lower().encode("ascii"), value.encode("ascii")) for key, value in error.headers.items()),
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
        self._wait(self._shared.lingering)

    def close(self) -> None:
        """Close once everything that was written has gone out."""
        self.closing = self._deaf = True
        self._wait(None)
        self.transport.close()

    # What uvicorn calls

    def shutdown(self) -> None:
        """A graceful stop: finish what is being answered, or has just begun to come, and nothing else."""
        if self._current is None and self._deadline is not self._shared.arriving:
            self.close()
            return
        self.closing = True
        if self._current is None:  # who has connected for a request would not know whether it was begun
            self._wait(self._shared.lingering)
            return
        if (task := self._current.task) is not None:  # uvicorn waits for these, and cancels them when the time is up
            self._server_state.tasks.add(task)
            task.add_done_callback(self._server_state.tasks.discard)

    # What is waited for, and for how long

    def _settle(self) -> None:
        """Wait for the rest of a request, for the next one, or, while one is answered, for nothing. A request behind
        which none may come (HTTP/1.0, `Connection: close`) is as whole as any other."""
        if self._half_closed:
            return
        if self._reader.partial and not self._deaf:
            if self._deadline is not self._shared.arriving:
                self._wait(self._shared.arriving)
        else:
            self._wait(self._shared.idle if self._current is None and not self._deaf else None)

    def _wait(self, deadline: Deadlines[ClientConnection] | None) -> None:
        if self._deadline is not None:
            self._deadline.stop(self)
        self._deadline = deadline
        if deadline is not None:
            self._received = self._reader.received
            deadline.start(self)

    def _restart(self) -> None:
        """The client was held back until now."""
        if self._deadline is self._shared.arriving:
            self._wait(self._shared.arriving)

    @property
    def idle(self) -> bool:
        """Nothing is answered on it, and no body arrives."""
        return self._current is None and self._reader.request is None

    def idled(self) -> None:
        """No further request came in time, or others need the room."""
        self._count("idle")
        self.close()

    def is_late(self) -> None:
        """A request that has begun to arrive is not whole in time, or none has."""
        reader, request = self._reader, self._reader.request
        if self._reading_paused:
            self._wait(self._shared.arriving)
        elif request is None:
            self._count("late_head")
            if reader.partial:
                self._time_out("the request's head took too long (--head-timeout)")
            else:
                self.close()
        elif request.awaits_continue or reader.received - self._received >= MIN_PROGRESS:
            self._wait(self._shared.arriving)
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
        """Tell how much waits for a client that reads slowly."""
        size = self.transport.get_write_buffer_size()
        self._shared.statistics.backlog.size += size - self._backlog
        self._backlog = size


def _address(address: object) -> tuple[str, int] | None:
    return (str(address[0]), int(address[1])) if isinstance(address, tuple) else None
