"""SGLang-Jax behind the router (`engines/sglang_jax.py` has its profile): a simulated worker with its mistakes, and
the engine itself where `SGLANG_JAX_SRC` says where it is.

Nothing here believes an answer: what it says was sampled is given to the engine again, as a prompt, and scored.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import re
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import aiohttp
import pytest

from miles_router.settings.config import MiddlewareSpec
from miles_router.tasks import spawn
from miles_router.testing import SimulatedWorker
from miles_router.testing.worker.model.moe import MoeShape
from tests.sglang_jax_worker import SOURCE, JaxWorker, jax_workers, model
from tests.support.cache_trial import CACHE, checkpoint
from tests.support.experts_trial import EXPERTS
from tests.support.scoring import LONG, PROMPT, SHORT, Client, client_of, impatient
from tests.support.simulated.sglang_jax import SimulatedJax
from tests.support.stage import Stage
from tests.support.waiting import soon, until

KINDS = [
    "simulated",
    pytest.param(
        "sglang-jax", marks=[pytest.mark.sglang, pytest.mark.skipif(SOURCE is None, reason="SGLANG_JAX_SRC is not set")]
    ),
]
MOE = MoeShape(layers=2, experts=8, top_k=2)


@dataclass
class Engines:
    """Two workers of one kind."""

    urls: list[str]
    checkpoint: str
    simulated: Sequence[SimulatedWorker] = ()

    def sampled(self) -> int:
        """How many generations were begun; 0 where nobody can say."""
        return sum(len(worker.log.generations) for worker in self.simulated)


@pytest.fixture(scope="module")  # its schedulers take a core for themselves, also where nothing runs
def jax() -> Iterator[list[JaxWorker]]:
    with jax_workers(2) as workers:
        yield workers


@contextlib.asynccontextmanager
async def simulated(count: int = 2) -> AsyncIterator[Engines]:
    async with contextlib.AsyncExitStack() as stack:
        workers = [
            await stack.enter_async_context(SimulatedJax(moe=MOE, tokenizer=checkpoint(), token_latency_s=0.004))
            for _ in range(count)
        ]
        yield Engines([worker.url for worker in workers], checkpoint(), workers)


@pytest.fixture(params=KINDS)
async def engines(request: pytest.FixtureRequest) -> AsyncIterator[Engines]:
    if request.param == "simulated":
        async with simulated() as made:
            yield made
    else:
        workers: list[JaxWorker] = request.getfixturevalue("jax")
        yield Engines([worker.url for worker in workers], str(model()))


@pytest.fixture
async def client(stage: Stage, engines: Engines) -> AsyncIterator[Client]:
    async with client_of(stage, engines.urls) as made:
        yield made


# What it answers


async def test_every_shape_has_the_ids_that_were_sampled_and_their_logprobs(client: Client) -> None:
    one, events = await client.shapes_are_true()
    assert "output_top_logprobs" not in one["meta_info"], "nobody asked for them"
    assert [len(event["output_ids"]) for event in events] == [*range(1, 7)]
    ask = functools.partial(client.generate, return_logprob=True)
    several = await ask(input_ids=PROMPT, sampling_params={**SHORT, "n": 3})
    assert [len(await client.is_true(PROMPT, answer)) for answer in several] == [6, 6, 6]
    await client.is_true(PROMPT, await ask(input_tokens=PROMPT, sampling_params=SHORT))
    await client.is_true(PROMPT, (await ask(input_ids=[PROMPT], sampling_params=SHORT))[0])


async def test_the_token_that_stops_is_among_the_ids(client: Client) -> None:
    greedy = {**SHORT, "temperature": 0}
    first = await client.generate(input_ids=PROMPT, sampling_params=greedy)
    stop = {"max_new_tokens": 6, "temperature": 0, "stop_token_ids": [first["output_ids"][3]]}
    for stream in (False, True):
        request = {"input_ids": PROMPT, "sampling_params": stop, "return_logprob": True}
        answer = (await client.events("/generate", **request))[-1] if stream else await client.generate(**request)
        end = first["output_ids"].index(first["output_ids"][3]) + 1
        assert await client.is_true(PROMPT, answer) == first["output_ids"][:end]


@contextlib.asynccontextmanager
async def batching(kind: str) -> AsyncIterator[Engines]:
    """A worker that computes several requests in one batch."""
    if kind == "simulated":
        async with simulated(1) as engines:
            yield engines
    else:
        with jax_workers(1, running=4) as (worker,):
            yield Engines([worker.url], str(model()))


@pytest.mark.parametrize("kind", KINDS)
async def test_who_asks_for_logprobs_and_who_does_not_are_served_side_by_side(stage: Stage, kind: str) -> None:
    asked: list[dict[str, Any]] = [{}, {"return_logprob": True}, {"return_logprob": True, "top_logprobs_num": 2}] * 3
    async with batching(kind) as engines, client_of(stage, engines.urls) as client:
        requests = [client.generate(input_ids=PROMPT, sampling_params=LONG, **each) for each in asked]
        answers = await asyncio.gather(*requests, client.chat(), client.ask("GET", "/health_generate"))
        for answer, each in zip(answers, asked, strict=False):
            meta = answer["meta_info"]
            assert len(answer["output_ids"]) == 40
            assert ("output_top_logprobs" in meta) is ("top_logprobs_num" in each)
            assert ("output_token_logprobs" in meta) is bool(each)
            if each:
                assert [entry[1] for entry in meta["output_token_logprobs"]] == answer["output_ids"]
        assert len(client.router.pool.routable) == 1, "it lives"


async def test_a_name_that_is_used_twice_is_its_clients_alone(client: Client, engines: Engines) -> None:
    request = {"input_ids": PROMPT, "sampling_params": LONG, "return_logprob": True, "rid": "mine"}
    answers = await asyncio.gather(*(client.generate(**request) for _ in range(4)))
    for answer in answers:
        assert answer["meta_info"]["id"] == "mine"
        assert len(await client.is_true(PROMPT, answer)) == 40
    listed = await client.generate(input_ids=[PROMPT, [45]], sampling_params=SHORT, rid="list")
    assert [each["meta_info"]["id"] for each in listed] == ["list_0", "list_1"]
    names = [record.rid for worker in engines.simulated for record in worker.log.generations]
    assert len(set(names)) == len(names)
    assert not {"mine", "list_0"} & {*names}


async def test_an_abort_by_its_clients_name_ends_it(client: Client) -> None:
    await client.is_aborted_by_its_name()


# Pauses


@pytest.mark.parametrize("mode", ["abort", "in_place"])
async def test_a_pause_in_each_mode_ends_and_everything_is_finished(
    client: Client, engines: Engines, mode: str
) -> None:
    whole: dict[str, Any] = {"input_ids": PROMPT, "sampling_params": LONG, "return_logprob": True}
    streamed = {**whole, "sampling_params": {**LONG, "max_new_tokens": 40 if engines.simulated else 400}}
    for worker in engines.simulated:
        worker.engine.token_latency_s = 0.3  # so that all is there when the pause comes
    async with contextlib.AsyncExitStack() as stack:
        streams = [await stack.enter_async_context(client.stream("/generate", **streamed)) for _ in range(2)]
        for stream in streams:
            await stream.next()
        many = [spawn(client.generate(**whole), name="whole") for _ in range(4)]  # the engine computes one at a time
        await until(lambda: client.router.pool.in_flight == 6, "all are with a worker")
        paused = await client.ask("POST", "/pause_generation", {"mode": mode})
        assert (paused.status, paused.json["status"]) == (200, "ok")
        assert (paused.json.get("mode"), paused.json.get("in_place_of")) == (
            ("retract", "abort") if mode == "abort" else (None, None)
        )
        late = spawn(client.generate(**whole), name="late")
        await until(lambda: client.router.app.router.gate.held, "a late one waits")
        with impatient():
            flushed = await client.ask("POST", "/flush_cache")
        assert flushed.status == 400 or flushed.json["error"]["type"] == "fan_out_failed"
        assert re.search(rb"The pause holds \d requests on this worker: ", flushed.body), flushed.body
        for worker in engines.simulated:
            worker.engine.token_latency_s = 0.0
        await client.post("/continue_generation")
        answers = [(await stream.rest())[-1] for stream in streams] + [await soon(each) for each in [*many, late]]
    for answer, request in zip(answers, [streamed, streamed, *[whole] * 5], strict=True):
        assert answer["meta_info"]["finish_reason"]["type"] == "length"
        assert len(await client.is_true(PROMPT, answer)) == request["sampling_params"]["max_new_tokens"]
    assert (await client.ask("POST", "/flush_cache")).status == 200


# Texts, rows and lost workers


async def test_five_turns_of_text_are_exact_with_the_rows_of_every_position(stage: Stage, engines: Engines) -> None:
    async with layered(stage, engines, CACHE, EXPERTS) as client:
        async for answer, found in client.turns_of_text():
            assert not {"output_token_logprobs", "routed_experts"} & answer["meta_info"].keys(), "nobody asked"
            known = found["tokens"], found["loss_mask"], found["rollout_logp"]
            scored = await client.is_scored(*known, return_routed_experts=True)
            delivered = await client.ask("POST", "/routed_experts", {"rid": found["rid"], "format": "json"})
            assert delivered.status == 200, delivered.body
            assert delivered.json["shape"] == [len(found["tokens"]) - 1, MOE.layers, MOE.top_k]
            assert delivered.json["routed_experts"] == scored["routed_experts"]


@contextlib.asynccontextmanager
async def layered(stage: Stage, engines: Engines, *paths: str) -> AsyncIterator[Client]:
    """A client of a router with these middlewares."""
    shape = {"moe_shape": f"{MOE.layers}x{MOE.experts}x{MOE.top_k}"}
    layers = tuple(MiddlewareSpec(path, shape if path == EXPERTS else {}) for path in paths)
    async with client_of(stage, engines.urls, middlewares=layers, hf_checkpoint=engines.checkpoint) as client:
        yield client


@pytest.mark.parametrize("own_tokenizer", [True, False])
async def test_a_text_goes_on_at_another_worker_with_a_tokenizer_of_our_own(stage: Stage, own_tokenizer: bool) -> None:
    async with simulated() as engines:
        await goes_on_elsewhere(stage, engines, engines.simulated[0].kill, own_tokenizer=own_tokenizer)


async def goes_on_elsewhere(stage: Stage, engines: Engines, lose: Any, *, own_tokenizer: bool = True) -> None:
    """Lose the first worker under a stream of text."""
    settings: dict[str, Any] = {"resume_on_worker_loss": True}
    if own_tokenizer:
        settings["hf_checkpoint"] = engines.checkpoint
    async with client_of(stage, engines.urls, **settings) as client:
        client.router.pool.drain(client.router.pool.get(engines.urls[1]), lambda: None)
        request = {"text": "Question: one?", "sampling_params": LONG, "return_logprob": True}
        async with client.stream("/generate", **request) as stream:
            shown = await stream.next()
            while len(shown["output_ids"]) < 5:
                shown = await stream.next()
            added = await client.ask("POST", f"/add_worker?url={engines.urls[1]}")
            assert added.status == 200
            lost = lose()
            if lost is not None:
                await lost
            if not own_tokenizer:
                with pytest.raises(aiohttp.ClientPayloadError):
                    await stream.rest()
                return
            last = (await stream.rest())[-1]
        tokens = last["meta_info"]["prompt_tokens"]
        prompt = client.router.app.router.tokenizer("Question: one?")["input_ids"]
        assert tokens == len(prompt)
        assert last["output_ids"][: len(shown["output_ids"])] == shown["output_ids"]
        assert len(await client.is_true(prompt, last)) == 40


@pytest.mark.sglang
@pytest.mark.skipif(SOURCE is None, reason="SGLANG_JAX_SRC is not set")
@pytest.mark.parametrize("kind", ["sglang-jax"])
async def test_a_text_goes_on_at_another_real_worker(stage: Stage, jax: list[JaxWorker], kind: str) -> None:
    with jax_workers(1, first_seed=21) as (lost,):
        engines = Engines([lost.url, jax[0].url], str(model()))
        await goes_on_elsewhere(stage, engines, lost.kill)


# What it cannot do


async def test_what_it_cannot_do_is_refused_by_name_before_anything_is_generated(
    client: Client, engines: Engines
) -> None:
    said = {
        "input_ids": await client.refused("/v1/chat/completions", messages=[], input_ids=[1]),
        "top_logprobs": await client.refused("/v1/chat/completions", messages=[], logprobs=True),
        "return_token_ids": await client.refused("/v1/completions", prompt="x", return_token_ids=True),
        "logit_bias": await client.refused("/generate", text="x", sampling_params={"logit_bias": {"1": 5}}),
        "session_params": await client.refused("/generate", text="x", session_params={"id": "s"}),
        "extra_key": await client.refused("/generate", text=["x", "y"], extra_key="old"),
        "release_memory_occupation": await client.refused("/release_memory_occupation"),
        "resume_memory_occupation": await client.refused("/resume_memory_occupation"),
    }
    assert [name for name, message in said.items() if name not in message] == []
    assert engines.sampled() == 0
    assert (await client.generate(text="One", sampling_params=SHORT))["output_ids"], "they live"
    assert (await client.ask("POST", "/generate", {"text": 7})).status == 400


# What nobody but the router knows


async def test_answers_have_the_version_that_was_set(client: Client) -> None:
    request = {"input_ids": PROMPT, "sampling_params": SHORT}
    assert "weight_version" not in (await client.generate(**request))["meta_info"]
    assert (await client.post("/router/weight_version", weight_version="7"))["weight_version"] == "7"
    meta = (await client.generate(**request))["meta_info"]
    assert (meta["weight_version"], meta["weight_versions"]) == ("7", [{"version": "7", "start": 0, "end": 6}])
    assert (await client.ask("POST", "/router/weight_version", {"weight_version": 8})).status == 400
    async with client.stream("/generate", input_ids=PROMPT, sampling_params=LONG) as stream:
        assert (await stream.next())["meta_info"]["weight_version"] == "7"
        await client.post("/pause_generation", mode="in_place")
        await client.post("/router/weight_version", weight_version="8")
        await client.post("/continue_generation")
        assert (await stream.rest())[-1]["meta_info"]["weight_version"] == "8"
