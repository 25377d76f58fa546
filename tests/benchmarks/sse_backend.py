"""A worker that streams one fixed 200-byte event to every open request each 20 ms.

Written on a raw asyncio protocol so that it never is what limits the run: one timer, one precomputed chunk, no task
per stream. All streams get their event at the same moment, as they do from an engine, whose decode step ends for its
whole batch at once. Runnable alone: `python tests/benchmarks/sse_backend.py --port 9000`.
"""

from __future__ import annotations

import argparse
import asyncio
import re
from typing import cast

PERIOD = 0.020
EVENT_BYTES = 200
MARK = b"~"  # exactly one in each event and none in the head: counting one byte survives any split between reads

EVENT = b'data: {"text": "~' + b"x" * (EVENT_BYTES - 21) + b'"}\n\n'
CHUNK = b"%x\r\n%b\r\n" % (len(EVENT), EVENT)
STREAM_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
STATUS_BODY = b'{"status": "ok", "model_path": "benchmark", "weight_version": "default", "is_generation": true}'
STATUS_REPLY = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%b" % (
    len(STATUS_BODY),
    STATUS_BODY,
)
CONTENT_LENGTH = re.compile(rb"\r\ncontent-length: *(\d+)", re.IGNORECASE)

assert len(EVENT) == EVENT_BYTES


class StreamServer(asyncio.Protocol):
    """One connection: `POST /generate` starts an endless stream, any other request gets a small JSON."""

    def __init__(self, streams: set[asyncio.Transport]) -> None:
        self.streams = streams
        self.buffer = bytearray()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)  # uvloop's does not inherit it

    def data_received(self, data: bytes) -> None:
        self.buffer += data
        while (head_end := self.buffer.find(b"\r\n\r\n")) >= 0:
            length = CONTENT_LENGTH.search(self.buffer, 0, head_end)
            end = head_end + 4 + (int(length[1]) if length else 0)
            if len(self.buffer) < end:
                return
            self.answer(bytes(self.buffer[:head_end]))
            del self.buffer[:end]

    def answer(self, head: bytes) -> None:
        if head.startswith(b"POST /generate "):
            self.transport.write(STREAM_HEAD)
            self.streams.add(self.transport)
        else:
            self.transport.write(STATUS_REPLY)

    def connection_lost(self, error: Exception | None) -> None:
        self.streams.discard(self.transport)


async def serve(port: int) -> None:
    loop = asyncio.get_running_loop()
    streams: set[asyncio.Transport] = set()

    def tick(due: float) -> None:
        for transport in streams:
            transport.write(CHUNK)
        due = max(due + PERIOD, loop.time())  # no burst to catch up after a stall
        loop.call_at(due, tick, due)

    tick(loop.time())
    server = await loop.create_server(lambda: StreamServer(streams), "127.0.0.1", port, backlog=4096)
    await server.serve_forever()


def main() -> None:
    import uvloop

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--port", type=int, required=True)
    uvloop.run(serve(parser.parse_args().port))


if __name__ == "__main__":
    main()
