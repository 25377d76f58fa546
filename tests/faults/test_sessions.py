"""Sessions and what goes wrong: nothing half is ever recorded, nothing stays under way, and the next turn works."""

from __future__ import annotations

import asyncio
import gzip
import itertools
import json
from typing import Any

import pytest

from tests.support.http import Client, CutReply, request
from tests.support.scripted_chat import (
    DONE,
    EVENT_STREAM,
    JSON,
    chat_answer,
    chat_events,
    chat_reply,
    meta_of,
    streamed,
)
from tests.support.scripted_worker import (
    CLOSE,
    HANG,
    LAST_CHUNK,
    RESET,
    Behaviour,
    ScriptedWorker,
    Step,
    chunk,
    chunked_head,
    reply,
    script,
)
from tests.support.session_apis import case
from tests.support.session_trial import (
    CHAT,
    SessionTrial,
    message_of,
    session_trial,
    simulated_sessions,
    text_of,
    user,
)
from tests.support.stage import Stage
from tests.support.under_way import under_way
from tests.support.waiting import until

HI = [user("Hi")]
HELLO = chat_events([7, 8], ["Hel", "lo"])
GOOD = script(chat_reply([7, 8], "Hello"))
SAME = [("X-Turn-Id", "t1")]


async def nothing_is_held(trial: SessionTrial, session: str, *, untraced: bool = False) -> None:
    found = await trial.read(session)
    assert (found["records"], found["metadata"]["in_flight"]) == ([], 0)
    if untraced:
        answer = await trial.ask("POST", f"/sessions/{session}/samples", {})
        assert (answer.status, answer.error_type) == (422, "invalid_sample")
    else:
        assert await trial.samples(session) == []


async def the_next_turn_works(trial: SessionTrial, session: str) -> None:
    assert message_of(await trial.chat(session, HI))["content"] == "Hello"
    assert len(await trial.records(session)) == 1


# Workers that are lost


async def test_a_worker_lost_inside_a_stream_breaks_the_agent_s_connection_off(
    worker: ScriptedWorker, trial: SessionTrial
) -> None:
    """Wherever it is lost, there is no turn."""
    for end, after in itertools.product((RESET, CLOSE), range(len(HELLO))):
        with case(end, after):
            worker.next(script(chunked_head(EVENT_STREAM), *map(chunk, HELLO[:after]), end)).always(GOOD)
            session = await trial.create()
            with pytest.raises(CutReply) as caught:
                await trial.turn(session, HI, SAME, stream=True)
            events = caught.value.reply.body.count(b"data: ")
            assert (caught.value.reply.status, events) == (200, min(after, 3)), "ids are not shown"
            await nothing_is_held(trial, session)
            again = await trial.turn(session, HI, SAME)
            assert message_of(again.json())["content"] == "Hello", "its turn id is free again"
            assert len(await trial.records(session)) == 1


# Workers that answer nonsense


def odd(**choice: Any) -> bytes:
    return chat_reply([7, 8], **choice)


def with_meta(**fields: Any) -> bytes:
    return odd(meta_info=meta_of([7, 8], **fields))


def as_json(answer: object) -> bytes:
    return reply(json.dumps(answer).encode(), headers=JSON)


GARBAGE = {
    "no JSON": reply(b"garbage", headers=JSON),
    "empty": reply(b"", headers=JSON),
    "a list": as_json([1]),
    "null": as_json(None),
    "no choices": as_json({"choices": []}),
    "odd choices": as_json({"choices": "many"}),
    "odd choice": as_json({"choices": [7]}),
    "no message": as_json({"choices": [{"index": 0, "finish_reason": "stop"}]}),
    "odd message": odd(message="text"),
    "no message at all": odd(message=None),
    "odd tool calls": odd(message={"role": "assistant", "content": "", "tool_calls": "many"}),
    "a tool call of nothing": odd(message={"role": "assistant", "content": "", "tool_calls": [{"id": "call_1"}]}),
    "a tool without a name": odd(message={"role": "assistant", "tool_calls": [{"function": {"name": 7}}]}),
    "no finish reason": odd(finish_reason=None),
    "no meta": odd(meta_info=None),
    "odd meta": odd(meta_info=[1]),
    "no logprobs": with_meta(output_token_logprobs=None),
    "fewer logprobs": with_meta(completion_tokens=3),
    "odd logprobs": with_meta(output_token_logprobs=[[-0.5], [-0.5]]),
    "a positive logprob": with_meta(output_token_logprobs=[[0.5, 7, None], [-0.5, 8, None]]),
    "a logprob that is none": with_meta(output_token_logprobs=[["x", 7, None], [-0.5, 8, None]]),
    "a null logprob": with_meta(output_token_logprobs=[[None, 7, None], [-0.5, 8, None]]),
    "a negative id": with_meta(output_token_logprobs=[[-0.5, -7, None], [-0.5, 8, None]]),
    "a null id": with_meta(output_token_logprobs=[[-0.5, None, None], [-0.5, 8, None]]),
    "versions with a gap": with_meta(
        weight_versions=[{"version": "1", "start": 0, "end": 1}, {"version": "2", "start": 2, "end": 2}]
    ),
    "too few versions": with_meta(weight_versions=[{"version": "1", "start": 0, "end": 1}]),
    "too many versions": with_meta(weight_versions=[{"version": "1", "start": 0, "end": 3}]),
    "odd versions": with_meta(weight_versions=[{"version": "1"}]),
    "no prompt": odd(prompt_token_ids=None),
    "an empty prompt": odd(prompt_token_ids=[]),
    "an odd prompt": odd(prompt_token_ids=["a"]),
    "a negative prompt": odd(prompt_token_ids=[-1]),
    "no content type": reply(json.dumps(chat_answer([7, 8])).encode()),
    "plain text": reply(b"hello", headers=[("Content-Type", "text/plain")]),
    "encoded": reply(b"\x1f\x8b", headers=[*JSON, ("Content-Encoding", "gzip")]),
}
LOST: dict[str, tuple[Step, ...]] = {
    "reset inside": (chat_reply([7, 8])[:-20], RESET),
    "closed inside": (chat_reply([7, 8])[:-20], CLOSE),
    "no HTTP": (b"\x16\x03\x01 no http\r\n\r\n", CLOSE),
}


async def test_an_answer_that_cannot_be_recorded_exactly_is_not_given_either(
    worker: ScriptedWorker, trial: SessionTrial
) -> None:
    for kind, steps in {**{kind: (garbage,) for kind, garbage in GARBAGE.items()}, **LOST}.items():
        with case(kind):
            worker.next(script(*steps)).always(GOOD)
            session = await trial.create()
            answer = await trial.turn(session, HI)
            assert (answer.status, answer.error_type) == (502, "upstream_error")
            assert answer.json()["error"]["message"]
            await nothing_is_held(trial, session)
            await the_next_turn_works(trial, session)


async def test_one_bad_choice_of_several_spoils_them_all(worker: ScriptedWorker, trial: SessionTrial) -> None:
    good = chat_answer([7, 8])
    bad = chat_answer([7, 8], index=1, meta_info=meta_of([7, 8], completion_tokens=5))
    worker.next(script(as_json({**good, "choices": good["choices"] + bad["choices"]}))).always(GOOD)
    session = await trial.create()
    answer = await trial.turn(session, HI, n=2)
    assert (answer.status, answer.error_type) == (502, "upstream_error")
    await nothing_is_held(trial, session)
    await the_next_turn_works(trial, session)


async def test_an_engine_that_was_given_other_ids_than_it_was_sent_is_found_out(
    worker: ScriptedWorker, trial: SessionTrial
) -> None:
    worker.next(script(chat_reply([7, 8], "Hello")), script(chat_reply([9], prompt_token_ids=[1, 2, 3])))
    session = await trial.create()
    message = message_of(await trial.chat(session, HI))
    answer = await trial.turn(session, [*HI, message, user("Go on")])
    assert (answer.status, answer.error_type) == (502, "upstream_error")
    assert len(await trial.records(session)) == 1


NO_STREAMS = {
    "json": script(reply(b'{"error": "odd"}', headers=JSON)),
    "text": script(reply(b"hello", headers=[("Content-Type", "text/plain")])),
    "compressed": script(
        chunked_head([*EVENT_STREAM, ("Content-Encoding", "gzip")]), chunk(gzip.compress(b"".join(HELLO))), LAST_CHUNK
    ),
}


async def test_an_answer_that_is_no_stream_is_no_answer_to_a_stream(
    worker: ScriptedWorker, trial: SessionTrial
) -> None:
    for kind, answer in NO_STREAMS.items():
        with case(kind):
            worker.next(answer).always(GOOD)
            session = await trial.create()
            got = await trial.turn(session, HI, stream=True)
            assert (got.status, got.error_type) == (502, "upstream_error")
            await nothing_is_held(trial, session)
            await the_next_turn_works(trial, session)


@pytest.mark.parametrize("stream", [False, True])
async def test_an_answer_comes_in_no_encoding_that_only_the_agent_could_read(
    worker: ScriptedWorker, trial: SessionTrial, stream: bool
) -> None:
    worker.always(streamed(*HELLO) if stream else GOOD)
    session = await trial.create()
    await trial.turn(session, HI, [("Accept-Encoding", "gzip, br")], stream=stream)
    assert worker.requests[-1].values("accept-encoding") == []
    assert len(await trial.records(session)) == 1


async def test_a_turn_that_no_worker_can_take_is_no_turn(stage: Stage) -> None:
    trial = await session_trial(stage)
    session = await trial.create()
    for stream in (False, True):
        answer = await trial.turn(session, HI, SAME, stream=stream)
        assert (answer.status, answer.error_type) == (503, "no_worker_available")
    await nothing_is_held(trial, session)


def nested(where: str, levels: int, *, stream: bool) -> Behaviour:
    """An answer with something nested so deep in its message, in its choice, or beside them."""
    deep = b"[" * levels + b"]" * levels
    if stream:
        first, event, *rest = HELLO
        name = {"message": b'"content": "Hel"', "choice": b'"finish_reason": null', "answer": b'"created": 1'}[where]
        return streamed(first, event.replace(name, name + b', "odd": ' + deep), *rest)
    answer = chat_answer([7, 8], "Hello")
    choice = answer["choices"][0]
    {"message": choice["message"], "choice": choice, "answer": answer}[where]["odd"] = "here"
    return script(reply(json.dumps(answer).encode().replace(b'"here"', deep), headers=JSON))


async def test_an_answer_that_is_nested_too_deep_is_no_turn_and_spoils_none(
    worker: ScriptedWorker, trial: SessionTrial
) -> None:
    places = (("message", 205), ("message", 253), ("choice", 300), ("answer", 300), ("message", 2000))
    for (where, levels), stream in itertools.product(places, (False, True)):
        with case(where, levels, stream):
            worker.next(nested(where, levels, stream=stream)).always(GOOD)
            session = await trial.create()
            answer = await trial.turn(session, HI, stream=stream)
            if stream:
                assert (answer.status, answer.body[-len(DONE) :]) == (200, DONE), "what was on its way already passes"
                assert len((await trial.read(session))["metadata"]["untraced"]) == 1
            else:
                assert (answer.status, answer.error_type) == (502, "upstream_error")
            await nothing_is_held(trial, session, untraced=stream)
            await the_next_turn_works(trial, session)


async def test_an_answer_that_is_nested_deep_is_recorded_and_read(worker: ScriptedWorker, trial: SessionTrial) -> None:
    for where, stream in itertools.product(("message", "choice", "answer"), (False, True)):
        with case(where, stream):
            worker.next(nested(where, 190, stream=stream))
            session = await trial.create()
            assert (await trial.turn(session, HI, stream=stream)).status == 200
            assert len(await trial.records(session)) == len(await trial.samples(session)) == 1


# Clients that leave


def as_sent(**fields: Any) -> bytes:
    """The body of `trial.turn(session, HI, **fields)`."""
    return json.dumps({"model": "m", "max_tokens": 8, "messages": HI, **fields}).encode()


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_leaves_before_the_answer_leaves_no_turn(
    stage: Stage, worker: ScriptedWorker, trial: SessionTrial, stream: bool
) -> None:
    worker.next(script(HANG)).always(GOOD)
    session = await trial.create()
    client = await stage.client(trial.router)
    body = json.dumps({"model": "m", "messages": HI, "stream": stream}).encode()
    await client.send(request("POST", f"/sessions/{session}{CHAT}", [*JSON, *SAME], body))
    await until(lambda: worker.requests, "the turn is at the worker")
    client.abort()
    await stage.nothing_under_way()
    await nothing_is_held(trial, session)
    assert (await trial.turn(session, HI, SAME)).status == 200, "its turn id is free again"
    assert len(await trial.records(session)) == 1


async def test_a_client_that_leaves_inside_a_stream_leaves_no_turn_and_frees_the_engine(stage: Stage) -> None:
    async with simulated_sessions(stage, token_latency_s=0.01) as trial:
        session = await trial.create()
        client = await stage.client(trial.router)
        asked = {"model": "m", "messages": HI, "stream": True, "max_tokens": 4000, "ignore_eos": True}
        await client.send(request("POST", f"/sessions/{session}{CHAT}", JSON, json.dumps(asked).encode()))
        await client.read_head("POST")
        for _ in range(3):
            await client.read_part()
        client.abort()
        await until(lambda: not trial.worker.running, "the engine is free")
        await stage.nothing_under_way()
        await nothing_is_held(trial, session)
        assert text_of(await trial.stream(session, HI))
        assert await trial.reasons(session) == [None]


async def test_client_leaving_a_repeated_turn_takes_nothing_from_the_other(
    stage: Stage, worker: ScriptedWorker, trial: SessionTrial
) -> None:
    worker.next(script(HANG)).always(GOOD)
    session = await trial.create()
    client = await stage.client(trial.router)
    await client.send(request("POST", f"/sessions/{session}{CHAT}", [*JSON, *SAME], as_sent()))
    await until(lambda: worker.requests, "the turn is at the worker")
    async with under_way(trial.turn(session, HI, SAME)) as waiting:
        while (await trial.read(session))["metadata"]["in_flight"] < 2:
            pass
        client.abort()
        assert (await waiting).status == 200
    assert len(await trial.records(session)) == 1


async def test_client_leaving_while_it_waits_for_a_repeated_turn_leaves_nothing(
    stage: Stage, worker: ScriptedWorker, trial: SessionTrial
) -> None:
    answer = asyncio.Event()
    worker.always(script(answer, chat_reply([7, 8], "Hello")))
    session = await trial.create()
    async with under_way(trial.turn(session, HI, SAME)) as first:
        await until(lambda: worker.requests, "the turn is at the worker")
        client = await stage.client(trial.router)
        await client.send(request("POST", f"/sessions/{session}{CHAT}", [*JSON, *SAME], as_sent()))
        while (await trial.read(session))["metadata"]["in_flight"] < 2:
            pass
        client.abort()
        await until(lambda: trial.router.app.router.metrics.client_disconnects, "its request has ended")
        assert (await trial.read(session))["metadata"]["in_flight"] == 1
        answer.set()
        assert (await first).status == 200


async def read_to_the_end(client: Client) -> bytes:
    """The events of a stream whose connection stays."""
    await client.read_head("POST")
    seen = b""
    while b"[DONE]" not in seen:
        seen += await client.read_part()
    return seen


async def test_a_client_that_reads_the_end_and_leaves_at_once_has_had_its_turn(
    stage: Stage, worker: ScriptedWorker, trial: SessionTrial
) -> None:
    gate = asyncio.Event()
    worker.next(streamed(*HELLO, gate)).always(GOOD)
    session = await trial.create()
    client = await stage.client(trial.router)
    await client.send(request("POST", f"/sessions/{session}{CHAT}", [*JSON, *SAME], as_sent(stream=True)))
    seen = await read_to_the_end(client)
    client.abort()
    await stage.nothing_under_way()
    assert len(await trial.records(session)) == 1
    assert (await trial.turn(session, HI, SAME, stream=True)).body == seen, "and may read it again"
    assert [asked.path for asked in worker.requests if asked.path != "/abort_request"] == [CHAT], "not asked twice"


async def test_a_worker_that_lingers_behind_the_end_is_not_told_to_abort(
    stage: Stage, worker: ScriptedWorker, trial: SessionTrial, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("miles_router.asgi.watch.WATCH_DELAY", 0.0)
    monkeypatch.setattr("miles_router.asgi.watch._patience", None)
    gate = asyncio.Event()
    worker.next(streamed(*HELLO, gate)).always(GOOD)
    session, other = await trial.create(), await trial.create()
    client = await stage.client(trial.router)
    await client.send(request("POST", f"/sessions/{session}{CHAT}", JSON, as_sent(stream=True)))
    await read_to_the_end(client)
    assert (await trial.turn(other, HI)).status == 200, "time passes"
    gate.set()
    await stage.nothing_under_way()
    assert [asked.path for asked in worker.requests] == [CHAT, CHAT]
    assert worker.connections == 2, "both are kept"


# Sessions that are deleted


@pytest.mark.parametrize("stream", [False, True])
async def test_a_request_in_a_session_that_is_deleted_finishes_and_its_result_is_dropped(
    worker: ScriptedWorker, trial: SessionTrial, stream: bool
) -> None:
    gate = asyncio.Event()
    slow = streamed(*HELLO[:2], gate, *HELLO[2:]) if stream else script(gate, chat_reply([7, 8], "Hello"))
    worker.next(slow).always(GOOD)
    session = await trial.create("s")
    async with under_way(trial.turn(session, HI, SAME, stream=stream)) as turn:
        await until(lambda: worker.requests, "the turn is at the worker")
        assert (await trial.ask("DELETE", f"/sessions/{session}")).status == 204
        assert (await trial.ask("GET", f"/sessions/{session}")).status == 404
        await trial.create("s")
        empty = trial.statistics()["bytes"]
        gate.set()
        answer = await turn
    assert answer.status == 200
    assert (b"Hel" in answer.body, answer.body.endswith(b"[DONE]\n\n")) == (True, stream)
    await nothing_is_held(trial, "s")
    told = trial.statistics()
    assert (told["turns"], told["bytes"]) == (0, empty)
    await the_next_turn_works(trial, "s")


async def test_a_turn_behind_one_that_is_deleted_meanwhile_still_has_its_ids(
    worker: ScriptedWorker, trial: SessionTrial
) -> None:
    gate = asyncio.Event()
    later = script(gate, chat_reply([9], "Bye", prompt_token_ids=None))
    worker.next(script(chat_reply([7, 8], "Hello")), later)
    session = await trial.create()
    message = message_of(await trial.chat(session, HI))
    async with under_way(trial.turn(session, [*HI, message, user("Go on")])) as turn:
        await until(lambda: len(worker.requests) == 2, "the turn is at the worker")
        await trial.ask("DELETE", f"/sessions/{session}")
        gate.set()
        assert message_of((await turn).json())["content"] == "Bye"
    assert json.loads(worker.requests[1].body)["input_ids"][:5] == [1, 2, 3, 7, 8]
