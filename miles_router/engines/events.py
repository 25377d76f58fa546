"""Server-sent events as SGLang writes them: `data: {json}` and an empty line, `data: [DONE]` at the end. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import orjson

DATA = b"data: "
DONE = b"[DONE]"
NEWLINE = b"\n"
END = NEWLINE + NEWLINE
LAST_EVENT = DATA + DONE + END


class EventReader:
    """Cuts a stream of bytes into events, each with the empty line that ends it."""

    def __init__(self) -> None:
        self._rest = bytearray()
        #: Whether an event that was let go has not ended yet.
        self.within = False

    def feed(self, data: bytes) -> Iterator[bytes]:
        """The events that are complete now."""
        if self.within:
            piece, data = self._through_its_end(data)
            yield piece
            if not data:
                return
        if not self._rest and data.endswith(END) and data.find(NEWLINE) == len(data) - len(END):
            yield data  # which is how they mostly come
            return
        rest = self._rest
        begin, at = 0, max(0, len(rest) - 1)
        rest += data
        while (at := rest.find(NEWLINE, at) + 1) > 0:  # one byte is found ten times as fast as two
            if rest.startswith(NEWLINE, at):
                at += 1
                yield bytes(memoryview(rest)[begin:at])
                begin = at
        del rest[:begin]

    def let_go(self) -> bytes:
        """What has come of the next event, which may be very long. From now on `feed` gives the rest of it in the
        pieces in which it comes."""
        beginning = self.rest
        self.within = bool(beginning)
        self._rest = bytearray(beginning[-1:])  # which may be half of its end
        return beginning

    def _through_its_end(self, data: bytes) -> tuple[bytes, bytes]:
        """The piece of an event that was let go, and what comes behind its end."""
        halved = self._rest == NEWLINE and data.startswith(NEWLINE)
        at = data.find(END)
        if at < 0 and not halved:
            self._rest = bytearray(data[-1:] or self._rest)
            return data, b""
        self.within, self._rest = False, bytearray()
        cut = len(NEWLINE) if halved else at + len(END)
        return data[:cut], data[cut:]

    @property
    def pending(self) -> int:
        """Bytes that came behind the last complete event, and were not let go."""
        return 0 if self.within else len(self._rest)

    @property
    def rest(self) -> bytes:
        """What came behind the last complete event, and was not let go."""
        return b"" if self.within else bytes(self._rest)


def payload(event: bytes) -> dict[str, Any] | None:
    """The answer of `/generate` in an event; None for `[DONE]`, errors and whatever else is none."""
    if not event.startswith(DATA) or event[len(DATA) :].startswith(DONE):
        return None
    try:
        parsed = orjson.loads(event[len(DATA) :])
    except orjson.JSONDecodeError:
        return None
    return parsed if isinstance(parsed, dict) and "output_ids" in parsed else None


def event(answer: Mapping[str, Any]) -> bytes:
    """An answer as an event."""
    return DATA + orjson.dumps(answer) + END
