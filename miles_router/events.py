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

    def feed(self, data: bytes) -> Iterator[bytes]:
        """The events that are complete now."""
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

    @property
    def rest(self) -> bytes:
        """What came behind the last complete event."""
        return bytes(self._rest)


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
