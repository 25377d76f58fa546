"""Sampling masks on a real SGLang: it tells them on `/generate` and in chat, whole, and where a pause cut a generation
the masks of both parts are one."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import orjson
import pytest

from miles_router.settings.config import MiddlewareSpec
from tests.e2e.test_sampling_masks import ASKED, CONTRACT, LOGPROBS, MASK, TOP_K, fits, last_event, sets
from tests.sglang.environment import ensure
from tests.sglang_worker import RealWorker
from tests.support.cache_trial import CACHE, Trial
from tests.support.cuts import continue_, pause
from tests.support.running_router import running_router
from tests.support.session_apis import MESSAGES, Api
from tests.support.session_trial import CHAT, SESSIONS, SessionTrial, message_of, user
from tests.support.under_way import under_way
from tests.support.waiting import until

pytestmark = pytest.mark.sglang

PARAMS = {"max_new_tokens": 24, "ignore_eos": True, "top_k": TOP_K, "top_p": 0.9, "temperature": 1.0}


@pytest.fixture
async def trials(sglang_workers: list[RealWorker]) -> AsyncIterator[tuple[Trial, SessionTrial]]:
    url, layers = sglang_workers[0].url, (MiddlewareSpec(SESSIONS), MiddlewareSpec(CACHE))
    checkpoint = str(ensure().dense_model)
    async with running_router(url, middlewares=layers, hf_checkpoint=checkpoint, partial_rollout="resume") as router:
        await until(lambda: router.pool.weight_version is not None, "the probe has passed")
        yield Trial(router), SessionTrial(router, [])


async def test_texts_have_them_whole_streamed_and_cut(trials: tuple[Trial, SessionTrial]) -> None:
    texts, sessions = trials
    gate = texts.router.app.router.gate
    for kind in ("whole", "streamed", "cut"):
        body: dict[str, Any] = {
            "text": f"A story, {kind}:",
            "sampling_params": PARAMS,
            **ASKED,
            "stream": kind != "whole",
        }
        if kind == "cut":
            body["sampling_params"] = {**PARAMS, "max_new_tokens": 800}
            async with under_way(texts.post("/generate", body)) as generating:
                await until(lambda: texts.router.pool.in_flight, "it is at the worker")
                await asyncio.wait({generating}, timeout=1)
                await pause(sessions)
                await until(lambda: gate.held, "it waits to be carried on")
                await continue_(sessions)
                reply = await generating
        else:
            reply = await texts.post("/generate", body)
        assert reply.status == 200, reply.body
        answer = last_event(reply) if body["stream"] else reply.json()
        meta = answer["meta_info"]
        assert (kind == "cut") == (meta.get("resumed") == 1)
        assert len(meta[MASK]) == meta["completion_tokens"]
        assert {len(each) for each in meta[MASK]} <= {*range(1, TOP_K + 1)}
        fits(await texts.retrieve(text=body["text"] + answer["text"], rid=meta["id"]), meta)
        assert min(meta[LOGPROBS]) < max(meta[LOGPROBS]) <= 0


@pytest.mark.parametrize(("path", "stream"), [(CHAT, False), (CHAT, True), (MESSAGES, True)])
async def test_sessions_have_them(trials: tuple[Trial, SessionTrial], path: str, stream: bool) -> None:
    _, trial = trials
    session = await trial.create(contract=CONTRACT)
    api, history = Api(path), [user("What is 17 + 25?")]
    for _ in range(2):
        answer = await api.post(trial, session, api.body(history, 12, stream=stream, ignore_eos=True))
        assert answer.status == 200, answer.body
        if path == CHAT and not stream:
            history += [message_of(orjson.loads(answer.body)), user("More")]
    for sample in await trial.samples(session):
        marked = zip(sets(sample["sampling_mask"]), sample["tokens"], sample["loss_mask"], strict=True)
        for each, token, sampled in marked:
            assert token in each
            assert len(each) <= TOP_K if sampled else len(each) == 1
