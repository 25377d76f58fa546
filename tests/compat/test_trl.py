"""TRL's calls (huggingface/trl at f2cd57710), in the order of its code: those of async GRPO to a `vllm serve`
(`experimental/async_grpo`: `vllm_client.py`, `weight_transfer.py`, `async_rollout_worker.py`), and those to its own
server, which is no engine (`generation/vllm_client.py`)."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Any

import aiohttp
import pytest

from miles_router.tasks import spawn
from tests.support.cache_trial import checkpoint
from tests.support.simulated_vllm import SimulatedVLLM
from tests.support.stage import Stage
from tests.support.waiting import until

#: `init_info` of `init_weight_transfer_engine`, and `update_info` of `update_weights`, which the router passes on.
GROUP = {"master_address": "10.0.0.1", "master_port": 51216, "rank_offset": 1, "world_size": 2}
WEIGHTS = {"names": ["a"], "dtype_names": ["bfloat16"], "shapes": [[2, 2]], "packed": True}


@dataclass
class AsyncGRPO:
    """Its `VLLMClient`, and the `_generate_one_turn` of its rollout worker."""

    url: str
    session: aiohttp.ClientSession

    async def get(self, path: str) -> Any:
        async with self.session.get(f"{self.url}{path}") as reply:
            assert reply.status == 200, await reply.text()
            return await reply.json() if reply.content_length else None

    async def post(self, path: str, **given: Any) -> int:
        async with self.session.post(f"{self.url}{path}", **given) as reply:
            await reply.read()
            return reply.status

    async def turn(self, prompt: list[int], **changes: Any) -> tuple[list[int], list[float]]:
        fields = {"max_tokens": 6, "temperature": 1.0, "n": 1, "return_token_ids": True, "logprobs": 0, **changes}
        payload = {"model": "a-model", "prompt": prompt, **fields}
        async with self.session.post(f"{self.url}/v1/completions", json=payload) as reply:
            reply.raise_for_status()
            choice = (await reply.json())["choices"][0]
        return choice["token_ids"], choice["logprobs"]["token_logprobs"]


@asynccontextmanager
async def trained(stage: Stage, count: int = 1, **kind: Any) -> AsyncIterator[tuple[AsyncGRPO, list[SimulatedVLLM]]]:
    async with AsyncExitStack() as stack:
        workers = [await stack.enter_async_context(SimulatedVLLM(checkpoint(), **kind).running()) for _ in range(count)]
        router = await stage.router(*(worker.url for worker in workers))
        await until(lambda: len(router.pool.routable) == count, "all workers have answered")
        session = await stack.enter_async_context(aiohttp.ClientSession())
        yield AsyncGRPO(router.url, session), workers


async def test_the_calls_of_async_grpo_in_their_order(stage: Stage) -> None:
    async with trained(stage, latency_s=0.01) as (trl, (worker,)):
        await trl.get("/health")
        assert (await trl.get("/v1/models"))["data"][0]["max_model_len"] == 4096
        assert (await trl.get("/get_world_size"))["world_size"] == 1
        assert await trl.post("/init_weight_transfer_engine", json={"init_info": GROUP}) == 200
        generating = spawn(trl.turn([40, 41, 42], max_tokens=60, ignore_eos=True), name="turn")
        await until(lambda: bool(worker.sampled), "a turn is under way")
        assert await trl.post("/pause", params={"mode": "keep"}) == 200
        assert worker.paused
        assert await trl.post("/start_weight_update", json={"is_checkpoint_format": True}) == 200
        assert await trl.post("/update_weights", json={"update_info": WEIGHTS}) == 200
        assert await trl.post("/finish_weight_update") == 200
        assert not generating.done(), "it waits for the new weights"
        assert await trl.post("/resume") == 200
        ids, logprobs = await generating
        assert len(ids) == len(logprobs) == 60
        assert worker.told == [
            ("/init_weight_transfer_engine", {"init_info": GROUP}),
            ("/pause?mode=keep", {"mode": "keep"}),
            ("/start_weight_update", {"is_checkpoint_format": True}),
            ("/update_weights", {"update_info": WEIGHTS}),
            ("/finish_weight_update", {}),
            ("/resume", {}),
        ]
        assert worker.sampled[0]["prompt"] == [40, 41, 42]


async def test_logprobs_of_another_temperature_are_refused(stage: Stage) -> None:
    """`logprobs: 0` asks for those of what is sampled: none of another distribution are given."""
    async with trained(stage, raw_logprobs=True) as (trl, (worker,)):
        with pytest.raises(aiohttp.ClientResponseError) as refused:
            await trl.turn([40, 41, 42], temperature=0.7)
        assert refused.value.status == 501
        assert not worker.sampled
        named = await trl.turn([40, 41, 42], repetition_penalty=1)
        assert len(named[1]) == 6, "temperature 1 is as it is sampled, where the model has no other default"


async def test_a_fleet_has_the_world_of_one_worker(stage: Stage) -> None:
    """With several workers each is told the same rank, which NCCL cannot join: the page says so."""
    async with trained(stage, 2) as (trl, workers):
        assert (await trl.get("/get_world_size"))["world_size"] == 1
        await trl.post("/init_weight_transfer_engine", json={"init_info": GROUP})
        told = [("/init_weight_transfer_engine", {"init_info": GROUP})]
        assert [worker.told for worker in workers] == [told, told]


@pytest.mark.parametrize("path", ["/generate/", "/chat/", "/init_communicator/", "/update_named_param/"])
async def test_the_calls_to_trls_own_server_are_not_answered(stage: Stage, path: str) -> None:
    async with trained(stage) as (trl, (worker,)):
        assert await trl.post(path, json={"prompts": ["Once"], "n": 1, "max_tokens": 16}) == 404
        assert not worker.sampled
