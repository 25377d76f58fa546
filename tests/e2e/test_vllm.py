"""vLLM behind the router (`engines/vllm/`): a simulated worker with its traps, and the engine itself where
`make vllm` has installed it.

Nothing here believes an answer: what it says was sampled is given to the engine again, as a prompt, and scored.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pytest

from miles_router.settings.config import MiddlewareSpec
from miles_router.tasks import spawn
from miles_router.testing import SimulatedWorker
from tests.support.agent_apis import APIS
from tests.support.by_ids_trial import five_turns
from tests.support.cache_trial import CACHE, checkpoint
from tests.support.recording_proxy import RecordingProxy
from tests.support.scoring import LONG, PROMPT, SHORT, Client, client_of, impatient
from tests.support.session_apis import case
from tests.support.session_trial import qwen3
from tests.support.simulated_vllm import SimulatedVLLM
from tests.support.stage import Stage
from tests.support.tokenizers import tokenizer_directory
from tests.support.waiting import soon, until
from tests.vllm.environment import model
from tests.vllm_worker import PYTHON, RealVLLM, vllm_workers

KINDS = [
    "simulated",
    pytest.param("sglang-vllm", marks=[pytest.mark.sglang, pytest.mark.skipif(PYTHON is None, reason="no vLLM")]),
]
SESSIONS = "middleware_hub.openai_session_middleware.OpenAISessionMiddleware"
CHATS = "/v1/chat/completions"


@dataclass
class Engines:
    """Workers of one kind."""

    urls: list[str]
    checkpoint: str
    adapter: str
    weights: str
    simulated: Sequence[SimulatedVLLM] = ()
    real: Sequence[RealVLLM] = ()


@pytest.fixture(scope="module")
def vllm() -> Iterator[list[RealVLLM]]:
    with vllm_workers(1) as workers:
        yield workers


@contextlib.asynccontextmanager
async def simulated(count: int = 2, **settings: Any) -> AsyncIterator[Engines]:
    async with contextlib.AsyncExitStack() as stack:
        made = [SimulatedVLLM(checkpoint(), **settings) for _ in range(count)]
        workers = [await stack.enter_async_context(worker.running()) for worker in made]
        yield Engines([worker.url for worker in workers], checkpoint(), "/an/adapter", "/other/weights", workers)


@pytest.fixture(params=KINDS)
async def engines(request: pytest.FixtureRequest) -> AsyncIterator[Engines]:
    if request.param == "simulated":
        async with simulated() as made:
            yield made
    else:
        workers: list[RealVLLM] = request.getfixturevalue("vllm")
        urls, own = [worker.url for worker in workers], str(model())
        yield Engines(urls, own, f"{own}/adapter", str(model(1)), real=workers)


@pytest.fixture
async def client(stage: Stage, engines: Engines) -> AsyncIterator[Client]:
    async with client_of(stage, engines.urls) as made:
        yield made


@contextlib.asynccontextmanager
async def layered(stage: Stage, engines: Engines, *paths: str, **settings: Any) -> AsyncIterator[Client]:
    """A client of a router with these middlewares."""
    layers = tuple(MiddlewareSpec(path, {}) for path in paths)
    made = client_of(stage, engines.urls, middlewares=layers, hf_checkpoint=engines.checkpoint, **settings)
    async with made as client:
        yield client


# What it answers


async def test_every_shape_has_the_ids_that_were_sampled_and_their_logprobs(client: Client) -> None:
    one, events = await client.shapes_are_true()
    assert one["meta_info"]["weight_versions"] == [{"version": "default", "start": 0, "end": 6}]
    assert [len(event["output_ids"]) for event in events] == sorted(len(event["output_ids"]) for event in events)
    request: dict[str, Any] = {"input_ids": [PROMPT, [45]], "sampling_params": {**SHORT, "n": 2}}
    several = await client.generate(**request, return_logprob=True)
    for prompt, answer in zip([PROMPT, PROMPT, [45], [45]], several, strict=True):
        assert len(await client.is_true(prompt, answer)) == 6
    assert len({each["meta_info"]["id"] for each in several}) == 4


async def test_a_text_is_sampled_behind_the_ids_that_the_engine_makes_of_it(client: Client) -> None:
    request = {"text": "Question: one?", "return_logprob": True, "logprob_start_len": 0}
    answer = await client.generate(**request, sampling_params=SHORT)
    prompt = [entry[1] for entry in answer["meta_info"]["input_token_logprobs"]]
    assert answer["meta_info"]["prompt_tokens"] == len(prompt) > 1
    await client.is_true(prompt, answer)


async def test_the_token_that_stops_is_among_the_ids_and_named(client: Client) -> None:
    seeded: dict[str, Any] = {**SHORT, "sampling_seed": 5}
    first = await client.generate(input_ids=PROMPT, sampling_params=seeded)
    token = first["output_ids"][3]
    stop = {"max_new_tokens": 6, "sampling_seed": 5, "ignore_eos": True, "stop_token_ids": [token]}
    for stream in (False, True):
        request = {"input_ids": PROMPT, "sampling_params": stop, "return_logprob": True}
        answer = (await client.events("/generate", **request))[-1] if stream else await client.generate(**request)
        end = first["output_ids"].index(token) + 1
        assert await client.is_true(PROMPT, answer) == first["output_ids"][:end]
        assert answer["meta_info"]["finish_reason"] == {"type": "stop", "matched": token}
    text = first["text"][3:6]
    request = {"input_ids": PROMPT, "sampling_params": {**seeded, "stop": ["", text]}, "return_logprob": True}
    events = await client.events("/generate", **request)
    cut = await client.generate(**request)
    for answer in (cut, events[-1]):
        assert answer["meta_info"]["finish_reason"] == {"type": "stop", "matched": text}
        assert answer["text"] == first["text"][: first["text"].index(text)]
        await client.is_true(PROMPT, answer)
    shown = ""
    for event in events:
        assert event["text"].startswith(shown), "a stop string in the making is not shown"
        shown = event["text"]


async def test_an_abort_by_its_clients_name_ends_it_with_all_that_was_sampled(client: Client) -> None:
    await client.is_aborted_by_its_name()


# Pauses


#: Tokens of a generation that a pause must find running, on a fast machine too.
PAUSED = 240


async def test_a_pause_in_each_mode_cuts_or_holds_and_versions_say_where(stage: Stage, engines: Engines) -> None:
    async with client_of(stage, engines.urls[:1]) as client:
        for spelled, mode in (
            *(("/pause_generation", "abort"), ("/pause_generation", "in_place"), ("/pause", "abort")),
            ("/pause", "retract"),
        ):
            with case(spelled, mode):
                await _pauses(client, mode, spelled)


async def _pauses(client: Client, mode: str, spelled: str) -> None:
    own = {"abort": "mode=abort", "retract": "mode=keep", "in_place": "mode=keep&clear_cache=false"}
    request: dict[str, Any] = {"input_ids": PROMPT, "sampling_params": {**LONG, "max_new_tokens": PAUSED}}
    request["return_logprob"] = True
    before = (await client.generate(input_ids=PROMPT, sampling_params=SHORT))["meta_info"]["weight_version"]
    async with client.stream("/generate", **request) as stream:
        while len((await stream.next())["output_ids"]) < 3:
            pass
        if spelled == "/pause":
            paused = await client.ask("POST", f"/pause?{own[mode]}")
        else:
            paused = await client.ask("POST", spelled, {"mode": mode})
        assert paused.status == 200, paused.body
        late = spawn(client.generate(**request), name="late")
        await until(lambda: client.router.app.router.gate.held, "a late one waits")
        with impatient():
            flushed = await client.ask("POST", "/flush_cache")
        assert flushed.status == (400 if mode == "in_place" else 200), "what is kept in place is held on to"
        named = await client.ask("POST", "/update_weight_version", {"new_version": f"{mode} {spelled}"})
        assert named.status == 200
        assert (await client.ask("POST", "/resume")).status == 200
        last, whole = (await stream.rest())[-1], await soon(late)
    sampled = len(await client.is_true(PROMPT, last))
    assert (last["meta_info"]["finish_reason"]["type"], sampled < PAUSED) == (
        ("abort", True) if mode == "abort" else ("length", False)
    )
    spans = [span["version"] for span in last["meta_info"]["weight_versions"]]
    assert spans == ([before] if mode == "abort" else [before, f"{mode} {spelled}"])
    assert [span["version"] for span in whole["meta_info"]["weight_versions"]] == [f"{mode} {spelled}"]
    assert len(await client.is_true(PROMPT, whole)) == PAUSED
    await client.ask("POST", "/update_weight_version", {"new_version": "default"})


async def test_what_a_pause_cuts_goes_on_without_its_seed(stage: Stage, engines: Engines) -> None:
    # With the tokenizer: without it, some texts that the unseeded rest may have cannot be joined.
    settings: dict[str, Any] = {"partial_rollout": "resume", "hf_checkpoint": engines.checkpoint}
    async with client_of(stage, engines.urls[:1], **settings) as client:
        seeded = {**LONG, "sampling_seed": 3}
        request = {"input_ids": PROMPT, "sampling_params": seeded, "return_logprob": True}
        async with client.stream("/generate", **request) as stream:
            shown: list[int] = []
            while len(shown) < 8:
                shown = (await stream.next())["output_ids"]
            await client.post("/pause_generation", mode="abort")
            await client.post("/continue_generation")
            last = (await stream.rest())[-1]
        ids, meta = await client.is_true(PROMPT, last), last["meta_info"]
        assert (len(ids), meta["resumed"], meta["seed_dropped"]) == (40, 1, True)
        assert ids[: len(shown)] == shown
        repeated = (await client.generate(**request))["output_ids"]
        assert repeated[:8] == ids[:8], "the seed does what it is for"
        cut = next(at for at, (one, other) in enumerate(zip(ids, repeated, strict=True)) if one != other)
        assert ids[cut : cut + 4] != repeated[:4], "the noise of the beginning comes again"
        unseeded = await client.generate(**{**request, "sampling_params": SHORT})
        assert "seed_dropped" not in unseeded["meta_info"]


# Layers


async def test_five_turns_of_text_are_exact(stage: Stage, engines: Engines) -> None:
    async with layered(stage, engines, CACHE) as client:
        async for _, found in client.turns_of_text():
            await client.is_scored(found["tokens"], found["loss_mask"], found["rollout_logp"])


async def test_turns_of_a_session_are_exact_whole_streamed_and_cut(stage: Stage, engines: Engines) -> None:
    async with layered(stage, engines, SESSIONS, partial_rollout="resume") as client:
        session = (await client.post("/sessions"))["session_id"]
        path, history = f"/sessions/{session}{CHATS}", [{"role": "user", "content": "Hi"}]
        for turn in range(4):
            request = {"messages": history, "max_tokens": 40, "ignore_eos": True, "seed": turn}
            if turn == 3:
                async with client.stream(path, **request) as stream:
                    seen = 0
                    while seen < 3:
                        seen += bool((await stream.next())["choices"][0]["delta"].get("content"))
                    await client.post("/pause_generation", mode="abort")
                    await client.post("/continue_generation")
                    await stream.rest()
            elif turn == 2:
                await client.events(path, **request)
            else:
                answer = await client.post(path, **request)
                assert answer["usage"]["completion_tokens"] == 40
            samples = (await client.post(f"/sessions/{session}/samples", format="json"))["samples"]
            said = (await client.get(f"/sessions/{session}"))["records"][-1]["response"]["choices"][0]["message"]
            history = [*history, said, {"role": "user", "content": "And?"}]
        (sample,) = samples
        assert sum(sample["loss_mask"]) == 160
        await client.is_scored(sample["tokens"], sample["loss_mask"], sample["logprobs"])


@contextlib.asynccontextmanager
async def behind_a_door(engines: Engines) -> AsyncIterator[tuple[RecordingProxy, str]]:
    """The proxy of a worker whose tokenizer is Qwen3's, and its checkpoint."""
    async with contextlib.AsyncExitStack() as stack:
        url, checkpoint = engines.urls[0], engines.checkpoint
        if engines.simulated:
            checkpoint = tokenizer_directory("qwen3")
            url = (await stack.enter_async_context(SimulatedVLLM(checkpoint).running())).url
        yield await stack.enter_async_context(RecordingProxy(url)), checkpoint


@pytest.mark.parametrize(("api", "stream"), [("chat", False), *((api, True) for api in sorted(APIS))])
async def test_five_turns_with_tools_are_what_the_engine_was_given_and_sampled(
    stage: Stage, engines: Engines, api: str, stream: bool
) -> None:
    async with behind_a_door(engines) as (proxy, checkpoint):
        await five_turns(stage, proxy, checkpoint, api, stream=stream)


async def test_completions_are_recorded(stage: Stage, engines: Engines) -> None:
    async with layered(stage, engines, SESSIONS) as client:
        session = (await client.post("/sessions"))["session_id"]
        await client.post(f"/sessions/{session}/v1/completions", prompt="Question: one?", max_tokens=8)
        (sample,) = (await client.post(f"/sessions/{session}/samples", format="json"))["samples"]
        assert 1 <= sum(sample["loss_mask"]) <= 8
        assert [span["version"] for span in sample["weight_versions"]] == ["default"]
        await client.is_scored(sample["tokens"], sample["loss_mask"], sample["logprobs"])


async def test_an_episode_is_accounted_for_rewarded_and_scored_and_an_evaluation_apart(
    stage: Stage, engines: Engines
) -> None:
    async with layered(stage, engines, SESSIONS, model_id="m") as client:
        request = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 8, "ignore_eos": True}
        session = (await client.post("/sessions"))["session_id"]
        await client.post(f"/sessions/{session}{CHATS}", **request)
        rewarded = await client.ask("POST", f"/sessions/{session}/rewards", [{"turn": 0, "reward": 0.5}])
        assert rewarded.status == 200
        wanted = {"format": "json", "per_token": ["reward"], "teacher": {"model": "m"}}
        (sample,) = (await client.post(f"/sessions/{session}/samples", **wanted))["samples"]
        (turn,) = sample["metadata"]["turns"]
        assert turn["parsed"] == "whole"
        last = len(sample["tokens"]) - 1
        assert [place for place, value in enumerate(sample["per_token"]["reward"]) if value] == [last]
        scored = [score for score, mask in zip(sample["teacher_logprobs"], sample["loss_mask"], strict=True) if mask]
        own = [each for each, mask in zip(sample["logprobs"], sample["loss_mask"], strict=True) if mask]
        assert scored == pytest.approx(own, abs=0.05), "the model is its own teacher"
        apart = (await client.post("/sessions", evaluation=True))["session_id"]
        await client.post(f"/sessions/{apart}{CHATS}", **request)
        assert [each["session_id"] for each in (await client.get("/sessions"))["sessions"]] == [session]
        assert (await client.get(f"/sessions/{apart}"))["metadata"]["evaluation"]


# Adapters, updates and fleets


async def test_an_adapter_is_loaded_applied_and_never_replaced_by_base_weights(
    client: Client, engines: Engines
) -> None:
    request = {"input_ids": PROMPT, "sampling_params": {**SHORT, "max_new_tokens": 0}, "return_logprob": True}
    scored = {**request, "logprob_start_len": 0}
    base = (await client.generate(**scored))["meta_info"]["input_token_logprobs"]
    assert (await client.ask("POST", "/generate", {**scored, "lora_path": "a"})).status == 404
    loaded = await client.ask("POST", "/load_lora_adapter", {"lora_name": "a", "lora_path": engines.adapter})
    assert (loaded.status, loaded.json) == (200, {"status": "ok"})
    adapted = (await client.generate(**scored, lora_path="a"))["meta_info"]["input_token_logprobs"]
    assert [each[0] for each in adapted[1:]] != [each[0] for each in base[1:]]
    unloaded = await client.ask("POST", "/v1/unload_lora_adapter", {"lora_name": "a"})
    assert unloaded.status == 200
    assert (await client.ask("POST", "/generate", {**scored, "lora_path": "a"})).status == 404


async def test_new_weights_come_by_vllms_way_and_a_cached_prompt_is_computed_anew(
    client: Client, engines: Engines
) -> None:
    request = {"input_ids": PROMPT, "sampling_params": SHORT}
    await client.generate(**request)
    refused = await client.refused("/update_weights_from_disk", model_path=engines.weights)
    assert "/start_weight_update" in refused
    call = {"method": "reload_weights", "kwargs": {"weights_path": engines.weights}}
    assert (await client.ask("POST", "/collective_rpc", call)).status == 200
    assert (await client.ask("POST", "/update_weight_version", {"new_version": "9"})).status == 200
    answers = [await client.generate(**request, return_logprob=True) for _ in range(4)]
    for answer in answers:
        assert answer["meta_info"]["weight_version"] == "9"
        await client.is_true(PROMPT, answer)
    if engines.simulated:
        salts = {salt for worker in engines.simulated for salt in worker.salts.get(tuple(PROMPT), ())}
        assert len(salts) > 1, "vLLM's cache does not know versions"
    call["kwargs"] = {"weights_path": engines.checkpoint}
    await client.post("/collective_rpc", **call)
    await client.post("/update_weight_version", new_version="default")


LEFT_OUT: list[dict[str, Any]] = [
    {"session_params": {"id": "a"}},
    {"return_hidden_states": True},
    {"custom_logit_processor": "x"},
    {"token_ids_logprob": [1]},
    {"return_routed_experts": True},
    {"return_indexer_topk": True},
    {"image_data": "x"},
    {"a_field_of_tomorrow": 1},
    {"stream": True, "return_logprob": True, "logprob_start_len": 0},
]


async def test_what_vllm_would_leave_out_is_refused_by_name(client: Client) -> None:
    for fields in LEFT_OUT:
        with case(*fields):
            message = await client.refused("/generate", input_ids=PROMPT, sampling_params=SHORT, **fields)
            assert any(name in message for name in [*fields, "routed experts"])


async def test_a_sampling_parameter_that_vllm_does_not_know_is_refused(client: Client) -> None:
    for name, value in {"stop_regex": "a", "custom_params": {"a": 1}, "max_tokens": 3, "nonsense": True}.items():
        message = await client.refused("/generate", input_ids=PROMPT, sampling_params={**SHORT, name: value})
        assert name in message


async def test_an_aborts_list_of_names_is_neither_empty_nor_several(client: Client) -> None:
    for names in ([], ["a", "b"], None, "a"):
        for path in ("/abort_requests", "/inference/v1/abort_requests"):
            answer = await client.ask("POST", path, {"request_ids": names})
            assert (answer.status, answer.json["error"]["type"]) == (400, "invalid_request")


# Fleets of two kinds


@contextlib.asynccontextmanager
async def mixed() -> AsyncIterator[tuple[RecordingProxy, RecordingProxy]]:
    """The proxies of a simulated vLLM worker and a simulated SGLang worker with one tokenizer."""
    checkpoint = tokenizer_directory("qwen3")
    async with (
        SimulatedVLLM(checkpoint).running() as one,
        SimulatedWorker(tokenizer=qwen3(), reasoning_parser="qwen3", weight_version="default") as other,
        RecordingProxy(one.url) as proxy,
        RecordingProxy(other.url) as other_door,
    ):
        yield proxy, other_door


async def test_each_of_two_kinds_is_asked_and_told_in_its_own_words(stage: Stage) -> None:
    # With the tokenizer: without it, some texts that are cut cannot be joined.
    settings: dict[str, Any] = {"partial_rollout": "resume", "hf_checkpoint": tokenizer_directory("qwen3")}
    async with mixed() as (one, other), client_of(stage, [one.url, other.url], **settings) as client:
        request = {"text": "Hi", "sampling_params": {**LONG, "max_new_tokens": 80}, "return_logprob": True}
        running = [spawn(client.generate(**request), name="rollout") for _ in range(6)]
        await until(lambda: client.router.pool.in_flight == 6, "all run")
        for path in ("/pause?mode=abort", "/continue_generation", "/pause_generation", "/resume"):
            assert (await client.ask("POST", path, {})).status == 200
        for answer in await asyncio.gather(*running):
            assert len(answer["output_ids"]) == len(answer["meta_info"]["output_token_logprobs"]) == 80
        paths = [exchange.path for exchange in one.exchanges if exchange.method == "POST"]
        assert [path for path in paths if "pause" in path or "resume" in path] == ["/pause", "/resume"] * 2
        theirs = [exchange.path for exchange in other.exchanges if exchange.method == "POST"]
        assert [path for path in theirs if "pause" in path] == ["/pause_generation"] * 2
        for path, kind in (("/update_weights_from_disk", "vllm"), ("/start_weight_update", "sglang")):
            refused = await client.refused(path, model_path="m")
            assert f"({kind})" in refused


async def test_running_generations_move_to_an_idler_worker(stage: Stage) -> None:
    async with simulated(2, latency_s=0.02) as engines, client_of(stage, engines.urls[:1], move_after=0.05) as client:
        request = {"input_ids": PROMPT, "sampling_params": {**LONG, "max_new_tokens": 100}, "return_logprob": True}
        running = [spawn(client.generate(**request, rid=f"mine-{n}"), name="rollout") for n in range(4)]
        await until(lambda: len(first := engines.simulated[0].lengths) == 4 and min(first) > 1, "all run at the first")
        assert (await client.ask("POST", f"/add_worker?url={engines.urls[1]}")).status == 200
        answers = await asyncio.gather(*running)
        metrics = client.router.app.router.metrics
        assert len(engines.simulated[1].sampled) >= 1, metrics.unmoved_generations
        for number, answer in enumerate(answers):
            assert answer["meta_info"]["id"] == f"mine-{number}"
            assert len(await client.is_true(PROMPT, answer)) == 100
        resumed = sum(answer["meta_info"].get("resumed", 0) for answer in answers)
        # One that is cut within a character may begin anew at the other worker, and says nothing of it then.
        assert metrics.moved_generations >= 1
        assert resumed + metrics.unmoved_generations["begun_anew"] >= 1
