"""Heartbeats for streams, so that clients and proxies do not time out while nothing is generated.

A paused fleet, a queue, a long prompt or a resumed generation can leave a client without a byte for minutes. nginx
closes such a connection after 60 s, Codex after 300 s (Codex counts only events, not comments).
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from types import TracebackType
from typing import Any

import orjson

from miles_router.asgi.exchange import Exchange, Message, Send
from miles_router.asgi.replies import OK, Kind, is_encoded, kind_of
from miles_router.engines.events import write_event
from miles_router.errors import ClientDisconnected, InternalError, RouterError, UpstreamError
from miles_router.tasks import cancelled, spawn

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
