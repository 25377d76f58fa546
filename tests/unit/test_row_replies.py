"""Replies on their way through the layer that captures rows, message by message."""

from __future__ import annotations

import json
import tracemalloc
from typing import Any

import numpy as np
import pybase64
import pytest

from middleware_hub.routed_experts.capture import Capture, CaptureContext
from middleware_hub.routed_experts.errors import RowsMissing
from middleware_hub.routed_experts.replies import RowReply, StrippedReply, VerbatimReply
from middleware_hub.routed_experts.shapes import ShapeCheck
from middleware_hub.routed_experts.store import RowStore
from miles_router import Exchange
from miles_router.asgi.exchange import Message, Send
from miles_router.engines.events import LAST_EVENT, write_event
from miles_router.engines.facts import Facts
from miles_router.engines.rows import EXPERT_FIELDS, INDEXER_FIELDS, GenerateRows, RowFields, RowRequest
from miles_router.errors import UpstreamError

JSON, EVENTS = b"application/json", b"text/event-stream"


async def unknown(url: str) -> Facts:
    return Facts()


class Client:
    """Keeps what it is given, and counts nothing."""

    def __init__(self) -> None:
        self.messages: list[Message] = []

    async def send(self, message: Message) -> None:
        self.messages.append(message)

    def unread_reply(self, layer: str, reason: str) -> None:
        pass

    @property
    def body(self) -> bytes:
        return b"".join(message["body"] for message in self.messages[1:])

    @property
    def complete(self) -> bool:
        return not self.messages[-1].get("more_body", True)


class Keeper:
    """A layer that captures one kind of rows."""

    def __init__(self, fields: RowFields = EXPERT_FIELDS, *, room: int = 1 << 30) -> None:
        self.store = RowStore(fields.kind, room)
        self.context = CaptureContext(fields, self.store, ShapeCheck(fields.kind, None), unknown, required=True)

    def reply(self, send: Send, client: Client, kind: type[RowReply] = StrippedReply) -> RowReply:
        capture = Capture(self.context, Exchange("it"), None, start=0)
        return kind(capture, GenerateRows(), send, client)

    def rows(self, rid: str) -> list[list[int]]:
        held = self.store.by_rid(rid)
        assert held is not None
        rows: list[list[int]] = held.array().tolist()
        return rows


def told(rows: Any) -> str:
    return pybase64.b64encode(np.asarray(rows, dtype="<i4").tobytes()).decode()


def answer(tokens: int, **fields: str) -> dict[str, Any]:
    meta = {"id": "r", "finish_reason": {"type": "stop"}, "prompt_tokens": tokens - 1, "completion_tokens": 1, **fields}
    return {"text": "x", "output_ids": [1], "meta_info": meta}


def compact(content: object) -> bytes:
    return json.dumps(content, separators=(",", ":")).encode()


async def through(reply: RowReply, kind: bytes, *pieces: bytes) -> None:
    await reply.send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", kind)]})
    for place, piece in enumerate(pieces):
        await reply.send({"type": "http.response.body", "body": piece, "more_body": place < len(pieces) - 1})


@pytest.mark.parametrize("stream", [False, True])
async def test_a_second_kind_of_rows_is_another_entry_and_both_are_kept_of_one_reply(stream: bool) -> None:
    experts, positions = [[1, 2], [3, 4]], [[0, -1], [1, 0]]
    whole = answer(3, routed_experts=told(experts), indexer_topk=told(positions))
    client, inner, outer = Client(), Keeper(), Keeper(INDEXER_FIELDS)
    reply = inner.reply(outer.reply(client.send, client).send, client)
    await through(reply, EVENTS if stream else JSON, write_event(whole) + LAST_EVENT if stream else compact(whole))
    bare = answer(3)
    assert client.body == (write_event(bare) + LAST_EVENT if stream else compact(bare))
    assert (inner.rows("r"), outer.rows("r")) == (experts, positions)


async def test_a_second_kind_is_asked_for_and_refused_by_its_own_names() -> None:
    request = RowRequest.write(b'{"text":"x"}', INDEXER_FIELDS, 3, parse=json.loads, client_may=True)
    assert json.loads(request.body) == {"text": "x", "return_indexer_topk": True}
    assert request.start == 0, "the engine always tells all of them"
    keeper, client = Keeper(INDEXER_FIELDS), Client()
    await through(keeper.reply(client.send, client), JSON, compact(answer(4, indexer_topk=told([[0], [1]]))))
    assert keeper.store.statistics.missing == {"positions_are_rows": 1}
    with pytest.raises(RowsMissing, match="start it with --enable-return-indexer-topk"):
        await through(keeper.reply(client.send, client), JSON, compact(answer(4, routed_experts=told([[5]]))))


@pytest.mark.parametrize("kind", [StrippedReply, VerbatimReply])
@pytest.mark.parametrize("stream", [False, True])
async def test_the_string_of_ids_is_never_collected(kind: type[RowReply], stream: bool) -> None:
    rows, width, piece = 40_000, 50, 1 << 16
    whole = compact(answer(rows + 1, routed_experts=told(np.ones((rows, width)))))
    data = b"data: " + whole + b"\n\n" + LAST_EVENT if stream else whole
    keeper, given = Keeper(), 0

    async def send(message: Message) -> None:
        nonlocal given
        given += len(message.get("body", b""))

    reply = keeper.reply(send, Client(), kind)
    pieces = [data[begin : begin + piece] for begin in range(0, len(data), piece)]
    tracemalloc.start()
    try:
        await through(reply, EVENTS if stream else JSON, *pieces)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert keeper.store.nbytes == rows * width
    assert peak < 1.5 * rows * width, "not much beside a byte for each id, of 5.3 that came"
    assert (given == len(data)) == (kind is VerbatimReply)


@pytest.mark.parametrize("kind", [StrippedReply, VerbatimReply])
async def test_stream_head_passes_at_once_and_an_answers_head_when_rows_are_certain(
    kind: type[RowReply],
) -> None:
    for content_type, at_once in ((EVENTS, True), (JSON, False)):
        client, keeper = Client(), Keeper()
        reply = keeper.reply(client.send, client, kind)
        await reply.send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", content_type)]})
        await reply.send({"type": "http.response.body", "body": b'{"text":', "more_body": True})
        assert len(client.messages) == at_once


async def test_an_error_never_stands_within_an_event_that_the_client_has_some_of() -> None:
    """Rows in a place where nobody looks for them: that none are where they belong is only clear at the event's end."""
    odd = {"index": 0, "odd": {"routed_experts": told([[1]])}, **answer(2)}
    raw = write_event(odd)
    client, keeper = Client(), Keeper()
    with pytest.raises(RowsMissing):
        await through(keeper.reply(client.send, client, VerbatimReply), EVENTS, raw[:60], raw[60:], LAST_EVENT)
    assert client.body == raw[:60]
    assert not client.complete


@pytest.mark.parametrize("cut", [40, -20])
async def test_an_event_that_a_stream_ends_within_shows_none_of_its_rows(cut: int) -> None:
    raw = write_event(answer(3, routed_experts=told([[1, 2], [3, 4]]), last="x" * 40))
    client, keeper = Client(), Keeper()
    await through(keeper.reply(client.send, client), EVENTS, raw[:cut])
    assert client.body == write_event(answer(3, last="x" * 40))[:cut]
    assert client.complete
    assert len(keeper.store) == 0


@pytest.mark.parametrize("kind", [StrippedReply, VerbatimReply])
@pytest.mark.parametrize("stream", [False, True])
async def test_an_answer_that_is_too_long_beside_its_rows_is_refused(
    monkeypatch: pytest.MonkeyPatch, kind: type[RowReply], stream: bool
) -> None:
    monkeypatch.setattr(RowReply, "max_collected", 200)
    whole = compact(answer(3, routed_experts=told([[1, 2], [3, 4]]), long="x" * 200))
    pieces = (b"data: " * stream + whole, b"\n\n")
    client, keeper = Client(), Keeper()
    with pytest.raises(UpstreamError, match="over 200 bytes"):
        await through(keeper.reply(client.send, client, kind), EVENTS if stream else JSON, *pieces)
    assert client.body == b""
