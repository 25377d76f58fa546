"""Event streams of workers: `engines/events.py`, from bytes to events, and from events to their fields."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Hashable, Sequence

from miles_router.engines.events import Event, EventReader, write_event
from tests.fuzz.target import Target, dice_of, expand, splits

WORDS = (b"data: ", b"data:", b"event: ", b"event:message_stop", b"id: 1", b": ping", b"retry: 5", b"data", b"\xff")
JSONS = (b"{}", b'{"error": {"message": "x"}}', b'{"text": "a\\n\\nb"}', b"[DONE]", b'"error"', b"{", b"1", b"")
LONG = 96 * 1024
LINE_ENDS = (b"\n", b"\n", b"\n", b"\r\n", b"\r")


class EventStreams(Target):
    """Any bytes of a stream, in any pieces.

    - The events and what is left are the bytes that came: nothing is lost, added or moved.
    - In whichever pieces they come, the events are those that an expression over all of the bytes finds.
    - An event that is let go in the middle comes in pieces that are its bytes, and the next one begins where it must.
    - What is held is the beginning of one event.
    - The fields of an event are those that a reader written line by line finds, and what is written is read again.
    """

    name = "event-streams"
    runs = 4000
    tokens = (*WORDS, *JSONS, *LINE_ENDS, b"\n\n", b"\r\n\r\n", b"\n\r\n", b"\r\r")

    def generate(self, dice: random.Random) -> bytes:
        events = []
        for _ in range(dice.randint(0, 5)):
            lines = [dice.choice(WORDS) + dice.choice(JSONS) for _ in range(dice.choice((1, 1, 1, 2, 3)))]
            events.append(b"".join(line + dice.choice(LINE_ENDS) for line in lines) + dice.choice((b"\n", b"\r\n")))
        return b"".join(events) + dice.choice((b"", b"", b"data: {", b"data: x\n"))

    def check(self, data: bytes) -> Hashable:
        data = expand(data, LONG)
        expected, rest = reference(data)
        for pieces in splits(data):
            reader, found, held = EventReader(), list[bytes](), 0
            for piece in pieces:
                new = list(reader.feed(piece))
                found += new
                held += len(piece) - sum(map(len, new))
                assert reader.pending == held == len(reader.rest), f"{reader.pending} bytes are held, not {held}"
            assert (found, reader.rest) == (expected, rest), f"{found} and {reader.rest!r}, not {expected} and {rest!r}"
            self._let_go(data, pieces, expected, rest)
        for raw in expected:
            event = Event.read(raw)
            assert (event.name, event.data) == fields_of(raw), f"{event} has the fields {fields_of(raw)}"
            assert event.is_error == _is_error(event.data), f"{event} is an error, or is not"
            _round_trip(event)
        return (
            len(expected),
            bool(rest),
            *((bool(e.name), e.is_last, e.is_error) for e in map(Event.read, expected[:3])),
        )

    def _let_go(self, data: bytes, pieces: Sequence[bytes], expected: Sequence[bytes], rest: bytes) -> None:
        """The same with a reader that is made to let go now and then."""
        dice, reader, came = dice_of(data), EventReader(), b""
        ends, longest = {0}, max(map(len, [*expected, rest]))
        for piece in pieces:
            for part in reader.feed(piece):
                came += part
                if not reader.in_released_event:
                    ends.add(len(came))
            if dice.random() < 0.3 and not reader.in_released_event:
                came += reader.release()
            assert reader.pending <= longest, f"{reader.pending} bytes are held, and the longest event has {longest}"
        assert came + reader.rest == data, f"of {data!r} came {came!r} and {reader.rest!r}"
        wrong = ends - _ends(expected)
        assert not wrong, f"events end at {sorted(wrong)}, where none does"
        assert reader.in_released_event == (len(came) > sum(map(len, expected))), "whether one is within an event"


def reference(data: bytes) -> tuple[list[bytes], bytes]:
    """The events, each with the empty line that ends it, and what is left."""
    events, begin = [], 0
    for end in re.finditer(rb"\n\r?\n", data):
        if end.start() >= begin:
            events.append(data[begin : end.end()])
            begin = end.end()
    return events, data[begin:]


def _ends(events: Sequence[bytes]) -> set[int]:
    places, at = {0}, 0
    for event in events:
        at += len(event)
        places.add(at)
    return places


def fields_of(raw: bytes) -> tuple[bytes, bytes]:
    """Name and data (WHATWG HTML, section 9.2.6), line by line."""
    name, data = b"", []
    for line in re.split(rb"\r\n|\n|\r", raw):
        field, _, value = line.partition(b":")
        value = value[1:] if value[:1] == b" " else value
        if field == b"event":
            name = value
        elif field == b"data":
            data.append(value)
    return name, b"\n".join(data)


def _is_error(data: bytes) -> bool:
    try:
        parsed = json.loads(data)
    except (ValueError, RecursionError):
        return False
    return isinstance(parsed, dict) and "error" in parsed


def _round_trip(event: Event) -> None:
    """Written anew it is one event, and says the same."""
    content = event.parse()
    if content is not None:
        written = write_event(content, event.name)
        (raw,) = EventReader().feed(written)
        again = Event.read(raw)
        assert (raw, again.name, again.parse()) == (written, event.name, content), f"{event} came back as {again}"
