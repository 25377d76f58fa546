"""SkyRL's calls (NovaSky-AI/SkyRL at a9564572e, `inference_servers/remote_inference_client.py`): those that go to its
`external_proxy_url`, and those that go there too where it has no `external_server_urls`."""

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
#: `get_vllm_sampling_params` of its defaults.
PARAMS: Mapping[str, Any] = {
    **{"min_tokens": 1, "skip_special_tokens": True, "include_stop_str_in_output": True, "max_tokens": 6},
    **{"temperature": 1.0, "top_p": 1.0, "top_k": -1, "min_p": 0.0, "logprobs": 1, "stop": None},
}


class SkyRLServer(SimulatedVLLM):
    """A vLLM server with the paths that SkyRL adds (`vllm_server_actor.py`)."""

    def _routes(self) -> tuple[list[Any], list[Any]]:
        open_, core = super()._routes()
        return [*open_, ("POST", "/skyrl/v1/load_lora_adapter", self._load)], core


@dataclass
class RemoteInferenceClient:
    """Its client: `proxy_url` and the only one of `server_urls` are the router's."""

    url: str
    session: aiohttp.ClientSession

    async def post(self, path: str, body: Mapping[str, Any], session_id: str | None = None) -> Any:
        """`_post`: what is 400 or more is an error with `error.message`."""
        headers = {"Content-Type": "application/json"} | ({"X-Session-ID": session_id} if session_id else {})
        async with self.session.post(f"{self.url}{path}", json=body, headers=headers) as reply:
            said = await reply.json()
            assert reply.status == 200, said["error"]["message"]
            return said

    async def call(self, path: str, body: Any = None, params: Any = None, method: str = "POST") -> tuple[int, Any]:
        """`_call_server`."""
        async with self.session.request(method, f"{self.url}{path}", json=body, params=params) as reply:
            return reply.status, await reply.json() if reply.content_length else None

    async def generate(self, session_id: str | None = None, **changes: Any) -> Any:
        payload = {"sampling_params": PARAMS, "model": "a-model", "token_ids": PROMPT, **changes}
        return (await self.post("/inference/v1/generate", payload, session_id))["choices"][0]


@asynccontextmanager
async def behind(
    stage: Stage, count: int = 2, settings: Mapping[str, Any] | None = None, **kind: Any
) -> AsyncIterator[tuple[RemoteInferenceClient, list[SkyRLServer]]]:
    async with AsyncExitStack() as stack:
        workers = [SkyRLServer(checkpoint(), **kind) for _ in range(count)]
        for worker in workers:
            await stack.enter_async_context(worker.running())
        router = await stage.router(*(worker.url for worker in workers), **(settings or {}))
        await until(lambda: len(router.pool.routable) == count, "all workers have answered")
        session = await stack.enter_async_context(aiohttp.ClientSession())
        yield RemoteInferenceClient(router.url, session), workers


async def test_all_turns_of_a_session_are_generated_by_one_worker(stage: Stage) -> None:
    async with behind(stage) as (skyrl, workers):
        for session in ("a", "b", "c", "d"):
            before = [len(worker.sampled) for worker in workers]
            for _ in range(3):
                choice = await skyrl.generate(session)
                assert (len(choice["token_ids"]), choice["finish_reason"]) == (6, "length")
                assert [type(each["logprob"]) for each in choice["logprobs"]["content"]] == [float] * 6
            turns = [len(worker.sampled) - had for worker, had in zip(workers, before, strict=True)]
            assert sorted(turns) == [0, 3]
        body = {"sampling_params": PARAMS, "model": "a-model", "token_ids": PROMPT}
        assert all(asked == body for worker in workers for asked in worker.sampled), "as it came"
        await skyrl.generate("e", cache_salt="7")
        assert any("7" in worker.salts.get(tuple(PROMPT), ()) for worker in workers)


async def test_a_sample_of_its_tinker_api_has_prompt_logprobs(stage: Stage) -> None:
    async with behind(stage, 1) as (skyrl, _):
        given: dict[str, Any] = {"n": 2, "logprobs": 0, "output_kind": 2, "temperature": 1.0, "max_tokens": 4}
        params = {**given, "prompt_logprobs": 0}
        payload = {"sampling_params": params, "model": "a-model", "token_ids": PROMPT}
        said = await skyrl.post("/inference/v1/generate", payload, "a")
        assert [len(choice["token_ids"]) for choice in said["choices"]] == [4, 4]
        first, *others = said["prompt_logprobs"]
        assert first is None
        assert all(each[str(token)]["logprob"] < 0 for each, token in zip(others, PROMPT[1:], strict=True))
        params["prompt_logprobs"] = None
        assert (await skyrl.post("/inference/v1/generate", payload, "a"))["prompt_logprobs"] is None


async def test_text_apis_and_tokenizers_pass(stage: Stage) -> None:
    async with behind(stage, 1) as (skyrl, (worker,)):
        chat = {"model": "a-model", "messages": [{"role": "user", "content": "Hello"}]}
        assert (await skyrl.post("/v1/chat/completions", chat, "a"))["choices"][0]["message"]["content"] == "Hi"
        assert worker.sampled[-1] == chat
        completion = {"model": "a-model", "prompt": "Once", "max_tokens": 3}
        assert (await skyrl.post("/v1/completions", completion, "a"))["usage"]["completion_tokens"] == 3
        text = {"model": "a-model", "prompt": "Once", "add_special_tokens": True}
        tokens = (await skyrl.post("/tokenize", text))["tokens"]
        assert (await skyrl.post("/detokenize", {"model": "a-model", "tokens": tokens}))["prompt"] == "Once"


async def test_weights_change_in_every_worker_while_turns_wait(stage: Stage) -> None:
    async with behind(stage, latency_s=0.01, sleep_mode=True) as (skyrl, workers):
        long = {**PARAMS, "max_tokens": 60, "ignore_eos": True}
        generating = [spawn(skyrl.generate(name, sampling_params=long), name=name) for name in ("a", "b")]
        await until(lambda: all(worker.sampled for worker in workers), "both workers generate")
        assert (await skyrl.call("/pause", params={"mode": "keep", "clear_cache": "false"}))[0] == 200
        start = {"method": "skyrl_start_weight_update", "kwargs": {"is_checkpoint_format": True}}
        update = {"method": "update_weights_nccl", "kwargs": {"update_info": {"names": ["a"]}}}
        for call in (start, update, {"method": "skyrl_finish_weight_update"}):
            assert (await skyrl.call("/collective_rpc", call))[0] == 200
        assert (await skyrl.call("/update_weights", {"update_info": {"names": ["a"]}}))[0] == 200
        assert not any(turn.done() for turn in generating)
        assert (await skyrl.call("/resume"))[0] == 200
        assert [len((await turn)["token_ids"]) for turn in generating] == [60, 60]
        reset = await skyrl.call("/reset_prefix_cache", {"reset_running_requests": False})
        assert reset == (200, {"success": True})
        for worker in workers:
            assert [path for path, _ in worker.told] == [
                "/pause?mode=keep&clear_cache=false",
                *["/collective_rpc"] * 3,
                "/update_weights",
                "/resume",
                "/reset_prefix_cache",
            ]


async def test_sleep_and_wake_by_tags_reach_every_worker(stage: Stage) -> None:
    async with behind(stage, sleep_mode=True) as (skyrl, workers):
        assert (await skyrl.call("/sleep", params={"level": "1"}))[0] == 200
        assert (await skyrl.call("/wake_up", params={"tags": ["weights"]}))[0] == 200
        assert (await skyrl.call("/wake_up", params={"tags": ["kv_cache"]}))[0] == 200
        for worker in workers:
            assert [path for path, _ in worker.told] == [
                "/sleep?level=1",
                "/wake_up?tags=weights",
                "/wake_up?tags=kv_cache",
            ]


async def test_an_adapter_of_its_own_path_is_loaded_everywhere_and_applied(stage: Stage) -> None:
    async with behind(stage, settings={"fan_out": ("/skyrl/v1/load_lora_adapter",)}) as (skyrl, workers):
        loaded = {"lora_name": "skyrl-lora", "lora_path": "/an/adapter"}
        assert (await skyrl.call("/skyrl/v1/load_lora_adapter", loaded))[0] == 200
        assert [worker.adapters for worker in workers] == [{"skyrl-lora": "/an/adapter"}] * 2
        base = await skyrl.generate("a")
        adapted = await skyrl.generate("a", model="skyrl-lora", sampling_params={**PARAMS, "max_tokens": 3})
        (worker,) = (worker for worker in workers if worker.sampled)
        assert [each["model"] for each in worker.sampled] == ["a-model", "skyrl-lora"]
        assert (len(base["token_ids"]), len(adapted["token_ids"])) == (6, 3)
        assert (await skyrl.call("/v1/unload_lora_adapter", {"lora_name": "skyrl-lora"}))[0] == 200
        assert [worker.adapters for worker in workers] == [{}, {}]


async def test_what_does_not_work_through_the_router_is_refused(stage: Stage) -> None:
    async with behind(stage) as (skyrl, workers):
        status, said = await skyrl.call("/pause", params={"mode": "wait", "clear_cache": "false"})
        assert (status, said["error"]["type"]) == (400, "invalid_request")
        assert "mode must be abort or keep" in said["error"]["message"]
        async with skyrl.session.post(f"{skyrl.url}/finish_session", params={"session_id": "a"}) as reply:
            assert reply.status == 404, "it logs that, and goes on"
        assert await skyrl.call("/get_world_size", method="GET") == (200, {"world_size": 1}), "of one of two workers"
        assert not any(worker.paused for worker in workers)
