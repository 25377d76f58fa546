"""Streamed turns: the first token reaches the agent when the engine sends it, and the turn is recorded exactly all the
same; where an engine cannot tell what it sampled, streams are buffered, and the log says so. Agents see what OpenAI's
own client expects, and what they asked for."""

from __future__ import annotations

import itertools
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
from openai.types.chat import ChatCompletion

from miles_router.testing import SimulatedWorker
from tests.support.http import RawReply, ask, whole_or_cut
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
    ADD,
    CHAT,
    JSON,
    SessionTrial,
    chunks_of,
    qwen3,
    session_trial,
    simulated_sessions,
    text_of,
    user,
)
from tests.support.stage import Stage, staged

HI: list[Any] = [user("Hi")]
HELLO = chat_events([7, 8, 9], ["Hel", "l", "o"])


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


SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}, "n": {"type": "integer"}}}
FORMAT = {"type": "json_schema", "json_schema": {"name": "place", "schema": SCHEMA}}
NAMED = {"type": "function", "function": {"name": "add"}}
#: What agents ask for.
ASKED: dict[str, dict[str, Any]] = {
    "nothing": {},
    "max_completion_tokens": {"max_tokens": None, "max_completion_tokens": 5},
    "logprobs": {"logprobs": True},
    "top_logprobs": {"logprobs": True, "top_logprobs": 3},
    "top_logprobs without logprobs": {"logprobs": False, "top_logprobs": 3},
    "n": {"n": 3},
    "n, logprobs": {"n": 2, "logprobs": True},
    "tools": {"tools": [ADD]},
    "no tool": {"tools": [ADD], "tool_choice": "none"},
    "some tool": {"tools": [ADD], "tool_choice": "required", "max_tokens": 200},
    "one tool": {"tools": [ADD], "tool_choice": NAMED, "max_tokens": 200, "logprobs": True},
    "response_format": {"response_format": FORMAT, "max_tokens": 200},
    "stop": {"stop": ["e", "a"], "max_tokens": 200},
    "unknown": {"priority": 7, "bogus": {"a": [1.5, None, "é"]}},
    "parameters": {"temperature": 0.5, "top_p": 0.9, "seed": 3, "presence_penalty": 0.1, "user": "me"},
    "ids": {"return_input_ids_in_sglext": True, "return_output_ids_in_sglext": True},
    "cached tokens": {"return_cached_tokens_details": True},
}
OF_WHOLE: dict[str, dict[str, Any]] = {
    "prompt ids": {"return_prompt_token_ids": True},
    "meta": {"return_meta_info": True},
    "meta, logprobs": {"return_meta_info": True, "logprobs": True, "top_logprobs": 1},
    "token ids": {"return_token_ids": True},
}
OF_STREAM: dict[str, dict[str, Any]] = {
    "usage": {"stream_options": {"include_usage": True}},
    "usage, n": {"stream_options": {"include_usage": True}, "n": 2},
    "usage all along": {"stream_options": {"include_usage": True, "continuous_usage_stats": True}},
    "usage, ids": {"stream_options": {"include_usage": True}, **ASKED["ids"]},
    "prompt ids refused": {"return_prompt_token_ids": True},
}


Pair = tuple[SessionTrial, SimulatedWorker]


@pytest.fixture(scope="module")
async def pair() -> AsyncIterator[Pair]:
    """A router with sessions and, beside it, a worker with the same weights that is asked for the same."""
    async with (
        staged() as stage,
        simulated_sessions(stage) as made,
        SimulatedWorker(tokenizer=qwen3(), weight_version="1") as other,
    ):
        yield made, other


#: What ends one request, when its client has left, must not end the next.
rids = (f"r-{number}" for number in itertools.count())


async def both(pair: Pair, session: str, body: dict[str, Any]) -> tuple[RawReply, RawReply]:
    """The router's reply and the other worker's."""
    through = await pair[0].ask("POST", f"/sessions/{session}{CHAT}", body)
    direct = await ask(pair[1].url, "POST", CHAT, JSON, json.dumps(body).encode())
    return through, direct


def steady(answer: Any) -> Any:
    """Without times and ids that are made up."""
    if isinstance(answer, list):
        return [steady(each) for each in answer]
    if not isinstance(answer, dict):
        return answer
    passing = ("created", "id", "e2e_latency", "response_sent_to_client_ts")
    return {name: None if name in passing else steady(value) for name, value in answer.items()}


def in_order(chunks: list[Any]) -> list[Any]:
    """By choice, and what tells logprobs apart: choices of one request interleave as they come, and a piece of a call
    waits until it is known that the answer does not end there."""
    return [steady(chunk) for chunk in sorted(chunks, key=_place)]


def _place(chunk: Any) -> tuple[int, bool]:
    if not chunk["choices"]:
        return 99, False
    choice = chunk["choices"][0]
    return choice["index"], choice.get("logprobs") is not None


async def test_an_agent_is_given_the_worker_s_answer_and_nothing_it_did_not_ask_for(pair: Pair) -> None:
    cases = [
        *((each, False) for each in (ASKED | OF_WHOLE).items()),
        *((each, True) for each in (ASKED | OF_STREAM).items()),
    ]
    for (name, asked), stream in cases:
        with case(name, stream):
            asking = {"temperature": 0, "rid": next(rids), "max_tokens": 8, **({"stream": True} if stream else {})}
            body = {"model": "m", "messages": HI, **asking, **asked}
            through, direct = await both(pair, await pair[0].create(), body)
            assert through.status == direct.status
            assert through.value("content-type") == direct.value("content-type")
            if direct.status != 200:
                assert through.body == direct.body
            elif stream:
                assert in_order(chunks_of(through.body)) == in_order(chunks_of(direct.body))
            else:
                told = direct.json()["metadata"]  # with a text, as the API has it
                told["weight_versions"] = json.dumps(told["weight_versions"], separators=(",", ":"))
                assert steady(through.json()) == steady({**direct.json(), "metadata": told})
                ChatCompletion.model_validate(through.json(), strict=True)
