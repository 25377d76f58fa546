"""The relay of replies: what passes untouched, what a layer sees of the rest, and what the client gets."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from miles_router.asgi.exchange import SCOPE_KEY, Exchange, Message, Receive, Scope, Send
from miles_router.asgi.replies import Collected, Kind, Tap, readable
from miles_router.engines.events import LAST_EVENT, Event, write_event
from miles_router.errors import UpstreamError

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


async def test_a_stream_s_head_and_each_event_go_on_at_once() -> None:
    client = Client()
    tap = Shouting(client)
    await tap.send(head(EVENTS))
    assert len(client.messages) == 1
    await tap.send(body(write_event([1]) + b"data: ", more=True))
    assert client.messages[1:] == [body(write_event([1]).upper(), more=True)]


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


async def test_identity_is_no_encoding_in_any_case_of_letters() -> None:
    client = Client()
    await through(Shouting(client), head(content_encoding="Identity"), body(b"{}"))
    assert client.body == b"{}!"
    collected = Collected()
    await through(collected, head(b"Application/JSON", content_encoding="Identity"), body(b"{}"))
    assert collected.is_json


async def test_a_layer_may_refuse_what_it_cannot_read() -> None:
    class Strict(Shouting):
        def unread(self, reason: str) -> None:
            raise UpstreamError(reason)

    client = Client()
    with pytest.raises(UpstreamError, match="content_encoding"):
        await Strict(client).send(head(content_encoding="gzip"))
    assert client.messages == []


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


class Keeping(Short):
    """Keeps the data of every event, or of the last one."""

    def __init__(self, client: Client, *, all_of_it: bool) -> None:
        super().__init__(client)
        self.all_of_it = all_of_it

    async def event(self, event: Event) -> bytes:
        self.keep("all", len(event.data), more=self.all_of_it)
        return await super().event(event)


@pytest.mark.parametrize("all_of_it", [True, False])
async def test_a_stream_of_which_a_layer_keeps_too_much_passes_from_there_on(all_of_it: bool) -> None:
    client = Client()
    tap = Keeping(client, all_of_it=all_of_it)
    await through(tap, head(EVENTS), *(body(b"data: a23456\n\n", more=number < 3) for number in range(4)))
    if all_of_it:
        assert client.body == b"DATA: A23456\n\n" * 2 + b"data: a23456\n\n" * 2
        assert client.unread == [("shouting", "too_large")]
    else:
        assert client.body == b"DATA: A23456\n\n" * 4 + b": end\n\n"
        assert client.unread == []
    assert client.complete


async def test_a_layer_takes_the_bound_of_the_request() -> None:
    client, asked = Client(), Exchange("id", max_answer_bytes=3)

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await through(tap, head(), body(b"{   }"))

    async def receive() -> Message:
        raise AssertionError

    tap = Shouting(client)
    await tap.call(app, {"headers": [], SCOPE_KEY: asked}, receive)
    assert (client.body, client.unread) == (b"{   }", [("shouting", "too_large")])


async def test_a_layer_that_asks_for_nothing_collects_nothing() -> None:
    client = Client()
    messages = [head(content_length="2"), body(b"{", more=True), body(b"}")]
    tap = Tap(client.send)
    await through(tap, *messages[:2])
    assert client.messages == messages[:2]
    await tap.send(messages[2])
    assert client.messages == messages


class Pieces(Tap):
    """Holds pieces back until one has an x."""

    def __init__(self, client: Client, *, same_length: bool) -> None:
        super().__init__(client.send)
        self.same_length = same_length
        self.waiting = b""

    async def piece(self, data: bytes, *, more: bool) -> bytes:
        self.waiting += data
        if more and b"x" not in data:
            return b""
        data, self.waiting = self.waiting, b""
        return data


@pytest.mark.parametrize("same_length", [True, False])
async def test_pieces_may_be_held_back_and_the_head_with_them(same_length: bool) -> None:
    client = Client()
    tap = Pieces(client, same_length=same_length)
    await through(tap, head(content_length="4"), body(b"a", more=True))
    assert client.messages == []
    await through(tap, body(b"x", more=True), body(b"b", more=True), body(b"c"))
    assert (client.body, client.complete) == (b"axbc", True)
    assert client.length == (b"4" if same_length else None)


@pytest.mark.parametrize("kind", [JSON, EVENTS])
async def test_a_layer_that_only_looks_on_does_not_hold_the_head(kind: bytes) -> None:
    class Copying(Pieces):
        holds_head = False

        async def piece(self, data: bytes, *, more: bool) -> bytes:
            self.waiting += data
            return data

    client = Client()
    tap = Copying(client, same_length=True)
    await through(tap, head(kind, content_length="2"))
    assert (len(client.messages), client.length) == (1, b"2")
    await through(tap, body(b"a", more=True), body(b"b"))
    assert (client.body, client.complete, tap.waiting) == (b"ab", True, b"ab")


async def test_whoever_wants_bytes_alone_gets_those_of_any_reply() -> None:
    client = Client()
    tap = Pieces(client, same_length=True)
    await through(tap, head(TEXT, content_encoding="gzip"), body(b"x"))
    assert (client.body, client.unread) == (b"x", [])


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


async def test_a_layer_may_end_a_stream_early_and_nothing_follows() -> None:
    class Ending(Shouting):
        async def event(self, event: Event) -> bytes:
            if event.data == b"2":
                await self.finish(b"data: over\n\n")
            return event.raw

    for pieces in ((b"data: 1\n\n", b"data: 2\n\ndata: 3\n\n"), (b"data: 1\n\ndata: 2\n\ndata: 3\n\n",)):
        client = Client()
        messages = [body(piece, more=place < len(pieces) - 1) for place, piece in enumerate(pieces)]
        await through(Ending(client), head(EVENTS), *messages)
        assert (client.body, client.complete) == (b"data: 1\n\ndata: over\n\n", True)


async def test_layer_output_at_an_event_follows_the_events_before() -> None:
    class Adding(Shouting):
        async def event(self, event: Event) -> bytes:
            await self.give(b": before %b\n\n" % event.data)
            return event.raw

    client = Client()
    await through(Adding(client), head(EVENTS), body(b"data: 1\n\ndata: 2\n\n"))
    assert client.body == b": before 1\n\ndata: 1\n\n: before 2\n\ndata: 2\n\n: end\n\n"
    assert client.complete


async def test_a_layer_may_go_on_behind_the_end_by_itself() -> None:
    class Later(Shouting):
        async def whole(self, body: bytes) -> None:
            return None

        async def ended(self) -> None:
            return None

    for start, came in ((head(), b"{}"), (head(EVENTS), b"data: 1\n\n")):
        client = Client()
        tap = Later(client)
        await through(tap, start, body(came))
        assert not client.complete
        await tap.give(b"more")
        await tap.finish()
        assert client.body.endswith(b"more")
        assert client.complete


async def test_a_layer_sees_what_has_come_and_answers_behind_the_end_with_another_length() -> None:
    class Later(Shouting):
        async def whole(self, body: bytes) -> None:
            return None

    client = Client()
    tap = Later(client)
    await through(tap, head(content_length="4"), body(b"{", more=True), body(b" ", more=True))
    assert (tap.collected, tap.passing) == (b"{ ", False)
    await through(tap, body(b" }"))
    assert (tap.collected, client.messages) == (b"", [])
    await tap.answer(b"{...}")
    assert (client.body, client.length, client.complete) == (b"{...}", b"5", True)
    await through(passed := Later(Client()), head(status=500))
    assert passed.passing


async def test_layer_sees_the_start_of_its_own_replies_only_and_before_the_client() -> None:
    class Early(Shouting):
        async def begun(self) -> None:
            self.seen.append(b"begun as " + self.kind.value.encode())
            assert client.messages == []

    for start, seen in ((head(), [b"begun as json", b"{}"]), (head(EVENTS), [b"begun as events", b"end"])):
        client = Client()
        tap = Early(client)
        await through(tap, start, body(b"{}"))
        assert tap.seen == seen
    client = Client()
    tap = Early(client)
    await through(tap, head(status=500), body(b"{}"))
    assert tap.seen == []


async def test_a_collected_reply_is_kept_whole_whatever_it_is() -> None:
    for start, is_json in ((head(), True), (head(status=500), False), (head(content_encoding="gzip"), False)):
        reply, client = Collected(), Client()
        await through(reply, start, body(b"{", more=True), body(b"}"))
        assert (reply.status, reply.body, reply.is_json, reply.parse()) == (start["status"], b"{}", is_json, {})
        await reply.give_to(client.send)
        assert client.messages == [start, body(b"{}")]
        other = Client()
        await reply.give_to(other.send, b"other")
        assert (other.body, other.length, other.messages[0]["status"]) == (b"other", b"5", start["status"])
    assert reply.kind is Kind.JSON


async def test_the_worker_is_asked_for_a_reply_that_can_be_read() -> None:
    asked: list[Scope] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        asked.append(scope)
        await send(head())
        await send(body(b"{}"))

    async def receive() -> Message:
        raise AssertionError

    client = Client()
    scope: dict[str, Any] = {"headers": [(b"accept", b"*/*"), (b"accept-encoding", b"gzip")]}
    await Shouting(client).call(app, scope, receive)
    assert [each["headers"] for each in asked] == [[(b"accept", b"*/*")]]
    assert client.body == b"{}!"
    assert readable(asked[0]) is asked[0]
