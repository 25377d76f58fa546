"""Streamed turns: the first token reaches the agent when the engine sends it, and the turn is recorded exactly all the
same; where an engine cannot tell what it sampled, streams are buffered, and the log says so."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.support.http import whole_or_cut
from tests.support.scripted_chat import (
    DONE,
    able,
    chat_events,
    chat_reply,
    delta,
    event,
    streamed,
)
from tests.support.scripted_worker import ScriptedWorker, reply, script
from tests.support.session_apis import case
from tests.support.session_trial import (
    CHAT,
    JSON,
    SessionTrial,
    session_trial,
    text_of,
    user,
)
from tests.support.stage import Stage

HI: list[Any] = [user("Hi")]
HELLO = chat_events([7, 8, 9], ["Hel", "l", "o"])


@pytest.fixture
async def worker(stage: Stage) -> ScriptedWorker:
    return able(await stage.worker())


@pytest.fixture
async def trial(stage: Stage, worker: ScriptedWorker) -> SessionTrial:
    return await session_trial(stage, worker)


def logged(caplog: pytest.LogCaptureFixture, message: str) -> list[str]:
    """The reasons that the log gives under a message."""
    return [str(each.__dict__["fields"]["reason"]) for each in caplog.records if each.getMessage() == message]


# Real streams


async def test_what_is_no_chunk_is_given_on_in_its_place(worker: ScriptedWorker, trial: SessionTrial) -> None:
    role, text, *rest = chat_events([7], ["Hi"])
    ping, named = b": ping\n\n", b"event: odd\ndata: no json\n\n"
    worker.always(streamed(role, ping, text, named, *rest))
    session = await trial.create()
    body = (await trial.turn(session, HI, stream=True)).body
    events = body.split(b"\n\n")
    assert (events[1] + b"\n\n", events[3] + b"\n\n") == (ping, named)


# Streams that cannot be recorded


@pytest.mark.parametrize(
    ("events", "reason"),
    [
        (chat_events([7, 8], ["H", "i"], input_ids=None, output_ids=None), "without the sampled ids"),
        ([event([delta("Hi", 0)]), *chat_events([7, 8], [])], "left out logprobs"),
    ],
    ids=["no ids", "no logprobs"],
)
async def test_engine_without_ids_in_streams_gets_buffered_streams_from_then_on(
    stage: Stage, events: list[bytes], reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    worker = able(await stage.worker())
    for path in worker.standing:
        worker.standing[path] = script(reply(b"{}", 404))
    worker.next(streamed(*events)).always(script(chat_reply([7, 8], "Hi")))
    trial = await session_trial(stage, worker)
    session = await trial.create()
    with caplog.at_level("WARNING"):
        assert text_of(await trial.stream(session, HI)) == "Hi", "the agent has its answer"
        (why,) = logged(caplog, "streams_are_buffered")
        assert reason in why
        assert text_of(await trial.stream(session, HI)) == "Hi"
    found = await trial.read(session)
    assert len(found["records"]) == 1, "the second"
    (untraced,) = found["metadata"]["untraced"]
    assert untraced["path"] == CHAT
    assert len(logged(caplog, "turn_not_traced")) == 1


async def test_stream_weights_are_those_the_engine_confirms_at_the_end(
    worker: ScriptedWorker, trial: SessionTrial
) -> None:
    worker.always(streamed(*HELLO))
    for says, whose in (("1", "engine"), ("2", "router"), (None, "router")):
        worker.model_info = script(reply(json.dumps({"weight_version": says}).encode(), headers=JSON))
        trial.router.worker(worker).weight_version = "1"
        session = await trial.create()
        await trial.stream(session, HI)
        (record,) = await trial.records(session)
        assert record["versions"] == whose, says
        (sample,) = await trial.samples(session)
        assert sample["weight_versions"] == [{"version": "1", "start": 3, "end": 6}]


def part(**fields: Any) -> bytes:
    return event([{**delta(None), **fields}])


NONSENSE = {
    "error": [*HELLO[:2], b'data: {"error": {"message": "out of memory", "code": 500}}\n\n', DONE],
    "odd choice": [*HELLO[:2], part(index=1), *HELLO[-3:]],
    "no choice": [*HELLO[:2], b'data: {"choices": [7]}\n\n', *HELLO[3:]],
    "odd text": [*HELLO[:2], part(delta={"content": 7}), *HELLO[3:]],
    "odd call": [*HELLO[:2], part(delta={"tool_calls": [7]}), *HELLO[3:]],
    "nameless call": [*HELLO[:2], part(delta={"tool_calls": [{"index": 0, "id": "a"}]}), *HELLO[3:]],
    "odd index": [*HELLO[:2], part(index="a"), *HELLO[3:]],
}


async def test_a_stream_that_makes_no_sense_is_untraced_and_one_without_ids_an_error(
    worker: ScriptedWorker, trial: SessionTrial
) -> None:
    """One bad answer says nothing of the next."""
    worker.always(streamed(*HELLO))
    for name, events in NONSENSE.items():
        with case(name):
            worker.next(streamed(*events))
            session = await trial.create()
            body = (await trial.turn(session, HI, stream=True)).body
            assert (b"Hel" in body, body.endswith(DONE)) == (True, True)
            found = await trial.read(session)
            assert (found["records"], [each["path"] for each in found["metadata"]["untraced"]]) == ([], [CHAT])
            assert await trial.stream(session, HI)
            assert len(await trial.records(session)) == 1
            assert json.loads(worker.requests[-1].body)["stream"] is True
    one, no = {"input_ids": [1], "output_ids": [["a", "b", "c"]]}, {"output_ids": [[7, 8, 9]]}
    for sglext in (one, {**one, "output_ids": [[-7, 8, 9]]}, no):
        with case(sglext):
            worker.next(streamed(*HELLO[:-2], event([], sglext=sglext), DONE))
            session = await trial.create()
            got = await whole_or_cut(trial.turn(session, HI, stream=True))
            assert b'"type":"upstream_error"' in got.body.replace(b" ", b"")
            assert DONE not in got.body
            assert (await trial.read(session))["records"] == []
            assert await trial.stream(session, HI)
            assert len(await trial.records(session)) == 1
