"""Replies that are no HTTP are 502, and nothing of them reaches the client as a reply; what a worker answers otherwise,
4xx and 5xx too, passes unchanged, and nobody else is asked."""

from __future__ import annotations

import asyncio

import pytest

from tests.support.http import CutReply, request
from tests.support.scripted_worker import (
    CLOSE,
    HANG,
    LAST_CHUNK,
    chunk,
    chunked_head,
    head,
    reply,
    script,
    unread,
)
from tests.support.session_apis import case
from tests.support.stage import Stage

GARBAGE = {
    "no HTTP at all": script(b"\x00\x01\x02 not http\r\n\r\n", HANG),
    "another protocol": script(b"SSH-2.0-OpenSSH_9.9\r\n", HANG),
    "no status": script(b"HTTP/1.1 OK\r\n\r\n", HANG),
    "two different lengths": script(head(200, [("Content-Length", "2"), ("Content-Length", "3")]) + b"abc", HANG),
    "length and chunks": script(head(200, [("Content-Length", "2"), ("Transfer-Encoding", "chunked")]), HANG),
    "an encoding that is not understood": script(head(200, [("Transfer-Encoding", "gzip")]) + b"packed", CLOSE),
    "a length that is no number": script(head(200, [("Content-Length", "two")]) + b"ab", HANG),
    "a control character in a header": script(b"HTTP/1.1 200 OK\r\nX-A: a\x01b\r\nContent-Length: 0\r\n\r\n", HANG),
    "no token as a header's name": script(b"HTTP/1.1 200 OK\r\nX(A): a\r\nContent-Length: 0\r\n\r\n", HANG),
    "a header without a colon": script(b"HTTP/1.1 200 OK\r\nnonsense\r\n\r\n", HANG),
    "a head without end": unread(b"HTTP/1.1 200 OK\r\n", *[b"X-Pad: " + b"x" * 8000 + b"\r\n"] * 50, HANG),
    "an upgrade nobody asked for": script(
        b"HTTP/1.1 101 Switching Protocols\r\nConnection: upgrade\r\nUpgrade: websocket\r\n\r\n", HANG
    ),
}
BROKEN_CHUNKS = {
    "no size": [b"zz\r\nbad\r\n"],
    "more than announced": [b"2\r\ntoo much\r\n"],
    "an extension without end": [b"2;", *[b"x" * 8000] * 50],
    "trailers without end": [b"0\r\n", *[b"X-Pad: " + b"x" * 8000 + b"\r\n"] * 50],
}


async def test_a_reply_that_is_no_http_is_502(stage: Stage) -> None:
    worker, router = await stage.worker_and_router()
    for kind, garbage in GARBAGE.items():
        with case(kind):
            worker.always(garbage)
            answer = await router.ask("POST", "/generate", body=b"{}")
            assert (answer.status, answer.error_type) == (502, "upstream_error")


async def test_garbage_is_not_tried_on_another_worker(stage: Stage) -> None:
    """It began to answer: what it did with the request is not known, and a repetition would not be safe."""
    workers = [(await stage.worker()).always(script(b"garbage\r\n\r\n", CLOSE)) for _ in range(2)]
    router = await stage.router(*workers)
    assert (await router.ask("POST", "/generate", body=b"{}")).status == 502
    assert sum(len(worker.requests) for worker in workers) == 1


async def test_chunks_that_are_no_chunks_break_the_client_off(stage: Stage) -> None:
    worker, router = await stage.worker_and_router()
    for kind, stream in BROKEN_CHUNKS.items():
        with case(kind):
            worker.always(script(chunked_head() + chunk(b"good"), *stream, HANG))
            client = await stage.client(router)
            with pytest.raises(CutReply):
                await client.ask("POST", "/generate", body=b"{}")


@pytest.mark.parametrize("pause", ["none", "before the body", "inside the body"])
async def test_bytes_behind_the_announced_length_are_cut_off_and_the_connection_with_them(
    stage: Stage, pause: str
) -> None:
    gate = asyncio.Event()
    start, end = {
        "none": (b"", reply(b"exact")),
        "before the body": (reply(b"exact")[:-5], b"exact"),
        "inside the body": (reply(b"exact")[:-2], b"ct"),
    }[pause]
    worker = (await stage.worker()).always(script(start, gate, end + b"surplus", HANG))
    router = await stage.router(worker)
    for _ in range(2):
        client = await stage.client(router)
        await client.send(request("POST", "/generate", body=b"{}"))
        if start:
            await client.read_head()
        gate.set()
        answer = await (client.read_body() if start else client.read())
        assert (answer.status, answer.body) == (200, b"exact")
    assert len({id(visit.link) for visit in worker.visits}) == 2


async def test_statuses_without_a_name_are_passed_on(stage: Stage) -> None:
    worker, router = await stage.worker_and_router()
    for status in (299, 418, 599):
        with case(status):
            worker.next(script(reply(b"odd", status, reason="Whatever")))
            answer = await router.ask("GET", "/x")
            assert (answer.status, answer.body) == (status, b"odd")


async def test_a_status_beyond_http_is_502(stage: Stage) -> None:
    worker, router = await stage.worker_and_router()
    for status in (600, 999):
        with case(status):
            worker.always(script(reply(b"odd", status)))
            answer = await router.ask("GET", "/x")
            assert (answer.status, answer.error_type) == (502, "upstream_error")


ODD_JSON = b'{ "error" : {"message":"caf\xc3\xa9 \\u00e9","code":400} ,\n"big":12345678901234567890, "nan":NaN}\n\n'


STATUSES = (400, 401, 403, 404, 405, 409, 413, 422, 429, 499, 500, 501, 502, 503, 504, 529)


async def test_error_replies_pass_byte_for_byte_and_are_not_retried(stage: Stage) -> None:
    headers = [("Content-Type", "application/json"), ("Retry-After", "7"), ("X-Reason", "a, b"), ("X-Reason", "c")]
    workers = [await stage.worker() for _ in range(2)]
    router = await stage.router(*workers)
    for count, status in enumerate(STATUSES, 1):
        with case(status):
            for worker in workers:
                worker.always(script(reply(ODD_JSON, status, headers)))
            answer = await router.ask("POST", "/generate", body=b"{}")
            assert (answer.status, answer.body) == (status, ODD_JSON)
            assert (answer.values("retry-after"), answer.values("x-reason")) == ([b"7"], [b"a, b", b"c"])
            assert sum(len(worker.requests) for worker in workers) == count
    assert [worker.failures for worker in router.pool] == [0, 0]


async def test_error_replies_pass_in_every_framing(stage: Stage) -> None:
    worker, router = await stage.worker_and_router()
    for status in (400, 500):
        for framing, answered, body in (
            ("chunked", script(chunked_head(status=status), chunk(b"Some"), chunk(b"thing"), LAST_CHUNK), b"Something"),
            ("until close", script(head(status) + b"Something", CLOSE), b"Something"),
            ("empty", script(reply(b"", status)), b""),
        ):
            with case(status, framing):
                worker.next(answered)
                answer = await router.ask("POST", "/generate", body=b"{}")
                assert (answer.status, answer.body) == (status, body)


async def test_redirects_are_the_clients_business(stage: Stage) -> None:
    worker, router = await stage.worker_and_router()
    statuses = (301, 302, 307, 308)
    for status in statuses:
        with case(status):
            worker.next(script(reply(b"", status, [("Location", "/elsewhere?x=%2F")])))
            answer = await router.ask("GET", "/here")
            assert (answer.status, answer.value("location")) == (status, b"/elsewhere?x=%2F")
    assert len(worker.requests) == len(statuses)


async def test_a_not_modified_reply_that_names_a_length_does_not_hold_the_client(stage: Stage) -> None:
    worker, router = await stage.worker_and_router()
    client = await stage.client(router)
    for _ in range(2):
        worker.next(script(head(304, [("Content-Length", "500")])))
        assert (await client.ask("GET", "/cached")).status == 304


async def test_not_modified_and_no_content_end_without_a_body(stage: Stage) -> None:
    worker, router = await stage.worker_and_router()
    client = await stage.client(router)
    for status in (304, 204, 304, 204):
        worker.next(script(head(status, [("ETag", '"a"')])))
        answer = await client.ask("GET", "/cached")
        assert (answer.status, answer.body, answer.value("etag")) == (status, b"", b'"a"')
