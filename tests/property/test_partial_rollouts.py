"""Generations that are cut anywhere, by any pause or by the loss of their worker, give what an uncut one would give."""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
from hypothesis import HealthCheck, Phase, example, given, settings
from hypothesis import strategies as st

from miles_router.testing import MoeShape, SimulatedWorker
from miles_router.testing.worker.model.indexer import IndexerShape, choose
from miles_router.testing.worker.model.moe import route
from tests.support.brake import Brake
from tests.support.chains import chain, check
from tests.support.events import events_of
from tests.support.http import RawReply, ask
from tests.support.recording_proxy import RecordingProxy
from tests.support.running_router import RunningRouter
from tests.support.stage import Stage, staged
from tests.support.tiers import examples
from tests.support.waiting import soon

PHASES = (Phase.explicit, Phase.reuse, Phase.generate)  # a plan is short as it is; shrinking it takes minutes
JSON = [("Content-Type", "application/json"), ("X-Request-Id", "it")]
MOE = MoeShape(2, 8, 2)
INDEXER = IndexerShape(2, 3)
LOGPROBS = ("output_token_logprobs", "output_top_logprobs")
OF_THE_PROMPT = ("prompt_tokens", "input_token_logprobs", "input_top_logprobs")
PROMPTS: dict[str, dict[str, Any]] = {
    "text": {"text": "Tell me of 世界"},
    "ids": {"input_ids": [5, 300, 229]},
    "texts": {"text": ["One é", "Two"]},
    "lists of ids": {"input_ids": [[7, 8], [9]]},
    "list of one": {"text": ["Only"]},
    "both": {"text": ["One", "Two"], "input_ids": [[7, 8, 9], [10, 11]]},
}
KINDS = ("abort", "abort", "abort", "retract", "in_place", "in_place abort", "retract abort", "loss")
PARALLEL = {"texts", "lists of ids", "both"}


@dataclass(frozen=True)
class Plan:
    """One request, and what happens to it."""

    prompt: str
    stream: bool
    incremental: bool
    rows: bool
    greedy: bool
    ends: bool  # whether the model ends by itself, so soon that cuts meet its ends
    n: int
    budget: int
    fields: dict[str, Any]
    params: dict[str, Any]
    stop: tuple[str, int] | None  # kind, and the place in the uncut answer that it is taken from
    cuts: list[tuple[str, int]]  # kind, and after how many tokens of a go

    def body(self) -> dict[str, Any]:
        params = {"max_new_tokens": self.budget, "temperature": 0 if self.greedy else 1, **self.params}
        if self.n > 1:
            params["n"] = self.n
        body = {**PROMPTS[self.prompt], **self.fields, "sampling_params": params, "stream": self.stream}
        if self.rows:
            body |= {"return_routed_experts": True, "return_indexer_topk": True}
        return body

    @property
    def count(self) -> int:
        return self.n * (2 if self.prompt in PARALLEL else 1)


plans = st.builds(
    Plan,
    prompt=st.sampled_from(list(PROMPTS)),
    stream=st.booleans(),
    incremental=st.booleans(),
    rows=st.booleans(),
    greedy=st.sampled_from([True, True, False]),
    ends=st.booleans(),
    n=st.sampled_from([1, 1, 1, 2]),
    budget=st.integers(0, 40),
    fields=st.fixed_dictionaries(
        {"return_logprob": st.booleans()},
        optional={
            "rid": st.just("mine"),
            "top_logprobs_num": st.just(2),
            "logprob_start_len": st.just(0),
            "routed_experts_start_len": st.just(1),
        },
    ),
    params=st.fixed_dictionaries(
        {},
        optional={
            "ignore_eos": st.just(True),
            "skip_special_tokens": st.just(False),
            "no_stop_trim": st.just(True),
        },
    ),
    stop=st.none() | st.tuples(st.sampled_from(["string", "string", "token"]), st.integers(0, 30)),
    cuts=st.lists(
        st.tuples(st.sampled_from(KINDS), st.integers(0, 15)),
        max_size=4,
    ),
)


@dataclass
class Scene:
    """Two workers behind proxies, and a third like them that nobody disturbs."""

    workers: list[SimulatedWorker]
    proxies: list[RecordingProxy]
    brakes: list[Brake]
    reference: SimulatedWorker
    router: RunningRouter

    def brake(self, *, on: bool) -> None:
        for brake in self.brakes:
            brake.on = on

    def reached(self, tokens: int) -> bool:
        goes = [go for worker in self.workers for go in worker.engine.running.values()]
        return any(len(go.output_ids) >= tokens for go in goes)


@asynccontextmanager
async def scene_of(stage: Stage, plan: Plan) -> AsyncIterator[Scene]:
    kind: dict[str, Any] = {
        "moe": MOE,
        "indexer": INDEXER,
        "incremental_streaming_output": plan.incremental,
        "weight_version": "0",
        "stop_probability": 0.1 if plan.ends else 0.0,
    }
    async with AsyncExitStack() as stack:
        reference = await stack.enter_async_context(SimulatedWorker(**kind))
        workers = [
            await stack.enter_async_context(SimulatedWorker(**kind, replica=number, token_latency_s=0.0005))
            for number in range(2)
        ]
        proxies = [
            await stack.enter_async_context(RecordingProxy(worker.url, incremental=plan.incremental))
            for worker in workers
        ]
        router = await stage.router(
            *(proxy.url for proxy in proxies), partial_rollout="resume", resume_on_worker_loss=True, max_retries=9
        )
        yield Scene(workers, proxies, [Brake(worker.engine) for worker in workers], reference, router)


async def control(router: RunningRouter, path: str, **body: Any) -> None:
    answer = await router.ask("POST", path, JSON[:1], json.dumps(body).encode())
    assert answer.status == 200, answer.body


async def disturb(scene: Scene, plan: Plan, asked: asyncio.Future[RawReply]) -> int:
    """Stop the engines exactly where the plan says, and only then do what it says. Counts the cuts."""
    done = 0
    for version, (kind, tokens) in enumerate(plan.cuts, 1):
        if kind == "loss" and not plan.stream and done:
            continue  # nobody has seen a token, and a request that ends every worker is not asked for ever
        while not scene.reached(tokens) and not asked.done():  # noqa: ASYNC110 - progress announces no event
            await asyncio.sleep(0)
        if asked.done():
            break
        done += 1
        scene.brake(on=True)
        if kind == "loss":
            victim = max(scene.workers, key=lambda worker: worker.running)
            await victim.kill()
            scene.brake(on=False)
            await victim.restart()
            continue
        for mode in kind.split():
            await control(scene.router, "/pause_generation", mode=mode)
            scene.brake(on=False)
        await control(scene.router, "/update_weight_version", new_version=str(version), abort_all_requests=False)
        await control(scene.router, "/continue_generation")
    return done


def answers(plan: Plan, reply: RawReply) -> list[dict[str, Any]]:
    """Every generation's answer, a stream's put together as a client does it."""
    assert reply.status == 200, reply.body
    if not plan.stream:
        parsed = json.loads(reply.body)
        assert isinstance(parsed, list) is (plan.count > 1 or plan.prompt == "list of one")
        return parsed if isinstance(parsed, list) else [parsed]
    found: dict[int, dict[str, Any]] = {}
    for event in events_of(reply.body):
        before = found.get(event.get("index", 0))
        if before is not None:
            assert before["meta_info"]["finish_reason"] is None, "nothing comes behind the end"
            event = _behind(before, event) if plan.incremental else _more_than(before, event)
        found[event.get("index", 0)] = event
    return [found[index] for index in range(plan.count)]


def _behind(before: dict[str, Any], event: dict[str, Any]) -> dict[str, Any]:
    meta = {**event["meta_info"]}
    for name in LOGPROBS:
        if name in meta:
            meta[name] = before["meta_info"][name] + meta[name]
    ids = before["output_ids"] + event["output_ids"]
    assert meta["completion_tokens"] == len(ids), (before, event)
    return {**event, "text": before["text"] + event["text"], "output_ids": ids, "meta_info": meta}


def _more_than(before: dict[str, Any], event: dict[str, Any]) -> dict[str, Any]:
    assert event["output_ids"][: len(before["output_ids"])] == before["output_ids"]
    assert event["text"].startswith(before["text"]), (before["text"], event["text"])
    return event


async def with_stop(scene: Scene, plan: Plan) -> dict[str, Any]:
    """The request, with a stop that the first of its answers will meet: a token, or a text that begins in one token
    and ends in the next."""
    body = plan.body()
    if plan.stop is None or not plan.greedy:
        return body
    kind, place = plan.stop
    first = answers(plan, await ask(scene.reference.url, "POST", "/generate", JSON, json.dumps(body).encode()))[0]
    ids = first["output_ids"]
    if len(ids) < place + 2:
        return body
    if kind == "token":
        body["sampling_params"]["stop_token_ids"] = [ids[place]]
        return body
    decode = scene.reference.tokenizer.decode
    left, right = decode(ids[place : place + 1]), decode(ids[place + 1 : place + 2])
    stop = left[-2:] + right[:2]
    if left and right and "\N{REPLACEMENT CHARACTER}" not in stop and decode(ids[place : place + 2]) == left + right:
        body["sampling_params"]["stop"] = [stop]
    return body


def expected_of(answer: dict[str, Any]) -> dict[str, Any]:
    """What does not depend on when and where it was sampled."""
    meta = answer["meta_info"]
    same = ("finish_reason", "completion_tokens", "routed_experts", "indexer_topk", *LOGPROBS, *OF_THE_PROMPT)
    return {"text": answer["text"], "ids": answer["output_ids"], **{name: meta.get(name) for name in same}}


async def play(stage: Stage, plan: Plan) -> None:
    async with scene_of(stage, plan) as scene:
        body = await with_stop(scene, plan)
        data = json.dumps(body).encode()
        uncut = answers(plan, await ask(scene.reference.url, "POST", "/generate", JSON, data))
        asked = asyncio.ensure_future(scene.router.ask("POST", "/generate", JSON, data))
        await soon(disturb(scene, plan, asked))
        came = answers(plan, await soon(asked))
        await stage.nothing_under_way()
        # Where the router leaves a worker in the middle of its answer, that one's server may log a defect.
        stage.defects[:] = [defect for defect in stage.defects if not defect.startswith("aiohttp.server")]
        for index, (answer, whole) in enumerate(zip(came, uncut, strict=True)):
            if plan.greedy:
                assert expected_of(answer) == expected_of(whole)
            verify(scene, plan, body, answer, index)


def verify(scene: Scene, plan: Plan, body: dict[str, Any], answer: dict[str, Any], index: int) -> None:
    meta, ids = answer["meta_info"], answer["output_ids"]
    if not (plan.greedy and plan.n > 1):  # samples that are alike cannot be told apart at the proxies
        check(answer, chain(scene.proxies, "it", answer, index=index, of=plan.count))
    assert meta["finish_reason"]["type"] in ("length", "stop")
    if meta["finish_reason"]["type"] == "length":
        assert meta["finish_reason"]["length"] == len(ids) == plan.budget
    if body.get("return_routed_experts"):
        rows = np.frombuffer(base64.b64decode(meta["routed_experts"]), np.int32).reshape(-1, MOE.layers, MOE.top_k)
        prompts = body.get("input_ids") or [scene.reference.tokenizer.encode(each) for each in texts(body)]
        prompt = prompts if isinstance(prompts[0], int) else prompts[index // plan.n]
        start = body.get("routed_experts_start_len", 0)
        assert len(rows) == max(0, len(prompt) + len(ids) - 1 - start)
        assert (rows == route(MOE, [*prompt, *ids], start)).all()
        chosen = np.frombuffer(base64.b64decode(meta["indexer_topk"]), np.int32)
        assert chosen.tolist() == choose(INDEXER, [*prompt, *ids]).reshape(-1).tolist()


def texts(body: dict[str, Any]) -> list[str]:
    return [body["text"]] if isinstance(body["text"], str) else body["text"]


def plan(**said: Any) -> Plan:
    usual = {"prompt": "texts", "stream": True, "incremental": False, "rows": False, "greedy": True, "ends": False}
    return Plan(
        **{**usual, "n": 1, "budget": 14, "fields": {"return_logprob": True}, "params": {}, "stop": None, **said}
    )


a_special_token_begins_the_stop_string = plan(
    prompt="lists of ids",
    stream=False,
    ends=True,
    budget=10,
    params={"no_stop_trim": True, "ignore_eos": True},
    stop=("string", 1),
    cuts=[("abort", 1)],
)
the_queue_holds_back_half_a_character = plan(cuts=[("in_place abort", 2)])


@settings(max_examples=examples(300), phases=PHASES, suppress_health_check=list(HealthCheck))
@given(plans)
@example(a_special_token_begins_the_stop_string)
@example(the_queue_holds_back_half_a_character)
async def test_what_was_cut_is_what_an_uncut_one_would_be(plan: Plan) -> None:
    async with staged() as stage:
        await play(stage, plan)
