"""Engines that are dealt with otherwise: how the router knows them, and what it makes of answers that are none."""

from __future__ import annotations

from typing import Any

import aiohttp
import orjson
import pytest

from miles_router.fleet.workers import WorkerState
from miles_router.testing import SimulatedWorker
from tests.contract.client import WorkerClient
from tests.support.fleet import PROBING, becomes, gate, post, posting
from tests.support.http import CutReply
from tests.support.resuming import EVENTS, in_json
from tests.support.scripted_worker import HANG, RESET, ScriptedWorker, chunk, reply, script
from tests.support.session_apis import case
from tests.support.simulated.sglang_jax import SimulatedJax
from tests.support.stage import Stage
from tests.support.waiting import until

SHORT = {"max_new_tokens": 4, "ignore_eos": True}
LENGTH = {"type": "length", "length": 2}
GENERATE: dict[str, Any] = {"input_ids": [1, 2], "sampling_params": SHORT}


def says(worker: ScriptedWorker, **server: Any) -> ScriptedWorker:
    """Have a worker say that it is SGLang-Jax."""
    worker.model_info = script(reply(b'{"model_path": "/a"}'))
    worker.standing["/server_info"] = script(reply(orjson.dumps({"precompile_token_paddings": None, **server})))
    return worker


def answered(ids: list[int], entries: list[int], count: int, finish: Any = LENGTH, **meta: Any) -> dict[str, Any]:
    logprobs = [[-0.5, token, None] for token in entries]
    said = {"id": "w", "finish_reason": finish, "prompt_tokens": 2, "completion_tokens": count, **meta}
    return {"text": "xy", "output_ids": ids, "meta_info": {**said, "output_token_logprobs": logprobs}}


async def test_a_worker_that_has_not_said_what_it_is_gets_no_request(stage: Stage) -> None:
    worker = await stage.worker()
    says(worker).standing["/server_info"] = script(HANG)
    router = await stage.router(worker, health_check_timeout=0.1, health_check_failure_threshold=1000)
    refused = await post(router, "/generate", **GENERATE)
    assert (refused.status, refused.error_type) == (502, "upstream_unreachable")
    assert "has not reported its kind of engine yet" in refused.json()["error"]["message"]
    assert worker.requests == []
    says(worker)
    worker.next(script(in_json(orjson.dumps(answered([7], [7, 8], 2)))))
    while (answer := await post(router, "/generate", **GENERATE)).status == 502:  # no answer within 0.1 s, again
        assert "has not reported its kind of engine yet" in answer.json()["error"]["message"]
    assert answer.json()["output_ids"] == [7, 8]


CONTRADICTING: dict[str, Any] = {
    "too few logprobs": answered([7, 8], [7], 2),
    "too many": answered([7, 8], [7, 8, 9], 2),
    "no such rows": answered([7, 8], [7, 8], 2, routed_experts="AAA="),
    "no meta_info": {"text": "x", "output_ids": [7]},
    "a list": [answered([7], [7], 1)],
}


async def test_an_answer_that_contradicts_itself_is_refused_and_a_stream_broken_off(stage: Stage) -> None:
    worker = says(await stage.worker())
    router = await stage.router(worker)
    for kind, said in CONTRADICTING.items():
        with case(kind):
            worker.next(script(in_json(orjson.dumps(said))))
            refused = await post(router, "/generate", **GENERATE, return_routed_experts=True)
            assert (refused.status, refused.error_type) == (502, "upstream_error")
            begun = b"data: %b\n\n" % orjson.dumps(answered([7], [7], 1, None))
            worker.next(script(EVENTS, chunk(begun), chunk(b"data: %b\n\n" % orjson.dumps(said)), chunk(b"")))
            with pytest.raises(CutReply) as cut:
                await post(router, "/generate", **GENERATE, stream=True, return_routed_experts=True)
            assert cut.value.reply.body.count(b"data:") <= 1


async def test_refusals_and_errors_of_the_engine_pass_as_they_are(stage: Stage) -> None:
    worker = says(await stage.worker())
    router = await stage.router(worker)
    worker.next(script(in_json(b'{ "error": {"message": "too long"} }', 400)))
    passed = await post(router, "/generate", **GENERATE)
    assert (passed.status, passed.body) == (400, b'{ "error": {"message": "too long"} }')
    event = b'data: {"error": {"message": "too long"}}\n\ndata: [DONE]\n\n'
    worker.next(script(EVENTS, chunk(event), chunk(b"")))
    assert (await post(router, "/generate", **GENERATE, stream=True)).body == event
    worker.next(script(EVENTS, RESET))
    with pytest.raises(CutReply):
        await post(router, "/generate", **GENERATE, stream=True)
    worker.next(script(b"HTTP/1.1 200 OK\r\ncontent-length: 100\r\n\r\n{", RESET))
    assert (await post(router, "/generate", **GENERATE)).error_type == "upstream_error"


async def test_who_can_do_it_gets_what_another_engine_cannot(stage: Stage) -> None:
    async with SimulatedJax() as unable, SimulatedWorker() as able:
        router = await stage.router(unable.url, able.url)
        chat = {"messages": [{"role": "user", "content": "x"}], "input_ids": [1, 2], "max_tokens": 2}
        for _ in range(4):
            assert (await post(router, "/v1/chat/completions", **chat)).status == 200
        assert [len(each.log.at("/v1/chat/completions")) for each in (unable, able)] == [0, 4]
        for _ in range(4):
            assert (await post(router, "/generate", **GENERATE)).status == 200
        given = [len(each.log.at("/generate")) for each in (unable, able)]
        assert (sum(given), 0 in given) == (4, False), "of several processes each takes turns by itself"
        refused = await post(router, "/release_memory_occupation")
        assert (refused.status, refused.error_type) == (501, "unsupported_by_engine")
        assert not able.log.at("/release_memory_occupation"), "nobody sleeps where one cannot"
        assert not gate(router).closed


async def test_one_that_is_aborted_behind_a_retraction_keeps_what_its_stream_has_told(stage: Stage) -> None:
    async with SimulatedJax(token_latency_s=0.004) as worker, aiohttp.ClientSession() as session:
        router = await stage.router(worker.url)
        client = WorkerClient(router.url, session)
        request = {"input_ids": [1, 2], "sampling_params": {**SHORT, "max_new_tokens": 4000}, "rid": "mine"}
        async with client.stream("/generate", **request, return_logprob=True) as stream:
            while len((await stream.next())["output_ids"]) < 3:
                pass
            await client.post("/pause_generation", mode="retract")
            await client.ask("POST", "/abort_request", {"rid": "mine"})
            events = await stream.rest()
        last = events[-1]
        assert last["meta_info"]["finish_reason"]["type"] == "abort"
        assert last["meta_info"]["id"] == "mine"
        ids = last["output_ids"]
        assert len(ids) == last["meta_info"]["completion_tokens"] >= 3
        assert [entry[1] for entry in last["meta_info"]["output_token_logprobs"]] == ids
        assert worker.log.generations[0].output_ids[: len(ids)] == ids
        await client.post("/continue_generation")


async def test_a_deep_check_asks_for_a_token_where_health_says_nothing(stage: Stage) -> None:
    async with SimulatedJax() as worker:
        router = await stage.router(worker.url, **{**PROBING, "deep_health_check_interval": 0.02})
        await until(lambda: worker.log.at("/health_generate"), "it was checked")
        assert not worker.log.at("/health")
        worker.faults.status(503, path="/health_generate", times=None)
        await becomes(router, worker, WorkerState.QUARANTINED)
        worker.faults.clear()
        await becomes(router, worker, WorkerState.READY)


async def test_a_worker_that_was_lost_has_no_version_until_it_is_set_again(stage: Stage) -> None:
    async with SimulatedJax() as worker, SimulatedJax() as other:
        settings = {**PROBING, "health_check_timeout": 2.0, "readmit": "same-weights"}
        router = await stage.router(worker.url, other.url, **settings)
        assert (await post(router, "/router/weight_version", weight_version="7")).status == 200
        await worker.kill()
        await becomes(router, worker, WorkerState.QUARANTINED)
        assert router.pool.get(worker.url).weight_version is None
        assert router.pool.get(other.url).weight_version == "7"
        await worker.restart()
        record = router.pool.get(worker.url)
        await until(lambda: "weight version None" in record.reason, "it is kept out for its weights")
        await until(lambda: record.engine is not None or record.failures == 0, "it answers")
        assert (await post(router, "/router/weight_version", weight_version="8")).status == 200
        await becomes(router, worker, WorkerState.READY)


async def test_a_whole_answer_during_which_the_version_changed_names_none(stage: Stage) -> None:
    async with SimulatedJax(token_latency_s=0.05) as worker:
        router = await stage.router(worker.url)
        await post(router, "/router/weight_version", weight_version="7")
        assert (await post(router, "/generate", **GENERATE)).json()["meta_info"]["weight_version"] == "7"
        during = posting(router, **GENERATE)
        await until(lambda: worker.running, "it is with the engine")
        await post(router, "/pause_generation", mode="in_place")
        await post(router, "/router/weight_version", weight_version="8")
        await post(router, "/continue_generation")
        assert not {"weight_version", "weight_versions"} & (await during).json()["meta_info"].keys()


async def test_new_weights_have_caches_of_their_own_where_the_engine_heeds_a_key(stage: Stage) -> None:
    async with SimulatedJax() as worker:
        router = await stage.router(worker.url)
        for version in ("7", "8"):
            await post(router, "/router/weight_version", weight_version=version)
            assert (await post(router, "/generate", **GENERATE)).status == 200
            assert (await post(router, "/generate", **{**GENERATE, "input_ids": [[1], [2]]})).status == 200
        keys = [each.json().get("extra_key") for each in worker.log.at("/generate")]
        assert keys[1::2] == [None, None], "it would drop them without a word"
        assert len({*keys[::2]} - {None}) == 2
        assert router.app.router.metrics.unkeyed_generations == 2


async def test_a_flush_that_is_refused_in_a_pause_is_repeated(stage: Stage) -> None:
    worker, router = await stage.worker_and_router()
    busy = script(in_json(b"Flush cache failed.\n", 400))
    worker.next(busy)
    assert (await post(router, "/flush_cache")).status == 400, "nobody paused"
    assert (await post(router, "/pause_generation", mode="retract")).status == 200
    worker.next(busy, busy)
    assert (await post(router, "/flush_cache")).status == 200
    assert [each.path for each in worker.requests].count("/flush_cache") == 4
