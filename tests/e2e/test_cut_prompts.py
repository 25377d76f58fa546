"""An engine that reads another prompt than it was given (`--allow-auto-truncate`): nothing is recorded, and its client
is told so."""

from __future__ import annotations

import itertools
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest

from miles_router.testing import SimulatedWorker
from tests.support.cache_trial import Trial, checkpoint, data_of, trial_before
from tests.support.http import RawReply, whole_or_cut
from tests.support.session_apis import APIS, BOTH, COMPLETIONS, case
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


async def test_a_text_whose_prompt_was_cut_is_an_error_and_not_recorded(texts: Trial) -> None:
    asked: list[Any] = [
        *(
            {"text": text, "sampling_params": {**SAMPLING, "n": n}}
            for text in (LONG, [SHORT_TEXT, LONG])
            for n in (1, 2)
        ),
        {"input_ids": [5] * (WINDOW + 1), "sampling_params": SAMPLING},
        {"text": LONG, "sampling_params": {"max_new_tokens": 0}},
    ]
    for number, body in enumerate(asked, 1):
        reply = await texts.post("/generate", body)
        assert (reply.status, reply.error_type) == (502, "upstream_error"), body
        assert _tells(reply)
        assert texts.statistics()["entries"] == 0
        assert texts.statistics()["passed_through"]["prompt_not_read"] == number
    for text in (LONG, [SHORT_TEXT, LONG]):
        body = {"text": text, "sampling_params": SAMPLING, "stream": True}
        reply = await whole_or_cut(texts.post("/generate", body))
        came = [json.loads(data) for data in data_of(reply.body)]
        assert came[-1]["error"]["type"] == "upstream_error"
        finished = [event for event in came if (event.get("meta_info") or {}).get("finish_reason")]
        assert len(finished) <= isinstance(text, list), "the one that was cut does not look complete"
    answer = await texts.generate(text=SHORT_TEXT, sampling_params=SAMPLING)
    assert (await texts.retrieve(rid=answer["meta_info"]["id"]))["finished"], "one that fits is recorded as ever"


def _tells(reply: RawReply) -> bool:
    return b"allow-auto-truncate" in reply.body


async def test_a_first_turn_whose_prompt_was_cut_is_an_error(sessions: SessionTrial) -> None:
    for api, stream in itertools.product(APIS, BOTH):
        with case(api, stream):
            session = await sessions.create()
            reply = await whole_or_cut(api.ask(sessions, session, 4, LONG, stream=stream))
            assert _tells(reply), reply.body
            assert (reply.status, b'finish_reason": "length' in reply.body) == (200 if stream else 502, False)
            if api.path == COMPLETIONS:
                assert _tells(await whole_or_cut(api.ask(sessions, session, 0, LONG, stream=stream))), "no token"
            assert await sessions.records(session) == []
            assert (await api.ask(sessions, session, 4, SHORT_TEXT, stream=stream)).status == 200
            assert len(await sessions.records(session)) == 1


async def test_a_later_turn_whose_prompt_was_cut_is_an_error(sessions: SessionTrial) -> None:
    for stream in BOTH:
        session = await sessions.create()
        first = await sessions.chat(session, [user(SHORT_TEXT)])
        history = [user(SHORT_TEXT), first["choices"][0]["message"]]
        assert _tells(await whole_or_cut(sessions.turn(session, [*history, user(LONG)], stream=stream)))
        assert len(await sessions.records(session)) == 1
        assert (await sessions.turn(session, [*history, user("Go on")], stream=stream)).status == 200
        assert await sessions.reasons(session) == [None, None], "both are of one line"
