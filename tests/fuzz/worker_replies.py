"""What workers answer: `forwarding/connection.py` and `asgi/wire.py`, from bytes to one reply.

An input is the method of the request on a line of its own, then everything that the worker sends before it closes.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace

import h11

from miles_router.errors import UpstreamError
from tests.fuzz.client_requests import AROUND_BODY, AROUND_CHUNK, BOUNDS_BEGIN
from tests.fuzz.target import AT_ONCE, Target, expand, splits
from tests.support.waiting import soon
from tests.support.wire import WorkerEnd

HEAD_BOUND = 256 * 1024
METHODS = (b"GET", b"POST", b"HEAD")
STARTS: tuple[bytes, ...] = (
    b"HTTP/1.1 200 OK",
    b"HTTP/1.1 200",
    b"HTTP/1.0 200 OK",
    b"HTTP/1.1 204 None",
    b"HTTP/1.1 304 x",
)
STARTS += (
    b"HTTP/1.1 500 \xff",
    b"HTTP/1.1 599 ",
    b"HTTP/1.1 600 x",
    b"HTTP/1.1 099 x",
    b"HTTP/2 200 OK",
    b"HTTP/0.9 200",
)
EARLY = (
    b"",
    b"",
    b"",
    b"HTTP/1.1 100 Continue\r\n\r\n",
    b"HTTP/1.1 103 E\r\nX-E: 1\r\n\r\n",
    b"HTTP/1.1 101 S\r\n\r\n",
)
LINES = (
    b"Content-Length: 3",
    b"Content-Length: 3, 3",
    b"Content-Length: 18446744073709551616",
    b"Content-Length: -1",
    b"Transfer-Encoding: chunked",
    b"Transfer-Encoding: gzip, chunked",
    b"Transfer-Encoding: identity",
    b"Connection: close",
    b"Connection: keep-alive",
    b"Connection: upgrade",
    b"Upgrade: websocket",
    b"Content-Encoding: gzip",
    b"X-A: \x00",
    b" folded",
    b"X-B: <<300000*b>>",
    b"<<60000*a: b\r\n>>X: y",
)
TRAILERS = (b"", b"", b"X-Late: 1\r\n", b"<<60000*t: u\r\n>>", b"T: <<300000*v>>\r\n")


@dataclass(frozen=True)
class Read:
    """What became of one exchange."""

    status: int
    headers: tuple[tuple[bytes, bytes], ...]
    body: bytes
    whole: bool
    error: str
    kept: bool


class WorkerReplies(Target):
    """Any bytes from a worker, in any pieces.

    - In whichever pieces they come (short of the bounds), the reply is the same, and so is its error.
    - A reply that h11 reads without finding fault is read the same here, or refused by a typed error.
    - One that h11 says is cut is not given as whole.
    - A connection is kept only behind a reply that is whole, with nothing behind it but ends of lines.
    - What is kept of a head, and of what stands around a body, is bounded. A bound may be missed by a read.
    """

    name = "worker-replies"
    runs = 600
    tokens = (*LINES, *STARTS, *EARLY[3:], b"\r\n", b"\n", b"\r\n\r\n", b"0\r\n\r\n", b"GET\n", b"HEAD\n", b";a=1")

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()

    def close(self) -> None:
        self._loop.close()

    def generate(self, dice: random.Random) -> bytes:
        return dice.choice(METHODS) + b"\n" + dice.choice(EARLY) + _reply(dice)

    def check(self, data: bytes) -> Hashable:
        method, _, sent = expand(data).partition(b"\n")
        method = method if method in METHODS else b"GET"
        first, *others = (self._loop.run_until_complete(read(method, pieces)) for pieces in splits(sent, singly=400))
        reference, rest = by_h11(method, sent)
        only_line_ends = reference is None or (
            rest and not rest.strip(b"\r\n")
        )  # which a connection may be kept behind
        for other in others if len(sent) < BOUNDS_BEGIN else ():
            other = replace(other, kept=first.kept) if only_line_ends else other
            assert other == first, f"in other pieces: {_short(other)}, not {_short(first)}"
        if reference is not None and first.whole:
            ours = (first.status, first.body, first.whole)
            assert ours == reference, f"h11 reads {_short(reference)}, not {_short(ours)}"
        assert not (first.kept and rest.strip(b"\r\n")), f"kept, and {rest[:80]!r} came behind the reply"
        length = min(len(first.body), 3)
        return (first.status, first.whole, first.error, first.kept, length, len(first.headers), reference is None)


def _reply(dice: random.Random) -> bytes:
    lines = [dice.choice(LINES) for _ in range(dice.choice((0, 0, 0, 1, 2)))]
    framing = dice.choice(("length", "length", "chunked", "chunked", "until close"))
    body = b"x" * dice.choice((0, 1, 5, 40))
    if framing == "length":
        lines.append(b"Content-Length: %d" % len(body))
    elif framing == "chunked":
        lines.append(b"Transfer-Encoding: chunked")
        chunk = b"%x\r\n%b\r\n" % (len(body), body) if body else b""
        body = chunk * dice.choice((1, 3)) + b"0\r\n" + dice.choice(TRAILERS) + b"\r\n"
    return b"\r\n".join([dice.choice(STARTS), *lines, b"", b""]) + body + dice.choice((b"", b"", b"", b"HTTP/1.1 200"))


def _short(what: object) -> str:
    shown = repr(what)
    return shown if len(shown) < 400 else f"{shown[:200]} ... {shown[-200:]}"


async def read(method: bytes, pieces: Sequence[bytes]) -> Read:
    """Let a worker send these pieces and close; the reader takes what there is behind each of them."""
    worker = WorkerEnd()
    reply = worker.connection.send(b"the request", b"", head_request=method == b"HEAD")
    body, around = b"", 0
    for data in pieces:
        if worker.wire.closed:
            break
        worker.says(data)
        came = reply.read_available()
        body += came
        around += len(data) - len(came) - AROUND_CHUNK * len(came)
        bound = HEAD_BOUND + AROUND_BODY + 3 * AT_ONCE
        assert around <= bound or worker.wire.closed, f"{around} bytes were taken that are no body"
        around = max(0, around) if not reply.complete else 0
    ended_before = reply.complete
    if not ended_before and not worker.wire.closed:
        worker.connection.connection_lost(None)
    error = ""
    try:
        while not reply.head_seen:
            await soon(reply.arrival())
        while not reply.exhausted:
            body += await soon(reply.read())
    except UpstreamError as raised:
        error = type(raised).__name__
    reply.close()
    whole = reply.complete and not error
    assert whole or error, "the reply has neither an end nor an error"
    kept = bool(worker.kept)
    assert not kept or ended_before, "kept although the worker closed it"
    head = (reply.status, tuple(reply.headers)) if reply.head_seen else (0, ())
    return Read(head[0], head[1], body, whole, error, kept)


def by_h11(method: bytes, sent: bytes) -> tuple[tuple[int, bytes, bool] | None, bytes]:
    """Status, body and wholeness as an h11 client reads them, or None where it finds fault; and what comes behind."""
    client = h11.Connection(h11.CLIENT, max_incomplete_event_size=HEAD_BOUND)
    client.send(h11.Request(method=method.decode(), target="/", headers=[("Host", "a")]))
    client.send(h11.EndOfMessage())
    status, body, whole = 0, b"", False
    try:
        client.receive_data(sent)
        client.receive_data(b"")
        while not whole and not isinstance(event := client.next_event(), h11.ConnectionClosed):
            if isinstance(event, h11.Response):
                status = event.status_code
            elif isinstance(event, h11.Data):
                body += bytes(event.data)
            elif isinstance(event, h11.EndOfMessage):
                whole = True
            elif event in (h11.NEED_DATA, h11.PAUSED):
                return None, b""
    except h11.RemoteProtocolError:
        return None, b""
    return (status, body, whole), bytes(client.trailing_data[0]) if whole else b""
