"""`Tap`, which middlewares build on: what passes untouched, what a layer sees of the rest, and what the client gets."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from miles_router.asgi.exchange import Message
from miles_router.asgi.replies import Tap
from miles_router.engines.events import LAST_EVENT, Event, write_event

JSON, EVENTS, TEXT = b"application/json", b"text/event-stream", b"text/plain"


def head(kind: bytes = JSON, status: int = 200, **headers: str) -> Message:
    pairs = [(name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()]
    return {"type": "http.response.start", "status": status, "headers": [(b"content-type", kind), *pairs]}


def body(data: bytes, *, more: bool = False) -> Message:
    return {"type": "http.response.body", "body": data, "more_body": more}


def pieces(data: bytes, cuts: Sequence[int]) -> list[Message]:
    places = sorted({0, len(data), *(cut for cut in cuts if cut < len(data))})
    parts = [data[a:b] for a, b in itertools.pairwise(places)] or [b""]
    return [body(part, more=place < len(parts) - 1) for place, part in enumerate(parts)]


class Client:
    """Keeps what it is given."""

    def __init__(self) -> None:
        self.messages: list[Message] = []
        self.unread: list[tuple[str, str]] = []

    async def send(self, message: Message) -> None:
        self.messages.append(message)

    def unread_reply(self, layer: str, reason: str) -> None:
        self.unread.append((layer, reason))

    @property
    def body(self) -> bytes:
        return b"".join(message["body"] for message in self.messages[1:])

    @property
    def length(self) -> bytes | None:
        return dict(self.messages[0]["headers"]).get(b"content-length")

    @property
    def complete(self) -> bool:
        """Exactly one message is the last."""
        return [message["more_body"] for message in self.messages[1:]].count(False) == 1


class Shouting(Tap):
    """Sees answers and events, and changes both."""

    layer = "shouting"

    def __init__(self, client: Client) -> None:
        super().__init__(client.send, client)
        self.seen: list[bytes] = []

    async def whole(self, body: bytes) -> bytes | None:
        self.seen.append(body)
        return body.upper() + b"!"

    async def event(self, event: Event) -> bytes:
        self.seen.append(event.data)
        return b"" if event.data == b"{}" else event.raw.upper()

    async def ended(self) -> bytes | None:
        self.seen.append(b"end")
        return b": end\n\n"


async def through(tap: Tap, *messages: Message) -> None:
    for message in messages:
        await tap.send(message)


@given(st.lists(st.integers(0, 30), max_size=5))
async def test_a_json_answer_is_seen_whole_and_given_with_its_new_length(cuts: list[int]) -> None:
    client = Client()
    tap = Shouting(client)
    await through(tap, head(content_length="11"), *pieces(b'{"a":"b c"}', cuts))
    assert tap.seen == [b'{"a":"b c"}']
    assert (client.body, client.length, client.complete) == (b'{"A":"B C"}!', b"12", True)


@given(st.lists(st.integers(0, 80), max_size=8))
async def test_a_stream_is_seen_event_by_event_and_its_end_before_the_client_learns_of_it(cuts: list[int]) -> None:
    client = Client()
    tap = Shouting(client)
    stream = write_event({"a": 1}) + write_event({}) + write_event({"b": 2}, b"named") + LAST_EVENT
    await through(tap, head(EVENTS, content_length="99"), *pieces(stream, cuts))
    assert tap.seen == [b'{"a":1}', b"{}", b'{"b":2}', b"[DONE]", b"end"]
    shown = write_event({"a": 1}) + write_event({"b": 2}, b"named") + LAST_EVENT
    assert (client.body, client.length) == (shown.upper() + b": end\n\n", None)
    assert client.complete


@pytest.mark.parametrize(
    ("start", "reason"),
    [
        (head(status=404, content_length="2"), None),
        (head(EVENTS, status=500), None),
        (head(TEXT), "content_type"),
        (head(content_encoding="gzip"), "content_encoding"),
        (head(EVENTS, content_encoding="br"), "content_encoding"),
    ],
)
async def test_refusals_pass_and_what_should_be_read_and_cannot_be_passes_and_is_counted(
    start: Message, reason: str | None
) -> None:
    client = Client()
    tap = Shouting(client)
    messages = [start, body(b"x", more=True), body(b"y")]
    await through(tap, *messages)
    assert client.messages == messages
    assert client.unread == ([] if reason is None else [("shouting", reason)])
    assert tap.seen == []


class Short(Shouting):
    max_collected = 10


@pytest.mark.parametrize("at_its_end", [True, False])
async def test_an_answer_that_is_too_long_passes_as_it_came_and_is_counted(at_its_end: bool) -> None:
    client = Client()
    tap = Short(client)
    start = head(content_length="12")
    await through(tap, start, body(b"123456", more=True), body(b"789012", more=not at_its_end))
    if not at_its_end:
        await tap.send(body(b""))
    assert client.messages[0] == start
    assert (client.body, client.complete, tap.seen) == (b"123456789012", True, [])
    assert client.unread == [("shouting", "too_large")]


async def test_an_event_that_is_too_long_passes_as_it_comes_with_all_behind_it() -> None:
    client = Client()
    tap = Short(client)
    await through(tap, head(EVENTS), body(b"data: 1\n\ndata: 12345", more=True), body(b"6\n\ndata: 2\n\n"))
    assert client.body == b"DATA: 1\n\ndata: 123456\n\ndata: 2\n\n"
    assert (tap.seen, client.unread, client.complete) == ([b"1"], [("shouting", "too_large")], True)


async def test_a_layer_that_has_seen_enough_lets_the_rest_pass() -> None:
    class Peeking(Shouting):
        async def piece(self, data: bytes, *, more: bool) -> bytes:
            if b"go" in data:
                await self.let_go()
            return data

    client = Client()
    tap = Peeking(client)
    await through(tap, head(), body(b"a", more=True), body(b"go", more=True), body(b"b", more=True), body(b"c"))
    assert (client.body, client.complete, tap.seen) == (b"agobc", True, [])
