"""verl's rollout calls through the router: ids, logprobs and mask are those of the simulated workers' own records."""

from __future__ import annotations

import asyncio
import importlib
import inspect
import json
import pickle
from collections.abc import AsyncIterator, Iterable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Any
from uuid import uuid4

import aiohttp
import numpy as np
import pytest
import yaml
from transformers import AutoTokenizer

from miles_router.client import InvalidReply, Retries, RouterClient
from miles_router.client.dialects.verl import (
    AgentLoop,
    AgentLoopOutput,
    AgentLoopWorker,
    ChatTemplate,
    FunctionTool,
    RolloutConfig,
    ServerManager,
    ToolError,
    UnusableTemplate,
    register,
)
from miles_router.client.dialects.verl.tools import shorten
from miles_router.settings.config import MiddlewareSpec
from miles_router.tasks import spawn
from miles_router.testing import SimulatedWorker
from miles_router.testing.worker.exchange_log import GenerationRecord
from tests.support.cache_trial import checkpoint
from tests.support.experts_trial import EXPERTS, MOE, SHAPE, in_one, truth
from tests.support.running_router import RunningRouter
from tests.support.scripted_worker import script
from tests.support.simulated_vllm import SimulatedVLLM
from tests.support.stage import Stage
from tests.support.waiting import PATIENCE, soon, until

PARAMS: Mapping[str, Any] = {"temperature": 0.0, "top_p": 1.0, "top_k": -1, "repetition_penalty": 1.0, "logprobs": True}
QUESTION = [{"role": "user", "content": "What is 17 plus 25?"}]
CONFIG = RolloutConfig(prompt_length=200, response_length=300, max_parallel_calls=4)
#: Of verl's `AgentLoopOutput` (verl-project/verl 1dda039b9, `agent_loop.py`), with those of its `AgentLoopMetrics`.
FIELDS = {
    "prompt_ids",
    "response_ids",
    "response_mask",
    "response_logprobs",
    "routed_experts",
    "multi_modal_data",
    "reward_score",
    "num_turns",
    "metrics",
    "extra_fields",
    "mm_processor_kwargs",
}
METRICS = {"generate_sequences", "tool_calls", "compute_score", "num_preempted"}


@dataclass
class Scene:
    """Workers of one model behind a router, and its client."""

    workers: list[SimulatedWorker]
    router: RunningRouter
    client: RouterClient

    def manager(self, config: RolloutConfig = CONFIG) -> ServerManager:
        return ServerManager(self.client, config)

    def loops(self, config: RolloutConfig = CONFIG, **options: Any) -> AgentLoopWorker:
        tokenizer = AutoTokenizer.from_pretrained(checkpoint())
        return AgentLoopWorker(self.manager(config), tokenizer, config, **options)

    @property
    def records(self) -> list[GenerationRecord]:
        """All that was generated, a rollout's in their order."""
        found = [record for worker in self.workers for at in worker.log.at("/generate") for record in at.generations]
        return sorted(found, key=lambda record: len(record.input_ids))

    def busy(self) -> SimulatedWorker | None:
        """A worker that has sampled something of what it is working on."""
        return next((w for w in self.workers if any(each.output_ids for each in w.engine.running.values())), None)


@asynccontextmanager
async def scene_of(
    stage: Stage, count: int = 1, *, settings: Mapping[str, Any] | None = None, **kind: Any
) -> AsyncIterator[Scene]:
    async with AsyncExitStack() as stack:
        workers = [
            await stack.enter_async_context(
                SimulatedWorker(tokenizer=checkpoint(), replica=number, weight_version="1", **kind)
            )
            for number in range(count)
        ]
        router = await stage.router(*(worker.url for worker in workers), **(settings or {}))
        client = RouterClient(router.url, retries=Retries(attempts=0), timeout=PATIENCE)
        yield Scene(workers, router, await stack.enter_async_context(client))


@pytest.fixture
async def scene(stage: Stage) -> AsyncIterator[Scene]:
    async with scene_of(stage) as made:
        yield made


def check(made: AgentLoopOutput, turns: list[GenerationRecord]) -> None:
    """A rollout is what its last generation was given and sampled; the mask has what all of them sampled."""
    last = turns[-1]
    assert made.prompt_ids == turns[0].input_ids
    assert made.prompt_ids + made.response_ids == last.input_ids + last.output_ids
    mask: list[int] = []
    logprobs: list[float] = []
    for turn in turns:
        given = len(turn.input_ids) - len(made.prompt_ids) - len(mask)
        mask += [0] * given + [1] * len(turn.output_ids)
        logprobs += [0.0] * given + turn.logprobs
    assert made.response_mask == mask
    assert made.response_logprobs == logprobs


def call(tool: str, **arguments: Any) -> str:
    return f"<tool_call>\n{json.dumps({'name': tool, 'arguments': arguments})}\n</tool_call>"


# The server manager


async def test_all_generations_of_one_request_id_go_to_one_worker(stage: Stage) -> None:
    async with scene_of(stage, 3) as scene:
        manager = scene.manager()

        async def rollout(request_id: str) -> None:
            ids = [5, 6, 7]
            for _ in range(4):
                output = await manager.generate(request_id, prompt_ids=ids, sampling_params={**PARAMS, "max_tokens": 3})
                ids = [*ids, *output.token_ids]

        await asyncio.gather(*(rollout(f"rollout-{number}") for number in range(9)))
        at: dict[str | None, set[str]] = {}
        for worker in scene.workers:
            for exchange in worker.log.at("/generate"):
                at.setdefault(exchange.header("x-smg-routing-key"), set()).add(worker.url)
        assert len(at) == 9
        assert all(len(urls) == 1 for urls in at.values()), at
        assert len(set.union(*at.values())) == 3, "different ones share the fleet"


async def test_a_generation_has_verls_fields(scene: Scene) -> None:
    given = {**PARAMS, "max_tokens": 6}
    output = await scene.manager().generate(
        "r", prompt_ids=np.array([5, 6, 7]), sampling_params=given, image_data=None, mm_processor_kwargs={}, priority=0
    )
    (record,) = scene.records
    assert (output.token_ids, output.log_probs) == (record.output_ids, record.logprobs)
    assert (output.stop_reason, output.num_preempted, output.routed_experts) == ("length", 0, None)
    assert output.extra_fields == {"global_steps": 1, "min_global_steps": 1, "max_global_steps": 1}
    assert given == {**PARAMS, "max_tokens": 6}, "the caller's parameters are its own"
    asked = scene.workers[0].log.last.json()
    assert (asked["sampling_params"]["max_new_tokens"], asked["return_logprob"]) == (6, True)
    assert "logprobs" not in asked["sampling_params"]
    bare = await scene.manager().generate(
        "r", prompt_ids=[5], sampling_params={"max_new_tokens": 2, "ignore_eos": True}
    )
    assert (len(bare.token_ids), bare.log_probs) == (2, None)


@pytest.mark.parametrize("field", ["image_data", "video_data", "audio_data", "mm_processor_kwargs"])
async def test_other_media_are_refused_by_name(scene: Scene, field: str) -> None:
    fields: dict[str, Any] = {field: ["x"]}
    with pytest.raises(ValueError, match=field):
        await scene.manager().generate("r", prompt_ids=[5], sampling_params=PARAMS, **fields)
    with pytest.raises(ValueError, match="prompt_logprobs"):
        await scene.manager().generate("r", prompt_ids=[5], sampling_params={"prompt_logprobs": 0})
    assert not scene.records


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"prompt_tokens": 2}, "the engine read 2 tokens, not 1"),
        ({"output_token_logprobs": [[-0.5, 8, None]]}, "other tokens"),
    ],
)
async def test_an_answer_that_does_not_fit_is_not_taken(stage: Stage, changes: Mapping[str, Any], says: str) -> None:
    worker = await stage.worker()
    meta: dict[str, Any] = {"id": "r", "finish_reason": {"type": "stop"}, "prompt_tokens": 1, "weight_version": "1"}
    meta |= {"output_token_logprobs": [[-0.5, 7, None]], **changes}
    worker.always(script(in_one({"text": "x", "output_ids": [7], "meta_info": meta})))
    router = await stage.router(worker)
    async with RouterClient(router.url) as client:
        with pytest.raises(InvalidReply, match=says):
            await ServerManager(client, CONFIG).generate("r", prompt_ids=[5], sampling_params=PARAMS)


# One turn


async def test_a_single_turn_has_the_fields_of_verls_output(scene: Scene) -> None:
    scene.workers[0].say("It is 42.")
    (made,) = await scene.loops().generate_sequences([{"raw_prompt": QUESTION, "index": 3}], PARAMS)
    check(made, scene.records)
    fields = made.to_dict()
    assert (set(fields), set(fields["metrics"])) == (FIELDS, METRICS)
    assert (fields["num_turns"], fields["reward_score"], fields["multi_modal_data"]) == (2, None, {})
    assert fields["metrics"]["generate_sequences"] > 0
    steps = {"global_steps": 1, "min_global_steps": 1, "max_global_steps": 1}
    scores: dict[str, list[float]] = {"turn_scores": [], "tool_rewards": []}
    assert made.extra_fields == {**steps, **scores, "stop_reason": "stop", "raw_prompt": QUESTION}


async def test_a_prompt_that_is_too_long_is_refused_and_never_cut(scene: Scene) -> None:
    with pytest.raises(ValueError, match="longer than prompt_length 8"):
        await scene.loops(RolloutConfig(prompt_length=8)).run(PARAMS, raw_prompt=QUESTION)
    assert not scene.records


async def test_routed_experts_are_those_of_all_tokens(stage: Stage) -> None:
    config = RolloutConfig(prompt_length=200, response_length=300, enable_rollout_routing_replay=True)
    keeper = {"middlewares": (MiddlewareSpec(EXPERTS, {"moe_shape": SHAPE}),), "hf_checkpoint": checkpoint()}
    async with scene_of(stage, settings=keeper, moe=MOE) as scene:
        scene.workers[0].say(call("add", a=17, b=25))
        loops = scene.loops(config, tools=[FunctionTool("add", add)])
        scene.workers[0].say("42")
        made = await loops.run(PARAMS, raw_prompt=QUESTION, agent_name="tool_agent")
        assert len(scene.records) == 2
        check(made, scene.records)
        assert made.routed_experts is not None
        assert np.array_equal(made.routed_experts, truth(made.prompt_ids + made.response_ids))


# Tools


async def add(a: int, b: int) -> tuple[str, float]:
    return str(a + b), 0.5


async def test_an_episode_with_tools_is_what_the_worker_was_given_and_sampled(scene: Scene) -> None:
    scene.workers[0].say("Let me see. " + call("add", a=17, b=25))
    scene.workers[0].say(call("add", a=42, b=0))
    scene.workers[0].say("It is 42.")
    made = await scene.loops(tools=[FunctionTool("add", add)]).run(PARAMS, raw_prompt=QUESTION, agent_name="tool_agent")
    assert len(scene.records) == 3
    check(made, scene.records)
    assert (made.num_turns, made.extra_fields["tool_rewards"]) == (6, [0.5, 0.5])
    chat = ChatTemplate(AutoTokenizer.from_pretrained(checkpoint()))
    said = [
        {"role": "assistant", "content": "Let me see. " + call("add", a=17, b=25)},
        {"role": "tool", "content": "42"},
        {"role": "assistant", "content": call("add", a=42, b=0)},
        {"role": "tool", "content": "42"},
    ]
    whole = chat.text(chat.prompt([*QUESTION, *said])) + "It is 42."
    assert chat.text(made.prompt_ids + made.response_ids).startswith(whole), "as the template writes it"


async def test_the_calls_of_one_turn_are_made_at_once_and_answered_in_their_order(scene: Scene) -> None:
    arrived: list[str] = []
    both = asyncio.Event()

    async def meet(name: str) -> str:
        arrived.append(name)
        if len(arrived) == 2:
            both.set()
        await soon(both.wait())
        return f"{name} came"

    scene.workers[0].say(call("meet", name="one") + call("meet", name="two") + call("meet", name="three"))
    scene.workers[0].say("They came.")
    config = RolloutConfig(prompt_length=200, response_length=900, max_parallel_calls=2)
    loops = scene.loops(config, tools=[FunctionTool("meet", meet)])
    made = await loops.run(PARAMS, raw_prompt=QUESTION, agent_name="tool_agent")
    assert sorted(arrived) == ["one", "two"], "no more than max_parallel_calls"
    text = scene.workers[0].tokenizer.decode(made.response_ids)
    assert 0 < text.index("one came") < text.index("two came")


async def fail(**_: Any) -> str:
    raise ToolError("no such city")


@pytest.mark.parametrize(
    ("said", "told"),
    [
        ("<tool_call>\nnot json\n</tool_call>", "Invalid tool call: not json"),
        ('<tool_call>["add"]</tool_call>', 'Invalid tool call: ["add"]'),
        (call("multiply", a=1), "Unknown function 'multiply'. Available tools: ['add', 'fail']"),
        (call("add", a=1), "Invalid arguments for 'add': missing a required argument: 'b'"),
        (call("fail"), "Error executing tool 'fail': no such city"),
    ],
)
async def test_a_call_that_fails_is_told_to_the_model(scene: Scene, said: str, told: str) -> None:
    scene.workers[0].say(said)
    scene.workers[0].say("Sorry.")
    loops = scene.loops(tools=[FunctionTool("add", add), FunctionTool("fail", fail)])
    made = await loops.run(PARAMS, raw_prompt=QUESTION, agent_name="tool_agent")
    assert told in scene.workers[0].tokenizer.decode(made.response_ids)
    assert made.extra_fields["tool_rewards"] == [0.0]


def test_a_long_answer_of_a_tool_is_cut_at_the_side_that_is_named() -> None:
    assert shorten("abcdef", 6, "left") == "abcdef"
    assert shorten("abcdef", 4, "left") == "(truncated)...cdef"
    assert shorten("abcdef", 4, "right") == "abcd...(truncated)"
    assert shorten("abcdef", 4, "middle") == "ab...(truncated)...ef"
    assert shorten("abcdef", 0, "left") == "(truncated)..."


def test_a_template_that_writes_a_turn_anew_is_refused() -> None:
    class Rewriting:
        def apply_chat_template(self, messages: list[Any], **_: Any) -> str:
            return f"{len(messages)}" + "".join(message["content"] for message in messages)

    with pytest.raises(UnusableTemplate):
        ChatTemplate(Rewriting()).continuation([{"role": "tool", "content": "42"}], [5])


# Loops of one's own


async def test_a_loop_of_ones_own_is_run_by_its_name(scene: Scene) -> None:
    @register("judged_agent")
    class JudgedAgentLoop(AgentLoop):
        async def run(self, sampling_params: Mapping[str, Any], **fields: Any) -> AgentLoopOutput:
            prompt = self.prompt_ids(fields["raw_prompt"])
            output = await self.server_manager.generate("mine", prompt_ids=prompt, sampling_params=sampling_params)
            ids = output.token_ids
            right = fields["label"] in self.chat.text(ids)
            return AgentLoopOutput(
                prompt, ids, [1] * len(ids), output.log_probs, reward_score=float(right), num_turns=2
            )

    scene.workers[0].say("It is 42.")
    sample = {"raw_prompt": QUESTION, "agent_name": "judged_agent", "label": "42"}
    (made,) = await scene.loops().generate_sequences([sample], PARAMS)
    assert made.reward_score == 1.0
    check(made, scene.records)


async def test_a_loop_that_nobody_registered_is_refused_by_name(scene: Scene) -> None:
    with pytest.raises(ValueError, match=r"no agent loop 'nobodys' is registered; known loops: .*tool_agent"):
        await scene.loops().run(PARAMS, raw_prompt=QUESTION, agent_name="nobodys")


# The router class that `rollout.router_config_path` names


@dataclass
class Actor:
    """The balancer as verl has it (`workers/rollout/router.py`, `get_router_handle`): made from a file, in a process of
    its own, where each method is called alone and gives what can be pickled."""

    balancer: Any

    @classmethod
    async def of(cls, config: str, addresses: Iterable[str]) -> Actor:
        given = yaml.safe_load(config)
        module, _, name = given["router_class"].rpartition(".")
        found = getattr(importlib.import_module(module), name)
        assert not inspect.getmembers(found, inspect.iscoroutinefunction), "Ray would make an actor with a loop of it"
        return cls(await asyncio.to_thread(found, dict.fromkeys(addresses), given))

    async def remote(self, method: str, *arguments: Any, **fields: Any) -> Any:
        made = await asyncio.to_thread(getattr(self.balancer, method), *arguments, **fields)
        return pickle.loads(pickle.dumps(made))

    async def generate(self, request_id: str, **fields: Any) -> Any:
        """`LLMServerClient.generate` of verl."""
        acquire = await self.remote("require_acquire_fields")
        release = await self.remote("require_release_fields")
        given = {name: fields[name] for name in acquire}
        server_id, server = await self.remote("acquire_server", request_id=request_id, **given)
        try:
            output = await server.generate.remote(request_id=uuid4().hex, image_data=None, video_data=None, **fields)
            output.extra_fields.setdefault("min_global_steps", output.extra_fields.get("global_steps"))
            return output
        finally:
            await self.remote("release_server", server_id=server_id, **dict.fromkeys(release, request_id))


@pytest.fixture
async def replicas() -> AsyncIterator[list[SimulatedVLLM]]:
    """verl's replicas: vLLM servers that no router knows yet."""
    async with AsyncExitStack() as stack:
        yield [await stack.enter_async_context(SimulatedVLLM(checkpoint()).running()) for _ in range(2)]


def router_file(router: RunningRouter, more: str = "prompt_length: 8\nresponse_length: 4\n") -> str:
    """The file at `rollout.router_config_path`."""
    named = "router_class: miles_router.client.dialects.verl.RouterLoadBalancer\n"
    return f"{named}router_url: {router.url}\n{more}"


async def test_verl_loads_the_router_by_its_dotted_name(stage: Stage, replicas: list[SimulatedVLLM]) -> None:
    router = await stage.router()
    by_address = {replica.url.removeprefix("http://"): replica for replica in replicas}
    actor = await Actor.of(router_file(router), by_address)
    await until(lambda: len(router.pool.routable) == 2, "the replicas are the router's workers")
    assert await actor.remote("get_all_servers") == sorted(by_address)
    params = {"temperature": 1.0, "top_p": 1.0, "top_k": -1, "repetition_penalty": 1.0, "logprobs": True}
    for _ in range(3):
        output = await actor.generate("rollout", prompt_ids=[40, 41, 42], sampling_params=params)
        assert (len(output.token_ids), len(output.log_probs), output.stop_reason) == (4, 4, "length")
        assert output.extra_fields["min_global_steps"] == "default", "no version was named"
    assert sorted(len(replica.sampled) for replica in replicas) == [0, 3], "a rollout stays on its worker"
    await asyncio.gather(*(actor.generate(f"{n}", prompt_ids=[40], sampling_params=params) for n in range(8)))
    assert all(replica.sampled for replica in replicas)
    assert await actor.remote("get_total_inflight") == 0


async def test_verls_replicas_leave_and_join_the_router(stage: Stage, replicas: list[SimulatedVLLM]) -> None:
    router = await stage.router()
    first, second = (replica.url.removeprefix("http://") for replica in replicas)
    actor = await Actor.of(router_file(router), [])
    with pytest.raises(RuntimeError, match="No available servers in load balancer"):
        await actor.remote("acquire_server", request_id="rollout")
    await actor.remote("add_servers", servers={first: None, second: None})
    await actor.remote("remove_servers", server_ids=[first, "127.0.0.1:1"])
    await until(lambda: [worker.url for worker in router.pool.routable] == [replicas[1].url], "one is left")
    address, server = await actor.remote("acquire_server", request_id="rollout")
    assert address == router.url
    params = {"max_tokens": 400, "ignore_eos": True}
    generating = spawn(server.generate.remote(request_id="x", prompt_ids=[40], sampling_params=params), name="generate")
    await until(lambda: bool(replicas[1].sampled), "it generates")
    loads = {"servers": {second: 1}, "total_inflight": 1, "active_servers": 1}
    assert await actor.remote("get_status") == loads
    assert await actor.remote("clear_sticky_cache") == {"cleared_entries": 0, "server_loads": {second: 1}}
    assert len((await generating).token_ids) == 400
    await actor.remote("release_server", server_id=address, request_id="rollout")
    assert await actor.remote("get_total_inflight") == 0


async def test_verls_own_abort_of_a_replica_comes_out_as_abort(stage: Stage, replicas: list[SimulatedVLLM]) -> None:
    """`FullyAsyncLLMServerClient` asks again behind what was sampled, while its weights may still be under way."""
    router = await stage.router()
    actor = await Actor.of(router_file(router), (replica.url.removeprefix("http://") for replica in replicas))
    await until(lambda: len(router.pool.routable) == 2, "the replicas are the router's workers")
    params = {"ignore_eos": True, "logprobs": True}
    first = spawn(actor.generate("r", prompt_ids=[40], sampling_params={**params, "max_tokens": 500}), name="first")
    await until(lambda: any(replica.sampled for replica in replicas), "it generates")
    async with aiohttp.ClientSession() as session:
        for replica in replicas:
            await (await session.post(f"{replica.url}/pause?mode=abort")).read()
        cut = await first
        assert (cut.stop_reason, len(cut.token_ids)) == ("abort", len(cut.log_probs))
        left = {**params, "max_tokens": 500 - len(cut.token_ids)}
        again = actor.generate("r", prompt_ids=[40, *cut.token_ids], sampling_params=left)
        second = spawn(again, name="second")
        await until(lambda: router.pool.in_flight > 0, "it is asked again")
        for replica in replicas:
            await (await session.post(f"{replica.url}/resume")).read()
    assert (await second).stop_reason == "length"
    assert len(cut.token_ids) + len((await second).token_ids) == 500


@pytest.mark.parametrize(
    ("fields", "error"),
    [
        ("prompt_length: 8\n", pytest.raises(ValueError, match="response_length is missing")),
        (
            "prompt_length: 8\nresponse_length: 4\na_field_of_tomorrow: 1\n",
            pytest.raises(TypeError, match="a_field_of_tomorrow"),
        ),
    ],
)
async def test_verls_router_file_is_refused_by_the_field(stage: Stage, fields: str, error: Any) -> None:
    router = await stage.router()
    with error:
        await Actor.of(router_file(router, fields), [])
