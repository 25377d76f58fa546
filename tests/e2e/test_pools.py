"""Several models behind one router: who answers which request, and what is done to one of them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import orjson
import pytest

from miles_router.fleet.workers import WorkerState
from miles_router.settings.config import MiddlewareSpec
from miles_router.testing import SimulatedWorker
from tests.support import http
from tests.support.fleet import JSON, info, post, posting
from tests.support.http import RawReply
from tests.support.running_router import RunningRouter, running_router
from tests.support.session_apis import case
from tests.support.tokenizers import tokenizer_directory
from tests.support.waiting import until

SHORT = {"max_new_tokens": 2}
HI = [{"role": "user", "content": "Hi"}]
CHAT = "/v1/chat/completions"
ROUTES: dict[str, dict[str, Any]] = {
    "/generate": {"text": "Hi", "sampling_params": SHORT},
    CHAT: {"messages": HI, "max_tokens": 2},
    "/v1/completions": {"prompt": "Hi", "max_tokens": 2},
    "/v1/messages": {"messages": HI, "max_tokens": 2},
    "/v1/responses": {"input": "Hi", "max_output_tokens": 2},
}
#: The routes that apply an adapter.
ADAPTED = ("/generate", CHAT, "/v1/completions", "/v1/messages")


class Scene:
    """A router with workers of several models."""

    def __init__(self, router: RunningRouter, workers: dict[str, SimulatedWorker]) -> None:
        self.router = router
        self.workers = workers

    def __getitem__(self, name: str) -> SimulatedWorker:
        return self.workers[name]

    def generations(self) -> dict[str, int]:
        return {name: len(worker.log.generations) for name, worker in self.workers.items()}

    async def answers(self, path: str = CHAT, **fields: Any) -> str | RawReply:
        """Which worker answers a request; the answer where none does."""
        before = self.generations()
        answer = await post(self.router, path, **{**ROUTES[path], **fields})
        after = self.generations()
        took = [name for name in after if after[name] > before[name]]
        assert len(took) <= 1
        assert (answer.status == 200) == bool(took), answer.body
        return took[0] if took else answer

    async def pool(self, name: str) -> dict[str, Any]:
        found: dict[str, Any] = (await info(self.router))["pools"][name]
        return found


async def register(router: RunningRouter, worker: SimulatedWorker, model_id: str | None) -> RawReply:
    fields = {} if model_id is None else {"model_id": model_id}
    return await post(router, "/workers", url=worker.url, **fields)


@asynccontextmanager
async def scene(*names: str, default: bool = False, settings: Any = None, **options: Any) -> AsyncIterator[Scene]:
    """Workers whose `model_id` is their name, and with `default` one that has none."""
    workers = {name: SimulatedWorker(**{"model_path": f"org/{name}", **options}) for name in names}
    if default:
        workers[""] = SimulatedWorker(**{"model_path": "org/plain", **options})
    try:
        for worker in workers.values():
            await worker.start()
        async with running_router(**(settings or {})) as router:
            for name, worker in workers.items():
                assert (await register(router, worker, name or None)).status == 201
            yield Scene(router, workers)
    finally:
        for worker in workers.values():
            await worker.stop()


def refused(answer: str | RawReply) -> dict[str, Any]:
    assert isinstance(answer, RawReply), answer
    assert answer.status == 404, answer.body
    error: dict[str, Any] = answer.json()["error"]
    return error


# Requests


async def test_a_request_goes_to_a_worker_of_its_model() -> None:
    async with scene("actor", "judge") as made:
        for path in ROUTES:
            with case(path):
                for name in ("judge", "judge", "actor", "judge", "actor"):
                    assert await made.answers(path, model=name) == name


async def test_an_unknown_model_is_404_with_those_that_are_known_and_no_worker_hears_of_it() -> None:
    async with scene("actor", "judge", default=True) as made:
        await until(lambda: all(each.facts for each in made.router.app.pools.workers), "all is known")
        for path in ROUTES:
            error = refused(await made.answers(path, model="gpt-4"))
            assert (error["type"], error["param"], error["code"]) == (
                "invalid_request_error",
                "model",
                "model_not_found",
            )
            assert "known models: actor, judge, org/plain" in error["message"]


async def test_a_request_that_names_no_model_is_for_the_workers_that_were_given_none() -> None:
    async with scene("judge", default=True) as made:
        assert await made.answers("/generate") == ""
        assert await made.answers(model="default") == ""
        assert (await made.router.ask("GET", "/v1/models")).json()["data"][0]["id"] == "org/plain"


async def test_where_all_have_a_model_id_a_request_has_to_name_one() -> None:
    async with scene("actor") as made:
        assert await made.answers("/generate") == "actor"
    async with scene("actor", "judge") as made:
        assert "known models: actor, judge" in refused(await made.answers("/generate"))["message"]
        assert (await made.router.ask("GET", "/v1/models")).status == 200


async def test_a_model_goes_by_the_name_that_its_engines_have_too() -> None:
    """At once, and for all who ask at the same time: what is not known yet is asked."""
    async with scene("actor", "judge", default=True) as made:
        body = {**ROUTES[CHAT], "model": "org/actor"}
        answers = await asyncio.gather(*(post(made.router, CHAT, **body) for _ in range(8)))
        assert ([each.status for each in answers], made.generations()["actor"]) == ([200] * 8, 8)
        assert await made.answers(model="org/judge") == "judge"
        assert await made.answers(model="org/plain") == ""


SAID = '"messages": [{"role": "user", "content": "\\"model\\": \\"actor\\""}]'


async def test_the_model_is_found_wherever_it_stands_and_the_body_stays_as_it_is() -> None:
    async with scene("actor", "judge") as made:
        for body in [
            '{"model": "judge", %s, "max_tokens": 2}',
            ' {\n "max_tokens": 2, %s, "model": "judge" } ',
            '{"max_tokens": 2, "model": "judge", %s}',
            '{"metadata": {"model": "actor"}, "model": "judge", "max_tokens": 2, %s}',
            '{"model": "judge", "metadata": {"model": "actor"}, "max_tokens": 2, %s}',
            '{"max_tokens": 2, %s, "model": "judge", "metadata": {"model": "actor"}}',
        ]:
            with case(body):
                sent = (body % SAID).encode()
                assert (await made.router.ask("POST", CHAT, JSON, sent)).status == 200
                assert (made["judge"].log.at(CHAT)[-1].body, len(made["actor"].log.generations)) == (sent, 0)


async def test_a_model_that_cannot_be_read_is_refused() -> None:
    async with scene("actor", "judge") as made:
        for headers in [[("Content-Encoding", "gzip")], [("Content-Type", "multipart/form-data")]]:
            with case(headers):
                answer = await made.router.ask("POST", CHAT, headers, b"\x1f\x8b")
                assert (answer.status, made.generations()) == (400, {"actor": 0, "judge": 0})


async def test_a_model_whose_workers_have_left_is_not_answered_by_another() -> None:
    async with scene("judge", default=True) as made:
        assert (await post(made.router, "/remove_worker", url=made["judge"].url)).status == 200
        answer = await made.answers(model="judge")
        assert isinstance(answer, RawReply)
        assert (answer.status, answer.json()["error"]["type"]) == (503, "no_worker_available")
        await register(made.router, made["judge"], "judge")
        assert await made.answers(model="judge") == "judge"


# Workers


@pytest.mark.alone("idle workers take turns in each process")
async def test_a_worker_stays_in_its_pool_until_it_is_removed() -> None:
    async with scene("actor", "judge") as made:
        router, worker = made.router, made["actor"]
        assert (await register(router, worker, None)).json()["model_id"] == "actor"
        answer = await register(router, worker, "judge")
        assert (answer.status, "registered for the model 'actor'" in answer.json()["error"]["message"]) == (400, True)
        shown = (await router.ask("GET", "/workers")).json()["workers"]
        assert {each["url"]: each["model_id"] for each in shown} == {made[name].url: name for name in made.workers}
        (only,) = [each for each in shown if each["model_id"] == "actor"]
        assert (await router.ask("DELETE", f"/workers/{only['id']}")).status == 200
        await register(router, worker, "judge")
        assert {await made.answers(model="judge") for _ in range(2)} == {"actor", "judge"}


async def test_a_model_id_that_is_no_name_is_refused() -> None:
    async with running_router() as router:
        for model_id in ["", " judge", 7, "x" * 257]:
            with case(model_id):
                answer = await post(router, "/workers", url="http://127.0.0.1:1", model_id=model_id)
                assert (answer.status, "model_id" in answer.json()["error"]["message"]) == (400, True)


async def test_workers_of_a_later_pool_are_checked_too() -> None:
    settings = {"health_check_interval": 0.05, "health_check_failure_threshold": 1}
    async with scene("judge", default=True, settings=settings) as made:
        (record,) = [each for each in made.router.app.pools.workers if each.url == made["judge"].url]
        await made["judge"].kill()
        await until(lambda: record.state is WorkerState.QUARANTINED, "it is found")
        await made["judge"].restart()
        await until(lambda: record.state is WorkerState.READY, "it is back")


# What is done to one of them


async def test_a_pause_of_one_leaves_the_other_alone() -> None:
    async with scene("actor", "judge") as made:
        assert (await post(made.router, "/pause_generation?model_id=actor", mode="retract")).status == 200
        waiting = posting(made.router, model="actor", **ROUTES["/generate"])
        gate = made.router.app.pools.of_id("actor").fleet.gate
        await until(lambda: gate.held == 1, "it waits")
        assert await made.answers(model="judge") == "judge"
        assert [(await made.pool(name))["gate"]["closed"] for name in ("actor", "judge")] == [True, False]
        assert (made["actor"].engine.paused is None, made["judge"].engine.paused) == (False, None)
        assert (await post(made.router, "/continue_generation?model_id=actor")).status == 200
        assert (await waiting).status == 200


async def test_weight_versions_are_of_one_pool() -> None:
    async with scene("actor", "judge", settings={"health_check_interval": 0.05}) as made:
        asked = "/update_weights_from_disk?x=1&model_id=actor"
        assert (await post(made.router, asked, model_path="org/actor", weight_version="7")).status == 200
        assert [(await made.pool(name))["weight_version"] for name in ("actor", "judge")] == ["7", "default"]
        assert (made["actor"].weight_version, made["judge"].weight_version) == ("7", "default")
        assert made["actor"].log.at("/update_weights_from_disk")[0].target == "/update_weights_from_disk?x=1"
        assert {each.state for each in made.router.app.pools.workers} == {WorkerState.READY}
        assert [await made.answers(model=name) for name in ("judge", "actor")] == ["judge", "actor"]
        late = SimulatedWorker(model_path="org/judge", weight_version="7")
        async with late:
            assert (await register(made.router, late, "judge")).json()["state"] == "outdated"


async def test_a_control_request_that_means_nobody_is_refused_and_asks_nobody() -> None:
    async with scene("actor", "judge") as made:
        for query in ["", "?model_id=gpt-4"]:
            with case(query):
                answer = await post(made.router, f"/pause_generation{query}")
                assert (answer.status, answer.json()["error"]["param"]) == (404, "model_id")
                assert "known models: actor, judge" in answer.json()["error"]["message"]
                assert [worker.log.at("/pause_generation") for worker in made.workers.values()] == [[], []]


# Layers


async def test_layers_that_hold_tokens_are_for_the_default_pool_and_others_pass_them_by() -> None:
    middlewares = tuple(
        MiddlewareSpec(f"middleware_hub.{path}", {})
        for path in (
            "openai_session_middleware.OpenAISessionMiddleware",
            "radix_tree_middleware.RadixTreeMiddleware",
            "routed_experts_middleware.RoutedExpertsMiddleware",
        )
    )
    settings = {"middlewares": middlewares, "hf_checkpoint": tokenizer_directory("qwen3")}
    async with SimulatedWorker() as worker, running_router(**settings) as router:
        refusal = await register(router, worker, "judge")  # else it would depend on who registers first
        assert (refusal.status, "--model-id" in refusal.json()["error"]["message"]) == (400, True)
        assert (await register(router, worker, None)).status == 201
    async with scene("judge", settings={**settings, "model_id": "actor"}) as made:
        judge = made["judge"]
        body = orjson.dumps({**ROUTES["/generate"], "model": "judge"})
        assert (await made.router.ask("POST", "/generate", JSON, body)).status == 200
        assert judge.log.at("/generate")[-1].body == body
        chat = orjson.dumps({**ROUTES[CHAT], "model": "judge"})
        assert (await made.router.ask("POST", CHAT, [*JSON, ("X-Session-Id", "s")], chat)).status == 200
        assert judge.log.at(CHAT)[-1].body == chat
        session = (await post(made.router, "/sessions")).json()["session_id"]
        answer = await made.router.ask("POST", f"/sessions/{session}{CHAT}", JSON, chat)
        assert (answer.status, b"the path is for the model 'actor'" in answer.body) == (400, True)


# Adapters


@asynccontextmanager
async def with_adapters() -> AsyncIterator[Scene]:
    async with scene("actor", "judge", enable_lora=True) as made:
        for name in ("one", "org/two:b"):
            answer = await post(made.router, "/load_lora_adapter?model_id=actor", lora_name=name, lora_path="/x")
            assert answer.status == 200
        yield made


def applied(worker: SimulatedWorker) -> str | None:
    """The adapter of a worker's last generation."""
    return worker.log.generations[-1].lora_path


def never_applied(answer: str | RawReply) -> None:
    """No worker took it, for its route applies no adapter."""
    assert isinstance(answer, RawReply)
    assert (answer.status, answer.json()["error"]["type"]) == (501, "unsupported_by_engine")
    assert "/v1/responses ignores LoRA adapters" in answer.json()["error"]["message"]


async def test_an_adapter_that_a_generation_names_itself_counts() -> None:
    async with with_adapters() as made:
        assert await made.answers("/generate", model="actor:one", lora_path="org/two:b") == "actor"
        assert applied(made["actor"]) == "org/two:b"
        assert await made.answers("/generate", model="actor:one", lora_path=None) == "actor"
        assert applied(made["actor"]) == "one"


async def test_an_adapter_that_nobody_has_is_never_answered_by_base_weights() -> None:
    async with with_adapters() as made:
        for model in ("actor:three", "judge:one"):
            answer = await made.answers(model=model)
            assert isinstance(answer, RawReply)
            assert (answer.status, b"never been loaded" in answer.body) == (400, True)
        error = refused(await made.answers(model="three"))
        assert "adapters: org/actor:one, org/actor:org/two:b" in error["message"]


@asynccontextmanager
async def one_model_with_adapters() -> AsyncIterator[Scene]:
    """A worker that was given no `model_id` and has adapters that the router has not seen."""
    async with SimulatedWorker(model_path="org/plain", enable_lora=True) as worker, running_router() as router:
        for name in ("one", "org/two:b"):
            loaded = orjson.dumps({"lora_name": name, "lora_path": "/x"})
            assert (await http.ask(worker.url, "POST", "/load_lora_adapter", JSON, loaded)).status == 200
        assert (await register(router, worker, None)).status == 201
        yield Scene(router, {"": worker})


async def test_where_no_worker_has_a_model_id_an_adapter_is_never_answered_by_base_weights() -> None:
    async with one_model_with_adapters() as made:
        for model in ("org/plain:one", "one"):
            answer = await made.answers("/v1/responses", model=model)
            never_applied(answer)
        assert (await post(made.router, "/unload_lora_adapter", lora_name="one")).status == 200
        for path in ADAPTED:
            answer = await made.answers(path, model="one")
            assert isinstance(answer, RawReply)
            assert (answer.status, b"one" in answer.body) == (400, True)


def with_lora(worker_class: type[SimulatedWorker] = SimulatedWorker, **options: Any) -> SimulatedWorker:
    return worker_class(model_path="org/plain", enable_lora=True, **options)


async def load(worker: SimulatedWorker, name: str) -> None:
    """Load an adapter, and the router does not see it."""
    loaded = orjson.dumps({"lora_name": name, "lora_path": "/x"})
    assert (await http.ask(worker.url, "POST", "/load_lora_adapter", JSON, loaded)).status == 200


async def test_an_adapter_that_one_of_the_workers_has_is_never_answered_by_base_weights() -> None:
    async with with_lora() as first, with_lora() as second, running_router() as router:
        await load(second, "one")
        for worker in (first, second):
            await register(router, worker, None)
        first.faults.status(400, path="/load_lora_adapter", times=1)
        assert (await post(router, "/load_lora_adapter", lora_name="two", lora_path="/x")).status == 502
        for model in ("one", "two"):
            answers = [await post(router, CHAT, **{**ROUTES[CHAT], "model": model}) for _ in range(12)]
            assert {answer.status for answer in answers} == {200, 400}
        assert not first.log.generations
        assert {each.lora_path for each in second.log.generations} == {"one", "two"}


async def test_adapter_field_is_applied_or_refused_on_routes_without_one() -> None:
    async with one_model_with_adapters() as made:
        assert await made.answers("/v1/messages", model="gpt-4", lora_path="one") == ""
        assert applied(made[""]) == "one"
        never_applied(await made.answers("/v1/responses", model="gpt-4", lora_path="one"))


async def test_a_model_that_cannot_be_written_is_refused() -> None:
    async with one_model_with_adapters() as made:
        body = b'{"text":"Hi","model":"default:\\ud800"}'
        answer = await made.router.ask("POST", "/generate", JSON, body)
        assert answer.status == 400, answer.body
