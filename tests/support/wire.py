"""Protocols without a socket: what the event loop would do to them, done by hand."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, cast

from miles_router.asgi.backlog import Backlog
from miles_router.fleet.worker_url import parse_worker_url
from miles_router.forwarding.connection import Connection
from miles_router.forwarding.upstream import Upstream

WORKER = parse_worker_url("http://worker:1")


class Wire:
    """A transport that keeps what is written."""

    def __init__(self) -> None:
        self.written = bytearray()
        self.closed = False
        self.reading = True

    def write(self, data: bytes) -> None:
        if not self.closed:
            self.written += data

    def writelines(self, pieces: Sequence[bytes]) -> None:
        self.write(b"".join(pieces))

    def get_extra_info(self, name: str) -> Any:
        return SimpleNamespace(setsockopt=lambda *_: None) if name == "socket" else ("127.0.0.1", 1)

    def close(self) -> None:
        self.closed = True

    abort = write_eof = close

    def is_closing(self) -> bool:
        return self.closed

    def get_write_buffer_size(self) -> int:
        return 0

    def pause_reading(self) -> None:
        self.reading = False

    def resume_reading(self) -> None:
        self.reading = True


class WorkerEnd:
    """A connection to a worker that says what a test lets it say; also where that connection belongs."""

    def __init__(self) -> None:
        self.read_buffer = memoryview(bytearray(2**20))
        self.backlog = Backlog()
        self.wire = Wire()
        self.connection = Connection(cast(Upstream, self), WORKER)
        self.connection.connection_made(cast(asyncio.BaseTransport, self.wire))
        self.kept = 0

    def says(self, data: bytes) -> None:
        self.read_buffer[: len(data)] = data
        self.connection.buffer_updated(len(data))

    def made(self, address: object, connection: Connection) -> None: ...

    def keep(self, address: object, connection: Connection) -> None:
        self.kept += 1

    def forget(self, address: object, connection: Connection) -> None: ...

    def release_slot(self) -> None: ...
