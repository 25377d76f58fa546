"""Streams whose client waits: the response head and heartbeats, so that neither a client nor a proxy gives up.

A paused fleet, a queue, a long prompt or a resumed generation may leave a client without a byte for minutes. Clients
and proxies take that for a dead connection: nginx after 60 s, Codex after 300 s, which counts events and not comments.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from types import TracebackType
from typing import Any

import orjson

from miles_router.asgi.exchange import Exchange, Message, Send
from miles_router.asgi.headers import first_header
from miles_router.asgi.replies import IDENTITY, OK, Kind, kind_of
from miles_router.engines.events import write_event
from miles_router.errors import ClientDisconnected, RouterError, UpstreamInvalidResponse
from miles_router.tasks import cancelled, spawn

EVENT_STREAM = [(b"content-type", b"text/event-stream; charset=utf-8")]
#: The clients of OpenAI and Anthropic, LiteLLM, the Vercel AI SDK and all other readers of the standard skip it.
COMMENT = b": waiting\n\n"
EVENT_ENDS = (b"\n\n", b"\n\r\n")
#: Bytes of a late refusal that are kept.
MAX_REFUSAL = 1 << 20


class HeartbeatForm:
    """How an API says in a stream that the stream goes on, or that it has failed."""

    def beat(self) -> bytes:
        """Return one heartbeat."""
        return COMMENT

    def passing(self, data: bytes) -> bytes:
        """Return what the client gets for a part of the answer. Whole events come here."""
        return data

    def failed(self, body: Mapping[str, Any]) -> bytes:
        """Return the events for an error; `body` is what the API answers a request with. Of SGLang that may be the
        error itself."""
        return write_event(body if "error" in body else {"error": body})


class Heartbeat:
    """A stream's way to its client, with heartbeats while nothing else is sent:

        async with Heartbeat(send, exchange, form, seconds) as heartbeat:
            await app(scope, receive, heartbeat.send)

    Once a heartbeat has sent the head, a refusal or an error of the router can no longer have a status: the client is
    told in the stream. After an error of the router the connection is broken off as well.

    Args:
        send: the client's side.
        form: how the client's API says it.
        seconds: the silence after which a heartbeat is sent; 0 for a reply that is no stream, which has none.
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
        #: Whether the head went out with a heartbeat.
        self._opened = False
        self._start: Message | None = None
        self._refusal: bytearray | None = None

    async def __aenter__(self) -> Heartbeat:
        self._wait()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        self._stop()
        if self._beating is not None:
            await cancelled(self._beating)
        if not self._opened or self._start is not None or isinstance(error, ClientDisconnected):
            return
        if isinstance(error, RouterError) and error.type != RouterError.type:
            await self._tell(self._written(error), more=True)
        elif isinstance(error, Exception):
            await self._tell(self._written(RouterError("the router failed; its log has the details")), more=True)

    async def send(self, message: Message) -> None:
        """Send one ASGI message of the reply."""
        if self._beating is not None:
            await asyncio.wait({self._beating})
        if message["type"] == "http.response.start":
            await self._begin(message)
        elif self._refusal is not None:
            await self._refuse(message)
        elif (passed := self._passed(message)) is not None:
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
        elif self._seconds:  # a heartbeat is not part of the length that it announces
            start = {**start, "headers": [pair for pair in start["headers"] if pair[0] != b"content-length"]}
        if not self._opened:
            self._sent_at = self._loop.time()
            await self._send(start)

    def _passed(self, message: Message) -> Message | None:
        """Return a part of the answer as the client gets it; None where it gets nothing."""
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

    async def _refuse(self, message: Message) -> None:
        """Collect an answer that is no stream, and tell the client of it in the stream that has begun."""
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
            body = self._written(
                UpstreamInvalidResponse(f"the worker answered {status} in place of a stream of events")
            )
        await self._tell(body, more=False)

    def _written(self, error: RouterError) -> Mapping[str, Any]:
        return self._exchange.error_body(error, self._exchange.request_id)

    async def _tell(self, body: Mapping[str, Any], *, more: bool) -> None:
        await self._send({"type": "http.response.body", "body": self._form.failed(body), "more_body": more})

    # The timer

    def _wait(self) -> None:
        if self._seconds:
            self._timer = self._loop.call_at(self._sent_at + self._seconds, self._look)

    def _stop(self) -> None:
        self._seconds = 0.0
        if self._timer is not None:
            self._timer.cancel()

    def _look(self) -> None:
        if self._loop.time() < self._sent_at + self._seconds:
            self._wait()
        elif self._sending or not self._between_events:
            self._sent_at = self._loop.time()
            self._wait()
        else:
            self._beating = spawn(self._beat(), name="heartbeat")

    async def _beat(self) -> None:
        if self._start is None and not self._opened:
            self._opened = True
            await self._send({"type": "http.response.start", "status": OK, "headers": list(EVENT_STREAM)})
        await self._send({"type": "http.response.body", "body": self._form.beat(), "more_body": True})
        self._sent_at, self._beating = self._loop.time(), None
        self._wait()


def _is_stream(start: Message) -> bool:
    """Return whether a reply is events that others can be put between."""
    encoding = first_header(start["headers"], b"content-encoding")
    return start["status"] == OK and kind_of(start["headers"]) is Kind.EVENTS and encoding in (None, IDENTITY)
