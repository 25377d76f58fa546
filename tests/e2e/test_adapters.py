"""Adapters: a request that names one is answered with it, or refused, whatever its workers have said and when."""

from __future__ import annotations

import gzip
from contextlib import AsyncExitStack
from typing import Any

import orjson
import pytest

from miles_router.fleet.workers import WorkerState
from miles_router.testing import SimulatedWorker
from tests.e2e.test_pools import CHAT, ROUTES, applied, load, register, with_lora
from tests.support import http
from tests.support.fleet import JSON, held, post, posting
from tests.support.http import RawReply
from tests.support.running_router import RunningRouter, processes_used, running_router
from tests.support.simulated.sglang_jax import SimulatedJax
from tests.support.waiting import until

KEYED = [*JSON, ("Authorization", "Bearer k")]
OTHERS = ("/api/chat", "/api/generate", "/v1/rerank", "/v1/score", "/v1/classify")


async def asked(router: RunningRouter, path: str, **fields: Any) -> RawReply:
    return await post(router, path, **{**ROUTES.get(path, {"text": "Hi"}), **fields})


def told(answer: RawReply) -> tuple[int, str]:
    return answer.status, answer.json()["error"]["type"]


async def test_an_engine_that_tells_its_adapters_to_clients_alone_applies_them() -> None:
    async with with_lora(api_key="k") as worker, running_router() as router:
        loaded = orjson.dumps({"lora_name": "one", "lora_path": "/x"})
        assert (await http.ask(worker.url, "POST", "/load_lora_adapter", KEYED, loaded)).status == 200
        assert (await register(router, worker, None)).status == 201
        for headers in (JSON, [*JSON, ("Authorization", "Bearer other")]):
            body = orjson.dumps({**ROUTES[CHAT], "model": "one"})
            assert (await router.ask("POST", CHAT, headers, body)).status == 401, "the engine's own"
        for path in ROUTES:
            answer = await router.ask("POST", path, KEYED, orjson.dumps({**ROUTES[path], "model": "one"}))
            assert answer.status == (501 if path == "/v1/responses" else 200)
        assert [each.lora_path for each in worker.log.generations] == ["one"] * 4


async def test_an_engine_with_a_key_and_no_adapters_answers_to_any_name() -> None:
    async with SimulatedWorker(model_path="org/plain", api_key="k") as worker, running_router() as router:
        await register(router, worker, None)
        for headers, status in ((JSON, 401), (KEYED, 200), (KEYED, 200), (JSON, 401)):
            body = orjson.dumps({**ROUTES[CHAT], "model": "gpt-4"})
            assert (await router.ask("POST", CHAT, headers, body)).status == status
        upload = [("Content-Type", "multipart/form-data; boundary=x"), KEYED[-1]]
        passed: list[Any] = []
        while not passed:  # the other processes of a router hear a moment later that it applies no adapters
            await router.ask("POST", "/v1/audio/transcriptions", upload, b"--x--")
            passed = worker.log.at("/v1/audio/transcriptions")
            assert passed or processes_used() > 1, "it passes as it came"
        answer = await post(router, "/workers", url=worker.url, api_key="k")
        assert answer.status in (200, 201), answer.body
        record = router.pool.get(worker.url)
        await until(lambda: record.applies_adapters is False, "it has said so to the router's own key")


async def test_a_check_that_fails_once_changes_nothing_for_who_uses_no_adapters() -> None:
    async with SimulatedWorker(model_path="org/plain") as worker, running_router(health_check_interval=60.0) as router:
        await register(router, worker, None)
        assert (await asked(router, CHAT, model="gpt-4")).status == 200
        fleet = router.app.pools.default.fleet
        worker.faults.hang(path="/v1/models", times=None)
        for path in ("/server_info", "/get_server_info"):
            worker.faults.hang(path=path, times=None)
        fleet.pool.record_failure(fleet.pool.get(worker.url), "it was late")
        assert not fleet.all_reported
        assert (await asked(router, CHAT, model="gpt-4")).status == 200
        packed = [*JSON, ("Content-Encoding", "gzip")]
        await router.ask("POST", CHAT, packed, gzip.compress(orjson.dumps(ROUTES[CHAT])))
        assert len(worker.log.at(CHAT)) == 3


@pytest.mark.parametrize("seen", ["a failed check", "the deep check"])
async def test_an_engine_in_another_ones_place_is_asked_for_its_adapters(seen: str) -> None:
    async with AsyncExitStack() as stack:
        worker = await stack.enter_async_context(SimulatedWorker(model_path="org/plain"))
        deep = 0.3 if seen == "the deep check" else 0.0
        router = await stack.enter_async_context(
            running_router(health_check_interval=0.2, deep_health_check_interval=deep)
        )
        await register(router, worker, None)
        assert (await asked(router, CHAT, model="one")).status == 200
        record = router.app.pools.default.fleet.pool.get(worker.url)
        await worker.stop()
        if seen == "a failed check":
            await until(lambda: record.failures, "it is missed")
        other = await stack.enter_async_context(with_lora(port=int(worker.url.rpartition(":")[2])))
        await load(other, "one")
        if seen == "the deep check":
            await until(lambda: record.applies_adapters, "it has said it")
        assert (await asked(router, CHAT, model="one")).status == 200
        assert applied(other) == "one"


async def test_while_a_worker_has_never_said_which_adapters_it_has_a_name_is_nobody_elses() -> None:
    async with with_lora() as silent, with_lora() as other, with_lora() as actor, running_router() as router:
        for worker in (silent, actor):
            await load(worker, "one")
        silent.faults.status(500, path="/v1/models", times=None)
        for worker, name in ((silent, "judge"), (other, "judge"), (actor, "actor")):
            await register(router, worker, name)
        fleet = router.app.pools.of_id("judge").fleet
        await until(lambda: fleet.all_reported, "they have said that they apply adapters")
        assert told(await asked(router, "/generate", model="one")) == (503, "no_worker_available")
        assert (await asked(router, "/generate", model="actor:one")).status == 200
        silent.faults.clear()
        router.app.pools.of_id("judge").forget_adapters()
        assert (await asked(router, "/generate", model="one")).status == 404, "two have it"
        assert [len(each.log.generations) for each in (silent, other, actor)] == [0, 0, 1]


async def test_what_a_worker_that_is_lost_has_said_is_known_still() -> None:
    async with with_lora() as lost, with_lora() as other, running_router() as router:
        await load(lost, "one")
        for worker in (lost, other):
            await register(router, worker, None)
        fleet = router.app.pools.default.fleet
        await until(lambda: fleet.all_reported, "they have said which they have")
        await lost.kill()
        for _ in range(3):
            fleet.pool.record_failure(fleet.pool.get(lost.url), "it is gone")
        assert fleet.pool.get(lost.url).state is WorkerState.QUARANTINED
        assert (await asked(router, CHAT, model="one")).status == 400
        assert not other.log.generations


async def test_the_adapters_of_a_worker_that_joins_are_known_at_once() -> None:
    async with with_lora() as first, with_lora() as newcomer, running_router() as router:
        await register(router, first, None)
        assert (await asked(router, CHAT, model="one")).status == 200, "nobody has it: it is the model's name"
        await load(newcomer, "one")
        await register(router, newcomer, None)
        answers = [(await asked(router, CHAT, model="one")).status for _ in range(4)]
        assert set(answers) <= {200, 400}
        assert len(first.log.generations) == 1
        assert {each.lora_path for each in newcomer.log.generations} == {"one"}


async def test_request_waiting_for_an_adapter_is_not_answered_by_base_weights() -> None:
    async with with_lora() as worker, running_router() as router:
        await register(router, worker, None)
        assert (await asked(router, CHAT, model="step-8")).status == 200
        await post(router, "/pause_generation", mode="abort")
        waiting = [posting(router, CHAT, **{**ROUTES[CHAT], "model": name}) for name in ("step-8", "gpt-4")]
        await held(router, 2)
        assert (await post(router, "/load_lora_adapter", lora_name="step-8", lora_path="/x")).status == 200
        await post(router, "/continue_generation")
        assert told(await waiting[0]) == (503, "no_worker_available")
        assert (await waiting[1]).status == 200
        assert (await asked(router, CHAT, model="step-8")).status == 200
        assert [each.lora_path for each in worker.log.generations] == [None, None, "step-8"]


async def test_an_adapter_beside_the_model_is_one_and_the_same_or_refused() -> None:
    async with with_lora() as worker, running_router() as router:
        for name in ("one", "two"):
            await load(worker, name)
        await register(router, worker, None)
        for path in ROUTES:
            both = await asked(router, path, model="one", lora_path="two")
            assert both.status == (200 if path == "/generate" else 400)
        assert [each.lora_path for each in worker.log.generations] == ["two"]
        for path in ("/v1/messages", "/v1/responses"):
            assert told(await asked(router, path, lora_path=["one"])) == (400, "invalid_request")
        for path in ("/encode", "/classify"):
            await asked(router, path, lora_path="one")
            await asked(router, path, model="org/plain:one")
            assert [each.json()["lora_path"] for each in worker.log.at(path)] == ["one", "one"]
        for path in OTHERS:
            assert told(await asked(router, path, lora_path="one")) == (501, "unsupported_by_engine")
            assert told(await asked(router, path, model="one")) == (501, "unsupported_by_engine")
        assert [len(worker.log.at(path)) for path in OTHERS] == [0] * len(OTHERS)


@pytest.mark.parametrize("model_id", [None, "actor"])
async def test_sglang_jax_applies_adapters_or_refuses_them(model_id: str | None) -> None:
    async with with_lora(SimulatedJax) as worker, running_router() as router:
        worker.engine.adapters["one"] = "/x"  # as it was started: it has no route for them
        await register(router, worker, model_id)
        base = model_id or "org/plain"
        ways: list[dict[str, Any]] = [{"model": f"{base}:one"}, {"model": base, "lora_path": "one"}]
        for fields in [*ways, {"model": "one"}] if model_id is None else ways:
            assert told(await asked(router, CHAT, **fields)) == (501, "unsupported_by_engine")
            for path in ("/generate", "/v1/completions"):
                assert (await asked(router, path, **fields)).status == 200
                assert applied(worker) == "one"
        assert (await asked(router, CHAT, model=base)).status == 200


async def test_sglang_jax_without_adapters_leaves_none_out_without_a_word() -> None:
    async with SimulatedJax(model_path="org/plain") as worker, running_router() as router:
        await register(router, worker, "actor")
        for path in ("/generate", "/v1/completions", CHAT):
            for fields in ({"model": "actor:one"}, {"model": "actor", "lora_path": "one"}):
                assert told(await asked(router, path, **fields)) == (501, "unsupported_by_engine")
            assert (await asked(router, path, model="actor")).status == 200


async def test_clients_keys_are_shown_to_workers_that_ask_for_one_alone() -> None:
    async with with_lora() as worker, with_lora(api_key="k") as keyed, running_router() as router:
        for each in (worker, keyed):
            await register(router, each, None)
        for number in range(3):
            body = orjson.dumps({**ROUTES[CHAT], "model": "gpt-4"})
            await router.ask("POST", CHAT, [*JSON, ("Authorization", f"Bearer {number}")], body)
        asked_with = [{each.header("authorization") for each in one.log.at("/v1/models")} for one in (worker, keyed)]
        assert asked_with == [{None}, {None, "Bearer 0", "Bearer 1", "Bearer 2"}]
