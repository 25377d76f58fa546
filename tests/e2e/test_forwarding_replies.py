"""Replies on their way out: what the client receives is what the worker sent, and when it sent it."""

from __future__ import annotations

import asyncio
import gzip
import hashlib
import itertools

import pytest

from miles_router.settings.config import MiddlewareSpec
from tests.support.http import Client, request
from tests.support.scripted_worker import (
    CLOSE,
    LAST_CHUNK,
    Behaviour,
    ScriptedWorker,
    chunk,
    chunked_head,
    head,
    reply,
    script,
)
from tests.support.session_apis import case
from tests.support.stage import Stage, both_ways
from tests.support.waiting import until

BINARY = bytes(range(256)) * 40
BIG = hashlib.sha512(b"reply").digest() * 2**19  # 32 MiB
SSE = [("Content-Type", "text/event-stream; charset=utf-8"), ("Cache-Control", "no-cache")]


async def pair(
    stage: Stage, *behaviours: Behaviour, layers: tuple[MiddlewareSpec, ...] = ()
) -> tuple[ScriptedWorker, Client]:
    """A worker with its next replies, and the client of a router in front of it."""
    worker = (await stage.worker()).next(*behaviours)
    return worker, await stage.client(await stage.router(worker, middlewares=layers))


async def test_bodies_reach_the_client_byte_for_byte(stage: Stage) -> None:
    worker, client = await pair(stage)
    for framing, body in itertools.product(
        ["length", "chunked", "many small chunks", "until close"], [b"", b"x", BINARY, BIG]
    ):
        with case(framing, len(body)):
            step = max(1, len(body) // (2000 if "small" in framing else 3))
            chunks = b"".join(chunk(body[start : start + step]) for start in range(0, len(body), step)) + LAST_CHUNK
            behaviours = {
                "length": script(reply(body)),
                "until close": script(head() + body, CLOSE),
            }
            worker.next(behaviours.get(framing, script(chunked_head() + chunks)))
            answer = await client.ask("POST", "/generate", body=b"{}")
            assert answer.body == body
            assert answer.value("content-length") == (str(len(body)).encode() if framing == "length" else None)
            assert (await client.ask("GET", "/again")).status == 200


@both_ways
async def test_each_event_reaches_the_client_before_the_worker_sends_the_next(
    stage: Stage, layers: tuple[MiddlewareSpec, ...]
) -> None:
    gates = [asyncio.Event() for _ in range(5)]
    steps: list[bytes | asyncio.Event] = [chunked_head(SSE)]
    for number, gate in enumerate(gates):
        steps += [chunk(b'data: {"n": %d}\n\n' % number), gate]
    _, client = await pair(stage, script(*steps, chunk(b"data: [DONE]\n\n"), LAST_CHUNK), layers=layers)
    await client.send(request("POST", "/generate", body=b"{}"))
    answer = await client.read_head()
    assert answer.value("content-type") == b"text/event-stream; charset=utf-8"
    for number, gate in enumerate(gates):
        assert await client.read_part() == b'data: {"n": %d}\n\n' % number
        assert stage.routers[0].app.router.metrics.bytes_out == 16 * (number + 1)
        gate.set()
    assert await client.read_part() == b"data: [DONE]\n\n"
    assert await client.read_part() == b""


@pytest.mark.parametrize("framing", ["length", "chunked"])
async def test_compressed_bodies_are_not_touched(stage: Stage, framing: str) -> None:
    packed = gzip.compress(BINARY)
    headers = [("Content-Encoding", "gzip"), ("Vary", "Accept-Encoding"), ("ETag", '"abc"')]
    whole = reply(packed, headers=headers)
    parts = chunked_head(headers) + chunk(packed[:100]) + chunk(packed[100:]) + LAST_CHUNK
    worker, client = await pair(stage, script(whole if framing == "length" else parts))
    answer = await client.ask("GET", "/x", [("Accept-Encoding", "gzip")])
    assert answer.body == packed
    assert (answer.value("content-encoding"), answer.value("vary")) == (b"gzip", b"Accept-Encoding")
    assert worker.requests[0].values("accept-encoding") == [b"gzip"]


async def test_headers_reach_the_client_in_order_with_repeats_and_odd_values(stage: Stage) -> None:
    sent = [
        ("Set-Cookie", "a=1; Path=/, x"),
        ("X-A", "1"),
        ("Set-Cookie", "b=2; Expires=Wed, 21 Oct 2026 07:28:00 GMT"),
        ("X-Empty", ""),
        ("X-Latin", "caf\xe9"),
        ("Link", "</a>; rel=next, </b>; rel=prev"),
        ("WWW-Authenticate", 'Basic realm="a"'),
        ("WWW-Authenticate", "Bearer"),
        ("X-Long", "x" * 20_000),
        ("Content-Type", "Application/JSON;charset=utf8"),
        ("Server", "sglang"),
        ("Date", "Tue, 15 Nov 1994 08:12:31 GMT"),
    ]
    _, client = await pair(stage, script(reply(b"{}", headers=sent)))
    answer = await client.ask("GET", "/x")
    got = [pair for pair in answer.headers if pair[0] not in (b"content-length", b"x-request-id")]
    assert got == [(name.lower().encode(), value.encode("latin-1")) for name, value in sent]


async def test_neither_server_nor_date_is_added_or_doubled(stage: Stage) -> None:
    own = [("Server", "worker/1"), ("Date", "Tue, 15 Nov 1994 08:12:31 GMT")]
    _, client = await pair(stage, script(reply()), script(reply(headers=own)))
    bare, named = await client.ask("GET", "/x"), await client.ask("GET", "/x")
    assert (bare.values("server"), bare.values("date")) == ([], [])
    assert (named.values("server"), named.values("date")) == ([b"worker/1"], [own[1][1].encode()])


async def test_hop_by_hop_headers_and_those_that_connection_names_stay_behind(stage: Stage) -> None:
    hop_by_hop = [
        ("Connection", "keep-alive, X-Mine"),
        ("Keep-Alive", "timeout=5"),
        ("Proxy-Connection", "keep-alive"),
        ("Upgrade", "h2c"),
        ("X-Mine", "1"),
        ("X-Kept", "2"),
    ]
    _, client = await pair(stage, script(reply(headers=hop_by_hop)))
    answer = await client.ask("GET", "/x")
    assert {name for name, _ in answer.headers} == {b"content-length", b"x-request-id", b"x-kept"}


async def test_a_worker_that_closes_after_its_reply_does_not_close_the_client(stage: Stage) -> None:
    closing = script(reply(b"bye", headers=[("Connection", "close")]), CLOSE)
    worker, client = await pair(stage, closing, closing)
    for _ in range(2):
        answer = await client.ask("GET", "/x")
        assert (answer.body, answer.values("connection")) == (b"bye", [])
    assert worker.connections >= 2


@pytest.mark.parametrize("framing", ["length", "chunked", "none"])
async def test_replies_to_head_have_the_headers_and_no_body(stage: Stage, framing: str) -> None:
    heads = {
        "length": head(200, [("Content-Length", "12345"), ("X-A", "1")]),
        "chunked": chunked_head([("X-A", "1")]),
        "none": head(200, [("X-A", "1")]),
    }
    worker, client = await pair(stage, script(heads[framing]), script(heads[framing]))
    for _ in range(2):
        answer = await client.ask("HEAD", "/x")
        assert (answer.status, answer.body, answer.value("x-a")) == (200, b"", b"1")
        assert answer.value("content-length") == (b"12345" if framing == "length" else None)
    assert (await client.ask("GET", "/again")).body == b"{}"
    # What follows a reply to HEAD could not be told from the next reply.
    assert len({id(visit.link) for visit in worker.visits}) == 3


@pytest.mark.parametrize("framing", ["length", "chunked"])
async def test_an_http_1_0_client_gets_a_reply_it_understands(stage: Stage, framing: str) -> None:
    parts = chunked_head() + chunk(b"some") + chunk(b"thing") + LAST_CHUNK
    _, client = await pair(stage, script(reply(b"something") if framing == "length" else parts))
    answer = await client.ask("GET", "/x", version="1.0")
    assert (answer.body, answer.values("transfer-encoding")) == (b"something", [])
    assert await client.closed() == b""


# Connections


@pytest.mark.alone("each process keeps connections of its own")
async def test_both_sides_keep_their_connections(stage: Stage) -> None:
    worker, client = await pair(stage)
    before = worker.connections  # the first probe's, which is kept as well
    for _ in range(20):
        assert (await client.ask("POST", "/generate", body=b"{}")).status == 200
    assert len({id(visit.link) for visit in worker.visits}) == 1
    assert worker.connections == max(before, 1)


async def test_concurrent_requests_never_share_a_connection(stage: Stage) -> None:
    worker, router = await stage.worker_and_router()
    gate = asyncio.Event()
    worker.always(script(gate, reply()))
    clients = [await stage.client(router) for _ in range(10)]
    for client in clients:
        await client.send(request("GET", "/x"))
    await until(lambda: worker.busy == 10, "ten connections are busy")
    gate.set()
    for client in clients:
        assert (await client.read()).status == 200


# What RFC 9110 and RFC 9112 ask, where other servers have been found to differ

REFUSED = {
    "no Host": b"GET /x HTTP/1.1\r\n\r\n",
    "two Hosts": b"GET /x HTTP/1.1\r\nHost: a\r\nhost: a\r\n\r\n",
    "two Hosts of an old client": b"GET /x HTTP/1.0\r\nHost: a\r\nhost: a\r\n\r\n",
    "a Host that is none": b"GET /x HTTP/1.1\r\nHost: a b\r\n\r\n",
    "a Host with a path": b"GET /x HTTP/1.1\r\nHost: a/b\r\n\r\n",
    "HTTP/0.9": b"GET /x\r\n\r\n",
    "HTTP/2.0": b"GET /x HTTP/2.0\r\nHost: a\r\n\r\n",
    "a tunnel": b"CONNECT /x HTTP/1.1\r\nHost: a\r\n\r\n",
    "an encoding before chunked": b"POST /x HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: gzip, chunked\r\n\r\n0\r\n\r\n",
    "two lengths": b"POST /x HTTP/1.1\r\nHost: a\r\nContent-Length: 4\r\nContent-Length: 5\r\n\r\n0\r\n\r\nGET /s",
    "a length and chunks": b"POST /x HTTP/1.1\r\nHost: a\r\nContent-Length: 4\r\nTransfer-Encoding: chunked\r\n\r\n0",
    "no colon": b"GET /x HTTP/1.1\r\nHost: a\r\nno colon\r\n\r\n",
    "a path that is not escaped": b"GET /caf\xc3\xa9 HTTP/1.1\r\nHost: a\r\n\r\n",
    "a chunk without a size": b"POST /x HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
}
BAD = {
    "garbage": b"\0garbage\r\n\r\n",
    "a bad head": request("GET", "/x", [("Host", "a b")]),
    "a bad chunk": request("POST", "/x", [("Transfer-Encoding", "chunked")]) + b"zz\r\n",
    "a chunked body that breaks later": request("POST", "/x", [("Transfer-Encoding", "chunked")])
    + b"5\r\nhello\r\nzz\r\n",
}


async def test_what_is_no_request_is_refused_and_the_connection_ends(stage: Stage) -> None:
    worker, router = await stage.worker_and_router()
    for data in REFUSED.values():
        with case(data):
            client = await stage.client(router)
            await client.send(data)
            answer = await client.read()
            assert (answer.status, answer.error_type) == (400, "invalid_request")
            assert await client.closed() == b""
    assert worker.requests == []
    assert router.app.clients.ended == {"invalid": len(REFUSED)}
    for host in (b"", b"Host: \r\n", b"Host: router.test:31000\r\n", b"Host: [::1]:31000\r\n"):
        with case(host):  # an old client needs none
            client = await stage.client(router)
            await client.send(b"GET /x HTTP/1.%d\r\n%b\r\n" % (1 if host else 0, host))
            assert (await client.read()).status == 200


@pytest.mark.parametrize("bad", [*BAD.values()], ids=[*BAD])
async def test_what_is_bad_behind_good_requests_is_refused_behind_their_replies(stage: Stage, bad: bytes) -> None:
    gate = asyncio.Event()
    worker = (await stage.worker()).next(script(gate, reply(b"first")), script(reply(b"second")))
    client = await stage.client(await stage.router(worker))
    await client.send(request("GET", "/first") + request("GET", "/second") + bad)
    await until(lambda: worker.busy, "the worker has the first request")
    gate.set()
    assert [(await client.read()).body for _ in range(2)] == [b"first", b"second"]
    answer = await client.read()
    assert (answer.status, answer.error_type, answer.value("connection")) == (400, "invalid_request", b"close")
    assert await client.closed() == b""
    assert [received.path for received in worker.requests] == ["/first", "/second"]


async def test_a_reply_that_has_no_body_has_none_whatever_it_announces(stage: Stage) -> None:
    worker = await stage.worker()
    client = await stage.client(await stage.router(worker))
    for framing in (("Content-Length", "5"), ("Transfer-Encoding", "chunked")):
        worker.next(*[script(head(204, [framing]))] * 2)
        for _ in range(2):
            answer = await client.ask("GET", "/x")
            assert (answer.status, answer.value("content-length"), answer.values("transfer-encoding")) == (
                204,
                None,
                [],
            )
        early = head(100, reason="Continue") + head(103, [framing, ("X-Early", "1")])
        worker.next(*[script(early, chunked_head(), b"2\r\nok\r\n0\r\n\r\n")] * 2)
        for _ in range(2):
            answer = await client.ask("GET", "/x")
            assert (answer.status, answer.body, answer.values("x-early")) == (200, b"ok", [])


async def test_whitespace_around_a_header_value_is_no_part_of_it(stage: Stage) -> None:
    worker = (await stage.worker()).always(script(head(200, [("Content-Length", "2 \t"), ("X-Told", " a \t")]), b"ok"))
    client = await stage.client(await stage.router(worker))
    for rest in (
        b"Content-Length: 2 \t\r\n\r\nhi",
        b"Transfer-Encoding: chunked \r\n\r\n2\r\nhi\r\n0\r\n\r\n",
        b"Expect: 100-continue \r\nContent-Length: 2\r\n\r\n",
    ):
        await client.send(b"POST /x HTTP/1.1\r\nHost:\t a \t\r\n" + rest)
        if b"Expect" in rest:
            assert await client.read_raw() == b"HTTP/1.1 100 Continue\r\n\r\n"
            await client.send(b"hi")
        answer = await client.read("POST")
        assert (answer.status, answer.body) == (200, b"ok")
        assert b"x-told: a\r\n" in answer.head
    assert [received.body for received in worker.requests] == [b"hi"] * 3
