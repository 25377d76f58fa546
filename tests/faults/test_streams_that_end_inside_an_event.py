"""A worker's stream that ends, in order, inside its last event: no client takes it for whole or gets what is internal,
and nothing is learned from it."""

from __future__ import annotations

import itertools
import json
import logging

import pytest

from miles_router.settings.config import MiddlewareSpec
from tests.faults.test_streams_that_end_early import (
    apis,
    generated,
    given,
    hello,
    nothing_is_held,
)
from tests.support.cache_trial import CACHE, checkpoint
from tests.support.http import CutReply
from tests.support.scripted_chat import DONE, JSON, able, event
from tests.support.scripted_worker import ScriptedWorker
from tests.support.session_apis import Api, case
from tests.support.session_trial import CHAT, SessionTrial, session_trial
from tests.support.stage import Stage

#: Bytes that are missing at the end of the last event.
MISSING = (1, 2, 3, 20, 60)
#: What stands in the engine's events alone.
INTERNAL = (b"sglext", b"input_ids", b"output_ids", b"token_ids", b'logprob"')
ENDS = (b"[DONE]", b"message_stop", b"response.completed", b"response.incomplete")


@pytest.fixture
async def worker(stage: Stage) -> ScriptedWorker:
    return able(await stage.worker())


@pytest.fixture
async def trial(stage: Stage, worker: ScriptedWorker) -> SessionTrial:
    return await session_trial(stage, worker)


async def is_broken_off(trial: SessionTrial, api: Api) -> None:
    """A turn whose client learns that its stream has broken off, and gets nothing internal."""
    session = await trial.create()
    with pytest.raises(CutReply) as broken:
        await api.ask(trial, session, 8, stream=True)
    told = broken.value.reply.body
    assert b"error" in told
    assert not any(mark in told for mark in (*INTERNAL, *ENDS)), told
    await nothing_is_held(trial, session)


@apis
async def test_a_stream_that_ends_inside_its_last_event_is_broken_off(
    worker: ScriptedWorker, trial: SessionTrial, api: Api
) -> None:
    for last, missing in itertools.product(("the ids", "the finish reason"), MISSING):
        with case(last, missing):
            *begun, cut = hello(api)[: None if last == "the ids" else -1]
            worker.next(given(*begun, cut[:-missing]))
            await is_broken_off(trial, api)


@apis
async def test_nothing_is_learned_from_a_stream_that_was_cut(
    worker: ScriptedWorker, trial: SessionTrial, api: Api, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        for missing in MISSING:
            *begun, last = hello(api)
            worker.next(given(*begun, last[:-missing]))
            await is_broken_off(trial, api)
    worker.next(given(*hello(api), DONE))
    session = await trial.create()
    assert (await api.ask(trial, session, 8, stream=True)).status == 200
    assert len(await trial.records(session)) == 1
    assert "streams_are_buffered" not in [each.message for each in caplog.records]


@pytest.mark.parametrize("api", [Api(CHAT), Api("/v1/messages"), Api("/v1/responses")], ids=str)
async def test_a_stream_that_ends_in_front_of_its_ids_is_broken_off(
    worker: ScriptedWorker, trial: SessionTrial, api: Api
) -> None:
    worker.next(given(*hello(api)[:-1])).always(given(*hello(api), DONE))
    await is_broken_off(trial, api)
    session = await trial.create()
    assert (await api.ask(trial, session, 8, stream=True)).status == 200, "as a stream"
    assert len(await trial.records(session)) == 1


@apis
async def test_a_last_line_without_its_empty_line_ends_the_stream(
    worker: ScriptedWorker, trial: SessionTrial, api: Api
) -> None:
    for end in (DONE[:-1], DONE[:-2], b"\n", DONE + b"\n"):
        worker.next(given(*hello(api), end))
        session = await trial.create()
        answer = await api.ask(trial, session, 2, stream=True)
        assert any(mark in answer.body[-60:] for mark in (b"[DONE]\n\n", b"message_stop", b"response.incomplete"))
        assert len(await trial.records(session)) == 1


@apis
async def test_what_comes_behind_the_end_is_not_given_to_the_client(
    worker: ScriptedWorker, trial: SessionTrial, api: Api
) -> None:
    worker.next(given(*hello(api), DONE)).next(given(*hello(api), DONE, event([], sglext={"output_ids": [[7]]})[:-2]))
    session, other = await trial.create(), await trial.create()
    good = await api.ask(trial, session, 2, stream=True)
    longer = await api.ask(trial, other, 2, stream=True)
    assert longer.body.count(b"data:") == good.body.count(b"data:")
    assert not any(mark in longer.body for mark in INTERNAL)


async def test_a_traced_stream_of_generate_that_ends_inside_an_event_is_broken_off(
    stage: Stage, worker: ScriptedWorker
) -> None:
    router = await stage.router(worker, middlewares=(MiddlewareSpec(CACHE),), hf_checkpoint=checkpoint())
    body = json.dumps({"text": "a", "sampling_params": {"max_new_tokens": 1}, "stream": True}).encode()
    for missing in MISSING:
        with case(missing):
            worker.next(given(generated(None), generated("length")[:-missing]))
            with pytest.raises(CutReply) as broken:
                await router.ask("POST", "/generate", JSON, body)
            assert b"output_token_logprobs" not in broken.value.reply.body
