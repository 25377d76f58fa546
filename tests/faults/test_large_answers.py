"""Answers without an end, and such as are larger than `--max-answer-bytes`: no layer that reads them grows with them.
What only looks on lets them pass, counted; what would have to change or record them gives an error."""

from __future__ import annotations

import itertools
import json
import tracemalloc
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from miles_router.settings.config import MiddlewareSpec
from tests.support.cache_trial import CACHE, checkpoint
from tests.support.experts_trial import EXPERTS, SHAPE
from tests.support.http import CutReply, request
from tests.support.metrics import metric
from tests.support.running_router import RunningRouter
from tests.support.scripted_chat import able
from tests.support.scripted_worker import Behaviour, ScriptedWorker, Visit, chunk, chunked_head
from tests.support.session_trial import CHAT, SESSIONS
from tests.support.stage import Stage

BOUND = 100_000
JSON, EVENTS = "application/json", "text/event-stream"
GENERATE = "/generate"
TEXT: dict[str, Any] = {"text": "Hi", "sampling_params": {"max_new_tokens": 9}}
TURN: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "Hi"}]}
IN_SESSION = f"/sessions/s{CHAT}"


def endless(kind: str, pieces: Callable[[], Iterator[bytes]]) -> Behaviour:
    """A reply that goes on until the router leaves."""

    async def run(visit: Visit) -> None:
        await visit.read_body()
        await visit.write(chunked_head([("Content-Type", kind)]))
        for piece in pieces():
            await visit.write(chunk(piece))

    return run


def text() -> Iterator[bytes]:
    yield b'{"text": "'
    yield from itertools.repeat(b"x" * 10_000)


def one_event() -> Iterator[bytes]:
    yield b'data: {"text": "'
    yield from itertools.repeat(b"x" * 10_000)


def event(content: Any) -> bytes:
    return b"data: %b\n\n" % json.dumps(content).encode()


def new_tokens() -> Iterator[bytes]:
    """A `/generate` that says with each event only what is new."""
    for count in itertools.count(1):
        ids = [5] * 50
        meta = {
            "id": "r",
            "finish_reason": None,
            "completion_tokens": 50 * count,
            "output_token_logprobs": [[-1.0, 5, None]] * 50,
            "weight_version": "1",
        }
        yield event({"text": "a" * 50, "output_ids": ids, "meta_info": meta})


def chunks() -> Iterator[bytes]:
    choice = {"index": 0, "delta": {"content": "a" * 500}, "logprobs": {"content": []}, "finish_reason": None}
    yield from itertools.repeat(event({"id": "c", "choices": [choice]}))


def comments() -> Iterator[bytes]:
    yield event({"id": "c", "choices": [{"index": 0, "delta": {"content": "a"}, "finish_reason": None}]})
    yield from itertools.repeat(b": still here\n\n" * 100)


def rows() -> Iterator[bytes]:
    yield b'{"text": "a", "output_ids": [5], "meta_info": {"id": "r", "routed_experts": "'
    yield from itertools.repeat(b"AAAA" * 4000)


def many_rows() -> Iterator[bytes]:
    answer = {"text": "a", "output_ids": [5], "meta_info": {"id": "r", "finish_reason": None, "routed_experts": ""}}
    yield from itertools.repeat(event(answer) * 100)


async def router_of(stage: Stage, worker: ScriptedWorker, *layers: str, **settings: Any) -> RunningRouter:
    options = {EXPERTS: {"moe_shape": SHAPE}}
    specs = tuple(MiddlewareSpec(layer, options.get(layer, {})) for layer in layers)
    given = {"hf_checkpoint": checkpoint(), "max_answer_bytes": BOUND, "max_retries": 0, **settings}
    return await stage.router(able(worker), middlewares=specs, **given)


async def unread(router: RunningRouter, layer: str) -> int:
    return int(await metric(router, "miles_router_unread_replies_total", layer=layer, reason="too_large"))


async def read_some(stage: Stage, router: RunningRouter, path: str, body: Any, nbytes: int) -> None:
    """Read so many bytes of a reply that goes on, and leave."""
    async with await stage.client(router) as client:
        await client.send(request("POST", path, [("Content-Type", JSON)], json.dumps(body).encode()))
        await client.read_head()
        assert client.reply.status == 200
        while nbytes > 0:
            part = await client.read_part()
            assert part
            nbytes -= len(part)


@pytest.mark.parametrize(
    ("layers", "settings", "counted"),
    [
        ((CACHE,), {}, "radix_tree"),
        ((), {"partial_rollout": "resume"}, "partial_rollouts"),
    ],
    ids=["text cache", "partial rollouts"],
)
@pytest.mark.parametrize(("kind", "pieces"), [(JSON, text), (EVENTS, one_event), (EVENTS, new_tokens)])
async def test_what_only_looks_on_lets_it_pass_and_counts(
    stage: Stage,
    layers: tuple[str, ...],
    settings: dict[str, Any],
    counted: str,
    kind: str,
    pieces: Callable[[], Iterator[bytes]],
) -> None:
    worker = (await stage.worker()).always(endless(kind, pieces))
    router = await router_of(stage, worker, *layers, **settings)
    await read_some(stage, router, GENERATE, {**TEXT, "stream": kind == EVENTS}, 3 * BOUND)
    assert await unread(router, counted) == 1
    await stage.nothing_under_way()


@pytest.mark.parametrize(
    ("layer", "pieces", "fields"),
    [(CACHE, text, {}), (EXPERTS, rows, {"return_routed_experts": True})],
    ids=["text", "rows"],
)
async def test_its_bytes_are_not_held(
    stage: Stage, layer: str, pieces: Callable[[], Iterator[bytes]], fields: dict[str, Any]
) -> None:
    worker = (await stage.worker()).always(endless(JSON, pieces))
    router = await router_of(stage, worker, layer)
    tracemalloc.start()
    try:
        await read_some(stage, router, GENERATE, {**TEXT, **fields}, 200 * BOUND)
        assert tracemalloc.get_traced_memory()[1] < 50 * BOUND
    finally:
        tracemalloc.stop()


async def test_an_answer_to_a_turn_is_refused_and_no_turn_recorded(stage: Stage) -> None:
    worker = (await stage.worker()).always(endless(JSON, text))
    router = await router_of(stage, worker, SESSIONS)
    await router.ask("POST", "/sessions", [], b'{"session_id": "s"}')
    answer = await router.ask("POST", IN_SESSION, [("Content-Type", JSON)], json.dumps(TURN).encode())
    assert (answer.status, answer.error_type) == (502, "upstream_error")
    assert "--max-answer-bytes" in answer.json()["error"]["message"]
    assert await unread(router, "openai_sessions") == 1
    assert (await router.ask("GET", "/sessions/s")).json()["records"] == []


@pytest.mark.parametrize("pieces", [one_event, chunks, comments])
async def test_a_turns_stream_is_broken_off_and_no_turn_recorded(
    stage: Stage, pieces: Callable[[], Iterator[bytes]]
) -> None:
    worker = (await stage.worker()).always(endless(EVENTS, pieces))
    router = await router_of(stage, worker, SESSIONS)
    await router.ask("POST", "/sessions", [], b'{"session_id": "s"}')
    headers = [("Content-Type", JSON), ("X-Turn-Id", "t")]
    with pytest.raises(CutReply):
        await router.ask("POST", IN_SESSION, headers, json.dumps({**TURN, "stream": True}).encode())
    assert await unread(router, "openai_sessions") == 1
    assert (await router.ask("GET", "/sessions/s")).json()["records"] == []


@pytest.mark.parametrize(("kind", "pieces"), [(JSON, text), (EVENTS, one_event), (EVENTS, many_rows)])
@pytest.mark.parametrize("asks", [True, False], ids=["verbatim", "stripped"])
async def test_an_answer_whose_rows_are_taken_out_is_refused_or_broken_off(
    stage: Stage, kind: str, pieces: Callable[[], Iterator[bytes]], asks: bool
) -> None:
    worker = (await stage.worker()).always(endless(kind, pieces))
    router = await router_of(stage, worker, EXPERTS)
    body = json.dumps({**TEXT, "stream": kind == EVENTS, "return_routed_experts": asks}).encode()
    try:
        answer = await router.ask("POST", GENERATE, [("Content-Type", JSON)], body)
        assert (answer.status, answer.error_type) == (502, "upstream_error")
    except CutReply:
        assert kind == EVENTS
    assert await unread(router, "routed_experts") == (pieces is not many_rows)
