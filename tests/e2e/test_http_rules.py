"""What RFC 9110 and RFC 9112 ask of a server and of a proxy, where other servers have been found to differ."""

from __future__ import annotations

import asyncio

import pytest

from tests.support.http import request
from tests.support.scripted_worker import chunked_head, head, reply, script
from tests.support.stage import Stage
from tests.support.waiting import until

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
    "a chunk without a size": b"POST /x HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
}
BAD = {
    "garbage": b"\0garbage\r\n\r\n",
    "a bad head": request("GET", "/x", [("Host", "a b")]),
    "a bad chunk": request("POST", "/x", [("Transfer-Encoding", "chunked")]) + b"zz\r\n",
    "a chunked body that breaks later": request("POST", "/x", [("Transfer-Encoding", "chunked")])
    + b"5\r\nhello\r\nzz\r\n",
}


@pytest.mark.parametrize("data", [*REFUSED.values()], ids=[*REFUSED])
async def test_what_is_no_request_is_refused_and_the_connection_ends(stage: Stage, data: bytes) -> None:
    worker = await stage.worker()
    router = await stage.router(worker)
    client = await stage.client(router)
    await client.send(data)
    answer = await client.read()
    assert (answer.status, answer.error_type) == (400, "invalid_request")
    assert await client.closed() == b""
    assert worker.requests == []
    assert router.app.clients.ended == {"invalid": 1}


@pytest.mark.parametrize("host", [b"", b"Host: \r\n", b"Host: router.test:31000\r\n", b"Host: [::1]:31000\r\n"])
async def test_an_old_client_needs_no_host_and_every_spelling_of_one_is_taken(stage: Stage, host: bytes) -> None:
    client = await stage.client(await stage.router(await stage.worker()))
    await client.send(b"GET /x HTTP/1.%d\r\n%b\r\n" % (1 if host else 0, host))
    assert (await client.read()).status == 200


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


@pytest.mark.parametrize("framing", [("Content-Length", "5"), ("Transfer-Encoding", "chunked")])
async def test_a_reply_that_has_no_content_announces_none(stage: Stage, framing: tuple[str, str]) -> None:
    worker = (await stage.worker()).always(script(head(204, [framing])))
    client = await stage.client(await stage.router(worker))
    for _ in range(2):
        answer = await client.ask("GET", "/x")
        assert (answer.status, answer.value("content-length"), answer.value("transfer-encoding")) == (204, None, None)


@pytest.mark.parametrize("framing", [("Content-Length", "5"), ("Transfer-Encoding", "chunked")])
async def test_an_informational_reply_has_no_body_whatever_it_announces(stage: Stage, framing: tuple[str, str]) -> None:
    worker = (await stage.worker()).always(script(head(103, [framing]), chunked_head(), b"2\r\nok\r\n0\r\n\r\n"))
    client = await stage.client(await stage.router(worker))
    for _ in range(2):
        assert (await client.ask("GET", "/x")).body == b"ok"
