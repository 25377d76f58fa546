"""A raw HTTP/1.1 client: sends exactly the bytes it is given and shows exactly the bytes that come back."""

from __future__ import annotations

import asyncio
import json
import socket
import struct
from collections.abc import Awaitable, Iterable
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any
from urllib.parse import urlsplit

from tests.support.waiting import soon

Pairs = Iterable[tuple[str, str]]
RESET_ON_CLOSE = struct.pack("ii", 1, 0)  # SO_LINGER: on, 0 seconds
BODILESS = frozenset({204, 304})


@dataclass
class RawReply:
    """One reply: its head as it was spelled, and the body with the framing taken off."""

    status: int
    head: bytes
    headers: list[tuple[bytes, bytes]]
    body: bytes = b""
    informational: list[int] = field(default_factory=list)

    def values(self, name: str) -> list[bytes]:
        return [value for key, value in self.headers if key.lower() == name.lower().encode()]

    def value(self, name: str) -> bytes | None:
        values = self.values(name)
        assert len(values) < 2, f"{name} came {len(values)} times"
        return values[0] if values else None

    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def error_type(self) -> str:
        """The `type` of one of the router's own errors, whose shape is checked on the way."""
        assert self.value("content-type") == b"application/json", self.head
        error = self.json()["error"]
        assert set(error) == {"type", "message", "request_id"}, error
        assert error["request_id"].encode() == self.value("x-request-id")
        return str(error["type"])


class CutReply(Exception):
    """The connection ended before the reply did. `reply` holds what came; status 0: not even the head did."""

    def __init__(self, reply: RawReply) -> None:
        super().__init__(f"cut after status {reply.status} and {len(reply.body)} body bytes")
        self.reply = reply


async def whole_or_cut(asked: Awaitable[RawReply]) -> RawReply:
    """A reply, or what came of it."""
    try:
        return await asked
    except CutReply as cut:
        return cut.reply


def request(method: str, target: str, headers: Pairs = (), body: bytes | None = None, *, version: str = "1.1") -> bytes:
    """The bytes of a request. `Host` and, with a body, `Content-Length` are added unless given."""
    pairs = list(headers)
    names = {name.lower() for name, _ in pairs}
    if "host" not in names:
        pairs.insert(0, ("Host", "router.test"))
    if body is not None and not names & {"content-length", "transfer-encoding"}:
        pairs.append(("Content-Length", str(len(body))))
    lines = [f"{method} {target} HTTP/{version}", *(f"{name}: {value}" for name, value in pairs), "", ""]
    return "\r\n".join(lines).encode("latin-1") + (body or b"")


def chunked(*parts: bytes) -> bytes:
    """A chunked body, one chunk for each part."""
    return b"".join(b"%x\r\n%b\r\n" % (len(part), part) for part in parts) + b"0\r\n\r\n"


class Client:
    """One connection. `async with await Client.connect(url) as client:`. Where it ends too early, reading raises
    `CutReply`."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        self._left: int | None = None  # of a Content-Length body
        self._framing = "none"
        self.reply: RawReply = RawReply(0, b"", [])

    @classmethod
    async def connect(cls, url: str, *, receive_buffer: int | None = None) -> Client:
        """`receive_buffer` (bytes) makes the client slow: the kernel and asyncio take little that nobody reads."""
        parts = urlsplit(url)
        sock = socket.socket(socket.AF_INET6 if ":" in (parts.hostname or "") else socket.AF_INET)
        sock.setblocking(False)
        if receive_buffer is not None:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        try:
            await asyncio.get_running_loop().sock_connect(sock, (parts.hostname or "127.0.0.1", parts.port or 80))
        except OSError:
            sock.close()
            raise
        return cls(*await asyncio.open_connection(sock=sock, limit=receive_buffer or 2**16))

    async def __aenter__(self) -> Client:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.abort()

    async def send(self, data: bytes) -> None:
        """Raises:
        ConnectionError: the other side has closed the connection.
        """
        if self._writer.is_closing():  # where uvloop's transports raise RuntimeError
            raise ConnectionResetError("the connection is closed")
        self._writer.write(data)
        await soon(self._writer.drain())

    def half_close(self) -> None:
        self._writer.write_eof()

    def abort(self) -> None:
        self._writer.transport.abort()

    def reset(self) -> None:
        """Leave at once and rudely: the other side sees a reset."""
        if (own := self._writer.get_extra_info("socket")) is not None:  # else the other side has left before
            own.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET_ON_CLOSE)
        self._writer.transport.abort()

    async def ask(
        self, method: str, target: str, headers: Pairs = (), body: bytes | None = None, *, version: str = "1.1"
    ) -> RawReply:
        await self.send(request(method, target, headers, body, version=version))
        return await self.read(method)

    async def read(self, method: str = "GET") -> RawReply:
        """The next reply, whole. `method` is that of its request, because replies to HEAD have no body."""
        await self.read_head(method)
        return await self.read_body()

    async def read_body(self) -> RawReply:
        """The reply whose head was read, with what is left of its body."""
        parts = []
        try:
            while part := await self.read_part():
                parts.append(part)
        finally:
            self.reply.body = b"".join(parts)
        return self.reply

    async def read_head(self, method: str = "GET") -> RawReply:
        """The head of the next reply; informational ones before it are noted."""
        informational: list[int] = []
        self.reply = RawReply(0, b"", [])
        while True:
            head = await self._step(self._reader.readuntil(b"\r\n\r\n"))
            first, *lines = head[:-4].split(b"\r\n")
            status = int(first.split(b" ", 2)[1])
            if status >= 200:
                break
            informational.append(status)
        pairs = [(name, value.strip()) for name, _, value in (line.partition(b":") for line in lines)]
        self.reply = RawReply(status, head, pairs, informational=informational)
        self._expect_body(method)
        return self.reply

    def _expect_body(self, method: str) -> None:
        length = self.reply.value("content-length")
        self._left = None
        if method == "HEAD" or self.reply.status in BODILESS:
            self._framing = "none"
        elif self.reply.values("transfer-encoding") == [b"chunked"]:
            assert length is None, self.reply.head
            self._framing = "chunked"
        elif length is not None:
            self._framing, self._left = "length", int(length)
        else:
            self._framing = "close"

    async def read_part(self) -> bytes:
        """The next bytes of the body, one chunk of a chunked one; b"" after the last."""
        if self._framing == "chunked":
            size = int(await self._step(self._reader.readuntil(b"\r\n")), 16)
            data = await self._step(self._reader.readexactly(size + 2))
            if not size:
                self._framing = "none"
            return data[:-2]
        if self._framing == "length" and self._left:
            data = await self._step(self._reader.read(min(self._left, 2**20)))
            if not data:
                raise CutReply(self.reply)
            self._left -= len(data)
            return data
        return await self._step(self._reader.read(2**20)) if self._framing == "close" else b""

    async def read_raw(self) -> bytes:
        return await soon(self._reader.read(2**16))

    async def closed(self) -> bytes:
        """Wait until the router closes or resets the connection; what it still said before."""
        try:
            return await soon(self._reader.read())
        except ConnectionResetError:
            return b""

    async def _step(self, reading: Any) -> bytes:
        try:
            data: bytes = await soon(reading)
        except (asyncio.IncompleteReadError, ConnectionResetError):
            raise CutReply(self.reply) from None
        return data


async def ask(url: str, method: str, target: str, headers: Pairs = (), body: bytes | None = None) -> RawReply:
    """One request on a connection of its own."""
    async with await Client.connect(url) as client:
        return await client.ask(method, target, headers, body)
