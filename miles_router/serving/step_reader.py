"""A client's bytes read one request at a time: what stands behind a request is still bytes when that is answered, and
can be given to another process with the connection."""

from __future__ import annotations

import re
from typing import Any

from miles_router.serving.request_reader import NOTHING, SLICE, RequestReader

EMPTY_LINE = b"\r\n\r\n"
_EMPTY_LINE = re.compile(EMPTY_LINE)
_SIZE = re.compile(rb"[0-9A-Fa-f]{1,16}")
CRLF_SIZE = 2


class ChunkedEnd:
    """Finds where a chunked body ends (RFC 9112 section 7.1). It judges nothing: the parser reads the same bytes, and
    refuses what is none."""

    def __init__(self) -> None:
        self._line = b""
        self._left = 0  # of a chunk, its line end included
        self._in_trailers = False

    def find(self, data: bytes) -> int:
        """How many of the next bytes are of the body."""
        at = 0
        while at < len(data):
            if self._left:
                step = min(self._left, len(data) - at)
                self._left -= step
                at += step
                continue
            end = data.find(b"\n", at)
            if end < 0:
                self._line += data[at:]
                break
            line, self._line, at = (self._line + data[at:end]).rstrip(b"\r"), b"", end + 1
            if self._in_trailers:
                if not line:
                    return at
            elif (size := _SIZE.match(line)) is not None:
                length = int(size[0], 16)
                self._in_trailers = not length
                self._left = length + CRLF_SIZE if length else 0
        return len(data)


class StepReader(RequestReader):
    """Gives the parser no byte behind the end of a head, or of a body, together with those before it. Whoever is given
    a request sets `full` until the next one may be read."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        #: As it came: of the request that is read, or was read last.
        self.head = b""
        self._chunks: ChunkedEnd | None = None

    def feed(self, data: bytes) -> None:
        """As `RequestReader.feed`."""
        self.received += len(data)
        self._unread = memoryview(bytes(self._unread) + data)
        self.go_on()

    def go_on(self) -> None:
        """As `RequestReader.go_on`."""
        while self._unread and not self.full:
            size = self._step()
            data, self._unread = self._unread[:size], self._unread[size:] if size < len(self._unread) else NOTHING
            if self._in_head:
                self.head = self.head + data if self.partial else bytes(data)
            self._parse(data)

    def on_headers_complete(self) -> None:
        super().on_headers_complete()
        if not self._resumed:
            self._chunks = None if self._excess is None else ChunkedEnd()

    def _step(self) -> int:
        """How many bytes may be parsed at once."""
        if not self._in_head:
            if self._chunks is None:
                return max(1, self._body_left)
            return self._chunks.find(bytes(self._unread[:SLICE]))
        tail = self.head[1 - len(EMPTY_LINE) :] if self.partial else b""
        split = (tail + bytes(self._unread[: len(EMPTY_LINE) - 1])).find(EMPTY_LINE) if tail else -1
        if split >= 0:
            return split + len(EMPTY_LINE) - len(tail)
        found = _EMPTY_LINE.search(self._unread, 0, SLICE)
        return SLICE if found is None else found.end()
