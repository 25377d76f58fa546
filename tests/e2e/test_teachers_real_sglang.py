"""A real SGLang with other weights as the teacher of another one."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterator
from typing import Any

import numpy as np
import pytest

from miles_router.client import RouterClient
from miles_router.settings.config import MiddlewareSpec
from tests.sglang_worker import RealWorker
from tests.support.audits import episode, text_rollout, text_rollouts
from tests.support.cache_trial import CACHE
from tests.support.http import ask
from tests.support.real_sessions import real_sessions, rolled_model
from tests.support.session_trial import JSON, SESSIONS, SessionTrial

pytestmark = pytest.mark.sglang

TOP_K = 4
#: Decoding is no prefill, to the last bit.
NEAR = 0.05


@pytest.fixture(scope="module")
def workers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[RealWorker, RealWorker]]:
    """A student and a teacher, started side by side."""
    student = RealWorker.start()
    with RealWorker.start(model=rolled_model(tmp_path_factory.mktemp("teacher"))) as teacher, student:
        yield student, teacher


@pytest.fixture
async def trial(workers: tuple[RealWorker, RealWorker]) -> AsyncIterator[SessionTrial]:
    student, teacher = workers
    layers = (MiddlewareSpec(SESSIONS), MiddlewareSpec(CACHE))
    async with real_sessions(student, middlewares=layers, model_id="m") as (made, _):
        assert (await made.ask("POST", "/workers", {"url": teacher.url, "model_id": "teacher"})).status == 201
        yield made


async def test_scores_of_sessions_and_texts_are_the_teachers_own(
    trial: SessionTrial, workers: tuple[RealWorker, RealWorker]
) -> None:
    session = await trial.create()
    await episode(trial, session, turns=2)
    made = await text_rollout(trial, 2)
    (rollout,) = [each for each in text_rollouts(trial) if each.id == made]
    rid = rollout.turns[max(rollout.turns)].entry.rid
    async with RouterClient(trial.router.url) as client:
        (sample,) = await client.session(session).collect(teacher={"model": "teacher", "top_k": TOP_K})
        retrieved = await client.retrieve(rid=rid, teacher={"model": "teacher", "top_k": TOP_K})
        (as_student,) = await client.session(session).collect(teacher="m")
    assert as_student.teacher is not None
    assert np.abs(as_student.teacher.logprobs - as_student.logprobs).max() < NEAR
    for held in (sample, retrieved):
        scores, sampled = held.teacher, np.flatnonzero(held.loss_mask)
        assert scores is not None
        assert np.abs(scores.logprobs - held.logprobs).max() > 4 * NEAR, "the weights are others"
        own = await own_words(workers[1], held.tokens.tolist())
        expected = np.array([own["input_token_logprobs"][place][0] for place in sampled])
        assert np.abs(scores.logprobs[sampled] - expected).max() < NEAR
        assert np.flatnonzero(scores.logprobs).tolist() == sampled.tolist()
        assert scores.arrays["teacher_top_positions"].tolist() == sampled.tolist()
        tops = [[entry[0] for entry in own["input_top_logprobs"][place]] for place in sampled]
        ids, logprobs = (scores.arrays[f"teacher_top_{name}"] for name in ("ids", "logprobs"))
        assert ids.shape == (len(sampled), TOP_K)
        assert np.abs(logprobs - np.array(tops)).max() < NEAR
        assert ids.min() >= 0


async def own_words(worker: RealWorker, ids: list[int]) -> Any:
    """What a worker itself answers for these ids."""
    body = {"input_ids": ids, "sampling_params": {"max_new_tokens": 0}, "logprob_start_len": 0}
    request = json.dumps({**body, "return_logprob": True, "top_logprobs_num": TOP_K}).encode()
    return (await ask(worker.url, "POST", "/generate", JSON, request)).json()["meta_info"]
