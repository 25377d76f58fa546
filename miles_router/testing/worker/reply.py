"""Send a simulated worker's replies, whole or streamed, with the fault that is planned for the request."""

import asyncio
import os
import socket
import struct
from collections.abc import Mapping
from typing import Any, NoReturn

import orjson
from aiohttp import web

from miles_router.testing.worker.exchange_log import Exchange
from miles_router.testing.worker.faults import Fault

JSON = "application/json"
EVENT_STREAM = "text/event-stream; charset=utf-8"
# SGLang's CORS settings allow every origin with credentials, which adds `vary` to its replies.
_OWN_HEADERS = {"server": "uvicorn", "vary": "Origin"}
_RST_ON_CLOSE = struct.pack("ii", 1, 0)
_REPLACING = {"hang", "reset_in_headers", "status", "garbage", "close"}


class _ResponseWithoutType(web.Response):
    """A response without a content type: aiohttp adds one to every body, SGLang does not."""

    async def _prepare_headers(self) -> None:
        await super()._prepare_headers()
        self.headers.popall("content-type", None)


class Reply:
    """The reply to one request."""

    def __init__(self, request: web.BaseRequest, exchange: Exchange, fault: Fault | None) -> None:
        self._request = request
        self._exchange = exchange
        self._fault = fault
        self._response: web.StreamResponse | None = None
        self._sent = 0
        self.cut = False
        """Whether the worker, not the client, closed the connection."""
        exchange.fault = fault.name if fault else None

    @property
    def replaced(self) -> bool:
        """True if the fault replaces the worker's reply completely."""
        return self._fault is not None and self._fault.name in _REPLACING

    async def misbehave(self) -> web.StreamResponse:
        """Send what the fault prescribes instead of the worker's reply."""
        fault = self._fault
        assert fault is not None
        if fault.name == "status":
            return await self._whole(fault.status, fault.body, dict(fault.headers))
        if fault.name == "garbage":
            self._write_raw(fault.body)
        elif fault.name == "reset_in_headers":
            self._write_raw(b"HTTP/1.1 200 OK\r\nserver: uvicorn\r\ncontent-le")
            await self._reset()
        if fault.name != "hang":
            self._close()
        await forever()

    async def json(self, value: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> web.StreamResponse:
        """Answer with a JSON value."""
        return await self._whole(status, self.encode(value), {"content-type": JSON, **(headers or {})})

    async def text(self, text: str, status: int = 200) -> web.StreamResponse:
        """Answer with plain text and no content type, as SGLang does."""
        return await self._whole(status, text.encode(), {})

    async def empty(self, status: int = 200, headers: Mapping[str, str] | None = None) -> web.StreamResponse:
        """Answer without a body."""
        return await self._whole(status, b"", dict(headers or {}))

    async def send(self, chunk: bytes) -> None:
        """Stream a chunk. The first chunk starts an event stream with status 200."""
        if self._response is None:
            await self._start(200, {"content-type": EVENT_STREAM}, None)
        elif self._fault is not None and self._fault.per_chunk_s:
            await asyncio.sleep(self._fault.per_chunk_s)
        await self._write_body(chunk)

    async def event(self, value: Any, name: str = "") -> None:
        """Stream a JSON value as a server-sent event."""
        await self.send((f"event: {name}\n" if name else "").encode() + b"data: " + self.encode(value) + b"\n\n")

    def encode(self, value: Any) -> bytes:
        """Encode JSON without spaces, as SGLang does."""
        return orjson.dumps(value)

    async def end(self) -> web.StreamResponse:
        """End the stream."""
        assert self._response is not None
        await self._finish_cutting()
        await self._response.write_eof()
        return self._response

    async def _whole(self, status: int, body: bytes, headers: dict[str, str]) -> web.StreamResponse:
        if self._fault is None or self._fault.name == "status":
            self._exchange.status = status
            kind = web.Response if "content-type" in map(str.lower, headers) else _ResponseWithoutType
            return kind(status=status, body=body, headers={**headers, **_OWN_HEADERS})
        response = await self._start(status, headers, len(body))
        await self._write_body(body)
        await self._finish_cutting()
        await response.write_eof()
        return response

    async def _start(self, status: int, headers: dict[str, str], length: int | None) -> web.StreamResponse:
        if self._fault is not None and self._fault.first_byte_s:
            await asyncio.sleep(self._fault.first_byte_s)
        response = self._response = web.StreamResponse(status=status, headers={**headers, **_OWN_HEADERS})
        response.content_length = length
        self._exchange.status = status
        await response.prepare(self._request)
        return response

    async def _write_body(self, chunk: bytes) -> None:
        assert self._response is not None
        if not self._cuts:
            await self._response.write(chunk)
            return
        assert self._fault is not None
        room = max(0, self._fault.after_bytes - self._sent)
        self._sent += len(chunk)
        await self._response.write(chunk[:room])
        if self._sent >= self._fault.after_bytes:
            await self._finish_cutting()

    @property
    def _cuts(self) -> bool:
        return self._fault is not None and self._fault.name in ("reset_in_body", "cut_body")

    async def _finish_cutting(self) -> None:
        """Break the connection if the fault is `reset_in_body` or `cut_body`, and never return then."""
        if not self._cuts:
            return
        assert self._fault is not None
        if self._fault.name == "reset_in_body":
            await self._reset()
        self._close()
        await forever()

    def _write_raw(self, raw: bytes) -> None:
        transport = self._request.transport
        if transport is not None:
            transport.write(raw)

    async def _reset(self) -> NoReturn:
        self.cut = True
        reset(self._request.transport)
        await forever()

    def _close(self) -> None:
        self.cut = True
        if self._request.transport is not None:
            self._request.transport.close()


def reset(transport: asyncio.Transport | None) -> None:
    """Reset a connection (RST)."""
    if transport is None or transport.is_closing():
        return
    carried = transport.get_extra_info("socket")
    # uvloop's transports return a socket object that refuses setsockopt: set the option on a duplicated descriptor.
    with socket.socket(fileno=os.dup(carried.fileno())) as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RST_ON_CLOSE)
    transport.abort()


async def forever() -> NoReturn:
    """Wait until the server cancels the handler, which it does when the connection ends."""
    await asyncio.get_running_loop().create_future()
    raise AssertionError("unreachable")
