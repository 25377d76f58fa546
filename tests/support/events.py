"""Server-sent events of an engine: as they come, and of a stream that ended."""

from __future__ import annotations

from typing import Any

import orjson

DONE = b"data: [DONE]\n\n"


class EventReader:
    """The JSON of events, each once the bytes that complete it are there."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> list[Any]:
        *events, self._rest = (self._rest + data).split(b"\n\n")
        return [orjson.loads(event.removeprefix(b"data: ")) for event in events if event.startswith(b"data: {")]


def events_of(body: bytes) -> list[Any]:
    assert body.endswith(DONE), body[-200:]
    return EventReader().feed(body)


def answers_of(body: bytes, *, stream: bool) -> list[Any]:
    """What `/generate` answered, one for each sample; of a stream, which must be cumulative, the last events."""
    if not stream:
        answers = orjson.loads(body)
        return answers if isinstance(answers, list) else [answers]
    last = {event.get("index", 0): event for event in events_of(body)}
    for answer in last.values():
        assert len(answer["output_ids"]) == answer["meta_info"]["completion_tokens"], answer
    return [last[index] for index in sorted(last)]
