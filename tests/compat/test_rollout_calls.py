"""The calls that rollout functions make without sessions, in the order of their code (miles at 31f1ca961
`sglang_engine.py` and `sglang_rollout.py`; slime at 624b824a, the same files): engines register, samples are generated,
what is under way is aborted at the engines, engines leave."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import pytest

from miles_router.testing import SimulatedWorker
from tests.support.cache_trial import checkpoint
from tests.support.running_router import RunningRouter
from tests.support.stage import Stage
from tests.support.waiting import until


class Trainer:
    """A framework's HTTP client: a status other than 2xx is raised, as `raise_for_status` does."""

    def __init__(self, http: aiohttp.ClientSession, router: str) -> None:
        self.http = http
        self.router = router

    async def call(self, method: str, url: str, **options: Any) -> Any:
        url = url if url.startswith("http") else f"{self.router}{url}"
        async with self.http.request(method, url, raise_for_status=True, **options) as reply:
            text = await reply.text()
            return json.loads(text) if text else None

    async def generate(self, ids: list[int], tokens: int, headers: dict[str, str] | None = None) -> dict[str, Any]:
        """One sample's request; what its `Sample` is updated with."""
        payload = {
            "sampling_params": {"max_new_tokens": tokens, "ignore_eos": True},
            "return_logprob": True,
            "input_ids": ids,
        }
        output = await self.call("POST", "/generate", json=payload, headers=headers)
        meta = output["meta_info"]
        triples = meta.get("output_token_logprobs") or []
        return {
            "tokens": ids + [item[1] for item in triples],
            "logprobs": [item[0] for item in triples],
            "finish": meta["finish_reason"]["type"],
            "version": meta["weight_version"],
        }


@pytest.fixture
async def workers() -> AsyncIterator[list[SimulatedWorker]]:
    options: dict[str, Any] = {"tokenizer": checkpoint(), "weight_version": "3", "token_latency_s": 0.001}
    async with SimulatedWorker(**options) as one, SimulatedWorker(**options) as other:
        yield [one, other]


@pytest.fixture
async def router(stage: Stage) -> RunningRouter:
    return await stage.router()


@pytest.fixture
async def trainer(router: RunningRouter) -> AsyncIterator[Trainer]:
    async with aiohttp.ClientSession() as http:
        yield Trainer(http, router.url)


async def rollout(trainer: Trainer, router: RunningRouter, urls: list[str]) -> None:
    """A step: short samples end, a long one is aborted at the engines, which the framework asks itself."""
    short = await asyncio.gather(
        *(trainer.generate([1, 2, 3 + n], 4, {"X-SMG-Routing-Key": f"s{n}"}) for n in range(8))
    )
    for number, sample in enumerate(short):
        assert sample["tokens"][:3] == [1, 2, 3 + number]
        assert (len(sample["tokens"]), len(sample["logprobs"]), sample["finish"]) == (7, 4, "length")
        assert sample["version"] == "3"
    long = asyncio.ensure_future(trainer.generate([1, 2, 3], 20_000))
    await until(lambda: router.app.router.pool.in_flight == 1, "it is under way")
    while not long.done():
        await asyncio.gather(*(trainer.call("POST", f"{url}/abort_request", json={"abort_all": True}) for url in urls))
    assert (await long)["finish"] == "abort"
    assert router.app.router.pool.in_flight == 0


async def test_the_calls_of_miles_in_their_order(
    trainer: Trainer, router: RunningRouter, workers: list[SimulatedWorker]
) -> None:
    for worker in workers:
        await trainer.call("POST", f"/add_worker?url={worker.url}")
    urls = (await trainer.call("GET", "/list_workers"))["urls"]
    assert urls == [worker.url for worker in workers]
    await rollout(trainer, router, urls)
    for worker in workers:
        await trainer.call("POST", f"/remove_worker?url={worker.url}")
    assert (await trainer.call("GET", "/list_workers"))["urls"] == []


async def test_the_calls_of_slime_in_their_order(
    trainer: Trainer, router: RunningRouter, workers: list[SimulatedWorker]
) -> None:
    for worker in workers:
        await trainer.call("POST", "/workers", json={"url": worker.url, "worker_type": "regular"})
    urls = [worker["url"] for worker in (await trainer.call("GET", "/workers"))["workers"]]
    assert urls == [worker.url for worker in workers]
    await rollout(trainer, router, urls)
    for url in urls:
        listed = (await trainer.call("GET", "/workers"))["workers"]
        (own,) = [worker["id"] for worker in listed if worker["url"] == url]
        await trainer.call("DELETE", f"/workers/{own}")
    assert (await trainer.call("GET", "/workers"))["workers"] == []
