"""Server-sent events as SGLang writes them: `data: {json}` and an empty line, `data: [DONE]` at the end. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import orjson

DATA = b"data: "
DONE = b"[DONE]"
END = b"\n\n"
LAST_EVENT = DATA + DONE + END


class EventReader:
    """Cuts a stream of bytes into events, each with the empty line that ends it."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> Iterator[bytes]:
        """The events that are complete now."""
        data = self._rest + data
        begin = 0
        while (end := data.find(END, begin)) >= 0:
            end += len(END)
            yield data[begin:end]
            begin = end
        self._rest = data[begin:]

    @property
    def rest(self) -> bytes:
        """What came behind the last complete event."""
        return self._rest


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
