"""Both ends' HTTP/1.1 against h11, which was written from the same RFCs by others: any message, cut anywhere."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, cast

import h11
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from miles_router.asgi.backlog import Backlog
from miles_router.asgi.exchange import Exchange, Receive, Scope, Send
from miles_router.asgi.wire import RawHeaders, request_head
from miles_router.errors import ClientDisconnected, UpstreamError
from miles_router.metrics import ClientStatistics
from miles_router.serving import client_connection, request_reader
from miles_router.serving.clients import ClientConnections
from tests.support.waiting import settled
from tests.support.wire import Wire, WorkerEnd

TOKEN = "abcXYZ019!#$%&'*+-.^_`|~"
FRAMING = {b"content-length", b"transfer-encoding", b"connection", b"upgrade", b"expect", b"host", b"te", b"trailer"}


names = st.text(TOKEN, min_size=1, max_size=12).map(str.encode).filter(lambda name: name.lower() not in FRAMING)
values = st.binary(max_size=20).map(lambda value: bytes(b for b in value if b >= 0x80 or 0x21 <= b < 0x7F))
plain_headers = st.lists(st.tuples(names, values), max_size=5)
bodies = st.lists(st.binary(min_size=1, max_size=40), max_size=4)
cuts = st.lists(st.integers(0, 400), max_size=6)
extensions = st.sampled_from([b"", b";a=1", b';name="a value"', b";x"])
trailers = st.sampled_from([b"", b"X-Late: 1\r\n", b"Server: a\r\nX-Late: 2\r\n"])
methods = st.sampled_from(["GET", "HEAD", "POST", "PUT", "DELETE", "OPTIONS"])
targets = st.sampled_from([b"/", b"/generate", b"/a%2Fb?c=d&e", b"/x?", b"*"])


def lower(headers: Sequence[tuple[bytes, bytes]]) -> RawHeaders:
    return [(name.lower(), value) for name, value in headers]


def without_framing(headers: RawHeaders) -> RawHeaders:
    return [pair for pair in headers if pair[0] not in FRAMING]


def pieces(data: bytes, places: Sequence[int]) -> list[bytes]:
    """`data`, cut at `places`."""
    marks = sorted({0, len(data), *(place for place in places if place < len(data))})
    return [data[start:end] for start, end in itertools.pairwise(marks)]


def chunked(parts: Sequence[bytes], extension: bytes, late: bytes) -> bytes:
    chunks = [b"%x%b\r\n%b\r\n" % (len(part), extension, part) for part in parts]
    return b"".join([*chunks, b"0", extension, b"\r\n", late, b"\r\n"])


def message(start: bytes, headers: Sequence[tuple[bytes, bytes]], body: bytes) -> bytes:
    return b"".join([start, b"\r\n", *(b"%b: %b\r\n" % pair for pair in headers), b"\r\n", body])


@dataclass
class Seen:
    """A message as one side understood it."""

    start: tuple[Any, ...]
    headers: RawHeaders
    body: bytes = b""
    whole: bool = False


def by_h11(connection: h11.Connection, arrived: Sequence[bytes]) -> tuple[list[Seen], bool]:
    """What h11 makes of `arrived`, and whether it found fault; b"" is the connection's end."""
    seen: list[Seen] = []
    try:
        for data in arrived:
            connection.receive_data(data)
            while (event := connection.next_event()) not in (h11.NEED_DATA, h11.PAUSED):
                if isinstance(event, h11.Request):
                    seen.append(Seen((event.method.decode(), event.target), list(event.headers)))
                elif isinstance(event, h11.Response):
                    seen.append(Seen((event.status_code,), list(event.headers)))
                elif isinstance(event, h11.Data):
                    seen[-1].body += bytes(event.data)
                elif isinstance(event, h11.EndOfMessage):
                    seen[-1].whole = True
                elif isinstance(event, h11.ConnectionClosed):
                    return seen, False
    except h11.RemoteProtocolError:
        return seen, True
    return seen, False


# What a worker sends


@st.composite
def replies(draw: st.DrawFn) -> tuple[str, bytes]:
    """The method of a request, and the bytes of a reply to it."""
    method = draw(st.sampled_from(["GET", "HEAD", "POST"]))
    status = draw(st.sampled_from([200, 201, 204, 304, 400, 404, 418, 500, 503]))
    headers, parts = draw(plain_headers), draw(bodies)
    body = b"".join(parts)
    framing = draw(st.sampled_from(["length", "chunked", "until close"]))
    if framing == "length":
        headers = [*headers, (draw(st.sampled_from([b"Content-Length", b"content-length"])), b"%d" % len(body))]
    elif framing == "chunked":
        headers = [*headers, (b"Transfer-Encoding", draw(st.sampled_from([b"chunked", b"Chunked"])))]
        body = chunked(parts, draw(extensions), draw(trailers))
    if method == "HEAD" or status in (204, 304):
        body = b""
    early = draw(
        st.sampled_from([b"", b"HTTP/1.1 100 Continue\r\n\r\n", b"HTTP/1.1 103 Early Hints\r\nX-E: 1\r\n\r\n"])
    )
    return method, early + message(b"HTTP/1.1 %d Reason" % status, headers, body)


async def by_connection(method: str, arrived: Sequence[bytes]) -> Seen | None:
    """What a `Connection` makes of a reply."""
    worker = WorkerEnd()
    reply = worker.connection.send(b"the request", b"", head_request=method == "HEAD")
    for data in arrived:
        if data and not worker.wire.closed:
            worker.says(data)
    if not arrived[-1]:
        worker.connection.connection_lost(None)
    if not reply.head_seen:
        return None
    seen = Seen((reply.status,), reply.headers)
    try:
        while not reply.exhausted:
            seen.body += await reply.read()
        seen.whole = True
    except UpstreamError:
        pass
    return seen


@settings(deadline=None)
@given(replies(), cuts, st.integers(0, 400), st.booleans())
def test_a_reply_is_read_as_h11_reads_it_however_it_arrives_and_wherever_it_ends(
    reply: tuple[str, bytes], places: list[int], end: int, whole: bool
) -> None:
    method, data = reply
    arrived = [*pieces(data if whole else data[:end], places), b""]
    client = h11.Connection(h11.CLIENT)
    client.send(h11.Request(method=method, target="/", headers=[("Host", "a")]))
    client.send(h11.EndOfMessage())
    expected = next(iter(by_h11(client, arrived)[0]), None)
    got = asyncio.run(by_connection(method, arrived))
    assert (got is None) == (expected is None)
    if got is not None and expected is not None:
        assert (got.start, got.body, got.whole) == (expected.start, expected.body, expected.whole)
        assert without_framing(got.headers) == without_framing(expected.headers)


@settings(deadline=None)
@given(methods, targets, plain_headers, st.binary(max_size=50))
def test_a_request_is_written_as_h11_reads_it(method: str, target: bytes, headers: RawHeaders, body: bytes) -> None:
    data = request_head(method, target, b"worker:1", headers, len(body)) + body
    (seen,), fault = by_h11(h11.Connection(h11.SERVER), [data])
    assert not fault
    assert (seen.start, seen.body, seen.whole) == ((method, target), body, True)
    assert without_framing(seen.headers) == lower(headers)


# What a client sends, and what it is answered


@st.composite
def requests(draw: st.DrawFn) -> bytes:
    method, parts = draw(methods), draw(bodies)
    headers = [(b"Host", b"a"), *draw(plain_headers)]
    framing = draw(st.sampled_from(["length", "chunked", "none"]))
    body = b"" if framing == "none" else b"".join(parts)
    if framing == "length":
        headers.append((b"Content-Length", b"%d" % len(body)))
    elif framing == "chunked":
        headers.append((b"Transfer-Encoding", b"chunked"))
        body = chunked(parts, draw(extensions), draw(trailers))
    if draw(st.integers(0, 9)) == 0:
        headers.append((b"Connection", b"close"))
    return message(b"%b %b HTTP/1.1" % (method.encode(), draw(targets)), headers, body)


@dataclass
class Answer:
    """What the app says to each request."""

    status: int
    headers: RawHeaders
    parts: list[bytes]
    with_length: bool

    @property
    def start(self) -> dict[str, Any]:
        length = [(b"content-length", b"%d" % sum(map(len, self.parts)))] if self.with_length else []
        return {"type": "http.response.start", "status": self.status, "headers": [*self.headers, *length]}


answers = st.builds(Answer, st.sampled_from([200, 204, 304, 404, 500]), plain_headers.map(lower), bodies, st.booleans())


async def served(arrived: Sequence[bytes], answer: Answer) -> tuple[list[Seen], Wire]:
    """The requests that an app sees behind a `ClientConnection`, and what the client is sent."""
    seen: list[Seen] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        target = scope["raw_path"] + (b"?" + scope["query_string"] if scope["query_string"] else b"")
        request = Seen((scope["method"], target), scope["headers"])
        seen.append(request)
        try:
            request.body = await Exchange("id").read(receive)
        except ClientDisconnected:
            return
        request.whole = True
        await send(answer.start)
        for part in answer.parts:
            await send({"type": "http.response.body", "body": part, "more_body": True})
        await send({"type": "http.response.body", "body": b""})

    state = SimpleNamespace(connections=set(), tasks=set())
    connections = ClientConnections(app, ClientStatistics(Backlog()), limit=10, idle_seconds=60, head_seconds=60)
    connection, wire = connections(server_state=state, app_state={}), Wire()
    connection.connection_made(cast(asyncio.BaseTransport, wire))
    for data in arrived:
        if wire.closed:
            break
        connection.data_received(data)
        await settled(40)  # these apps wait for nothing but their client
    connection.connection_lost(None)
    await settled(40)
    return seen, wire


def requests_by_h11(data: bytes) -> list[Seen]:
    """The requests in `data` as an h11 server reads them, one after the other."""
    server = h11.Connection(h11.SERVER)
    server.receive_data(data)
    seen: list[Seen] = []
    while not isinstance(event := server.next_event(), h11.ConnectionClosed | type(h11.NEED_DATA) | type(h11.PAUSED)):
        if isinstance(event, h11.Request):
            seen.append(Seen((event.method.decode(), event.target), list(event.headers)))
        elif isinstance(event, h11.Data):
            seen[-1].body += bytes(event.data)
        elif isinstance(event, h11.EndOfMessage):
            seen[-1].whole = True
            server.send(h11.Response(status_code=204, headers=[]))
            server.send(h11.EndOfMessage())
            if server.our_state is not h11.DONE:
                break
            server.start_next_cycle()
    return seen


def replies_by_h11(asked: Sequence[Seen], data: bytes) -> list[Seen]:
    """The replies in `data` to what was `asked`, as an h11 client reads them."""
    client = h11.Connection(h11.CLIENT)
    client.receive_data(data)
    client.receive_data(b"")
    seen: list[Seen] = []
    for request in asked:
        client.send(h11.Request(method=request.start[0], target="/", headers=[("Host", "a")]))
        client.send(h11.EndOfMessage())
        while not isinstance(event := client.next_event(), h11.EndOfMessage):
            if isinstance(event, h11.Response):
                seen.append(Seen((event.status_code,), list(event.headers)))
            elif isinstance(event, h11.Data):
                seen[-1].body += bytes(event.data)
            else:
                raise AssertionError(f"{event!r} instead of the rest of a reply")
        seen[-1].whole = True
        if client.our_state is h11.DONE and client.their_state is h11.DONE:
            client.start_next_cycle()
    return seen


@settings(deadline=None)
@given(
    st.lists(requests(), min_size=1, max_size=3),
    cuts,
    st.integers(0, 600),
    st.booleans(),
    answers,
    st.sampled_from([1, 7, 60, 4096]),
    st.sampled_from([1, 16]),
)
def test_requests_are_framed_and_answered_like_h11_however_they_arrive(
    sent: list[bytes], places: list[int], end: int, whole: bool, answer: Answer, at_once: int, waiting: int
) -> None:
    data = b"".join(sent) if whole else b"".join(sent)[:end]
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(request_reader, "SLICE", at_once)
        patched.setattr(client_connection, "MAX_PIPELINED", waiting)
        seen, wire = asyncio.run(served(pieces(data, places), answer))
    expected = requests_by_h11(data)
    assert [(each.start, each.headers) for each in seen] == [(each.start, each.headers) for each in expected]
    complete = [each for each in expected if each.whole]
    assert [each.body for each in seen if each.whole] == [each.body for each in complete]
    replies = replies_by_h11(complete, bytes(wire.written))
    for request, reply in zip(complete, replies, strict=True):
        bodiless = request.start[0] == "HEAD" or answer.status in (204, 304)
        assert reply.start == (answer.status,)
        assert without_framing(reply.headers) == answer.headers
        assert reply.body == (b"" if bodiless else b"".join(answer.parts))
    last_says_close = bool(complete) and (b"connection", b"close") in complete[-1].headers
    assert wire.closed == last_says_close
    assert (bool(replies) and (b"connection", b"close") in replies[-1].headers) == last_says_close
