"""Server-sent events, cut out of a stream's bytes and read (WHATWG HTML, section 9.2). Pure.

Engines write `data: {json}` and an empty line, some with the event's name in front, and `data: [DONE]` at the end.
Lines end with `\\n` or `\\r\\n`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import orjson

from miles_router.engines.scan import Field

DATA = b"data: "
DONE = b"[DONE]"
NEWLINE = b"\n"
END = NEWLINE + NEWLINE
LAST_EVENT = DATA + DONE + END
_ENDS = (NEWLINE, b"\r\n")
_END = re.compile(rb"\n\r?\n")
#: The longest beginning of an event's end that may stand at the end of a piece: a newline and a carriage return.
_TAIL = 2
_ERROR = Field("error")


class Event(NamedTuple):
    """One event: its bytes with the empty line that ends it, its name (empty without one), its data, and whether it is
    the last of a stream that ends in order (`[DONE]`)."""

    raw: bytes
    name: bytes
    data: bytes
    is_last: bool

    @classmethod
    def read(cls, raw: bytes) -> Event:
        """Read the fields of an event. Comments and unknown fields are skipped; several data lines are joined."""
        if raw.startswith(DATA) and raw.find(NEWLINE) == len(raw) - len(END) and b"\r" not in raw:
            data = raw[len(DATA) : -len(END)]  # nearly all of them
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
        """Whether it tells of an error in place of an answer."""
        if _ERROR.quoted not in self.data:
            return False
        parsed = self.parse()
        return isinstance(parsed, dict) and _ERROR.name in parsed

    def parse(self) -> Any:
        """The JSON in its data; None for `[DONE]`, for an event without data, and for data that is no JSON."""
        data = self.data
        if not data or self.is_last:
            return None
        try:
            return orjson.loads(data)
        except orjson.JSONDecodeError:
            return None


def write_event(content: object, name: bytes = b"") -> bytes:
    """JSON as an event."""
    event = DATA + orjson.dumps(content) + END
    return b"event: " + name + NEWLINE + event if name else event


class EventReader:
    """Cuts a stream of bytes into events, each with the empty line that ends it."""

    def __init__(self) -> None:
        self._rest = bytearray()
        #: Whether an event that was let go has not ended yet.
        self.within = False

    def feed(self, data: bytes) -> Sequence[bytes]:
        """Return the events that are complete now."""
        whole = not self._rest and not self.within and data.endswith(END)
        if whole and data.find(NEWLINE) == len(data) - len(END):
            return (data,)  # which is how they mostly come
        return [*self._cut(data)]

    def _cut(self, data: bytes) -> Iterator[bytes]:
        if self.within:
            piece, data = self._through_its_end(data)
            yield piece
            if not data:
                return
        rest = self._rest
        begin, at = 0, max(0, len(rest) - _TAIL)
        rest += data
        while (at := rest.find(NEWLINE, at) + 1) > 0:  # one byte is found ten times as fast as two
            for end in _ENDS:
                if rest.startswith(end, at):
                    at += len(end)
                    yield bytes(memoryview(rest)[begin:at])
                    begin = at
                    break
        del rest[:begin]

    def let_go(self) -> bytes:
        """What has come of the next event, which may be very long. From now on `feed` gives the rest of it in the
        pieces in which it comes."""
        beginning = self.rest
        self.within = bool(beginning)
        self._rest = bytearray(beginning[-_TAIL:])
        return beginning

    def _through_its_end(self, data: bytes) -> tuple[bytes, bytes]:
        """The piece of an event that was let go, and what comes behind its end."""
        tail = bytes(self._rest)
        end = _END.search(tail + data)
        if end is None:
            self._rest = bytearray((tail + data)[-_TAIL:])
            return data, b""
        self.within, self._rest = False, bytearray()
        cut = end.end() - len(tail)
        return data[:cut], data[cut:]

    @property
    def pending(self) -> int:
        """Bytes that came behind the last complete event, and were not let go."""
        return 0 if self.within else len(self._rest)

    @property
    def is_cut(self) -> bool:
        """Whether a stream that has ended now ended inside an event. Of the event `[DONE]`, only the empty line may be
        missing."""
        return self.rest.strip() not in (b"", DATA + DONE)

    @property
    def rest(self) -> bytes:
        """What came behind the last complete event, and was not let go."""
        return b"" if self.within else bytes(self._rest)
