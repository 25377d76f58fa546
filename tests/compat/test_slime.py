"""slime's calls (THUDM/slime at 624b824a), in the order of its code: a rollout that is aborted and goes on in the next
step (`sglang_rollout.py`), the same streamed (`sglang_streaming_rollout.py`), and the adapter between an agent and
`/generate` (`agent/adapters/common.py`)."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import pytest

from miles_router.testing import SimulatedWorker
from tests.compat.test_rollout_calls import Trainer
from tests.support.cache_trial import checkpoint
from tests.support.events import EventReader
from tests.support.running_router import RunningRouter
from tests.support.stage import Stage
from tests.support.under_way import under_way
from tests.support.waiting import until

ENDLESS = 50_000


@dataclass
class SlimeSample:
    """What it has of one sample, and what it does with an answer: the ids that were sampled are put behind those it
    has."""

    prompt: list[int]
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    status: str = "pending"

    def __post_init__(self) -> None:
        self.tokens = list(self.prompt)

    @property
    def response_length(self) -> int:
        return len(self.tokens) - len(self.prompt)

    def append(self, meta: dict[str, Any]) -> None:
        triples = meta["output_token_logprobs"]
        self.tokens += [token for _, token, *_ in triples]
        self.logprobs += [logprob for logprob, *_ in triples]
        if meta.get("finish_reason"):
            self.status = meta["finish_reason"]["type"]


class Rollout:
    """The part of its rollout functions that speaks to the router and the engines."""

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self.aborted = False

    def _payload(self, sample: SlimeSample, tokens: int) -> dict[str, Any]:
        params = {
            "temperature": 1.0,
            "top_p": 1.0,
            "top_k": -1,
            "max_new_tokens": tokens - sample.response_length,
            "stop": None,
            "stop_token_ids": None,
            "skip_special_tokens": True,
            "no_stop_trim": True,
            "spaces_between_special_tokens": False,
            "ignore_eos": True,
        }
        return {"sampling_params": params, "return_logprob": True, "input_ids": sample.tokens}

    async def generate(self, sample: SlimeSample, tokens: int, key: str) -> None:
        headers = {"X-SMG-Routing-Key": key}
        output = await self._trainer.call("POST", "/generate", json=self._payload(sample, tokens), headers=headers)
        sample.append(output["meta_info"])

    async def generate_streaming(self, sample: SlimeSample, tokens: int) -> None:
        """Each chunk has all that was sampled so far; one that is aborted between two chunks reads no further."""
        payload = {**self._payload(sample, tokens), "stream": True}
        tokens_before, logprobs_before = list(sample.tokens), list(sample.logprobs)
        url = f"{self._trainer.router}/generate"
        async with self._trainer.http.post(url, json=payload, raise_for_status=True) as reply:
            reader = EventReader()
            async for data in reply.content.iter_any():
                for event in reader.feed(data):
                    sample.tokens, sample.logprobs = list(tokens_before), list(logprobs_before)
                    sample.append(event["meta_info"])
                if self.aborted:
                    break
        if self.aborted and sample.status == "pending":
            sample.status = "abort"

    async def abort(self) -> None:
        """Every engine is asked by itself, until it has nothing left."""
        self.aborted = True
        workers = (await self._trainer.call("GET", "/workers"))["workers"]
        await asyncio.gather(*(self._abort(worker["url"]) for worker in workers))

    async def _abort(self, url: str) -> None:
        while True:
            await self._trainer.call("POST", f"{url}/abort_request", json={"abort_all": True})
            loads = (await self._trainer.call("GET", f"{url}/v1/loads?include=core"))["loads"]
            if not sum(each["num_running_reqs"] + each["num_waiting_reqs"] for each in loads):
                return


@pytest.fixture
async def workers() -> AsyncIterator[list[SimulatedWorker]]:
    options: dict[str, Any] = {"tokenizer": checkpoint(), "token_latency_s": 0.002, "context_len": 100_000}
    async with SimulatedWorker(**options) as one, SimulatedWorker(**options) as other:
        yield [one, other]


@pytest.fixture
async def router(stage: Stage, workers: list[SimulatedWorker]) -> RunningRouter:
    return await stage.router(*(worker.url for worker in workers))


@pytest.fixture
async def trainer(router: RunningRouter) -> AsyncIterator[Trainer]:
    async with aiohttp.ClientSession() as http:
        yield Trainer(http, router.url)


def sampled(workers: Iterable[SimulatedWorker]) -> list[list[int]]:
    """What each request that is running has sampled."""
    return [each.output_ids for worker in workers for each in worker.engine.running.values()]


def given(workers: Iterable[SimulatedWorker]) -> list[tuple[list[int], list[int]]]:
    """Prompt and output of all that the workers have generated."""
    proxies = [exchange for worker in workers for exchange in worker.log.at("/generate")]
    return [(each.input_ids, each.output_ids) for exchange in proxies for each in exchange.generations]


@pytest.mark.parametrize("stream", [False, True])
async def test_a_rollout_that_is_aborted_goes_on_in_the_next_step(
    trainer: Trainer, router: RunningRouter, workers: list[SimulatedWorker], stream: bool
) -> None:
    samples = [SlimeSample([1, 2, 3 + number]) for number in range(8)]

    async def step(rollout: Rollout, tokens: int) -> None:
        for sample in samples:
            sample.status = "pending"
        if stream:
            await asyncio.gather(*(rollout.generate_streaming(sample, tokens) for sample in samples))
        else:
            await asyncio.gather(*(rollout.generate(sample, tokens, f"s{n}") for n, sample in enumerate(samples)))

    rollout = Rollout(trainer)
    async with under_way(step(rollout, ENDLESS)) as first:
        await until(lambda: len(sampled(workers)) == 8 and all(sampled(workers)), "each has sampled something")
        await rollout.abort()
        await first
    assert {sample.status for sample in samples} == {"abort"}
    assert router.app.router.pool.in_flight == 0
    begun = [list(sample.tokens) for sample in samples]
    tokens = max(sample.response_length for sample in samples) + 8
    await step(Rollout(trainer), tokens)
    for sample, before in zip(samples, begun, strict=True):
        assert (sample.status, sample.response_length, len(sample.logprobs)) == ("length", tokens, tokens)
        assert sample.tokens[: len(before)] == before
        assert (before, sample.tokens[len(before) :]) in given(workers), "the rest was sampled behind what it had"


async def test_a_stream_that_is_read_no_further_frees_the_engine_and_leaves_what_was_read(
    trainer: Trainer, workers: list[SimulatedWorker], stage: Stage
) -> None:
    rollout, sample = Rollout(trainer), SlimeSample([1, 2, 3])
    async with under_way(rollout.generate_streaming(sample, ENDLESS)) as generating:
        await until(lambda: sample.response_length, "chunks have come")
        rollout.aborted = True
        await generating
    await until(lambda: not sampled(workers), "the engine is free")
    await stage.nothing_under_way()
    assert sample.status == "abort"
    ((prompt, output),) = given(workers)
    assert (prompt, output[: sample.response_length]) == ([1, 2, 3], sample.tokens[3:])


class Adapter:
    """The adapter's way of asking: a request id of its own for each turn, which it aborts when its agent has left."""

    def __init__(self, trainer: Trainer, session: str) -> None:
        self._trainer = trainer
        self._session = session
        self.turns = 0

    async def turn(self, ids: list[int], tokens: int) -> list[int]:
        self.turns += 1
        rid = f"{self._session}-{self.turns}"
        params = {
            "skip_special_tokens": False,
            "spaces_between_special_tokens": False,
            "no_stop_trim": True,
            "max_new_tokens": tokens,
            "ignore_eos": True,
        }
        body = {"rid": rid, "input_ids": ids, "sampling_params": params, "return_logprob": True}
        headers = {"X-SMG-Routing-Key": self._session}
        try:
            output = await self._trainer.call("POST", "/generate", json=body, headers=headers)
        except asyncio.CancelledError:
            await self._trainer.call("POST", "/abort_request", json={"rid": rid})
            raise
        assert output["meta_info"]["id"] == rid
        return [token for _, token, *_ in output["meta_info"]["output_token_logprobs"]]


async def test_agent_adapter_keeps_its_worker_and_aborts_turns_of_agents_that_left(
    trainer: Trainer, workers: list[SimulatedWorker], stage: Stage
) -> None:
    one, other = Adapter(trainer, "one"), Adapter(trainer, "other")
    ids = {one: [1, 2, 3], other: [4, 5, 6]}
    for _ in range(3):
        for adapter in (one, other):
            ids[adapter] += [*await adapter.turn(ids[adapter], 4), 9]
    places = [{each.json()["rid"].split("-")[0] for each in worker.log.at("/generate")} for worker in workers]
    assert sorted(map(sorted, places)) == [["one"], ["other"]]
    async with under_way(other.turn(ids[other], ENDLESS)) as staying:
        leaving = asyncio.ensure_future(one.turn(ids[one], ENDLESS))
        await until(lambda: len(sampled(workers)) == 2 and all(sampled(workers)), "both sample")
        leaving.cancel()
        with pytest.raises(asyncio.CancelledError):
            await leaving
        await until(lambda: len(sampled(workers)) == 1, "the turn has ended")
        assert not staying.done()
        await trainer.call("POST", "/abort_request", json={"rid": f"other-{other.turns}"})
        assert await staying, "what was sampled until then"
    assert len(await one.turn(ids[one], 4)) == 4
    await stage.nothing_under_way()
