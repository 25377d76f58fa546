"""prime-rl's calls (PrimeIntellect-ai/prime-rl at 559b44772): its orchestrator's (`utils/client.py`), and those of the
rollouts that it runs (PrimeIntellect-ai/verifiers at a60a606ec, whose train client calls `renderers.client.generate`).
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Any

import aiohttp

from miles_router.tasks import spawn
from tests.support.cache_trial import checkpoint
from tests.support.simulated_vllm import SimulatedVLLM
from tests.support.stage import Stage
from tests.support.waiting import until

PROMPT = [40, 41, 42]
#: What `generate` of renderers makes of a run's sampling: the last three are always its own.
PARAMS: Mapping[str, Any] = {
    **{"temperature": 1.0, "top_p": 1.0, "max_tokens": 6, "ignore_eos": True},
    **{"stop_token_ids": [2], "logprobs": 1, "skip_special_tokens": False},
}
ADAPTER = {"lora_name": "r8-1e-4", "lora_path": "/run/broadcasts/step_1"}
GROUP = {"host": "10.0.0.1", "port": 29501, "rank_offset": 0, "inference_world_size": 2, "timeout": 1200}


class PrimeServer(SimulatedVLLM):
    """A vLLM server with the paths that prime-rl adds (`inference/vllm/server.py`): its adapters may come again."""

    def _routes(self) -> tuple[list[Any], list[Any]]:
        open_, core = super()._routes()
        own = [
            ("POST", "/load_lora_adapter", self._load_again),
            ("POST", "/init_broadcaster", lambda _: {"status": "ok"}),
        ]
        return [*open_, *own], core

    def _load_again(self, asked: Any) -> Any:
        self.adapters[asked["lora_name"]] = asked["lora_path"]
        return {"status": "ok"}


@dataclass
class PrimeRL:
    """An `InferencePool`: `base_url` is the router's; `admin_base_url` is left out, and the router's too, or names the
    workers."""

    router: str
    workers: list[PrimeServer]
    session: aiohttp.ClientSession

    async def admin(self, path: str, *, at: list[str] | None = None, **given: Any) -> list[int]:
        """`_admin_post` to each admin URL."""
        statuses = []
        for url in at or [self.router]:
            async with self.session.post(f"{url}{path}", **given) as reply:
                await reply.read()
                statuses.append(reply.status)
        return statuses

    async def generate(self, rollout: str, **changes: Any) -> Any:
        """`generate` of renderers: the path stands at the root, `base_url` without its `/v1`."""
        body = {"model": "a-model", "token_ids": PROMPT, "sampling_params": PARAMS, **changes}
        headers = {"Authorization": "Bearer EMPTY", "X-Session-ID": rollout}
        async with self.session.post(f"{self.router}/inference/v1/generate", json=body, headers=headers) as reply:
            said = await reply.json()
            assert reply.status == 200, said
            assert said["request_id"]
            return said

    @property
    def urls(self) -> list[str]:
        return [worker.url for worker in self.workers]


@asynccontextmanager
async def pool(stage: Stage, settings: Mapping[str, Any] | None = None, **kind: Any) -> AsyncIterator[PrimeRL]:
    async with AsyncExitStack() as stack:
        workers = [PrimeServer(checkpoint(), **kind) for _ in range(2)]
        for worker in workers:
            await stack.enter_async_context(worker.running())
        router = await stage.router(*(worker.url for worker in workers), **(settings or {}))
        await until(lambda: len(router.pool.routable) == 2, "all workers have answered")
        yield PrimeRL(router.url, workers, await stack.enter_async_context(aiohttp.ClientSession()))


async def test_it_finds_the_router_ready_and_its_model(stage: Stage) -> None:
    async with pool(stage) as prime:
        async with prime.session.get(f"{prime.router}/health") as reply:
            assert reply.status == 200
        async with prime.session.get(f"{prime.router}/v1/models") as reply:
            assert [(card["id"], card["max_model_len"]) for card in (await reply.json())["data"]] == [("a-model", 4096)]


async def test_a_rollouts_turns_are_generated_by_one_worker(stage: Stage) -> None:
    async with pool(stage) as prime:
        for rollout in ("a", "b", "c", "d"):
            before = [len(worker.sampled) for worker in prime.workers]
            for _ in range(3):
                (choice,) = (await prime.generate(rollout, cache_salt="3"))["choices"]
                assert (len(choice["token_ids"]), choice["finish_reason"]) == (6, "length")
                assert [type(each["logprob"]) for each in choice["logprobs"]["content"]] == [float] * 6
            turns = [len(worker.sampled) - had for worker, had in zip(prime.workers, before, strict=True)]
            assert sorted(turns) == [0, 3]
        body = {"model": "a-model", "token_ids": PROMPT, "sampling_params": PARAMS, "cache_salt": "3"}
        assert all(asked == body for worker in prime.workers for asked in worker.sampled), "as it came"


async def test_an_evaluation_chats_under_its_rollouts_name(stage: Stage) -> None:
    async with pool(stage) as prime:
        body = {"model": "a-model", "messages": [{"role": "user", "content": "Hello"}], "cache_salt": "3"}
        for _ in range(3):
            headers = {"X-Session-ID": "a"}
            async with prime.session.post(f"{prime.router}/v1/chat/completions", json=body, headers=headers) as reply:
                assert (await reply.json())["choices"][0]["message"]["content"] == "Hi"
        assert sorted(len(worker.sampled) for worker in prime.workers) == [0, 3]


async def test_prefill_logprobs_score_every_token_but_the_first(stage: Stage) -> None:
    async with pool(stage) as prime:
        scoring = {"max_tokens": 1, "temperature": 1.0, "top_p": 1.0, "prompt_logprobs": 1}
        first, *others = (await prime.generate("a", sampling_params=scoring))["prompt_logprobs"]
        assert first is None
        assert all(next(iter(each.values()))["logprob"] < 0 for each in others)
        assert len(others) == len(PROMPT) - 1


async def test_weights_change_in_every_worker_while_rollouts_wait(stage: Stage) -> None:
    async with pool(stage, latency_s=0.01) as prime:
        long = {**PARAMS, "max_tokens": 60}
        generating = [spawn(prime.generate(name, sampling_params=long), name=name) for name in ("a", "b")]
        await until(lambda: all(worker.sampled for worker in prime.workers), "both workers generate")
        assert await prime.admin("/pause", params={"mode": "keep", "clear_cache": "false"}) == [200]
        assert await prime.admin("/update_weights", json={"weight_dir": "/run/broadcasts/step_1"}) == [200]
        assert not any(turn.done() for turn in generating)
        assert await prime.admin("/resume") == [200]
        assert [len((await turn)["choices"][0]["token_ids"]) for turn in generating] == [60, 60]
        for worker in prime.workers:
            assert worker.told == [
                ("/pause?mode=keep&clear_cache=false", {"mode": "keep", "clear_cache": "false"}),
                ("/update_weights", {"weight_dir": "/run/broadcasts/step_1"}),
                ("/resume", {}),
            ]


async def test_an_adapter_that_comes_anew_under_its_name_goes_to_the_workers(stage: Stage) -> None:
    """Through the router it is vLLM's own, which takes a name once; so `admin_base_url` names the workers."""
    async with pool(stage) as prime:
        assert await prime.admin("/load_lora_adapter", at=prime.urls, json=ADAPTER) == [200, 200]
        assert await prime.admin("/load_lora_adapter", at=prime.urls, json=ADAPTER) == [200, 200]
        await prime.generate("a", model="r8-1e-4")
        assert [asked["model"] for worker in prime.workers for asked in worker.sampled] == ["r8-1e-4"]
        assert await prime.admin("/load_lora_adapter", json=ADAPTER) == [400], "already loaded"
        assert await prime.admin("/v1/unload_lora_adapter", json={"lora_name": "r8-1e-4"}) == [200]
        assert await prime.admin("/load_lora_adapter", json=ADAPTER) == [200]
        assert [[*worker.adapters] for worker in prime.workers] == [["r8-1e-4"]] * 2


async def test_ranks_of_a_broadcast_go_to_each_worker_itself(stage: Stage) -> None:
    """`rank_offset` is another for each server, and the router passes on what it does not know to one of them."""
    async with pool(stage) as prime:
        for rank, url in enumerate(prime.urls):
            assert await prime.admin("/init_broadcaster", at=[url], json={**GROUP, "rank_offset": rank}) == [200]
        ranks = [[asked["rank_offset"] for _, asked in worker.told] for worker in prime.workers]
        assert ranks == [[0], [1]]
        assert await prime.admin("/init_broadcaster", json=GROUP) == [200]
        assert sorted(len(worker.told) for worker in prime.workers) == [1, 2], "one worker alone"
