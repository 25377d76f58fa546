"""The router in front of two real SGLang workers that register themselves: what users do on the first day."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import anthropic
import openai
import pytest

from tests.sglang_worker import RealWorker
from tests.support.running_router import RunningRouter, running_router
from tests.support.waiting import until

pytestmark = pytest.mark.sglang

GREEDY = {"temperature": 0, "max_new_tokens": 8, "ignore_eos": True}
#: Answers that hold still between two requests, so that the router's can be compared with the worker's own.
STEADY = """/model_info /get_model_info /v1/models /v1/models/default /is_scaling_elastic_ep /list_external_corpora
    /ping /v1/responses/unknown /hicache/storage-backend /get_hicache_l3_cache_layout
    /remote_instance_transfer_engine_info
    /get_remote_instance_transfer_engine_info /get_weights_by_name /"""
#: Answers whose numbers move: status and shape are compared.
MOVING = "/api/tags /server_info /get_server_info /v1/loads /health_generate /ready /openapi.json"
#: GETs that change the worker's state, or wait for something; the shape of their route is shown by the others.
LEFT_OUT = """/flush_cache /start_profile /stop_profile /set_trace_level /freeze_gc /start_expert_distribution_record
    /stop_expert_distribution_record /dump_expert_distribution_record /release_memory_occupation
    /resume_memory_occupation /weights_checker /slow_down /open_session /close_session /configure_logging"""
#: Paths that the router answers itself.
ROUTERS_OWN = "/health"


@pytest.fixture
async def router(sglang_workers: list[RealWorker]) -> AsyncIterator[RunningRouter]:
    """A router at which both workers registered over HTTP."""
    settings: dict[str, Any] = {"health_check_interval": 0.2, "health_check_timeout": 2.0}
    async with running_router(**settings) as running:
        for worker in sglang_workers:
            added = await running.ask("POST", f"/add_worker?url={worker.url}")
            assert added.status == 200
        await until(lambda: all(w.weight_version for w in running.pool), "probes have passed")
        yield running
        await until(lambda: running.pool.in_flight == 0, "every lease is given back")


@pytest.fixture
async def http(router: RunningRouter) -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession(router.url, timeout=aiohttp.ClientTimeout(total=120)) as session:
        yield session


async def generate(http: aiohttp.ClientSession, **payload: Any) -> Any:
    async with http.post("/generate", json=payload) as answer:
        assert answer.status == 200, await answer.text()
        return await answer.json()


async def test_plain_generate_gives_what_the_worker_gives(
    http: aiohttp.ClientSession, sglang_workers: list[RealWorker]
) -> None:
    payload = {"text": "The capital of France is", "sampling_params": GREEDY, "return_logprob": True}
    through = await generate(http, **payload)
    async with aiohttp.ClientSession(sglang_workers[0].url) as direct_http:
        direct = await generate(direct_http, **payload)
    assert through.keys() == direct.keys()
    assert through["meta_info"].keys() == direct["meta_info"].keys()
    assert len(through["output_ids"]) == len(direct["output_ids"]) == 8
    assert [token for _, token, _ in through["meta_info"]["output_token_logprobs"]] == through["output_ids"]
    assert through["meta_info"]["weight_version"] == "default"


async def test_a_stream_has_its_events_and_ends_with_done(http: aiohttp.ClientSession) -> None:
    payload = {"text": "Once", "sampling_params": {**GREEDY, "max_new_tokens": 24}, "stream": True}
    async with http.post("/generate", json=payload) as answer:
        assert answer.headers["content-type"].startswith("text/event-stream")
        events = [line.removeprefix(b"data: ") for line in (await answer.read()).split(b"\n\n") if line]
    assert events[-1] == b"[DONE]"
    # SGLang tells several tokens in one event where it is late.
    assert len(events) > 2
    assert len(json.loads(events[-2])["output_ids"]) == 24


async def test_the_openai_client_runs_unmodified(router: RunningRouter) -> None:
    client = openai.AsyncOpenAI(base_url=f"{router.url}/v1", api_key="none", max_retries=0)
    async with client:
        messages: Any = [{"role": "user", "content": "Say something."}]
        plain = await client.chat.completions.create(
            model="default", messages=messages, max_tokens=8, logprobs=True, extra_body={"return_meta_info": True}
        )
        assert plain.usage is not None
        assert plain.usage.completion_tokens == 8
        assert plain.choices[0].logprobs is not None
        stream = await client.chat.completions.create(
            model="default", messages=messages, max_tokens=8, stream=True, extra_body={"ignore_eos": True}
        )
        finishes = [chunk.choices[0].finish_reason async for chunk in stream if chunk.choices]
        assert finishes[-1] == "length"
        assert set(finishes[:-1]) == {None}
        with pytest.raises(openai.BadRequestError):
            await client.chat.completions.create(model="default", messages=messages, temperature=-5)


async def test_the_anthropic_client_runs_unmodified(router: RunningRouter) -> None:
    async with anthropic.AsyncAnthropic(base_url=router.url, api_key="none", max_retries=0) as client:
        messages: Any = [{"role": "user", "content": "Hi"}]
        answer = await client.messages.create(model="default", max_tokens=8, messages=messages)
    assert answer.usage.output_tokens == 8
    assert answer.stop_reason == "max_tokens"


async def test_every_get_endpoint_answers_as_the_worker_does(
    http: aiohttp.ClientSession, sglang_workers: list[RealWorker]
) -> None:
    async with aiohttp.ClientSession(sglang_workers[0].url) as direct:
        paths = (await (await direct.get("/openapi.json")).json())["paths"]
        known = {path for path, methods in paths.items() if "get" in methods and "{" not in path}
        assert known <= {*STEADY.split(), *MOVING.split(), *LEFT_OUT.split(), ROUTERS_OWN}, "a GET without a test"
        for path in STEADY.split():
            assert await fetched(http, path) == await fetched(direct, path), path
        for path in MOVING.split():
            status, kind, _ = await fetched(http, path)
            assert (status, kind) == (await fetched(direct, path))[:2], path


async def fetched(session: aiohttp.ClientSession, path: str) -> tuple[int, str, bytes]:
    """Returns an answer's status, type and body; the second at which `/v1/models` is asked stands for itself."""
    async with session.get(path, allow_redirects=False) as answer:
        return answer.status, answer.content_type, re.sub(rb'"created":\d+', b'"created":0', await answer.read())


async def test_errors_of_the_worker_pass_unchanged(
    http: aiohttp.ClientSession, sglang_workers: list[RealWorker]
) -> None:
    payload = {"text": "x", "input_ids": [1], "sampling_params": {"temperature": -1}}
    async with (
        aiohttp.ClientSession(sglang_workers[0].url) as direct,
        direct.post("/generate", json=payload) as own,
        http.post("/generate", json=payload) as through,
    ):
        assert through.status == own.status == 400
        assert await through.read() == await own.read()


async def test_a_client_that_leaves_stops_the_generation(
    http: aiohttp.ClientSession, router: RunningRouter, sglang_workers: list[RealWorker]
) -> None:
    endless = {"text": "Once", "sampling_params": {"max_new_tokens": 8000, "ignore_eos": True}, "stream": True}
    async with http.post("/generate", json=endless) as answer:
        await answer.content.readany()
        assert router.pool.in_flight == 1
        answer.close()
    await until(lambda: router.pool.in_flight == 0, "the lease is given back")
    for worker in sglang_workers:
        await becomes_idle(worker)


async def becomes_idle(worker: RealWorker) -> None:
    async with aiohttp.ClientSession(worker.url) as direct:
        for _ in range(200):
            loads = (await (await direct.get("/v1/loads")).json())["loads"]
            if not sum(load["num_running_reqs"] + load["num_waiting_reqs"] for load in loads):
                return
            await asyncio.sleep(0.05)
    raise AssertionError(f"{worker.url} still generates for a client that has left")


async def test_killed_worker_costs_no_unanswered_request_and_is_readmitted(
    router: RunningRouter, http: aiohttp.ClientSession, sglang_workers: list[RealWorker]
) -> None:
    victim = sglang_workers[0]
    record = router.pool.get(victim.url)
    sampling = {"max_new_tokens": 48, "ignore_eos": True}
    rollouts = [asyncio.ensure_future(generate(http, text=f"rollout {n}", sampling_params=sampling)) for n in range(24)]
    await until(lambda: record.in_flight >= 8, "the victim is under load")
    victim.kill()
    try:
        answers = await asyncio.gather(*rollouts)
        assert {len(answer["output_ids"]) for answer in answers} == {48}
        await until(lambda: record.state.value == "quarantined", "the dead worker is quarantined")
    finally:
        await asyncio.to_thread(victim.restart)
    await until(lambda: record.state.value == "ready", f"readmission: {record.reason}")
    before = router.app.router.metrics.requests["generate", 200, victim.url]
    await asyncio.gather(*(generate(http, text=f"{n}", sampling_params=GREEDY) for n in range(4)))
    assert router.app.router.metrics.requests["generate", 200, victim.url] == before + 2
