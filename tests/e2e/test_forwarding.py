"""Requests on their way in: what the worker receives is what the client sent."""

from __future__ import annotations

import asyncio
import hashlib
import itertools

from tests.support.http import Client, chunked, request
from tests.support.running_router import RunningRouter
from tests.support.scripted_worker import HANG, ScriptedWorker, head, reply, script
from tests.support.session_apis import case
from tests.support.stage import Stage
from tests.support.waiting import until

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
    worker = await stage.worker()
    router = await stage.router(worker, **settings)
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
    for target in (*PATHS, *(path + query for path in ("/generate", "/x%2D") for query in QUERIES)):
        with case(target):
            assert (await client.ask("GET", target)).status == 200
            assert worker.requests[-1].target == target.encode()


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


async def test_an_absolute_target_reaches_the_worker_as_its_path(stage: Stage) -> None:
    worker, _, client = await pair(stage)
    assert (await client.ask("GET", "http://router.test:80/a%2Db?c=d")).status == 200
    assert worker.requests[0].target == b"/a%2Db?c=d"


async def test_options_for_the_whole_server_is_forwarded(stage: Stage) -> None:
    worker, _, client = await pair(stage)
    assert (await client.ask("OPTIONS", "*")).status == 200
    assert worker.requests[0].target == b"*"


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


async def test_host_names_the_worker(stage: Stage) -> None:
    worker, _, client = await pair(stage)
    await client.ask("GET", "/", [("Host", "public.example:8443")])
    assert worker.requests[0].values("host") == [f"127.0.0.1:{worker.port}".encode()]


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
    names = {name for name, _ in worker.requests[0].headers}
    assert names == {b"host", b"content-length", b"x-request-id", b"x-kept"}


async def test_an_offer_to_upgrade_is_declined_and_the_request_forwarded_whole(stage: Stage) -> None:
    """Java's HTTP client offers h2c with its first request, bodies included."""
    worker, _, client = await pair(stage)
    offer = [("Connection", "Upgrade, HTTP2-Settings"), ("Upgrade", "h2c"), ("HTTP2-Settings", "AAMAAABkAAQCAAAA")]
    for _ in range(2):
        assert (await client.ask("POST", "/generate", offer, BINARY)).status == 200
    assert [received.body for received in worker.requests] == [BINARY] * 2
    assert not {b"upgrade", b"http2-settings", b"connection"} & {name for name, _ in worker.requests[0].headers}


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


async def test_a_body_that_trickles_in_is_forwarded_once_it_is_complete(stage: Stage) -> None:
    worker, _, client = await pair(stage)
    data = request("POST", "/generate", CHUNKED) + b"5;ext=1\r\nhello\r\n0\r\nX-Trailer: 1\r\n\r\n"
    for start in range(len(data)):
        await client.send(data[start : start + 1])
        await asyncio.sleep(0)
    assert (await client.read("POST")).status == 200
    assert worker.requests[0].body == b"hello"
    assert worker.requests[0].values("x-trailer") == []


async def test_a_client_that_expects_100_continue_gets_it_and_the_worker_never_hears_of_it(stage: Stage) -> None:
    worker, _, client = await pair(stage)
    await client.send(request("POST", "/generate", [("Expect", "100-continue"), ("Content-Length", "5")]))
    assert await client.read_raw() == b"HTTP/1.1 100 Continue\r\n\r\n"
    assert worker.requests == []
    await client.send(b"hello")
    answer = await client.read("POST")
    assert (answer.status, answer.informational) == (200, [])
    assert (worker.requests[0].body, worker.requests[0].values("expect")) == (b"hello", [])


async def test_a_client_that_expects_100_continue_and_does_not_wait_is_served(stage: Stage) -> None:
    worker, _, client = await pair(stage)
    for _ in range(3):
        answer = await client.ask("POST", "/generate", [("Expect", "100-continue")], BINARY)
        assert answer.status == 200
    assert [received.body for received in worker.requests] == [BINARY] * 3


async def test_the_clients_request_id_goes_to_the_worker_and_back(stage: Stage) -> None:
    worker, _, client = await pair(stage)
    for name in ["X-Request-Id", "x-request-id"]:
        with case(name):
            answer = await client.ask("GET", "/", [(name, "abc-123_~!")])
            assert answer.value("x-request-id") == b"abc-123_~!"
            assert worker.requests[-1].values("x-request-id") == [b"abc-123_~!"]


async def test_a_request_id_of_the_workers_own_does_not_come_beside_it(stage: Stage) -> None:
    worker, _, client = await pair(stage)
    worker.next(script(reply(headers=[("X-Request-Id", "of-the-worker")])))
    answer = await client.ask("GET", "/", [("X-Request-Id", "mine"), ("X-Request-Id", "twice")])
    assert answer.values("x-request-id") == [b"mine"]
    assert worker.requests[0].values("x-request-id") == [b"mine"]


async def test_without_a_request_id_each_request_gets_its_own(stage: Stage) -> None:
    worker, _, client = await pair(stage)
    returned = [(await client.ask("GET", "/")).value("x-request-id") for _ in range(3)]
    assert len({*returned}) == 3
    assert all(returned)
    assert [received.values("x-request-id") for received in worker.requests] == [[each] for each in returned]


async def test_a_request_id_that_is_no_safe_token_is_replaced(stage: Stage) -> None:
    worker, _, client = await pair(stage)
    for bad in ["", "x" * 129, "caf\xe9"]:
        with case(bad):
            returned = (await client.ask("GET", "/", [("X-Request-Id", bad)])).value("x-request-id")
            assert returned
            assert returned != bad.encode("latin-1")
            assert worker.requests[-1].values("x-request-id") == [returned]


async def test_errors_of_the_routers_own_carry_the_request_id(stage: Stage) -> None:
    router = await stage.router()
    answer = await router.ask("GET", "/", [("X-Request-Id", "mine")])
    assert answer.json()["error"]["request_id"] == "mine"
    assert answer.value("x-request-id") == b"mine"


async def test_a_request_that_is_no_http_is_told_so_in_json(stage: Stage) -> None:
    worker, router, _ = await pair(stage)
    for garbage in [
        b"garbage\r\n\r\n",
        b"GET / HTTP/1.1\r\nno colon\r\n\r\n",
        b"GET /caf\xc3\xa9 HTTP/1.1\r\nHost: x\r\n\r\n",
    ]:
        with case(garbage):
            client = await stage.client(router)
            await client.send(garbage)
            answer = await client.read()
            assert (answer.status, answer.error_type) == (400, "invalid_request")
            assert worker.requests == []


async def test_garbage_behind_a_request_is_never_answered_in_the_middle_of_its_reply(stage: Stage) -> None:
    gate = asyncio.Event()
    worker, _, client = await pair(stage)
    worker.next(script(head(200, [("Content-Length", "1000")]) + b"x" * 10, gate, b"x" * 990))
    await client.send(request("GET", "/x"))
    await client.read_head()
    assert await client.read_part() == b"x" * 10
    await client.send(b"garbage\r\n\r\n")
    gate.set()
    assert (await client.read_body()).body == b"x" * 990
    assert (await client.read()).status == 400
    assert await client.closed() == b""


async def test_a_request_head_without_end_is_refused(stage: Stage) -> None:
    worker, router, client = await pair(stage)
    line = b"X-Pad: " + b"x" * 1000 + b"\r\n"
    await client.send(b"GET / HTTP/1.1\r\n" + line * 70)
    answer = await client.read()
    assert (answer.status, answer.error_type) == (400, "invalid_request")
    assert worker.requests == []
    assert (await router.ask("GET", "/")).status == 200


async def test_two_lengths_that_differ_are_refused_and_never_reach_a_worker(stage: Stage) -> None:
    """Request smuggling (CWE-444): both sides must see the same end of a request."""
    worker, router, client = await pair(stage)
    for framing in ([("Content-Length", "4"), ("Content-Length", "5")], [("Content-Length", "4"), *CHUNKED]):
        async with await Client.connect(router.url) as other:
            await other.send(request("POST", "/", framing) + b"0\r\n\r\nGET /smuggled HTTP/1.1\r\n\r\n")
            assert (await other.read("POST")).status == 400
    assert worker.requests == []
    assert (await client.ask("GET", "/")).status == 200


async def test_a_hanging_worker_holds_up_no_other_request_of_the_same_router(stage: Stage) -> None:
    worker, router, client = await pair(stage)
    worker.next(script(HANG), script(reply(b"quick")))
    await client.send(request("GET", "/slow"))
    await until(lambda: worker.busy, "the worker holds the slow one")
    assert (await router.ask("GET", "/fast")).body == b"quick"
    client.abort()
