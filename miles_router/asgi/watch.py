"""Timers of a request: a watch that stops it when its client disconnects or its timeout expires, heartbeats for its
stream, and the timer that many items with the same timeout share.

ASGI reports a disconnect only through `receive`, so a second task has to wait there while the request's task waits for
the worker. For a short request that task would cost more than everything else, so it starts only after `WATCH_DELAY`.

A paused fleet, a queue, a long prompt or a resumed generation can leave a client without a byte for minutes. nginx
closes such a connection after 60 s, Codex after 300 s (Codex counts only events, not comments).
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Mapping
from contextvars import Context, copy_context
from types import TracebackType
from typing import Any, Generic, TypeVar

import orjson

from miles_router import tasks
from miles_router.asgi.exchange import Exchange, Message, Receive, Send
from miles_router.asgi.replies import OK, Kind, is_encoded, kind_of
from miles_router.engines.events import write_event
from miles_router.errors import ClientDisconnected, InternalError, RouterError, UpstreamError, UpstreamTimeout
from miles_router.tasks import LOOKS, cancelled, spawn

Item = TypeVar("Item")


class Deadlines(Generic[Item]):
    """A timeout shared by many items: calls `expired` with each item started `seconds` ago and not stopped since.

    One event loop timer per item would cost more than the rest of a short request's bookkeeping. One timer serves all
    items: it ticks `LOOKS` times within `seconds`, and age is counted in ticks. So a pause of this process itself does
    not expire items.
    """

    def __init__(
        self, seconds: float, expired: Callable[[Item], None], loop: asyncio.AbstractEventLoop | None = None
    ) -> None:
        self.loop = loop or asyncio.get_running_loop()
        self._interval = seconds / LOOKS
        self._expired = expired
        self._ticks = 0
        self._started: dict[Item, int] = {}  # item -> the tick at which it was started, oldest first
        self._timer: asyncio.TimerHandle | None = None
        self._context = Context()  # empty, so that the timer keeps no context variables of a request

    def start(self, item: Item) -> None:
        """Start the timeout of `item`, which must not be running already."""
        self._started[item] = self._ticks
        if self._timer is None:
            self._set_timer()

    def stop(self, item: Item) -> None:
        """Cancel the timeout of `item`; do nothing if it is not running."""
        self._started.pop(item, None)

    def oldest(self) -> Item | None:
        """Return the item that was started first, or None."""
        return next(iter(self._started), None)

    def _tick(self) -> None:
        limit = self._ticks - LOOKS  # the first tick may come right after an item was started, so it does not count
        self._ticks += 1
        try:
            while self._started:
                item, started = next(iter(self._started.items()))
                if started > limit:
                    break
                del self._started[item]
                self._expired(item)
        finally:  # an exception in one call must not stop the timer of the other items
            self._timer = None
            if self._started:
                self._set_timer()

    def _set_timer(self) -> None:
        self._timer = self.loop.call_later(self._interval, self._tick, context=self._context)


#: Seconds before the router begins to watch for a disconnect. Generations take far longer, other requests less.
WATCH_DELAY = 0.1


class Watch:
    """A context manager that breaks off the block of one request.

    `with Watch(receive, timeout):` raises from the block's current `await`: `ClientDisconnected` when the client has
    disconnected, `UpstreamTimeout` after `timeout` seconds (0: never). The request body must have been read before.
    """

    __slots__ = ("_context", "_deadline", "_patience", "_reason", "_receive", "_task", "_timeout", "_watcher")

    def __init__(self, receive: Receive, timeout: float = 0.0) -> None:
        self._receive = receive
        self._timeout = timeout
        self._reason: RouterError | None = None
        self._watcher: asyncio.Task[None] | None = None
        self._deadline: asyncio.TimerHandle | None = None

    def __enter__(self) -> Watch:
        loop = asyncio.get_running_loop()
        self._task = asyncio.current_task(loop)
        self._context = copy_context()
        self._patience = _patience if _patience is not None and _patience.loop is loop else _new_patience(loop)
        self._patience.start(self)
        if self._timeout:
            self._count_down(loop, tasks.LOOKS)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._patience.stop(self)
        if self._watcher is not None:
            self._watcher.cancel()
        if self._deadline is not None:
            self._deadline.cancel()
        if self._reason is not None and kind is asyncio.CancelledError:
            if sys.version_info >= (3, 11) and self._task is not None:
                self._task.uncancel()
            raise self._reason from None

    def _start_watching(self) -> None:
        self._context.run(self._spawn_watcher)  # a layer's `receive` may need the request's context variables

    def _spawn_watcher(self) -> None:
        self._watcher = tasks.spawn(self._wait_for_disconnect(), name="watch client")

    async def _wait_for_disconnect(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        self.stop(ClientDisconnected("the client left before its answer was complete"))

    def _count_down(self, loop: asyncio.AbstractEventLoop, left: int) -> None:
        if left:
            self._deadline = loop.call_later(self._timeout / tasks.LOOKS, self._count_down, loop, left - 1)
            return
        self.stop(UpstreamTimeout(f"the worker's reply was not complete within {self._timeout:g} s"))

    def stop(self, reason: RouterError) -> None:
        """Raise `reason` from the block's current `await`. Only the first call counts."""
        if self._reason is None and self._task is not None:
            self._reason = reason
            self._task.cancel()


def _new_patience(loop: asyncio.AbstractEventLoop) -> Deadlines[Watch]:
    global _patience
    _patience = Deadlines(WATCH_DELAY, Watch._start_watching, loop)
    return _patience


#: The shared timer of the event loop that started a watch last. If a process has several loops, each
#: watch keeps the timer of its own loop.
_patience: Deadlines[Watch] | None = None


EVENT_STREAM = [(b"content-type", b"text/event-stream; charset=utf-8")]
#: An SSE comment: OpenAI's and Anthropic's clients, LiteLLM, the Vercel AI SDK and all standard parsers skip it.
COMMENT = b": waiting\n\n"
EVENT_ENDS = (b"\n\n", b"\n\r\n")
#: Bytes of a late refusal that are buffered.
MAX_REFUSAL = 1 << 20


class HeartbeatForm:
    """The form of heartbeats and errors in the streams of one API; this class is SGLang's and OpenAI's form."""

    def beat(self) -> bytes:
        """Return one heartbeat."""
        return COMMENT

    def passing(self, data: bytes) -> bytes:
        """Return the bytes to send to the client for a part of the answer. `data` consists of whole events."""
        return data

    def failed(self, body: Mapping[str, Any]) -> bytes:
        """Return the events for an error. `body` is the JSON error answer; SGLang's may lack the outer `error`."""
        return write_event(body if "error" in body else {"error": body})


class Heartbeat:
    """A wrapper of `send` that adds heartbeats to a stream while nothing else is sent:

        async with Heartbeat(send, exchange, form, seconds) as heartbeat:
            await app(scope, receive, heartbeat.send)

    A heartbeat sends the response head with status 200 if needed. A refusal or a router error after that is sent as an
    event of the stream. After a router error the connection is also broken off.

    Args:
        send: sends to the client.
        form: the form of heartbeats and errors in the client's API.
        seconds: the silence after which a heartbeat is sent; 0: none, for a reply that is not a stream.
    """

    def __init__(self, send: Send, exchange: Exchange, form: HeartbeatForm, seconds: float) -> None:
        self._send = send
        self._exchange = exchange
        self._form = form
        self._seconds = seconds
        self._loop = asyncio.get_running_loop()
        self._sent_at = self._loop.time()
        self._timer: asyncio.TimerHandle | None = None
        self._beating: asyncio.Task[None] | None = None
        self._sending = False
        self._between_events = True
        #: True if a heartbeat sent the response head.
        self._opened = False
        self._start: Message | None = None
        self._refusal: bytearray | None = None

    async def __aenter__(self) -> Heartbeat:
        self._set_timer()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        self._stop()
        if self._beating is not None:
            await cancelled(self._beating)
        if not self._opened or self._start is not None or isinstance(error, ClientDisconnected):
            return
        if isinstance(error, RouterError) and error.type:
            await self._send_failure(self._error_body(error), more=True)
        elif isinstance(error, Exception):
            defect = InternalError("the router failed; its log has the details")
            await self._send_failure(self._error_body(defect), more=True)

    async def send(self, message: Message) -> None:
        """Send one ASGI message of the reply."""
        if self._beating is not None:
            await asyncio.wait({self._beating})
        if message["type"] == "http.response.start":
            await self._begin(message)
        elif self._refusal is not None:
            await self._collect_refusal(message)
        elif (passed := self._message_for_client(message)) is not None:
            self._sending, self._sent_at = True, self._loop.time()
            try:
                await self._send(passed)
            finally:
                self._sending = False

    async def _begin(self, start: Message) -> None:
        self._start = start
        if not _is_stream(start):
            self._stop()
            self._refusal = bytearray() if self._opened else None
        elif self._seconds:  # heartbeats add bytes that Content-Length does not count
            start = {**start, "headers": [pair for pair in start["headers"] if pair[0] != b"content-length"]}
        if not self._opened:
            self._sent_at = self._loop.time()
            await self._send(start)

    def _message_for_client(self, message: Message) -> Message | None:
        """Return the message to send to the client for a part of the answer, or None."""
        if not self._seconds:
            return message
        body, more = message.get("body", b""), message.get("more_body", False)
        if body:
            self._between_events = body.endswith(EVENT_ENDS)
        body = self._form.passing(body)
        if not more:
            self._stop()
        elif not body:
            return None
        return {**message, "body": body}

    async def _collect_refusal(self, message: Message) -> None:
        """Buffer an answer that is not a stream, and send it as an error event in the stream that has begun."""
        assert self._refusal is not None
        assert self._start is not None
        if len(self._refusal) < MAX_REFUSAL:
            self._refusal += message.get("body", b"")
        if message.get("more_body", False):
            return
        try:
            body = orjson.loads(self._refusal)
        except orjson.JSONDecodeError:
            body = None
        if not isinstance(body, dict) or not body.keys() & {"error", "message"}:
            status = self._start["status"]
            body = self._error_body(UpstreamError(f"the worker answered {status} in place of a stream of events"))
        await self._send_failure(body, more=False)

    def _error_body(self, error: RouterError) -> Mapping[str, Any]:
        return self._exchange.error_body(error, self._exchange.request_id)

    async def _send_failure(self, body: Mapping[str, Any], *, more: bool) -> None:
        await self._send({"type": "http.response.body", "body": self._form.failed(body), "more_body": more})

    # The timer

    def _set_timer(self) -> None:
        if self._seconds:
            self._timer = self._loop.call_at(self._sent_at + self._seconds, self._on_timer)

    def _stop(self) -> None:
        self._seconds = 0.0
        if self._timer is not None:
            self._timer.cancel()

    def _on_timer(self) -> None:
        if self._loop.time() < self._sent_at + self._seconds:
            self._set_timer()
        elif self._sending or not self._between_events:
            self._sent_at = self._loop.time()
            self._set_timer()
        else:
            self._beating = spawn(self._beat(), name="heartbeat")

    async def _beat(self) -> None:
        if self._start is None and not self._opened:
            self._opened = True
            await self._send({"type": "http.response.start", "status": OK, "headers": list(EVENT_STREAM)})
        await self._send({"type": "http.response.body", "body": self._form.beat(), "more_body": True})
        self._sent_at, self._beating = self._loop.time(), None
        self._set_timer()


def _is_stream(start: Message) -> bool:
    """Return True for an uncompressed stream of events, into which heartbeats can be inserted."""
    headers = start["headers"]
    return start["status"] == OK and kind_of(headers) is Kind.EVENTS and not is_encoded(headers)
