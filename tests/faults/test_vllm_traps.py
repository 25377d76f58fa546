"""Traps of vLLM: flags that a worker lacks, health that lies, logprobs of another distribution, errors inside a 200."""

from __future__ import annotations

import base64
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import numpy as np
import orjson
import pytest

from miles_router.engines.known import overflow_of
from miles_router.fleet.workers import WorkerState
from tests.support.cache_trial import checkpoint
from tests.support.experts_trial import experts_of, experts_trial
from tests.support.fleet import PROBING, becomes, info, post, posting
from tests.support.http import RawReply
from tests.support.running_router import RunningRouter
from tests.support.session_trial import CHAT, SESSIONS, user
from tests.support.simulated_vllm import CONTEXT, EXPERTS, LAYERS, LIKELY, TOP, SimulatedVLLM
from tests.support.stage import Stage
from tests.support.waiting import until

SHORT = {"max_new_tokens": 6, "ignore_eos": True}
GENERATE: dict[str, Any] = {"input_ids": [40, 41, 42], "sampling_params": SHORT}
READY, QUARANTINED = WorkerState.READY, WorkerState.QUARANTINED


@asynccontextmanager
async def before(
    stage: Stage, settings: dict[str, Any] | None = None, **flags: Any
) -> AsyncIterator[tuple[RunningRouter, SimulatedVLLM]]:
    async with SimulatedVLLM(checkpoint(), **flags).running() as worker:
        yield await stage.router(worker.url, **(settings or {})), worker


def refusal(answer: RawReply) -> str:
    assert (answer.status, answer.error_type) == (501, "unsupported_by_engine"), answer.body
    return str(answer.json()["error"]["message"])


# What a worker was started with


@pytest.mark.parametrize(
    ("flags", "lacks"),
    [
        ({}, []),
        ({"raw_logprobs": True}, ["--logprobs-mode processed_logprobs"]),
        ({"scale_out": False}, ["--enable-scale-out"]),
        ({"controlled": False}, ["VLLM_SERVER_DEV_MODE=1 in its environment"]),
        ({"config": {"parallel_config": {"_api_process_count": 2}}}, ["--api-server-count 1"]),
        ({"config": {"model_config": {"seed": 0}}}, ["a --seed of its own"]),
    ],
    ids=["nothing", "processed logprobs", "scale out", "dev mode", "one API server", "seed"],
)
async def test_registration_says_which_flags_are_missing(stage: Stage, flags: dict[str, Any], lacks: list[str]) -> None:
    async with SimulatedVLLM(checkpoint(), **flags).running() as worker:
        router = await stage.router()
        added = (await post(router, "/add_worker", url=worker.url)).json()
        assert added["status"] == "success"
        said = added.get("lacks", [])
        assert [each.partition(":")[0] for each in said] == lacks
        (shown,) = (await info(router))["workers"]
        assert shown.get("lacks", []) == said


async def test_without_scale_out_nothing_is_sampled_and_chat_passes(stage: Stage) -> None:
    async with before(stage, scale_out=False) as (router, worker):
        assert "--enable-scale-out" in refusal(await post(router, "/generate", **GENERATE))
        by_ids = {"input_ids": [40], "messages": [], "separate_reasoning": False}
        assert "--enable-scale-out" in refusal(await post(router, "/v1/chat/completions", **by_ids))
        chat = await post(router, "/v1/chat/completions", messages=[{"role": "user", "content": "Hi"}])
        assert chat.status == 200
        assert len(worker.sampled) == 1


async def test_without_dev_mode_control_is_refused_by_name_and_it_generates(stage: Stage) -> None:
    async with before(stage, controlled=False) as (router, _):
        for path in ("/pause_generation", "/continue_generation", "/flush_cache", "/pause", "/resume"):
            assert "VLLM_SERVER_DEV_MODE" in refusal(await post(router, path))
        assert (await post(router, "/generate", **GENERATE)).status == 200
        assert "processed_logprobs" in refusal(
            await post(router, "/generate", **{**GENERATE, "sampling_params": {"temperature": 2}}, return_logprob=True)
        )


async def test_several_api_servers_take_no_abort_by_name(stage: Stage) -> None:
    async with before(stage, config={"parallel_config": {"_api_process_count": 2}}) as (router, worker):
        for meant in ({"rid": "a"}, {"group": "g"}):
            assert "--api-server-count 1" in refusal(await post(router, "/abort_request", **meant))
        assert "--api-server-count 1" in refusal(await post(router, "/abort_requests", request_ids=["a"]))
        assert (await post(router, "/abort_request", abort_all=True)).status == 200
        assert worker.told == [("/abort_requests", {})]


async def test_a_client_that_leaves_where_no_abort_is_taken_crashes_nothing(
    stage: Stage, caplog: pytest.LogCaptureFixture
) -> None:
    several = {"parallel_config": {"_api_process_count": 2}}
    async with before(stage, config=several, latency_s=0.02) as (router, _), aiohttp.ClientSession() as client:
        asked = {"token_ids": [40], "request_id": "mine", "stream": True, "output_mode": "text"}
        asked["sampling_params"] = {"max_tokens": 200}
        async with client.post(f"{router.url}/inference/v1/generate", json=asked) as answer:
            await answer.content.readany()
        await until(lambda: not router.pool.in_flight, "it has left")
        assert (await post(router, "/generate", **GENERATE)).status == 200
        assert "task_crashed" not in caplog.messages


async def test_what_has_no_sleep_mode_is_not_told_to_sleep(stage: Stage) -> None:
    async with before(stage) as (router, worker):
        for path in ("/sleep", "/sleep?level=2", "/release_memory_occupation"):
            assert "--enable-sleep-mode" in refusal(await post(router, path))
        assert worker.told == []


@pytest.mark.parametrize(
    "changed",
    [{"temperature": 0.7}, {"frequency_penalty": 0.5}, {"repetition_penalty": 1.1}, {"logit_bias": {"5": 1}}],
    ids=lambda changed: next(iter(changed)),
)
async def test_raw_logprobs_of_another_distribution_are_refused(stage: Stage, changed: dict[str, Any]) -> None:
    async with before(stage, raw_logprobs=True) as (router, worker):
        request = {**GENERATE, "sampling_params": {**SHORT, **changed}}
        assert "processed_logprobs" in refusal(await post(router, "/generate", **request, return_logprob=True))
        named = {"temperature": 1, "repetition_penalty": 1, **changed}
        for fields in ({**named, "temperature": 0.7}, named, {**named, "repetition_penalty": None}):
            chat = {"messages": [], "logprobs": True, **fields}
            assert "processed_logprobs" in refusal(await post(router, "/v1/chat/completions", **chat))
            asked = {"prompt": "a", "logprobs": 0, **fields}
            assert "processed_logprobs" in refusal(await post(router, "/v1/completions", **asked))
            asked = {"input": "a", "include": ["message.output_text.logprobs"], **fields}
            assert "processed_logprobs" in refusal(await post(router, "/v1/responses", **asked))
        assert worker.sampled == []
        assert (await post(router, "/generate", **request)).status == 200, "nobody wants logprobs"
        for temperature in (0, 1, 1.0, None):
            same = {**GENERATE, "sampling_params": {**SHORT, "temperature": temperature}}
            assert (await post(router, "/generate", **same, return_logprob=True)).status == 200


async def test_a_list_that_would_take_too_many_connections_is_refused(stage: Stage) -> None:
    async with before(stage) as (router, worker):
        for prompts in ({"input_ids": [[40, 41]] * 513}, {"text": ["a"] * 513}):
            refused = await post(router, "/generate", **prompts, sampling_params=SHORT)
            assert "at most 512" in refusal(refused)
        assert (worker.sampled, worker.told) == ([], []), "no text was tokenized"
        several = await post(router, "/generate", text=["a b", "c", "a b"] * 9, sampling_params=SHORT)
        assert several.status == 200
        sampled = [tuple(asked["token_ids"]) for asked in worker.sampled]
        assert len(sampled) == 27
        assert len(set(sampled)) == 2


async def test_a_slow_first_answer_about_itself_holds_requests_and_fails_none(stage: Stage) -> None:
    worker = SimulatedVLLM(checkpoint(), raw_logprobs=True)
    worker.info_ready.clear()
    async with worker.running():
        router = await stage.router(health_check_timeout=0.1)
        added = (await post(router, "/add_worker", url=worker.url)).json()
        assert "lacks" not in added, "nobody waits for that"
        early = posting(router, **GENERATE)
        assert "lacks" not in (await post(router, "/add_worker", url=worker.url)).json()
        assert (early.done(), worker.sampled) == (False, []), "it is not known how to ask it"
        worker.info_ready.set()
        assert len((await early).json()["output_ids"]) == 6
        assert (await post(router, "/add_worker", url=worker.url)).json()["lacks"]


async def test_a_worker_that_was_started_anew_with_other_flags_is_asked_by_these(stage: Stage) -> None:
    """Before any check has seen that it was away."""
    hot = {**GENERATE, "sampling_params": {**SHORT, "temperature": 0.7}, "return_logprob": True}
    async with SimulatedVLLM(checkpoint()).running() as worker:
        router = await stage.router(worker.url)
        assert (await post(router, "/generate", **hot)).status == 200
        port = int(worker.url.rpartition(":")[2])
    async with SimulatedVLLM(checkpoint(), raw_logprobs=True).running(port) as other:
        assert "processed_logprobs" in refusal(await post(router, "/generate", **hot))
        assert (await post(router, "/generate", **GENERATE)).status == 200
        assert len(other.sampled) == 1


# Health


async def test_a_hung_core_behind_a_healthy_process_is_found(stage: Stage) -> None:
    async with before(stage, {**PROBING, "health_check_failure_threshold": 2}) as (router, worker):
        worker.hang()
        assert (await router.ask("GET", "/health")).status == 200
        await becomes(router, worker, QUARANTINED)
        worker.hang(hung=False)
        await becomes(router, worker, READY)


async def test_what_a_hung_core_has_is_given_up_and_goes_on_elsewhere(stage: Stage) -> None:
    async with SimulatedVLLM(checkpoint()).running() as sick, SimulatedVLLM(checkpoint()).running() as well:
        settings = {**PROBING, "health_check_interval": 30.0, "stall_timeout": 0.2, "resume_on_worker_loss": True}
        router = await stage.router(sick.url, **settings)
        running = posting(router, **{**GENERATE, "sampling_params": {**SHORT, "max_new_tokens": 200}})
        await until(lambda: sick.sampled, "it runs")
        sick.hang()
        assert (await post(router, "/add_worker", url=well.url)).status == 200
        answer = (await running).json()
        assert len(answer["output_ids"]) == 200
        assert len(well.sampled) == 1
        sick.hang(hung=False)
        await until(lambda: not sick.generating, "what was given up has ended there")


async def test_a_pause_behind_the_router_takes_a_worker_out_until_it_ends(stage: Stage) -> None:
    async with before(stage, {**PROBING, "health_check_timeout": 0.3}) as (router, worker):
        worker.paused = True
        await becomes(router, worker, WorkerState.PAUSED)
        worker.paused = False
        worker.hang(hung=False)
        await becomes(router, worker, READY)


async def test_a_worker_that_begins_anew_has_other_weights_and_takes_nothing(stage: Stage) -> None:
    settings = {**PROBING, "health_check_interval": 0.05}
    async with before(stage, settings) as (router, worker), SimulatedVLLM(checkpoint()).running() as other:
        assert (await post(router, "/add_worker", url=other.url)).status == 200
        assert (await post(router, "/update_weight_version", new_version="7")).status == 200
        worker.version = "default"  # as it begins anew
        await becomes(router, worker, WorkerState.OUTDATED)
        for _ in range(4):
            answer = (await post(router, "/generate", **GENERATE)).json()
            assert answer["meta_info"]["weight_version"] == "7"


async def test_a_prompt_that_is_too_long_is_refused_as_vllm_says_it(stage: Stage) -> None:
    async with before(stage) as (router, _):
        refused = await post(router, "/generate", **{**GENERATE, "input_ids": [40] * CONTEXT})
        assert (refused.status, b"longer than the maximum model length" in refused.body) == (400, True)
        assert overflow_of(refused.json()) == (CONTEXT, CONTEXT, None)
        said = (
            "This model's maximum context length is 10 tokens. However, your prompt contains at least 11 input tokens"
        )
        assert overflow_of({"error": {"message": said}}) == (11, 10, None)


# Errors inside a 200


async def test_an_error_inside_a_stream_is_an_error(stage: Stage) -> None:
    async with before(stage) as (router, worker):
        worker.fails_next = True
        answer = await post(router, "/generate", **GENERATE, stream=True)
        assert answer.status == 200
        assert b'"error"' in answer.body
        assert b'"finish_reason":{' not in answer.body, "no answer that looks complete"


async def test_a_late_refusal_stands_in_the_stream(stage: Stage) -> None:
    async with before(stage) as (router, _):
        answer = await post(router, "/generate", **{**GENERATE, "input_ids": [10**9]}, stream=True)
        assert (answer.status, b"out of vocabulary" in answer.body) == (200, True)
        whole = await post(router, "/generate", **{**GENERATE, "input_ids": [10**9]})
        assert whole.status == 400
        listed = await post(router, "/generate", **{**GENERATE, "input_ids": [[40], [10**9]]})
        assert listed.status == 400, "one that is refused fails the whole"


async def test_a_flush_that_did_nothing_is_refused_though_its_status_is_200(stage: Stage) -> None:
    async with before(stage) as (router, worker):
        running = posting(router, **{**GENERATE, "sampling_params": {**SHORT, "max_new_tokens": 100}})
        await until(lambda: worker.sampled, "it runs")
        assert (await post(router, "/flush_cache")).status == 400
        await running
        assert (await post(router, "/flush_cache")).status == 200


async def test_a_part_that_is_lost_fails_the_whole(stage: Stage) -> None:
    async with before(stage) as (router, worker):
        listed = {**GENERATE, "input_ids": [[40], [41], [42]]}
        worker.fails_next = True
        answer = await post(router, "/generate", **listed, stream=True)
        finished = answer.body.count(b'"finish_reason":{')
        assert (b'"error"' in answer.body, finished) == (True, 2)


# Rows


async def test_routed_experts_come_as_int32_from_the_row_that_is_asked_for(stage: Stage) -> None:
    async with before(stage, experts=True) as (router, _):
        for start in (0, 2, 3):
            for stream in (False, True):
                request = {**GENERATE, "return_routed_experts": True, "routed_experts_start_len": start}
                answer = await post(router, "/generate", **request, stream=stream)
                last = answer.body.split(b"data: ")[-2] if stream else answer.body
                said = orjson.loads(last)
                rows = np.frombuffer(base64.b64decode(said["meta_info"]["routed_experts"]), np.int32)
                rows = rows.reshape(-1, LAYERS, TOP)
                tokens = [40, 41, 42, *said["output_ids"]]
                assert len(rows) == len(tokens) - 1 - start
                assert rows[:, 0, 0].tolist() == [token % EXPERTS for token in tokens[start:-1]]
        plain = (await post(router, "/generate", **GENERATE)).json()
        assert "routed_experts" not in plain["meta_info"], "nobody asked"
        none = {**GENERATE, "return_routed_experts": True, "sampling_params": {"max_new_tokens": 0}}
        prompt = (await post(router, "/generate", **none)).json()["meta_info"]["routed_experts"]
        assert len(base64.b64decode(prompt)) == 2 * LAYERS * TOP * 4


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
async def test_a_session_has_the_routed_experts_of_all_its_tokens(stage: Stage, stream: bool) -> None:
    async with SimulatedVLLM(checkpoint(), experts=True).running() as worker:
        options = {"moe_shape": f"{LAYERS}x{EXPERTS}x{TOP}"}
        trial = await experts_trial(stage, worker.url, around=(SESSIONS,), options=options)
        session, history = await trial.create(), [user("Hi")]
        for turn in range(3):
            turn_of = {"messages": history, "max_tokens": 6, "ignore_eos": True, "stream": stream}
            answer = await trial.ask("POST", f"/sessions/{session}{CHAT}", turn_of)
            assert answer.status == 200, answer.body
            recorded = (await trial.ask("GET", f"/sessions/{session}")).json()["records"][-1]
            history += [recorded["response"]["choices"][0]["message"], user(f"And {turn}?")]
        (sample,) = await trial.samples(session)
        tokens, rows = sample["tokens"], experts_of(sample)
        assert rows.shape == (len(tokens) - 1, LAYERS, TOP)
        assert rows[:, 0, 0].tolist() == [token % EXPERTS for token in tokens[:-1]]


@pytest.mark.parametrize(
    "fields",
    [{"return_routed_experts": True}, {"return_logprob": True, "logprob_start_len": 0}],
    ids=lambda fields: next(iter(fields)),
)
async def test_what_is_aborted_before_its_first_token_has_no_rows_and_goes_on(
    stage: Stage, fields: dict[str, Any]
) -> None:
    for settings, sampled in (({}, 0), ({"partial_rollout": "resume"}, 6)):
        async with before(stage, settings, experts=True, latency_s=0.3) as (router, worker):
            running = posting(router, **GENERATE, **fields)
            await until(lambda: worker.sampled, "it waits")
            assert (await post(router, "/pause_generation", mode="abort")).status == 200
            worker.latency_s = 0.001
            assert (await post(router, "/continue_generation")).status == 200
            answer = await running
            assert answer.status == 200, answer.body
            said = answer.json()
            assert len(said["output_ids"]) == sampled
            assert ("routed_experts" in said["meta_info"]) == ("return_routed_experts" in fields and sampled > 0)


# Fields of other types


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("top_logprobs_num", ["x", 2.5, -1, [1], {"a": 1}, True]),
        ("logprob_start_len", ["x", 2.5, -5, [1], {"a": 1}, True]),
        ("routed_experts_start_len", ["x", 2.5, -5, [1], {"a": 1}, True]),
        ("stop", [1, [1], [None], {"a": 1}, True]),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
async def test_what_cannot_be_read_is_refused_and_never_left_out(stage: Stage, name: str, values: list[Any]) -> None:
    async with before(stage, names_ids=True, experts=True) as (router, worker):
        for value in values:
            request: dict[str, Any] = {**GENERATE, "return_logprob": True, "return_routed_experts": True}
            if name == "stop":
                request["sampling_params"] = {**SHORT, name: value}
            else:
                request[name] = value
            refused = await post(router, "/generate", **request)
            assert (refused.status, refused.error_type) == (400, "invalid_request"), (value, refused.body)
        assert worker.sampled == []


# Top logprobs


async def test_top_logprobs_are_ranked_with_ids_and_the_sampled_token(stage: Stage) -> None:
    async with before(stage, names_ids=True) as (router, worker):
        wanted = {**GENERATE, "return_logprob": True, "top_logprobs_num": 2}
        for stream in (False, True):
            answer = await post(router, "/generate", **wanted, stream=stream)
            said = orjson.loads(answer.body.split(b"data: ")[-2] if stream else answer.body)
            own, tops = (said["meta_info"][f"output_{name}_logprobs"] for name in ("token", "top"))
            assert [entry[1] for entry in own] == said["output_ids"]
            for sampled, two in zip(own, tops, strict=True):
                assert len(two) == 2
                assert two == sorted(two, key=lambda entry: -entry[0])
                assert {entry[1] for entry in two} <= {sampled[1], *LIKELY}
                assert sampled in two or sampled[0] <= two[-1][0]
        assert {asked["sampling_params"]["logprobs"] for asked in worker.sampled} == {3}


async def test_top_logprobs_without_ids_are_refused_by_name(stage: Stage) -> None:
    async with before(stage) as (router, worker):
        wanted = {**GENERATE, "return_logprob": True, "top_logprobs_num": 2}
        assert "--return-tokens-as-token-ids" in refusal(await post(router, "/generate", **wanted))
        assert worker.sampled == []


# Names


async def test_names_are_the_routers_inward_and_the_clients_outward(stage: Stage) -> None:
    async with before(stage) as (router, worker):
        for _ in range(2):
            answer = (await post(router, "/generate", **GENERATE, rid="mine")).json()
            assert answer["meta_info"]["id"] == "mine"
        chat = await post(router, "/v1/chat/completions", messages=[], rid="mine", lora_path=None)
        assert chat.json()["id"] == "chatcmpl-mine"
        names = [asked["request_id"] for asked in worker.sampled]
        assert len({*names}) == 3
        assert not any(name == "mine" or name.startswith("mr-") for name in names), "no X-Request-Id that wins"


async def test_completions_are_ended_by_their_clients_name(stage: Stage) -> None:
    async with before(stage, latency_s=0.02) as (router, worker):
        asked = {"prompt": "Hi", "max_tokens": 200, "ignore_eos": True, "rid": "mine"}
        running = posting(router, "/v1/completions", **asked)
        await until(lambda: worker.sampled, "it runs")
        assert (await post(router, "/abort_request", rid="mine")).status == 200
        (choice,) = (await running).json()["choices"]
        assert choice["finish_reason"] == "abort"


async def test_chat_names_an_adapter_as_its_model_and_refuses_what_would_be_left_out(stage: Stage) -> None:
    async with before(stage) as (router, worker):
        worker.adapters["a"] = "/a"
        chat = {"messages": [{"role": "user", "content": "Hi"}]}
        assert (await post(router, "/v1/chat/completions", **chat, lora_path="a")).json()["model"] == "a"
        assert (await post(router, "/v1/chat/completions", **chat, lora_path="b")).status == 404
        for name in ("return_meta_info", "session_params", "regex"):
            refused = await post(router, "/v1/chat/completions", **chat, **{name: "x"})
            assert name in refusal(refused)
        assert "json_schema" in refusal(await post(router, "/v1/completions", prompt="Hi", json_schema="{}"))
        assert len(worker.sampled) == 2


async def test_an_adapter_is_applied_however_its_model_is_written(stage: Stage) -> None:
    async with before(stage) as (router, worker):
        loaded = await post(router, "/v1/load_lora_adapter", lora_name="a", lora_path="/a")
        assert loaded.status == 200
        chat = {"messages": [{"role": "user", "content": "Hi"}]}
        for model in ("a", "a-model:a"):
            answer = await post(router, "/v1/chat/completions", **chat, model=model)
            assert (answer.status, answer.json().get("model")) == (200, "a"), answer.body
        assert (await post(router, "/v1/chat/completions", **chat, model="a-model")).json()["model"] == "a-model"
        answer = await post(router, "/generate", **GENERATE, model="a-model:a")
        assert (answer.status, worker.sampled[-1]["model"]) == (200, "a")


async def test_connections_that_vllm_closes_when_they_are_idle_cost_no_request(stage: Stage) -> None:
    async with before(stage, keep_alive_s=0) as (router, worker):
        for _ in range(20):
            assert (await post(router, "/generate", **GENERATE)).status == 200
        assert len(worker.sampled) == 20
