"""No cache of old weights under a new version: what updates without a flush leave in the engines' prefix caches.

The watched worker notes with each generation whose weights filled the part of its prefix cache that it found.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import orjson
import pytest

from miles_router.tasks import spawn
from miles_router.testing import SimulatedWorker
from tests.support.http import RawReply
from tests.support.metrics import metric
from tests.support.running_router import RunningRouter
from tests.support.session_trial import message_of, simulated_sessions, user
from tests.support.simulated.odd_workers import WatchedWorker
from tests.support.stage import Stage
from tests.support.waiting import until

JSON = [("Content-Type", "application/json")]
PROMPT = list(range(20, 60))
SHORT = {"max_new_tokens": 4, "ignore_eos": True}
#: At the latency below it takes longer than any test waits.
ENDLESS = {"max_new_tokens": 30_000, "ignore_eos": True}
LATENCY = 0.005
CHAT, COMPLETIONS, MESSAGES = "/v1/chat/completions", "/v1/completions", "/v1/messages"
ASKED: dict[str, dict[str, Any]] = {
    "/generate": {"input_ids": PROMPT, "sampling_params": SHORT},
    CHAT: {"model": "m", "messages": [user("Count to ten, please.")], "max_tokens": 4},
    COMPLETIONS: {"model": "m", "prompt": "Count to ten, please.", "max_tokens": 4},
    MESSAGES: {"model": "m", "messages": [user("Count to ten, please.")], "max_tokens": 4},
}


async def post(router: RunningRouter, path: str, **fields: Any) -> RawReply:
    return await router.ask("POST", path, JSON, orjson.dumps(fields))


async def generate(router: RunningRouter, **fields: Any) -> dict[str, Any]:
    """The `meta_info` of one good answer."""
    answer = await post(router, "/generate", **{**ASKED["/generate"], **fields})
    assert answer.status == 200, answer.body
    meta: dict[str, Any] = answer.json()["meta_info"]
    return meta


async def update(router: RunningRouter, version: str, mode: str | None = None) -> None:
    """An update without a flush."""
    if mode is not None:
        assert (await post(router, "/pause_generation", mode=mode)).status == 200
    answer = await post(router, "/update_weight_version", new_version=version, abort_all_requests=False)
    assert answer.status == 200
    if mode is not None:
        assert (await post(router, "/continue_generation")).status == 200


@asynccontextmanager
async def fleet(stage: Stage, *, settings: dict[str, Any] | None = None, **worker: Any) -> AsyncIterator[Any]:
    async with WatchedWorker(stop_probability=0.0, **{"weight_version": "1", **worker}) as started:
        yield started, await stage.router(started.url, **(settings or {}))


@asynccontextmanager
async def endless(router: RunningRouter, worker: SimulatedWorker) -> AsyncIterator[asyncio.Task[dict[str, Any]]]:
    """A generation that runs within this, unless a pause ends it."""
    task = spawn(generate(router, input_ids=[*PROMPT, 9], sampling_params=ENDLESS, rid="endless"), name="endless")
    await samples(worker)
    yield task
    assert (await post(router, "/abort_request", rid="endless")).status == 200
    await task


async def samples(worker: SimulatedWorker) -> None:
    """Until a generation has sampled something."""
    await until(lambda: any(each.output_ids for each in worker.engine.running.values()), "it samples")


def bodies(worker: SimulatedWorker, path: str = "/generate") -> list[Any]:
    return [each.json() for each in worker.log.at(path)]


def keys(worker: SimulatedWorker, path: str = "/generate") -> list[Any]:
    return [body.get("extra_key") for body in bodies(worker, path)]


# New generations


@pytest.mark.parametrize("mode", [None, "abort", "retract", "in_place"])
async def test_a_new_generation_finds_no_cache_of_older_weights(stage: Stage, mode: str | None) -> None:
    async with fleet(stage, token_latency_s=LATENCY) as (worker, router):
        assert [(await generate(router))["cached_tokens"] for _ in range(2)] == [0, len(PROMPT) - 1]
        async with endless(router, worker):
            await update(router, "2", mode)
            first, second = await generate(router), await generate(router)
        assert [(each["weight_version"], each["cached_tokens"]) for each in (first, second)] == [("2", 0), ("2", 39)]
        assert (await generate(router))["cached_tokens"] == 39, "what went on over the update has left nothing there"
        assert {filled == sampled for filled, sampled in worker.cache.reused} == {True}


async def test_before_any_update_and_after_a_flush_requests_arrive_byte_for_byte(stage: Stage) -> None:
    async with fleet(stage) as (worker, router):
        await generate(router)
        await update(router, "2")
        await generate(router)
        assert (await post(router, "/flush_cache")).status == 200
        assert (await generate(router))["cached_tokens"] == 0
        assert (await generate(router))["cached_tokens"] == 39
        await update(router, "3")
        answer = await post(router, "/update_weights_from_disk", model_path="m", weight_version="4")
        assert answer.status == 200
        await generate(router)
        sent = [each.body for each in worker.log.at("/generate")]
        plain = orjson.dumps(ASKED["/generate"])
        assert [body == plain for body in sent] == [True, False, True, True, True]


async def test_a_clients_own_key_counts_beside_it(stage: Stage) -> None:
    async with fleet(stage) as (_, router):
        await update(router, "2")
        found = [(await generate(router, extra_key=key))["cached_tokens"] for key in ("a", "b", "a", None)]
        assert found == [0, 0, 39, 0]
        await update(router, "3")
        assert (await generate(router, extra_key="a"))["cached_tokens"] == 0


async def test_while_an_update_is_under_way_no_two_generations_share_a_cache(stage: Stage) -> None:
    async with fleet(stage, token_latency_s=LATENCY) as (worker, router):
        async with endless(router, worker):
            body = {"model_path": "m", "weight_version": "2", "flush_cache": False}
            updating = spawn(post(router, "/update_weights_from_disk", **body), name="updating")
            await until(lambda: router.pool.weights_epoch == 1, "the update has begun")
            assert [(await generate(router))["cached_tokens"] for _ in range(2)] == [0, 0]
        assert (await updating).status == 200
        assert (await generate(router))["cached_tokens"] == 0
        assert len(set(keys(worker))) == 4


async def test_a_path_that_takes_no_key_is_said_and_counted(stage: Stage, caplog: pytest.LogCaptureFixture) -> None:
    async with fleet(stage) as (worker, router):
        await update(router, "2")
        for _ in range(2):
            assert (await post(router, MESSAGES, **ASKED[MESSAGES])).status == 200
        assert worker.log.at(MESSAGES)[-1].body == orjson.dumps(ASKED[MESSAGES])
        assert await metric(router, "miles_router_unkeyed_generations_total") == 2
        for name in "ab":
            await post(router, f"/sessions/{name}{CHAT}", **ASKED[CHAT])
        assert caplog.messages.count("prefix_caches_not_separated") == 2, "each path is said once, in sessions too"


# What goes on


async def test_a_generation_that_is_resumed_is_prefilled_anew(stage: Stage) -> None:
    async with fleet(stage, token_latency_s=LATENCY, settings={"partial_rollout": "resume"}) as (worker, router):
        async with endless(router, worker) as running:
            await update(router, "2", "abort")
            await samples(worker)
        assert [span["version"] for span in running.result()["weight_versions"]] == ["1", "2"]
        assert worker.cache.reused == set()


async def test_a_session_keeps_its_cache_and_its_sample_says_whose_it_was(stage: Stage) -> None:
    async with simulated_sessions(stage) as trial:
        old, turns = await trial.create(), [user("Hi there, how are you?")]
        turns.append(message_of(await trial.chat(old, turns)))
        await update(trial.router, "2")
        turns.append(user("And now?"))
        turns.append(message_of(await trial.chat(old, turns)))
        await update(trial.router, "3")
        turns.append(user("And then?"))
        await trial.stream(old, turns)
        new = await trial.create()
        await trial.chat(new, turns[:1])
        records = await trial.records(old)
        assert [record["cache_versions"] for record in records] == [[], ["1", "2"], ["1", "2", "3"]]
        assert all(record["cached_tokens"] for record in records[1:]), "it did find its own"
        assert [record["cache_versions"] for record in await trial.records(new)] == [[]]
        (sample,) = await trial.samples(old)
        assert [turn["cache_versions"] for turn in sample["metadata"]["turns"]] == [[], ["1", "2"], ["1", "2", "3"]]
        assert [key is None for key in keys(trial.worker, CHAT)] == [True, True, True, False]


# Updates that were refused


class LetsGoLater:
    """An engine that still holds an aborted request when it answers the pause, and lets go of it behind `refusals`."""

    def __init__(self, worker: SimulatedWorker, refusals: int) -> None:
        self.refusals = refusals
        worker.engine.can_flush = self.can_flush  # type: ignore[method-assign]

    def can_flush(self) -> bool:
        self.refusals -= 1
        return self.refusals < 0


@pytest.mark.parametrize(("mode", "refusals"), [("abort", 1), ("retract", 3)])
async def test_an_update_whose_flush_comes_too_early_is_flushed_later(
    stage: Stage, mode: str, refusals: int, caplog: pytest.LogCaptureFixture
) -> None:
    async with fleet(stage) as (worker, router):
        await generate(router)
        assert (await post(router, "/pause_generation", mode=mode)).status == 200
        engine = LetsGoLater(worker, refusals)
        answer = await post(router, "/update_weights_from_disk", model_path="m", weight_version="2")
        assert (answer.status, answer.json()["success"]) == (200, True), answer.body
        assert engine.refusals < 0
        assert router.pool.weight_version == worker.engine.named_version == "2"
        assert caplog.messages.count("refused_update_took_effect") == 1
        assert (await post(router, "/continue_generation")).status == 200
        assert (await generate(router))["cached_tokens"] == 0
        assert keys(worker) == [None, None], "nothing of older weights is left to be kept apart"
