"""A real pair of SGLang workers behind the router: one prefill half, two decode halves, on the CPU.

What each half said went through a proxy, so that the one answer can be held against both. Random weights are sampled
greedily, and computed again: what a prompt's end is given, and what was sampled from there, is the same each time but
for the last bits of a logprob.
"""

from __future__ import annotations

import asyncio
import base64
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Any

import aiohttp
import numpy as np
import orjson
import pytest

from miles_router.engines import recomputing
from miles_router.tasks import spawn
from tests.sglang_worker import RealHalves, real_pair
from tests.support import tiers
from tests.support.events import events_of
from tests.support.recording_proxy import RecordingProxy
from tests.support.running_router import RunningRouter, running_router
from tests.support.waiting import until

pytestmark = pytest.mark.sglang

WIDTH = 8  # ids in a row of the model
SHORT = {"max_new_tokens": 12, "temperature": 0, "ignore_eos": True}
LONG = {**SHORT, "max_new_tokens": 60}
PROMPT = list(range(1000, 1040))
whole_and_streamed = pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])


@pytest.fixture(scope="module")
def engines() -> Iterator[RealHalves]:
    if not tiers.heavy():
        pytest.skip("three engines of their own")
    with real_pair("--enable-return-routed-experts", moe=True, decodes=2) as halves:
        yield halves


@dataclass
class Pair:
    """The router, the proxies of its workers, and the clock of their engines."""

    engines: RealHalves
    router: RunningRouter
    prefill: RecordingProxy
    decodes: list[RecordingProxy]
    http: aiohttp.ClientSession

    async def post(self, path: str, *, status: int = 200, **body: Any) -> bytes:
        async with self.http.post(path, json=body) as reply:
            text = await reply.read()
            assert reply.status == status, (path, text)
            return text

    async def answer(self, **body: Any) -> Any:
        """An answer of `/generate`; of a stream, its last event."""
        async with self.http.post("/generate", json={"input_ids": PROMPT, "sampling_params": SHORT, **body}) as reply:
            text = await reply.read()
            assert reply.status == 200, text
            return events_of(text)[-1] if body.get("stream") else await reply.json()

    def said(self, proxy: RecordingProxy) -> Any:
        """What a half answered last to `/generate`."""
        last = [each for each in proxy.exchanges if each.path == "/generate"][-1]
        return events_of(last.reply)[-1] if last.reply.startswith(b"data") else orjson.loads(last.reply)

    async def slow(self, seconds: float | None, *, prefill: bool = False) -> None:
        """Let each step of the one kind of half take so much longer."""
        for worker in self.engines.prefills if prefill else self.engines.decodes:
            if not worker.alive:
                continue
            order = {"forward_sleep_time": seconds}
            async with aiohttp.ClientSession() as direct, direct.post(f"{worker.url}/slow_down", json=order) as reply:
                assert reply.status == 200


@pytest.fixture
async def pair(engines: RealHalves) -> AsyncIterator[Pair]:
    settings: dict[str, Any] = {"health_check_interval": 0.5, "health_check_timeout": 5.0, "partial_rollout": "resume"}
    async with AsyncExitStack() as stack:
        router = await stack.enter_async_context(running_router(**settings))
        proxies = [
            await stack.enter_async_context(RecordingProxy(worker.url))
            for worker in (*engines.prefills, *engines.decodes)
        ]
        http = await stack.enter_async_context(
            aiohttp.ClientSession(router.url, timeout=aiohttp.ClientTimeout(total=120))
        )
        made = Pair(engines, router, proxies[0], proxies[1:], http)
        asked = f"worker_type=prefill&bootstrap_port={engines.ports[0]}"
        await made.post(f"/add_worker?url={proxies[0].url}&{asked}")
        for proxy in proxies[1:]:
            await made.post(f"/add_worker?url={proxy.url}&worker_type=decode")
        await until(lambda: all(worker.weight_version for worker in router.pool), "the first probes are over")
        yield made
        await until(lambda: not router.pool.in_flight, "every lease is back")


def rows_of(meta: Any) -> Any:
    return np.frombuffer(base64.b64decode(meta["routed_experts"]), np.int32).reshape(-1, WIDTH)


async def test_a_generation_is_one_exact_answer_of_both(pair: Pair) -> None:
    for stream in (False, True):
        answer = await pair.answer(stream=stream, return_logprob=True)
        meta, ids = answer["meta_info"], answer["output_ids"]
        assert len(ids) == 12
        assert [entry[1] for entry in meta["output_token_logprobs"]] == ids
        handed = pair.said(pair.prefill)
        assert handed["output_ids"] == ids[:1]
        assert handed["meta_info"]["output_token_logprobs"][0][0] == meta["output_token_logprobs"][0][0]
    assert ids == (await pair.answer())["output_ids"]


async def test_logprobs_of_the_prompt(pair: Pair) -> None:
    for stream in (False, True):
        answer = await pair.answer(
            stream=stream, return_logprob=True, logprob_start_len=0, top_logprobs_num=2, token_ids_logprob=[5, 6]
        )
        meta, handed = answer["meta_info"], pair.said(pair.prefill)["meta_info"]
        assert [entry[1] for entry in meta["input_token_logprobs"]] == PROMPT
        for name in ("input_token_logprobs", "input_top_logprobs", "input_token_ids_logprobs"):
            assert meta[name] == handed[name]
        assert len(meta["output_token_ids_logprobs"]) == 12
        assert meta["output_token_ids_logprobs"][0] == handed["output_token_ids_logprobs"][0]


async def test_logprobs_of_given_tokens_as_a_teacher_is_asked_for_them(pair: Pair) -> None:
    ids = np.array(PROMPT, np.int32)
    for start, top_k in ((0, 0), (17, 3)):
        asked = orjson.loads(recomputing.request(ids, start, "", top_k))
        found = recomputing.read(await pair.post("/generate", **asked), PROMPT[start:], top_k)
        whole = await pair.answer(return_logprob=True, logprob_start_len=0)
        told = [entry[0] for entry in whole["meta_info"]["input_token_logprobs"]]
        assert found.logprobs == pytest.approx(told[start + 1 :], abs=1e-3)
        assert (found.likeliest is None) == (top_k == 0)


@whole_and_streamed
async def test_sampling_masks_of_every_token(pair: Pair, stream: bool) -> None:
    params = {**SHORT, "temperature": 1.0, "top_k": 5}
    answer = await pair.answer(sampling_params=params, return_sampling_mask=True, stream=stream)
    masks = answer["meta_info"]["output_token_sampling_mask"]
    assert [token in mask for token, mask in zip(answer["output_ids"], masks, strict=True)] == [True] * 12
    assert pair.said(pair.prefill)["meta_info"]["output_token_sampling_mask"] == masks[:1]


@whole_and_streamed
@pytest.mark.parametrize("start", [0, 17, len(PROMPT)])
async def test_expert_rows_of_the_prompt_and_of_the_output(pair: Pair, stream: bool, start: int) -> None:
    await pair.answer(input_ids=PROMPT[::-1])  # whose rows lie in the decode half's memory then
    answer = await pair.answer(stream=stream, return_routed_experts=True, routed_experts_start_len=start)
    rows, ids = rows_of(answer["meta_info"]), answer["output_ids"]
    again = await pair.answer(
        input_ids=[*PROMPT, *ids], return_routed_experts=True, sampling_params={**SHORT, "max_new_tokens": 1}
    )
    truth = rows_of(again["meta_info"])[start:]
    assert len(rows) == len(truth) - 1 == len(PROMPT) + 12 - 1 - start
    same = (rows == truth[: len(rows)]).all(axis=1)
    assert same[: len(PROMPT) - start].all()
    assert same.mean() > 0.8  # one computes a position alone, the other beside others


async def test_several_samples_and_lists(pair: Pair) -> None:
    for stream in (False, True):
        async with pair.http.post(
            "/generate",
            json={"input_ids": [PROMPT, PROMPT[:9]], "sampling_params": {**SHORT, "n": 3}, "stream": stream},
        ) as reply:
            text = await reply.read()
            assert reply.status == 200, text
            answers = (
                [event for _, event in sorted({each["index"]: each for each in events_of(text)}.items())]
                if stream
                else await reply.json()
            )
        assert [answer["meta_info"]["prompt_tokens"] for answer in answers] == [40] * 3 + [9] * 3
        assert [len(answer["output_ids"]) for answer in answers] == [12] * 6


async def test_every_endpoint(pair: Pair) -> None:
    said: dict[str, Any] = {
        "messages": [{"role": "user", "content": "Hi"}],
        "model": "m",
        "max_tokens": 6,
        "temperature": 0,
    }
    model = (await (await pair.http.get("/v1/models")).json())["data"][0]["id"]
    whole = orjson.loads(
        await pair.post("/v1/chat/completions", **said, return_meta_info=True, return_routed_experts=True)
    )
    meta = whole["choices"][0]["meta_info"]
    assert len(rows_of(meta)) == meta["prompt_tokens"] + 6 - 1
    chunks = events_of(await pair.post("/v1/chat/completions", **said, stream=True))
    text = "".join(chunk["choices"][0]["delta"].get("content") or "" for chunk in chunks)
    assert text == whole["choices"][0]["message"]["content"]
    assert b"msg_" in await pair.post("/v1/messages", **said)
    assert b"completed" in await pair.post("/v1/responses", model=model, input="Hi", max_output_tokens=6)
    listed = orjson.loads(await pair.post("/v1/completions", model="m", prompt=["a", "b"], max_tokens=3))
    assert len(listed["choices"]) == 2


@whole_and_streamed
async def test_an_abort_while_it_decodes(pair: Pair, stream: bool) -> None:
    await pair.slow(0.05)
    generating = spawn(pair.answer(rid="r", sampling_params=LONG, stream=stream), name="a client")
    await until(lambda: _answered(pair.prefill, "r"), "the prompt was handed over")
    await asyncio.sleep(0.3)  # a few steps; any number will do
    await pair.post("/abort_request", rid="r")
    await pair.slow(None)
    answer = await generating
    assert answer["meta_info"]["finish_reason"]["type"] == "abort"
    assert 0 < len(answer["output_ids"]) < 60


@whole_and_streamed
async def test_an_abort_while_its_prompt_is_computed(pair: Pair, stream: bool) -> None:
    await pair.slow(1.5, prefill=True)
    generating = spawn(pair.answer(rid="q", input_ids=PROMPT[::2], stream=stream), name="a client")
    await until(
        lambda: _has(pair.prefill, "q") and any(_has(each, "q") for each in pair.decodes), "both halves have it"
    )
    await asyncio.sleep(0.5)
    await pair.post("/abort_request", rid="q")
    await pair.slow(None, prefill=True)
    answer = await generating
    assert answer["meta_info"]["finish_reason"]["type"] == "abort"
    assert answer["output_ids"] == []
    assert (await pair.answer())["meta_info"]["finish_reason"]["type"] == "length"


@pytest.mark.parametrize("mode", ["abort", "retract", "in_place"])
@pytest.mark.parametrize("phase", ["prompt", "output"])
@whole_and_streamed
async def test_generations_outlive_an_update(pair: Pair, mode: str, phase: str, stream: bool) -> None:
    version = f"{mode}-{phase}-{stream}"
    await pair.slow(1.0 if phase == "prompt" else 0.05, prefill=phase == "prompt")
    prompts = [PROMPT[start:] for start in range(1, 5)]
    generating = [
        spawn(
            pair.answer(
                rid=f"{version}-{len(prompt)}",
                input_ids=prompt,
                sampling_params=LONG,
                stream=stream,
                return_logprob=True,
                return_routed_experts=True,
            ),
            name="a client",
        )
        for prompt in prompts
    ]
    half = _has if phase == "prompt" else _answered
    await until(lambda: all(half(pair.prefill, f"{version}-{len(prompt)}") for prompt in prompts), "all are there")
    await asyncio.sleep(0.3)
    await pair.post("/pause_generation", mode=mode)
    await pair.post("/update_weight_version", new_version=version, abort_all_requests=False)
    await pair.slow(None, prefill=phase == "prompt")
    await pair.post("/continue_generation")
    for prompt, answer in zip(prompts, await asyncio.gather(*generating), strict=True):
        meta, ids = answer["meta_info"], answer["output_ids"]
        assert (meta["finish_reason"]["type"], len(ids)) == ("length", 60)
        assert [entry[1] for entry in meta["output_token_logprobs"]] == ids
        assert len(rows_of(meta)) == len(prompt) + 60 - 1
        spans = meta["weight_versions"]
        assert (spans[0]["start"], spans[-1]["end"]) == (0, 60)
        assert spans[-1]["version"] == version
        if phase == "output":
            assert len(spans) == 2
        else:
            assert {span["version"] for span in spans} <= {spans[0]["version"], version}


async def test_a_decode_half_that_dies_is_replaced(pair: Pair) -> None:
    await pair.slow(0.05)
    generating = [spawn(pair.answer(sampling_params=LONG), name="a client") for _ in range(4)]
    await until(lambda: all(_busy(proxy) for proxy in pair.decodes), "both decode halves have some")
    pair.engines.decodes[1].kill()
    await pair.slow(None)
    answers = await asyncio.gather(*generating)
    assert [len(answer["output_ids"]) for answer in answers] == [60] * 4


def _of(proxy: RecordingProxy, rid: str) -> list[Any]:
    return [each for each in proxy.exchanges if each.path == "/generate" and rid.encode() in each.body]


def _has(proxy: RecordingProxy, rid: str) -> bool:
    return bool(_of(proxy, rid))


def _answered(proxy: RecordingProxy, rid: str) -> bool:
    return any(each.ended for each in _of(proxy, rid))


def _busy(proxy: RecordingProxy) -> bool:
    return any(each.path == "/generate" and not each.ended for each in proxy.exchanges)
