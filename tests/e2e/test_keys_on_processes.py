"""Requests on several processes: what they are about has an owner, and a key is at home in one of them."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import orjson
import pytest

from miles_router.fleet.placement.sessions import NAMES, Affinity
from miles_router.shards.owners import ShardOwners
from miles_router.shards.process_table import ProcessTable
from miles_router.testing import SimulatedWorker
from tests.e2e.test_owned_sessions import TEXTS as LAYER
from tests.support.cache_trial import Trial, checkpoint
from tests.support.fleet import JSON
from tests.support.http import Client, Pairs, RawReply, chunked, request
from tests.support.owned import name_of, several
from tests.support.ports import free_ports
from tests.support.running_router import RunningRouter
from tests.support.scripted_worker import CLOSE, ScriptedWorker, script
from tests.support.session_apis import case
from tests.support.session_trial import user
from tests.support.shard_owners import owners_at
from tests.support.stage import Stage

CHAT = "/v1/chat/completions"
KEYS = [f"key-{number}" for number in range(6)]


async def takers(
    routers: list[RunningRouter], workers: list[ScriptedWorker], path: str, headers: Pairs, body: bytes
) -> set[int]:
    """Which workers take this request, wherever it lands."""
    before = [len(worker.requests) for worker in workers]
    for router in routers:
        assert (await router.ask("POST", path, [*headers, *JSON], body)).status == 200
    return {index for index, worker in enumerate(workers) if len(worker.requests) > before[index]}


def forwarded(router: RunningRouter) -> int:
    owners = router.app.router.owners
    assert isinstance(owners, ShardOwners)
    (numbers,) = owners.numbers()
    return int(numbers.requests)  # type: ignore[attr-defined]


async def test_all_requests_of_a_key_go_to_one_worker(stage: Stage, tmp_path: Path) -> None:
    workers = [await stage.worker() for _ in range(3)]
    routers = await several(stage, tmp_path, 3, *workers, middlewares=())
    named = [("/generate", "X-SMG-Routing-Key"), (CHAT, "X-Session-Id"), (CHAT, "X-Claude-Code-Session-Id")]
    asked: list[tuple[str, Pairs, dict[str, Any]]] = [
        *((path, [(name, f"{name} {key}")], {"text": "Hi"}) for path, name in named for key in KEYS),
        *(
            (CHAT, [], {"model": "m", "messages": [user("Hi" * 50_000)], field: f"{field} {key}"})
            for field in ("prompt_cache_key", "session_id")
            for key in KEYS
        ),
    ]
    for number, (path, headers, fields) in enumerate(asked, 1):
        await routers[0].ask("POST", "/x")  # so that its turns are others
        assert len(await takers(routers, workers, path, headers, orjson.dumps(fields))) == 1
        assert sum(map(forwarded, routers)) == 2 * number, "each but where it is at home"
    await takers(routers, workers, CHAT, [], b'{"text": "Hi"}')
    assert sum(map(forwarded, routers)) == 2 * len(asked), "what has no key stays"


async def test_nobody_waits_for_the_home_of_a_key_that_is_being_started_again(stage: Stage, tmp_path: Path) -> None:
    worker, held = await stage.worker(), await stage.worker()
    table = ProcessTable(tmp_path, 2)
    owners = owners_at(0, 2, tmp_path, ["", held.url], Affinity(NAMES), lambda other: table.process_id(other) != 0)
    router = await stage.router(worker, owners=owners)
    for there in (False, True):
        if there:
            table.record_start(1)
        assert (await router.ask("POST", CHAT, [("X-Session-Id", name_of(1, 2)), *JSON], b"{}")).status == 200
        assert (len(worker.requests), len(held.requests)) == (1, int(there))


async def test_a_key_counts_only_where_something_generates(stage: Stage, tmp_path: Path) -> None:
    workers = [await stage.worker() for _ in range(2)]
    routers = await several(stage, tmp_path, 2, *workers, middlewares=())
    for key in KEYS:
        for router in routers:
            assert (await router.ask("POST", "/x", [("X-Session-Id", key)])).status == 200
            assert (await router.ask("GET", "/router/info", [("X-Session-Id", key)])).status == 200
    assert not any(map(forwarded, routers))


async def test_where_the_home_is_not_there_the_request_is_answered_where_it_is(stage: Stage, tmp_path: Path) -> None:
    worker, gone = await stage.worker(), f"http://127.0.0.1:{free_ports(1)[0]}"
    owners = owners_at(0, 2, tmp_path, ["", gone], Affinity(NAMES))
    router = await stage.router(worker, owners=owners)
    key, body = name_of(1, 2), b'{"text": "Hi"}'
    for path in ("/generate", CHAT):
        assert (await router.ask("POST", path, [("X-Session-Id", key), *JSON], body)).status == 200
    assert [request.body for request in worker.requests] == [body, body]


@pytest.mark.parametrize("headers", [[], [("X-Turn-Id", "1")]], ids=["plain", "with a turn's id"])
async def test_what_a_home_that_is_lost_may_have_done_is_not_done_again(
    stage: Stage, tmp_path: Path, headers: Pairs
) -> None:
    """No session knows the turn, so its id makes it no repeat."""
    worker, lost = await stage.worker(), await stage.worker()
    lost.always(script(CLOSE))
    owners = owners_at(0, 2, tmp_path, ["", lost.url], Affinity(NAMES))
    router = await stage.router(worker, owners=owners)
    for path in ("/generate", CHAT):
        answer = await router.ask("POST", path, [("X-Session-Id", name_of(1, 2)), *headers, *JSON], b"{}")
        assert (answer.status, answer.error_type) == (502, "upstream_error")
    assert (len(lost.requests), len(worker.requests)) == (2, 0)


async def test_a_new_text_goes_where_its_key_is_at_home_and_one_that_goes_on_to_its_holder(
    stage: Stage, tmp_path: Path
) -> None:
    async with SimulatedWorker(tokenizer=checkpoint()) as worker:
        routers = await several(stage, tmp_path, 2, worker.url, middlewares=LAYER, hf_checkpoint=checkpoint())
        trials = [Trial(router, worker) for router in routers]
        keys = [name_of(index, 2) for index in (0, 1)]

        async def ask(landing: int, key: str, **fields: object) -> dict[str, object]:
            headers = [("X-Session-Id", key), *JSON]
            answer = await routers[landing].ask("POST", "/generate", headers, orjson.dumps(fields))
            assert answer.status == 200
            return dict(answer.json())

        first = await ask(0, keys[1], text="A new text. ")
        assert [trial.statistics()["entries"] for trial in trials] == [0, 1]
        await ask(1, keys[0], text=f"A new text. {first['text']} And then?")
        assert [trial.statistics()["entries"] for trial in trials] == [0, 2], "its holder, whatever the key"
        await ask(1, keys[0], input_ids=[1, 2, 3], image_data="data:image/png;base64,AA==")
        assert [forwarded(router) for router in routers] == [1, 1], "what is not recorded goes home, too"


# Requests that their owner answers


def told(reply: RawReply) -> dict[str, Any]:
    assert reply.status == 200, reply.body
    found: dict[str, Any] = json.loads(reply.value("x-told") or b"")
    return found


async def owners(routers: list[RunningRouter]) -> list[int]:
    """What each says of itself."""
    count = len(routers)
    return [
        told(await each.ask("GET", f"/owned/{name_of(i, count, 'own')}"))["owner"] for i, each in enumerate(routers)
    ]


async def test_a_request_is_answered_by_its_owner_wherever_it_lands(stage: Stage, tmp_path: Path) -> None:
    routers = await several(stage, tmp_path, 3)
    known = await owners(routers)
    for index in range(3):
        name = name_of(index, 3)
        replies = [told(await router.ask("POST", f"/owned/{name}", body=b"12345")) for router in routers]
        assert [(each["owner"], each["times"], each["length"]) for each in replies] == [
            (known[index], times, 5) for times in (1, 2, 3)
        ]


BY = ("head", "body")


async def test_a_body_arrives_whole_however_it_is_framed(stage: Stage, tmp_path: Path) -> None:
    first, _ = await several(stage, tmp_path, 2)
    client = await stage.client(first)
    for by, framing, size in itertools.product(BY, ("length", "chunked"), (10, 20_000, 1_000_000)):
        with case(by, framing, size):
            name = name_of(1, 2, f"{by}-{framing}-{size}-")
            body = json.dumps({"name": name, "pad": "x" * size}).encode()
            target = f"/owned/{name}" if by == "head" else "/owned"
            for times in (1, 2):
                if framing == "length":
                    reply = await client.ask("POST", target, body=body)
                else:
                    parts = [body[i : i + 70_000] for i in range(0, len(body), 70_000)]
                    reply = await client.ask("POST", target, [("Transfer-Encoding", "chunked")], chunked(*parts))
                assert (told(reply)["length"], told(reply)["times"]) == (len(body), times)
                assert told(reply)["head"] == body[:40].decode()


async def test_pipelined_requests_of_several_owners_are_answered_in_order_and_once(
    stage: Stage, tmp_path: Path
) -> None:
    routers = await several(stage, tmp_path, 3)
    known = await owners(routers)
    wanted = [name_of(index, 3) for index in range(3)]
    order = [0, 0, 1, 2, 2, 1, 0, 2, 1, 1, 1, 0] * 4
    sent = bytearray()
    for place, index in enumerate(order):
        body = json.dumps({"name": wanted[index], "place": place, "pad": "x" * (place * 97 % 3000)}).encode()
        if place % 3 == 0:
            sent += request("POST", f"/owned/{wanted[index]}", body=body)
        elif place % 3 == 1:
            sent += request("POST", "/owned", [("Transfer-Encoding", "chunked")], chunked(body[:5], body[5:]))
        else:
            sent += request("POST", "/owned", body=body)
    async with await Client.connect(routers[1].url) as client:
        await client.send(bytes(sent))
        replies = [told(await client.read("POST")) for _ in order]
    assert [each["owner"] for each in replies] == [known[index] for index in order]
    assert [each["times"] for each in replies] == [order[: at + 1].count(index) for at, index in enumerate(order)]


@pytest.mark.parametrize("by", BY)
async def test_a_client_that_expects_100_continue_gets_it_once(stage: Stage, tmp_path: Path, by: str) -> None:
    first, _ = await several(stage, tmp_path, 2)
    name = name_of(1, 2)
    body, target = json.dumps({"name": name}).encode(), f"/owned/{name}" if by == "head" else "/owned"
    expects = [("Expect", "100-continue"), ("Content-Length", str(len(body)))]
    client = await stage.client(first)
    await client.send(request("POST", target, expects))
    assert await client.read_raw() == b"HTTP/1.1 100 Continue\r\n\r\n"
    await client.send(body)
    reply = await client.read("POST")
    assert (told(reply)["length"], reply.informational) == (len(body), [])
    for byte in b"\r\n" + request("POST", target, [("Transfer-Encoding", "chunked")]) + chunked(body[:3], body[3:]):
        await client.send(bytes([byte]))
    assert told(await client.read("POST"))["head"] == body.decode()


@pytest.mark.parametrize("by", BY)
async def test_a_client_that_has_closed_its_own_side_is_answered(stage: Stage, tmp_path: Path, by: str) -> None:
    first, _ = await several(stage, tmp_path, 2)
    ours, theirs = name_of(0, 2), name_of(1, 2)
    async with await Client.connect(first.url) as client:
        body = json.dumps({"name": theirs}).encode()
        last = request("POST", "/owned", body=body) if by == "body" else request("GET", f"/owned/{theirs}")
        await client.send(request("GET", f"/owned/{ours}") + last)
        client.half_close()
        owner = told(await client.read())["owner"]
        assert told(await client.read())["owner"] != owner
        await client.closed()


async def test_requests_that_belong_to_nobody_stay_where_they_land(stage: Stage, tmp_path: Path) -> None:
    worker = await stage.worker()
    first, second = await several(stage, tmp_path, 2, worker)
    async with await Client.connect(first.url) as client:
        for body in (b"{}", b"x" * 300_000):
            assert (await client.ask("POST", "/generate", body=body)).status == 200
    assert [sum(router.app.router.metrics.requests.values()) for router in (first, second)] == [2, 0]


async def test_a_path_that_is_escaped_has_the_owner_of_what_it_means(stage: Stage, tmp_path: Path) -> None:
    first, second = await several(stage, tmp_path, 2)
    name = name_of(1, 2)
    escaped = "".join(f"%{ord(each):02x}" for each in name)
    assert told(await first.ask("GET", f"/owned/{escaped}"))["times"] == 1
    assert told(await second.ask("GET", f"/owned/{name}"))["times"] == 2
    assert (await first.ask("GET", f"/owned/{name}%2f")).error_type == "invalid_request"


async def test_a_slow_client_reads_one_process_to_the_end_before_the_next_says_anything(
    stage: Stage, tmp_path: Path
) -> None:
    first, _ = await several(stage, tmp_path, 2)
    ours, theirs, size = name_of(0, 2), name_of(1, 2), 8 << 20
    client = await stage.client(first, receive_buffer=4096)
    for _ in range(2):
        await client.send(request("GET", f"/owned/{ours}?bytes={size}") + request("GET", f"/owned/{theirs}"))
        await client.send(request("GET", f"/owned/{ours}?bytes={size}") + request("GET", f"/owned/{ours}"))
        for name in (ours, theirs, ours, ours):
            reply = await client.read()
            assert reply.body == (b"." * size if len(reply.body) > 1 else b"")
            assert told(reply)["times"] > 0, name
