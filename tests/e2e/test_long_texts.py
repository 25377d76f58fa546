"""Texts that take long to encode, or are too long, through the middlewares that encode them."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator

import pytest

from middleware_hub.tokenizing.async_encoder import AT_ONCE, IN_A_THREAD, AsyncEncoder
from miles_router.settings.config import MiddlewareSpec
from miles_router.testing import SimulatedWorker
from tests.support.cache_trial import CACHE, JSON, SHORT, checkpoint
from tests.support.http import request
from tests.support.session_trial import SESSIONS, SessionTrial, message_of, user
from tests.support.stage import Stage
from tests.support.waiting import until

LONGEST = 4 * AT_ONCE


@pytest.fixture
async def worker() -> AsyncIterator[SimulatedWorker]:
    async with SimulatedWorker(tokenizer=checkpoint(), context_len=1 << 20) as started:
        yield started


async def trial_before(stage: Stage, worker: SimulatedWorker, longest: int) -> SessionTrial:
    middlewares = (MiddlewareSpec(SESSIONS), MiddlewareSpec(CACHE))
    return SessionTrial(
        await stage.router(worker.url, middlewares=middlewares, hf_checkpoint=checkpoint(), max_text_chars=longest),
        [worker],
    )


def encoder_of(trial: SessionTrial) -> AsyncEncoder:
    return AsyncEncoder.of(trial.router.app.router)


async def test_a_text_that_is_too_long_is_413_and_no_worker_hears_of_it(stage: Stage, worker: SimulatedWorker) -> None:
    trial = await trial_before(stage, worker, LONGEST)
    long, just = "a" * (LONGEST + 1), "a" * LONGEST
    for path, body in (
        ("/generate", {"text": long, "sampling_params": SHORT}),
        ("/generate", {"text": ["short", long], "sampling_params": SHORT}),
        ("/generate", {"input_ids": [7] * (LONGEST + 1), "sampling_params": SHORT}),
        ("/retrieve_from_text", {"text": long}),
        ("/retrieve_from_text", {"texts": ["short", long]}),
    ):
        answer = await trial.ask("POST", path, body)
        assert (answer.status, answer.error_type) == (413, "invalid_request"), path
        assert "--max-text-chars" in answer.json()["error"]["message"]
    assert encoder_of(trial).statistics.refused == 5
    assert not worker.log.at("/generate")
    assert (await trial.ask("POST", "/generate", {"text": just, "sampling_params": SHORT})).status == 200


async def test_a_turn_that_appends_too_much_is_413_and_changes_nothing(stage: Stage, worker: SimulatedWorker) -> None:
    trial = await trial_before(stage, worker, LONGEST)
    session = await trial.create()
    history = [user("Hi"), message_of(await trial.chat(session, [user("Hi")]))]
    answer = await trial.turn(session, [*history, user("a" * (LONGEST + 1))])
    assert (answer.status, answer.error_type) == (413, "invalid_request")
    await trial.chat(session, [*history, user("a" * (LONGEST - 1000))])
    assert [each["parent"] for each in await trial.records(session)] == [None, 0]


async def test_a_long_text_is_given_in_the_ids_of_a_short_one_and_continued(
    stage: Stage, worker: SimulatedWorker
) -> None:
    trial = await trial_before(stage, worker, 1 << 24)
    text = "The answer is 42. " * (IN_A_THREAD // 18 + 1)
    answer = (await trial.ask("POST", "/generate", {"text": text, "sampling_params": SHORT})).json()
    plain = encoder_of(trial).encoder.encode_whole(text).ids.tolist()
    assert worker.log.at("/generate")[-1].generations[0].input_ids == plain
    more = text + answer["text"] + "More."
    await trial.ask("POST", "/generate", {"text": more, "sampling_params": SHORT})
    given = worker.log.at("/generate")[-1].generations[0].input_ids
    assert given[: len(plain) + len(answer["output_ids"])] == [*plain, *answer["output_ids"]]


@pytest.mark.parametrize("path", ["/generate", "/retrieve_from_text"])
async def test_a_client_that_leaves_ends_the_encoding_of_its_text(
    stage: Stage, worker: SimulatedWorker, path: str
) -> None:
    trial = await trial_before(stage, worker, 1 << 24)
    statistics = encoder_of(trial).statistics
    client = await stage.client(trial.router)
    text = "The answer is the sum of two numbers. " * ((1 << 24) // 38)
    await client.send(request("POST", path, JSON, json.dumps({"text": text}).encode()))
    await until(lambda: statistics.numbers()["pending"], "its text is encoded")
    client.abort()
    await until(lambda: statistics.abandoned, "nobody waits for it any more")
    assert statistics.numbers() == {"pending": 0, "abandoned": 1, "refused": 0}
    assert not worker.log.at("/generate")
