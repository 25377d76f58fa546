"""An engine that reads another prompt than it was given (`--allow-auto-truncate`): nothing is recorded, and its client
is told so."""

from __future__ import annotations

import json
import logging
from collections.abc import AsyncIterator
from typing import Any

import pytest

from miles_router.testing import SimulatedWorker
from tests.support.cache_trial import Trial, checkpoint, data_of, trial_before
from tests.support.http import RawReply, whole_or_cut
from tests.support.session_apis import APIS, Api
from tests.support.session_trial import SessionTrial, simulated_sessions, user
from tests.support.stage import Stage

WINDOW = 120
LONG, SHORT_TEXT = "far too long " * 60, "Hi"
SAMPLING = {"max_new_tokens": 4, "ignore_eos": True}


@pytest.fixture
async def texts(stage: Stage) -> AsyncIterator[Trial]:
    async with SimulatedWorker(tokenizer=checkpoint(), context_len=WINDOW, auto_truncate=True) as worker:
        yield await trial_before(stage, worker)


@pytest.fixture
async def sessions(stage: Stage) -> AsyncIterator[SessionTrial]:
    async with simulated_sessions(stage, context_len=WINDOW, auto_truncate=True) as trial:
        yield trial


async def _not_retrieved(texts: Trial, text: str) -> None:
    assert (await texts.post("/retrieve_from_text", {"text": text, "strict": True})).status == 404


@pytest.mark.parametrize("text", [LONG, [SHORT_TEXT, LONG]], ids=["one", "batch"])
@pytest.mark.parametrize("samples", [1, 2])
async def test_a_text_whose_prompt_was_cut_is_an_error_and_not_recorded(texts: Trial, text: Any, samples: int) -> None:
    reply = await texts.post("/generate", {"text": text, "sampling_params": {**SAMPLING, "n": samples}})
    assert (reply.status, reply.error_type) == (502, "upstream_error")
    assert "--allow-auto-truncate" in reply.json()["error"]["message"]
    assert texts.statistics()["entries"] == 0
    assert texts.statistics()["passed_through"]["prompt_not_read"] == 1


async def test_ids_that_were_cut_are_an_error_too(texts: Trial) -> None:
    reply = await texts.post("/generate", {"input_ids": [5] * (WINDOW + 1), "sampling_params": SAMPLING})
    assert (reply.status, reply.error_type) == (502, "upstream_error")


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
async def test_a_cut_prompt_without_a_sampled_token_is_an_error_too(
    texts: Trial, sessions: SessionTrial, stream: bool
) -> None:
    body = {"text": LONG, "sampling_params": {"max_new_tokens": 0}, "stream": stream}
    assert _tells(await whole_or_cut(texts.post("/generate", body)))
    assert texts.statistics()["entries"] == 0
    session = await sessions.create()
    assert _tells(await whole_or_cut(Api("/v1/completions").ask(sessions, session, 0, LONG, stream=stream)))
    assert await sessions.records(session) == []


@pytest.mark.parametrize("text", [LONG, [SHORT_TEXT, LONG]], ids=["one", "batch"])
async def test_a_streamed_text_whose_prompt_was_cut_ends_with_an_error(texts: Trial, text: Any) -> None:
    body = {"text": text, "sampling_params": SAMPLING, "stream": True}
    reply = await whole_or_cut(texts.post("/generate", body))
    came = [json.loads(data) for data in data_of(reply.body)]
    assert came[-1]["error"]["type"] == "upstream_error"
    finished = [event for event in came if (event.get("meta_info") or {}).get("finish_reason")]
    assert len(finished) <= isinstance(text, list), "the one that was cut does not look complete"


async def test_a_prompt_that_fits_is_recorded_as_ever(texts: Trial) -> None:
    answer = await texts.generate(text=SHORT_TEXT, sampling_params=SAMPLING)
    assert (await texts.retrieve(rid=answer["meta_info"]["id"]))["finished"]


def _tells(reply: RawReply) -> bool:
    return b"allow-auto-truncate" in reply.body


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("api", APIS, ids=str)
async def test_a_first_turn_whose_prompt_was_cut_is_an_error(sessions: SessionTrial, api: Api, stream: bool) -> None:
    session = await sessions.create("s")
    reply = await whole_or_cut(api.ask(sessions, session, 4, LONG, stream=stream))
    assert _tells(reply), reply.body
    assert (reply.status, b'finish_reason": "length' in reply.body) == (200 if stream else 502, False)
    assert await sessions.records(session) == []
    assert (await api.ask(sessions, session, 4, SHORT_TEXT, stream=stream)).status == 200
    assert len(await sessions.records(session)) == 1


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
async def test_a_later_turn_whose_prompt_was_cut_is_an_error(sessions: SessionTrial, stream: bool) -> None:
    session = await sessions.create()
    first = await sessions.chat(session, [user(SHORT_TEXT)])
    history = [user(SHORT_TEXT), first["choices"][0]["message"]]
    reply = await whole_or_cut(sessions.turn(session, [*history, user(LONG)], stream=stream))
    assert _tells(reply)
    assert len(await sessions.records(session)) == 1
    assert (await sessions.turn(session, [*history, user("Go on")], stream=stream)).status == 200
    assert await sessions.reasons(session) == [None, None], "both are of one line"


async def test_a_stream_shows_usage_to_those_alone_who_ask_for_it(stage: Stage) -> None:
    async with simulated_sessions(stage) as trial:
        session = await trial.create()
        plain = await trial.stream(session, [user("Hi")])
        asked = await trial.stream(session, [user("Ho")], stream_options={"include_usage": True})
    assert not any(chunk.get("usage") for chunk in plain)
    assert all(chunk["choices"] for chunk in plain)
    assert asked[-1]["usage"]["completion_tokens"] > 0


async def test_a_worker_that_cuts_prompts_is_named_in_the_log(stage: Stage, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        async with SimulatedWorker(auto_truncate=True) as cuts, SimulatedWorker() as refuses:
            router = await stage.router(cuts.url, refuses.url)
            for worker in (cuts, refuses):
                await router.app.router.fleet.facts(worker.url)
    warned = [record for record in caplog.records if record.message == "worker_truncates_prompts"]
    assert [record.__dict__["fields"]["worker"] for record in warned] == [cuts.url]
