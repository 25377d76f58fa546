"""A LoRA adapter of a real SGLang: however a client names it, each route answers with it, never with base weights."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pytest
from safetensors.numpy import save_file

from miles_router.testing import SimulatedWorker
from tests.sglang.environment import ensure
from tests.sglang_worker import RealWorker
from tests.support import http, tiers
from tests.support.fleet import JSON, post
from tests.support.running_router import RunningRouter, running_router

pytestmark = pytest.mark.sglang

HI = [{"role": "user", "content": "Count."}]
#: Each path that applies an adapter, and a request that is answered alike each time.
ROUTES: dict[str, dict[str, Any]] = {
    "/generate": {"text": "Count", "sampling_params": {"max_new_tokens": 8, "temperature": 0}},
    "/v1/chat/completions": {"messages": HI, "max_tokens": 8, "temperature": 0},
    "/v1/completions": {"prompt": "Count", "max_tokens": 8, "temperature": 0},
    "/v1/messages": {"messages": HI, "max_tokens": 8, "temperature": 0},
    "/invocations": {"messages": HI, "max_tokens": 8, "temperature": 0},
}


@pytest.fixture(scope="module")
def adapter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random adapter that changes nearly every token."""
    directory: Path = tmp_path_factory.mktemp("adapter")
    config = json.loads((Path(ensure().dense_model) / "config.json").read_text(encoding="utf-8"))
    hidden, heads, size = config["hidden_size"], config["num_attention_heads"], config["head_dim"]
    random, weights = np.random.default_rng(0), {}
    for layer in range(config["num_hidden_layers"]):
        for name, out in (("q_proj", heads * size), ("v_proj", config["num_key_value_heads"] * size)):
            prefix = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            weights[f"{prefix}.lora_A.weight"] = random.normal(size=(4, hidden)).astype(np.float32)
            weights[f"{prefix}.lora_B.weight"] = random.normal(size=(out, 4)).astype(np.float32)
    save_file(weights, directory / "adapter_model.safetensors")
    about = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj"], "bias": "none"}
    (directory / "adapter_config.json").write_text(json.dumps(about), encoding="utf-8")
    return directory


@pytest.fixture(scope="module")
def worker(adapter: Path) -> Iterator[RealWorker]:
    if not tiers.heavy():
        pytest.skip("an engine of its own, with an adapter")
    flags = ("--enable-lora", "--lora-backend", "torch_native", "--lora-paths", f"one={adapter}")
    with RealWorker.start(*flags) as started:
        yield started


@pytest.fixture
async def router(worker: RealWorker) -> AsyncIterator[RunningRouter]:
    async with SimulatedWorker() as judge, running_router() as running:
        for url, model_id in ((worker.url, "actor"), (judge.url, "judge")):
            assert (await post(running, "/workers", url=url, model_id=model_id)).status == 201
        yield running


def said(answer: http.RawReply) -> object:
    """What was generated, without what differs each time."""
    assert answer.status == 200, answer.body
    body = answer.json()
    return body.get("text") or body.get("content") or body["choices"][0].get("text") or body["choices"][0]["message"]


@pytest.mark.parametrize("path", ROUTES)
async def test_an_adapter_answers_however_it_is_named(worker: RealWorker, router: RunningRouter, path: str) -> None:
    served = (await http.ask(worker.url, "GET", "/model_info")).json()["served_model_name"]
    direct = {"lora_path": "one"} if path == "/generate" else {"model": f"{served}:one"}
    by_adapter = said(await http.ask(worker.url, "POST", path, JSON, orjson.dumps({**ROUTES[path], **direct})))
    by_base = said(await post(router, path, model="actor", **ROUTES[path]))
    assert by_adapter != by_base
    for name in ("actor:one", f"{served}:one", "one"):
        assert said(await post(router, path, model=name, **ROUTES[path])) == by_adapter, name


async def test_an_adapter_answers_where_no_worker_has_a_model_id(worker: RealWorker) -> None:
    async with running_router() as router:
        assert (await router.ask("POST", f"/add_worker?url={worker.url}")).status == 200
        for path, request in ROUTES.items():
            direct = {"lora_path": "one"} if path == "/generate" else {"model": "any:one"}
            by_adapter = said(await http.ask(worker.url, "POST", path, JSON, orjson.dumps({**request, **direct})))
            for name in ("one", "any:one"):
                assert said(await post(router, path, model=name, **request)) == by_adapter, (path, name)
            assert said(await post(router, path, model="any", **request)) != by_adapter, path
        refused = await post(router, "/v1/responses", model="one", input="Count")
        assert (refused.status, refused.json()["error"]["type"]) == (501, "unsupported_by_engine")


async def test_what_no_adapter_answers_is_refused(router: RunningRouter) -> None:
    refused = await post(router, "/v1/responses", model="one", input="Count")
    assert (refused.status, refused.json()["error"]["type"]) == (501, "unsupported_by_engine")
    unknown = await post(router, "/v1/completions", model="two", prompt="Count")
    assert (unknown.status, ":one" in unknown.json()["error"]["message"]) == (404, True)
    never = await post(router, "/v1/completions", model="actor:two", prompt="Count")
    assert never.status == 400
