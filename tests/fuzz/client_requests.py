"""What clients send: `serving/`, from bytes to the requests that an app sees and the replies that are written.

An input is everything that a client sends on one connection.
"""

from __future__ import annotations

import asyncio
import json
import logging
import random
import re
from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import cast

import h11

from miles_router.asgi.backlog import Backlog
from miles_router.asgi.exchange import Receive, Scope, Send
from miles_router.asgi.wire import RawHeaders
from miles_router.metrics import ClientStatistics
from miles_router.middlewares.contract import ASGIApp
from miles_router.serving.clients import ClientConnections
from tests.fuzz.target import AT_ONCE, Target, expand, splits
from tests.support.wire import Wire

HEAD_BOUND = 64 * 1024
#: Inputs from this size on may reach a bound, and which one they reach first depends on the pieces.
BOUNDS_BEGIN = 60_000
#: Sizes, extensions and trailers of a chunked body, and what each byte of it may have around it.
AROUND_BODY, AROUND_CHUNK = 64 * 1024, 32
#: The event loop has nothing more to do once so many steps changed nothing.
STILL, STEPS = 6, 4000
LOOKS_LIKE_HEAD = re.compile(rb"HTTP/1\.1 ([2-5]\d\d) [^\r\n]*\r\n((?:[!-9;-~]+: [^\r\n]*\r\n)*)\r\n")
ABSOLUTE = re.compile(rb"^[A-Za-z][A-Za-z0-9+.-]*://[^/?]*(?=(.?))")

METHODS = (b"GET", b"POST", b"PUT", b"HEAD", b"DELETE", b"OPTIONS", b"PATCH")
TARGETS = (
    b"/",
    b"/generate",
    b"/a%2Fb?c=d&e",
    b"/x?",
    b"*",
    b"http://h/p?q",
    b"/generate%0a",
    b"//a/../b",
    b"/\xc3\xa9",
)
LINES = (
    b"Host: a",
    b"Host: a",
    b"Host: b:1",
    b"host:",
    b"Connection: close",
    b"Connection: keep-alive",
    b"Connection: upgrade",
    b"Upgrade: websocket",
    b"Upgrade: h2c",
    b"Expect: 100-continue",
    b"Content-Length: 3",
    b"Content-Length: 03",
    b"Content-Length: 3, 3",
    b"Content-Length: +3",
    b"Transfer-Encoding: chunked",
    b"Transfer-Encoding: gzip, chunked",
    b"Transfer-Encoding : chunked",
    b"Transfer-Encoding: \tchunked",
    b"TE: trailers",
    b"X-A: 1",
    b" folded: yes",
    b"X-B: <<70000*b>>",
    b"<<20000*a: b\r\n>>X: y",
    b"X-Request-Id: \x00",
    b"X-C: \xff\xfe",
)
EXTENSIONS = (b"", b"", b"", b";a=1", b';n="v"', b";<<70000*x>>", b" ")
TRAILERS = (b"", b"", b"X-Late: 1\r\n", b"Content-Length: 9\r\n", b"<<30000*t: u\r\n>>", b"T: <<90000*v>>\r\n")


@dataclass
class Request:
    """A request that the app was given whole."""

    start: tuple[str, bytes]
    headers: list[tuple[bytes, bytes]]
    body: bytes


@dataclass
class Spoken:
    """What one connection came to."""

    begun: int = 0
    whole: list[Request] = field(default_factory=list)
    replies: list[tuple[int, bytes]] = field(default_factory=list)
    closed: bool = False
    body_bytes: int = 0


class ClientRequests(Target):
    """Any bytes from a client, in any pieces.

    - In whichever pieces they come (short of the bounds), the app sees the same requests and the client gets the same
      replies.
    - Whatever h11 reads as requests without finding fault is read the same here, or refused.
    - Replies are whole, in order, one for each request, and never a 5xx.
    - What is kept of a head, and of what stands around a body, is bounded. A bound may be missed by a read.
    - Once the client is gone nothing is left: no connection, no task.
    """

    name = "client-requests"
    runs = 200
    tokens = (*LINES, *TARGETS, *METHODS, b"\r\n", b"\n", b"\r", b"\r\n\r\n", b"HTTP/1.1", b"HTTP/1.0", b"HTTP/0.9")

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()

    def close(self) -> None:
        self._loop.close()

    def generate(self, dice: random.Random) -> bytes:
        return b"".join(_request(dice) for _ in range(dice.choice((1, 1, 2, 3, 20))))

    def check(self, data: bytes) -> Hashable:
        data = expand(data)
        with defects() as logged:
            first, *others = (self._loop.run_until_complete(spoken(pieces)) for pieces in splits(data))
        assert not logged, f"logged: {logged[0]}"
        for other in others if len(data) < BOUNDS_BEGIN else ():
            assert other.whole == first.whole, f"in other pieces the app sees {other.whole!r}, not {first.whole!r}"
            assert other.replies == first.replies, f"in other pieces: {other.replies!r}, not {first.replies!r}"
            assert other.closed == first.closed, "whether the connection ends depends on the pieces"
        by_h11 = requests_by_h11(data)
        if by_h11 is not None and first.replies and first.replies[-1][0] < 400:
            ours = [replace(each, headers=_stripped(each.headers)) for each in first.whole]
            assert ours == by_h11[: len(ours)], f"h11 reads {by_h11!r}, not {ours!r}"
        statuses = tuple(status for status, _ in first.replies)
        refusal = first.replies[-1][1] if statuses and statuses[-1] >= 400 else b""
        kinds = tuple((each.start[0], len(each.headers), bool(each.body)) for each in first.whole[:3])
        return (statuses[:3], len(statuses) > 3, refusal[:40], kinds, first.closed, first.begun - len(first.whole))


@contextmanager
def defects() -> Iterator[list[str]]:
    """Errors that are logged within: each would be a 5xx, or worse."""
    seen: list[str] = []

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if not record.name.startswith("miles_router.testing"):  # what a worker says of its own
                seen.append(f"{record.getMessage()}: {record.exc_info[1] if record.exc_info else None!r}")

    logger, handler = logging.getLogger("miles_router"), Handler(logging.ERROR)
    logger.addHandler(handler)
    before, logger.propagate = logger.propagate, False
    try:
        yield seen
    finally:
        logger.removeHandler(handler)
        logger.propagate = before


def _request(dice: random.Random) -> bytes:
    lines = [line for line in (dice.choice(LINES) for _ in range(dice.randint(0, 3))) if dice.random() < 0.7]
    body = b""
    framing = dice.choice(("none", "none", "length", "chunked"))
    if framing == "length":
        body = dice.randbytes(dice.choice((0, 1, 30)))
        lines.append(b"Content-Length: %d" % len(body))
    elif framing == "chunked":
        lines.append(b"Transfer-Encoding: chunked")
        parts = [b"a" * dice.choice((1, 2, 17)) for _ in range(dice.randint(0, 4))]
        extension = dice.choice(EXTENSIONS)
        body = b"".join(b"%x%b\r\n%b\r\n" % (len(part), extension, part) for part in parts)
        body += b"0%b\r\n%b\r\n" % (dice.choice(EXTENSIONS), dice.choice(TRAILERS))
    start = b"%b %b HTTP/1.%d" % (dice.choice(METHODS), dice.choice(TARGETS), dice.random() < 0.9)
    return b"\r\n".join([start, *(() if dice.random() < 0.1 else (b"Host: h",)), *lines, b"", b""]) + body


async def spoken(pieces: Sequence[bytes]) -> Spoken:
    """Let a client send these pieces, and leave."""
    seen = Spoken()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        seen.begun += 1
        target = scope["raw_path"] + (b"?" + scope["query_string"] if scope["query_string"] else b"")
        body, more = b"", True
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                return
            body, more = body + message["body"], message["more_body"]
            seen.body_bytes += len(message["body"])
        seen.whole.append(Request((scope["method"], target), list(scope["headers"]), body))
        said = b"%d" % len(seen.whole)
        headers = [(b"content-length", b"%d" % len(said))]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": said})

    state, wire = SimpleNamespace(connections=set(), tasks=set()), Wire()
    connection = _connections(app)(server_state=state, app_state={})
    connection.connection_made(cast(asyncio.BaseTransport, wire))
    since = 0  # bytes since the last request that was complete, without those of bodies
    for data in pieces:
        if wire.closed:
            break
        complete, bodies = len(seen.whole), seen.body_bytes
        connection.data_received(data)
        await settled(seen, wire)
        around = len(data) - (1 + AROUND_CHUNK) * (seen.body_bytes - bodies)
        since = 0 if len(seen.whole) > complete else max(0, since + around)
        bound = HEAD_BOUND + AROUND_BODY + 3 * AT_ONCE
        assert since <= bound or wire.closed, f"{since} bytes were taken that are no body"
    seen.closed = wire.closed
    connection.connection_lost(None)
    assert not state.connections, "the connection is still known"
    await alone()
    seen.replies = replies_in(bytes(wire.written), [request.start[0] for request in seen.whole])
    return seen


def _connections(app: ASGIApp) -> ClientConnections:
    """What the process host calls for each connection; nothing is closed for taking long."""
    return ClientConnections(app, ClientStatistics(Backlog()), limit=10, idle_seconds=60, head_seconds=60)


async def settled(seen: Spoken, wire: Wire) -> None:
    """Until the loop has nothing to do that could be seen."""
    still, before = 0, (-1, -1, -1)
    for _ in range(STEPS):
        await asyncio.sleep(0)
        now = (seen.begun, len(seen.whole), len(wire.written))
        still = still + 1 if now == before else 0
        before = now
        if still == STILL:
            return
    raise AssertionError("the connection does not come to rest")


async def alone() -> None:
    """Until no task of the connection is left."""
    for _ in range(STEPS):
        left = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        if not left:
            return
        await asyncio.sleep(0)
    raise AssertionError(f"left running: {left}")


def replies_in(data: bytes, methods: Sequence[str]) -> list[tuple[int, bytes]]:
    """Status and body of each reply; of an error its type and message."""
    found: list[tuple[int, bytes]] = []
    data = data.replace(b"HTTP/1.1 100 Continue\r\n\r\n", b"")
    while data:
        head = LOOKS_LIKE_HEAD.match(data)
        assert head is not None, f"no head of a reply: {data[:200]!r}"
        length = re.search(rb"(?:^|\n)content-length: (\d+)\r", head[2])
        assert length is not None, f"a reply without a length: {data[:200]!r}"
        to_head = len(found) < len(methods) and methods[len(found)] == "HEAD"
        end = head.end() + (0 if to_head else int(length[1]))
        assert end <= len(data), f"a reply is cut: {data!r}"
        status, body = int(head[1]), data[head.end() : end]
        assert status < 500, f"{status}: {body!r}"
        if status >= 400 and body:
            error = json.loads(body)["error"]
            body = f"{error['type']}: {error['message']}".encode()
        found.append((status, body))
        data = data[end:]
    return found


def _stripped(headers: RawHeaders) -> RawHeaders:
    """Values without the space around them, which is no part of them (RFC 9110 section 5.5) and is passed on. That of
    Transfer-Encoding in lower case, as h11 tells it: capitals mean nothing there (RFC 9112 section 7)."""
    values = [(name, value.strip(b" \t")) for name, value in headers]
    return [(name, value.lower() if name == b"transfer-encoding" else value) for name, value in values]


def _origin_form(start: re.Match[bytes]) -> bytes:
    """What takes the place of scheme and authority (RFC 9112 section 3.2.1)."""
    return b"" if start[1] == b"/" else b"/"


def _with_host_of(request: h11.Request) -> list[tuple[bytes, bytes]]:
    """The headers; an absolute target says the host, whatever `Host` says (RFC 9112 section 3.2.2)."""
    _, mark, rest = request.target.partition(b"://")
    if not mark or not ABSOLUTE.match(request.target):
        return list(request.headers)
    authority = re.split(rb"[/?#]", rest)[0].rpartition(b"@")[2]
    return [(b"host", authority), *(pair for pair in request.headers if pair[0] != b"host")]


def requests_by_h11(data: bytes) -> list[Request] | None:
    """What an h11 server reads, or None where it finds fault."""
    server = h11.Connection(h11.SERVER, max_incomplete_event_size=HEAD_BOUND)
    server.receive_data(data)
    seen: list[Request] = []
    whole = 0
    try:
        while not isinstance(
            event := server.next_event(), h11.ConnectionClosed | type(h11.NEED_DATA) | type(h11.PAUSED)
        ):
            if isinstance(event, h11.Request):
                target = ABSOLUTE.sub(_origin_form, event.target)
                seen.append(Request((event.method.decode(), target), _with_host_of(event), b""))
            elif isinstance(event, h11.Data):
                seen[-1].body += bytes(event.data)
            elif isinstance(event, h11.EndOfMessage):
                whole += 1
                server.send(h11.Response(status_code=204, headers=[]))
                server.send(h11.EndOfMessage())
                if server.our_state is not h11.DONE:
                    break
                server.start_next_cycle()
    except h11.RemoteProtocolError:
        return None
    return seen[:whole]
