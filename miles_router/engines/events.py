"""Server-sent events: a splitter, a parser and a writer (WHATWG HTML, section 9.2). No I/O.

Engines write `data: {json}` and an empty line, some with the event's name in front, and `data: [DONE]` at the end.
Lines end with `\\n` or `\\r\\n`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import orjson

from miles_router.engines.json_bytes import Field

DATA = b"data: "
DONE = b"[DONE]"
NEWLINE = b"\n"
END = NEWLINE + NEWLINE
LAST_EVENT = DATA + DONE + END
_ENDS = (NEWLINE, b"\r\n")
_END = re.compile(rb"\n\r?\n")
#: The longest part of an event's end that a piece may end with: a newline and a carriage return.
_TAIL = 2
_ERROR = Field("error")


class Event(NamedTuple):
    """One event of a stream.

    Attributes:
        raw: its bytes with the empty line that ends it.
        name: empty if the event has none.
        data: the joined data lines.
        is_last: the event is `[DONE]`, the last one of a complete stream.
    """

    raw: bytes
    name: bytes
    data: bytes
    is_last: bool

    @classmethod
    def read(cls, raw: bytes) -> Event:
        """Parse the fields of an event. Comments and unknown fields are skipped; several data lines are joined."""
        if raw.startswith(DATA) and raw.find(NEWLINE) == len(raw) - len(END) and b"\r" not in raw:
            data = raw[len(DATA) : -len(END)]  # the fast path, for nearly all events
            return cls(raw, b"", data, data == DONE)
        name, lines = b"", []
        for line in raw.splitlines():
            field, _, value = line.partition(b":")
            if field == b"data":
                lines.append(value.removeprefix(b" "))
            elif field == b"event":
                name = value.removeprefix(b" ")
        data = NEWLINE.join(lines)
        return cls(raw, name, data, data == DONE)

    @property
    def is_error(self) -> bool:
        """Whether the event reports an error instead of an answer."""
        if _ERROR.quoted not in self.data:
            return False
        parsed = self.parse()
        return isinstance(parsed, dict) and _ERROR.name in parsed

    def parse(self) -> Any:
        """Return the JSON in the data; None for `[DONE]`, for an event without data, and for invalid JSON."""
        data = self.data
        if not data or self.is_last:
            return None
        try:
            return orjson.loads(data)
        except orjson.JSONDecodeError:
            return None


def write_event(content: object, name: bytes = b"") -> bytes:
    """Return an event that contains `content` as JSON."""
    event = DATA + orjson.dumps(content) + END
    return b"event: " + name + NEWLINE + event if name else event


class EventReader:
    """A splitter of a byte stream into events, each with the empty line that ends it."""

    def __init__(self) -> None:
        self._rest = bytearray()
        #: Whether the stream is inside an event whose beginning `release` has returned.
        self.in_released_event = False

    def feed(self, data: bytes) -> Sequence[bytes]:
        """Return the events that `data` completes."""
        whole = not self._rest and not self.in_released_event and data.endswith(END)
        if whole and data.find(NEWLINE) == len(data) - len(END):
            return (data,)  # the fast path: mostly one piece is one event
        return [*self._split(data)]

    def _split(self, data: bytes) -> Iterator[bytes]:
        if self.in_released_event:
            piece, data = self._rest_of_released_event(data)
            yield piece
            if not data:
                return
        rest = self._rest
        begin, at = 0, max(0, len(rest) - _TAIL)
        rest += data
        while (at := rest.find(NEWLINE, at) + 1) > 0:  # searching one byte is ten times as fast as two
            for end in _ENDS:
                if rest.startswith(end, at):
                    at += len(end)
                    yield bytes(memoryview(rest)[begin:at])
                    begin = at
                    break
        del rest[:begin]

    def release(self) -> bytes:
        """Return the incomplete event and stop buffering it, since it may be very long. Later `feed` calls return the
        rest of it in pieces as they arrive."""
        beginning = self.rest
        self.in_released_event = bool(beginning)
        self._rest = bytearray(beginning[-_TAIL:])
        return beginning

    def _rest_of_released_event(self, data: bytes) -> tuple[bytes, bytes]:
        """Return the bytes up to the end of the event that `release` returned, and the bytes behind it."""
        tail = bytes(self._rest)
        end = _END.search(tail + data)
        if end is None:
            self._rest = bytearray((tail + data)[-_TAIL:])
            return data, b""
        self.in_released_event, self._rest = False, bytearray()
        cut = end.end() - len(tail)
        return data[:cut], data[cut:]

    @property
    def pending(self) -> int:
        """The number of buffered bytes behind the last complete event."""
        return 0 if self.in_released_event else len(self._rest)

    @property
    def is_cut(self) -> bool:
        """Whether a stream that ends now ends inside an event. Only `[DONE]` may lack its empty line."""
        return self.rest.strip() not in (b"", DATA + DONE)

    @property
    def rest(self) -> bytes:
        """The buffered bytes behind the last complete event."""
        return b"" if self.in_released_event else bytes(self._rest)
