"""Streams whose client waits: it gets the head and heartbeats in its API's own form. The answer that follows is the one
that it would have got, or an error in the stream."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import anthropic
import openai
import pytest

from miles_router.settings.config import MiddlewareSpec
from tests.support.agent_apis import CLIENT
from tests.support.cache_trial import CACHE, Trial, checkpoint
from tests.support.cache_trial import event as text_event
from tests.support.http import Client, CutReply, RawReply, request
from tests.support.scripted_chat import DONE, EVENT_STREAM, chat_events, finish_event, streamed
from tests.support.scripted_worker import (
    LAST_CHUNK,
    RESET,
    Behaviour,
    Received,
    ScriptedWorker,
    chunk,
    chunked_head,
    reply,
    script,
)
from tests.support.session_apis import FIELDS, MESSAGES, RESPONSES
from tests.support.session_trial import CHAT, JSON, SessionTrial, session_trial, simulated_sessions, user
from tests.support.stage import Stage

SOON: Any = {"heartbeat_interval": 0.02}
COMMENT = b": waiting"
HELLO = chat_events([7, 8, 9], ["Hel", "l", "o"])
HELLO[-3] = finish_event("stop")
#: How each API says that a stream goes on.
BEATS = {
    CHAT: COMMENT,
    MESSAGES: b'event: ping\ndata: {"type":"ping"}',
    RESPONSES: b"event: response.in_progress",
}
apis = pytest.mark.parametrize("path", list(BEATS))


@pytest.fixture
async def trial(stage: Stage, worker: ScriptedWorker) -> SessionTrial:
    return await session_trial(stage, worker, **SOON)


def asking(path: str, *, stream: bool = True, most: int = 8) -> dict[str, Any]:
    given, length = FIELDS[path]
    return {"model": "m", given: [user("Hi")] if given == "messages" else "Hi", length: most, "stream": stream}


async def begin(stage: Stage, trial: SessionTrial, session: str, path: str, *headers: tuple[str, str]) -> Client:
    """A client that has sent a streamed turn."""
    client = await stage.client(trial.router)
    body = json.dumps(asking(path)).encode()
    await client.send(request("POST", f"/sessions/{session}{path}", [*JSON, *headers], body))
    return client


async def beats(client: Client, path: str, count: int) -> bytes:
    """The next bytes of a stream, with so many heartbeats."""
    seen = b""
    while seen.count(BEATS[path]) < count:
        seen += await client.read_part()
    return seen


def without_beats(body: bytes, path: str) -> list[bytes]:
    """The events of a stream but for heartbeats, and for what of an event no other answer shares."""
    kept = [event for event in body.split(b"\n\n") if event and not event.startswith(BEATS[path])]
    return [_anonymous(event) for event in kept]


def _anonymous(event: bytes) -> bytes:
    name, _, data = event.rpartition(b"data: ")
    parsed = json.loads(data) if data.startswith(b"{") else {}
    for each in (parsed, parsed.get("response", {}), parsed.get("item", {}), parsed.get("message", {})):
        for unlike in ("id", "item_id", "sequence_number", "created_at"):
            each.pop(unlike, None)
        for item in each.get("output") or ():
            item.pop("id", None)
    return name + (json.dumps(parsed).encode() if parsed else data)


def asked_at(worker: ScriptedWorker) -> list[Received]:
    return [each for each in worker.requests if each.path == CHAT]


def numbers(body: bytes) -> list[int]:
    """The sequence numbers of a response's events."""
    return [json.loads(data)["sequence_number"] for data in _data(body)]


@apis
async def test_a_silent_worker_costs_a_client_neither_its_head_nor_its_answer(
    stage: Stage, worker: ScriptedWorker, trial: SessionTrial, path: str
) -> None:
    worker.always(streamed(*HELLO))
    usual = await trial.ask("POST", f"/sessions/{await trial.create()}{path}", asking(path))
    first, middle, end = asyncio.Event(), asyncio.Event(), asyncio.Event()
    *texts, finish, ids, done = HELLO
    replied = streamed(*texts[:2], middle, *texts[2:], end, finish, ids, done)

    async def answer(visit: Any) -> None:
        await visit.run([first])
        await replied(visit)

    worker.always(answer)
    session = await trial.create()
    client = await begin(stage, trial, session, path)
    head = await client.read_head("POST")
    assert (head.status, head.value("content-type")) == (200, b"text/event-stream; charset=utf-8")
    seen = await beats(client, path, 3)
    for gate in (first, middle, end):
        assert await trial.records(session) == []
        gate.set()
        seen += await beats(client, path, 2) if gate is not end else b""
    seen += (await client.read_body()).body
    assert seen.count(BEATS[path]) >= 6
    assert without_beats(seen, path) == without_beats(usual.body, path)
    if path == RESPONSES:
        assert numbers(seen) == list(range(len(numbers(seen))))
        assert seen.count(b"event: response.created\n") == 1
        said = [json.loads(each) for each in _data(seen)]
        assert len({each["response"]["id"] for each in said if "response" in each}) == 1
    (sample,) = await trial.samples(session)
    assert sample["tokens"] == [1, 2, 3, 7, 8, 9]


@apis
async def test_a_paused_fleet_keeps_its_clients(
    stage: Stage, worker: ScriptedWorker, trial: SessionTrial, path: str
) -> None:
    worker.always(streamed(*HELLO))
    session = await trial.create()
    await trial.ask("POST", "/pause_generation", {})
    client = await begin(stage, trial, session, path)
    assert (await client.read_head("POST")).status == 200
    await beats(client, path, 2)
    assert asked_at(worker) == []
    await trial.ask("POST", "/continue_generation", {})
    await client.read_body()
    assert len(await trial.records(session)) == 1


# Errors that come behind the head


def failed(body: bytes, path: str) -> Any:
    """The error that a stream ended with, in its API's form."""
    last = body.rstrip(b"\n").split(b"\n\n")[-1]
    name, _, data = last.rpartition(b"data: ")
    said = json.loads(data)
    if path == RESPONSES:
        assert name == b"event: response.failed\n"
        assert said["response"]["status"] == "failed"
        assert numbers(body) == list(range(len(numbers(body))))
        return said["response"]["error"]
    assert name == (b"event: error\n" if path == MESSAGES else b"")
    assert path != MESSAGES or said["type"] == "error"
    return said["error"]


async def late(stage: Stage, trial: SessionTrial, worker: ScriptedWorker, path: str, then: Behaviour) -> RawReply:
    """What a client has read whose worker does something once heartbeats were sent."""
    gate = asyncio.Event()

    async def answer(visit: Any) -> None:
        await visit.read_body()
        await visit.run([gate])
        await then(visit)

    worker.always(answer)
    session = await trial.create()
    client = await begin(stage, trial, session, path)
    head = await client.read_head("POST")
    seen = await beats(client, path, 1)
    gate.set()
    try:
        seen += (await client.read_body()).body
    except CutReply as cut:
        seen += cut.reply.body
    assert await trial.records(session) == []
    return RawReply(head.status, head.head, head.headers, seen)


@apis
async def test_a_late_refusal_of_the_engine_is_told_in_the_stream(
    stage: Stage, worker: ScriptedWorker, trial: SessionTrial, path: str
) -> None:
    said = json.dumps({"object": "error", "message": "It is too hot.", "code": 500}).encode()
    told = json.dumps({"error": {"message": "It is too hot.", "type": "BadRequest"}}).encode()
    for body, status in ((said, 500), (told, 400), (b"Bad gateway", 502)):
        seen = await late(stage, trial, worker, path, script(reply(body, status, JSON)))
        if path != CHAT or body is not said:
            assert failed(seen.body, path)["message"] == "It is too hot." or body.startswith(b"Bad")
        assert b"[DONE]" not in seen.body


@apis
async def test_a_late_error_of_the_router_is_told_and_the_connection_broken_off(
    stage: Stage, worker: ScriptedWorker, trial: SessionTrial, path: str
) -> None:
    seen = await late(stage, trial, worker, path, script(RESET))
    assert "closed the connection" in failed(seen.body, path)["message"]
    assert b"[DONE]" not in seen.body


async def test_the_official_clients_read_answers_between_heartbeats(stage: Stage) -> None:
    slow: Any = {"token_latency_s": 0.03, "script": [{"text": "Hello, you."}] * 3}
    async with simulated_sessions(stage, settings={"heartbeat_interval": 0.005}, **slow) as trial:
        address = f"{trial.router.url}/sessions/{await trial.create()}"
        async with (
            openai.AsyncOpenAI(base_url=f"{address}/v1", **CLIENT) as chat,
            anthropic.AsyncAnthropic(base_url=address, **CLIENT) as messages,
        ):
            async with chat.chat.completions.stream(**_unstreamed(CHAT)) as chunks:
                assert (await chunks.get_final_completion()).choices[0].message.content == "Hello, you."
            async with messages.messages.stream(**_unstreamed(MESSAGES)) as events:
                assert await events.get_final_text() == "Hello, you."
            async with chat.responses.stream(**_unstreamed(RESPONSES)) as parts:
                seen = [part async for part in parts]
                assert (await parts.get_final_response()).output_text == "Hello, you."
        assert [part.sequence_number for part in seen] == list(range(len(seen)))
        assert sum(part.type == "response.in_progress" for part in seen) > 2
        assert len(await trial.records(address.rpartition("/")[2])) == 3


def _unstreamed(path: str) -> Any:
    return {name: value for name, value in asking(path, most=99).items() if name != "stream"}


# Repetitions, and the text cache


@apis
async def test_a_repetition_waits_with_heartbeats_and_gets_the_recorded_answer(
    stage: Stage, worker: ScriptedWorker, trial: SessionTrial, path: str
) -> None:
    gate = asyncio.Event()
    *texts, finish, ids, done = HELLO
    worker.always(streamed(texts[0], gate, *texts[1:], finish, ids, done))
    session, turn = await trial.create(), ("X-Turn-Id", "7")
    first = await begin(stage, trial, session, path, turn)
    await first.read_head("POST")
    begun = await beats(first, path, 2)
    second = await begin(stage, trial, session, path, turn)
    await second.read_head("POST")
    waited = b""
    while waited.count(b"\n\n") < 2:
        waited += await second.read_part()
    gate.set()
    bodies = [begun + (await first.read_body()).body, waited + (await second.read_body()).body]
    third = await trial.ask("POST", f"/sessions/{session}{path}", asking(path), [turn])
    events = [[e for e in without_beats(b, path) if not e.startswith(COMMENT)] for b in (*bodies, third.body)]
    assert events[0] == events[1] == events[2]
    assert len(asked_at(worker)) == len(await trial.records(session)) == 1
    if path == RESPONSES:
        assert [numbers(body) for body in (*bodies, third.body)] == [
            list(range(len(numbers(body)))) for body in (*bodies, third.body)
        ]


async def text_stream(stage: Stage, worker: ScriptedWorker) -> tuple[Trial, Client]:
    """A text cache, and a client whose stream waits."""
    middlewares = (MiddlewareSpec(CACHE),)
    trial = Trial(await stage.router(worker, middlewares=middlewares, hf_checkpoint=checkpoint(), **SOON))
    client = await stage.client(trial.router)
    await client.send(request("POST", "/generate", JSON, json.dumps({"text": "Hi", "stream": True}).encode()))
    assert (await client.read_head("POST")).status == 200
    assert (await client.read_part()).startswith(COMMENT)
    return trial, client


async def test_a_stream_of_the_text_cache_waits_with_comments(stage: Stage, worker: ScriptedWorker) -> None:
    gate = asyncio.Event()
    told = [text_event([7, 8], "ab"), text_event([7, 8, 9], "abc", finish=True), DONE]
    worker.always(script(gate, chunked_head(EVENT_STREAM), *map(chunk, told), LAST_CHUNK))
    trial, client = await text_stream(stage, worker)
    gate.set()
    body = (await client.read_body()).body
    assert [json.loads(each)["output_ids"] for each in _data(body)] == [[7, 8], [7, 8, 9]]
    assert (await trial.retrieve(rid="r1"))["tokens"][-3:] == [7, 8, 9]


def _data(body: bytes) -> list[bytes]:
    lines = [line.removeprefix(b"data: ") for line in body.split(b"\n") if line.startswith(b"data: {")]
    assert lines, body
    return lines
