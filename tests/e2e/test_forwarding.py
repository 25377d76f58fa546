"""Requests on their way in: what the worker receives is what the client sent."""

from __future__ import annotations

import hashlib
import itertools

from tests.support.http import Client, chunked, request
from tests.support.running_router import RunningRouter
from tests.support.scripted_worker import ScriptedWorker, reply, script
from tests.support.session_apis import case
from tests.support.stage import Stage

CHUNKED = [("Transfer-Encoding", "chunked")]
BINARY = bytes(range(256)) * 40
BIG = hashlib.sha512(b"seed").digest() * 2**19  # 32 MiB

PATHS = [
    "/",
    "/generate",
    "/a%2Db",
    "/a%2db",
    "/%20/%25",
    "/...;/.x",
    "/caf%C3%A9/%E6%97%A5%E6%9C%AC",
    "/%67enerate",
    "/v1/models/Qwen%2FQwen3-4B",
    "/a%20b",
    "/semi;a=1;b=2/comma,colon:at@dollar$and&plus+star*bang!tilde~paren()quote'",
    "/trailing/",
    "/worker",
    "/healthy",
    "/router",
    "/metrics_of_worker",
    "/" + "long/" * 2000,
]
QUERIES = [
    "?",
    "?a",
    "?a=",
    "?a=1&a=2&a=1",
    "?a=%2F%20+b&c=%C3%A9",
    "?a=1?b=2",
    "?&&=&",
    "?q=/../x//y;z",
    "?url=http://other:1/x?y",
    "?" + "k=v&" * 2000,
]


async def pair(stage: Stage, **settings: object) -> tuple[ScriptedWorker, RunningRouter, Client]:
    """A worker, a router in front of it, a client of that."""
    worker, router = await stage.worker_and_router(**settings)
    return worker, router, await stage.client(router)


async def test_any_method_is_forwarded_with_and_without_a_body(stage: Stage) -> None:
    worker, _, client = await pair(stage)
    for method, body in itertools.product(
        ["GET", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "HEAD", "TRACE", "PROPFIND"], [None, b"", b'{"a": 1}']
    ):
        with case(method, body):
            for _ in range(2):
                answer = await client.ask(method, "/path", body=body)
                assert (answer.status, answer.body) == (200, b"" if method == "HEAD" else b"{}")
            for received in worker.requests[-2:]:
                assert (received.method, received.target, received.body) == (method, b"/path", body or b"")
                assert received.values("transfer-encoding") == []
                if body is None and method in ("GET", "HEAD", "OPTIONS", "DELETE", "TRACE"):
                    assert received.values("content-length") == []


async def test_the_path_arrives_as_it_was_spelled(stage: Stage) -> None:
    worker, _, client = await pair(stage)
    targets = (*PATHS, *(path + query for path in ("/generate", "/x%2D") for query in QUERIES))
    absolute = ("GET", "http://router.test:80/a%2Db?c=d", "/a%2Db?c=d")
    for method, target, arrives in [*(("GET", target, target) for target in targets), absolute, ("OPTIONS", "*", "*")]:
        with case(target):
            assert (await client.ask(method, target)).status == 200
            assert worker.requests[-1].target == arrives.encode()


async def test_a_worker_behind_a_path_prefix_gets_it_in_front_of_every_path(stage: Stage) -> None:
    worker = await stage.worker()
    router = await stage.router(f"{worker.url}/engines/0/")
    await router.ask("GET", "/a%2Db?c=d")
    asked = [received.target for received in worker.requests]
    assert asked.count(b"/engines/0/a%2Db?c=d") == 1
    assert {*asked} - {b"/engines/0/a%2Db?c=d"} <= {
        b"/engines/0/model_info",
        b"/engines/0/ready",
        b"/engines/0/server_info",
        b"/engines/0/openapi.json",
    }


async def test_headers_arrive_in_order_with_repeats_and_odd_values(stage: Stage) -> None:
    worker, _, client = await pair(stage)
    sent = [
        ("X-B", "2"),
        ("Accept-Encoding", "gzip, deflate, br"),
        ("X-A", "1"),
        ("X-B", "1, 2;q=0.5"),
        ("Cookie", "a=b; c=d"),
        ("Cookie", "e=f"),
        ("X-Empty", ""),
        ("X-Latin", "caf\xe9 \xff"),
        ("User-Agent", 'it\'s "quoted" \\ (comment)'),
        ("Content-Type", "application/json; charset=UTF-8"),
        ("X-Long", "x" * 20_000),
        ("Authorization", "Bearer of-the-worker"),
        ("Via", "1.1 somebody"),
        ("X-Forwarded-For", "10.0.0.1"),
        ("Trailer", "X-Late"),
    ]
    await client.ask("POST", "/generate", [*sent, ("X-Request-Id", "id-1")], b"{}")
    expected = [(name.lower().encode(), value.encode("latin-1")) for name, value in sent]
    got = [pair for pair in worker.requests[0].headers if pair[0] not in (b"host", b"content-length", b"x-request-id")]
    assert got == expected


async def test_hop_by_hop_headers_and_those_that_connection_names_stay_behind(stage: Stage) -> None:
    worker, _, client = await pair(stage)
    hop_by_hop = [
        ("Connection", "keep-alive, X-Mine"),
        ("Connection", "x-other ,, Keep-Alive"),
        ("Keep-Alive", "timeout=5"),
        ("Proxy-Connection", "keep-alive"),
        ("TE", "trailers"),
        ("X-Mine", "1"),
        ("X-Other", "2"),
        ("X-Kept", "3"),
    ]
    assert (await client.ask("POST", "/generate", hop_by_hop, b"{}")).status == 200
    assert worker.requests[0].values("host") == [f"127.0.0.1:{worker.port}".encode()]
    names = {name for name, _ in worker.requests[0].headers}
    assert names == {b"host", b"content-length", b"x-request-id", b"x-kept"}


async def test_an_offer_to_upgrade_changes_nothing_for_the_requests_around_it(stage: Stage) -> None:
    worker, _, client = await pair(stage)
    offer = [("Connection", "Upgrade"), ("Upgrade", "websocket")]
    sent = [
        request("POST", "/1", body=b"one"),
        request("GET", "/2", offer),
        request("POST", "/3", [*offer, *CHUNKED]) + chunked(b"th", b"ree"),
        request("POST", "/4", offer, b"GET /smuggled HTTP/1.1\r\n\r\n"),
        request("GET", "/5"),
    ]
    await client.send(b"".join(sent))
    for _ in sent:
        assert (await client.read("POST")).status == 200
    got = [(received.target, received.body) for received in worker.requests]
    assert got == [
        (b"/1", b"one"),
        (b"/2", b""),
        (b"/3", b"three"),
        (b"/4", b"GET /smuggled HTTP/1.1\r\n\r\n"),
        (b"/5", b""),
    ]


async def test_bodies_arrive_byte_for_byte_with_their_length(stage: Stage) -> None:
    worker, _, client = await pair(stage)
    for framing, body in itertools.product(["length", "chunked", "many small chunks"], [b"", b"x", BINARY, BIG]):
        with case(framing, len(body)):
            step = max(1, len(body) // (2000 if "small" in framing else 3))
            parts = [body[start : start + step] for start in range(0, len(body), step)]
            sent = (
                request("POST", "/", body=body)
                if framing == "length"
                else request("POST", "/", CHUNKED) + chunked(*parts)
            )
            await client.send(sent)
            assert (await client.read("POST")).status == 200
            (received,) = worker.requests
            assert received.body == body
            assert received.values("content-length") == [str(len(body)).encode()]
            worker.requests.clear()


async def test_a_client_that_expects_100_continue_gets_it_and_the_worker_never_hears_of_it(stage: Stage) -> None:
    worker, _, client = await pair(stage)
    await client.send(request("POST", "/generate", [("Expect", "100-continue"), ("Content-Length", "5")]))
    assert await client.read_raw() == b"HTTP/1.1 100 Continue\r\n\r\n"
    assert worker.requests == []
    await client.send(b"hello")
    answer = await client.read("POST")
    assert (answer.status, answer.informational) == (200, [])
    assert (worker.requests[0].body, worker.requests[0].values("expect")) == (b"hello", [])


async def test_the_clients_request_id_goes_to_the_worker_and_back(stage: Stage) -> None:
    worker, _, client = await pair(stage)
    worker.always(script(reply(headers=[("X-Request-Id", "of-the-worker")])))
    for given, kept in (
        *((given, True) for given in (["mine-123_~!"], ["mine", "twice"])),
        *((given, False) for given in ([], [""], ["x" * 129], ["caf\xe9"])),
    ):
        with case(given):
            returned = (await client.ask("GET", "/", [("x-request-id", each) for each in given])).values("x-request-id")
            assert worker.requests[-1].values("x-request-id") == returned
            assert (returned == [each.encode() for each in given[:1]]) == kept
    assert len({request.values("x-request-id")[0] for request in worker.requests}) == 6, "each without gets its own"
