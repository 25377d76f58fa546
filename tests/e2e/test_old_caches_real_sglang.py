"""Updates without a flush on real SGLang: what its prefix cache holds of old weights, and who finds it there."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import orjson
import pytest

from miles_router.settings.config import MiddlewareSpec
from miles_router.tasks import spawn
from tests.contract.client import FLUSH
from tests.sglang.environment import ensure
from tests.sglang_worker import RealWorker
from tests.support.http import ask
from tests.support.running_router import RunningRouter, running_router
from tests.support.session_trial import message_of, user
from tests.support.waiting import until

pytestmark = pytest.mark.sglang

LAYERS = (
    MiddlewareSpec("middleware_hub.openai_session_middleware.OpenAISessionMiddleware", {}),
    MiddlewareSpec("middleware_hub.radix_tree_middleware.RadixTreeMiddleware", {}),
)
JSON = [("Content-Type", "application/json")]
CHAT = "/v1/chat/completions"
SHORT = {"max_new_tokens": 4, "ignore_eos": True, "temperature": 0}
ENDLESS = {"max_new_tokens": 4000, "ignore_eos": True}


async def post(url: str, path: str, *, status: int = 200, **fields: Any) -> Any:
    answer = await ask(url, "POST", path, JSON, orjson.dumps(fields))
    assert answer.status == status, (path, answer.body)
    return orjson.loads(answer.body) if answer.body.startswith((b"{", b"[")) else None


async def generate(url: str, start: int, **fields: Any) -> tuple[str, int]:
    """The weight version of a short answer to a prompt of 80 ids, and how many of them were cached."""
    asked = {"input_ids": list(range(start, start + 80)), "sampling_params": SHORT, **fields}
    meta = (await post(url, "/generate", **asked))["meta_info"]
    assert [span["version"] for span in meta["weight_versions"]] == [meta["weight_version"]]
    return meta["weight_version"], meta["cached_tokens"]


async def chat(url: str, path: str, messages: list[Any]) -> Any:
    return await post(url, path, model="m", messages=messages, max_tokens=6, ignore_eos=True)


@pytest.fixture
async def router(sglang_workers: list[RealWorker]) -> AsyncIterator[RunningRouter]:
    """In front of one worker, whose weights have their first version again afterwards."""
    url = sglang_workers[0].url
    async with running_router(url, middlewares=LAYERS, hf_checkpoint=str(ensure().dense_model)) as running:
        await until(lambda: running.pool.weight_version is not None, "the probe has passed")
        try:
            yield running
        finally:
            await post(url, "/continue_generation")
            await post(url, "/abort_request", abort_all=True)
            await post(url, "/update_weight_version", new_version="default")
            await until(lambda: running.pool.in_flight == 0, "nothing runs")
            await post(url, FLUSH)


@asynccontextmanager
async def something_running(url: str) -> AsyncIterator[None]:
    """A generation that a pause keeps, so that the cache cannot be flushed."""
    task = spawn(post(url, "/generate", text="Once upon a time", sampling_params=ENDLESS), name="long")
    loads = {"num_running_reqs": 0}
    while not loads["num_running_reqs"]:
        loads = orjson.loads((await ask(url, "GET", "/v1/loads")).body)["loads"][0]
    yield
    await post(url, "/abort_request", abort_all=True)
    await task


@pytest.mark.parametrize("mode", ["in_place", "retract", "abort"])
async def test_a_new_generation_finds_no_cache_of_older_weights(
    router: RunningRouter, sglang_workers: list[RealWorker], mode: str
) -> None:
    worker = sglang_workers[0].url
    start = {"in_place": 1000, "retract": 2000, "abort": 3000}[mode]
    old = {"messages": [user(f"Say something about {mode} and weights.")]}
    assert [await generate(router.url, start) for _ in range(2)] == [("default", 0), ("default", 79)]
    await chat(router.url, CHAT, **old)
    async with something_running(worker):
        await post(router.url, "/pause_generation", mode=mode)
        await post(router.url, "/update_weight_version", new_version=mode, abort_all_requests=False)
        await post(router.url, "/continue_generation")
        assert await generate(worker, start) == (mode, 79), "SGLang itself reuses it, and stamps the new version alone"
        assert [await generate(router.url, start) for _ in range(2)] == [(mode, 0), (mode, 79)]
        assert await generate(router.url, start, extra_key="mine") == (mode, 0)
        pair: dict[str, Any] = {"input_ids": [list(range(start, start + 80))] * 2, "extra_key": ["a", "b"]}
        answers = await post(router.url, "/generate", **pair, sampling_params=SHORT)
        assert [each["meta_info"]["cached_tokens"] for each in answers] == [0, 0], "a batch has a key for each"
        answers = await post(router.url, "/generate", **pair, sampling_params={**SHORT, "n": 2})
        assert [each["meta_info"]["weight_version"] for each in answers] == [mode] * 4
        cached = [(await chat(router.url, CHAT, **old))["usage"]["prompt_tokens_details"] for _ in range(2)]
        assert not (cached[0] or {}).get("cached_tokens")
    await post(router.url, FLUSH)
    assert [await generate(router.url, start) for _ in range(2)] == [(mode, 0), (mode, 79)]
    assert (await generate(worker, start))[1] == 79, "behind a flush there is one cache for all"


async def test_what_goes_on_keeps_its_cache_and_says_whose_it_was(router: RunningRouter) -> None:
    session = (await post(router.url, "/sessions"))["session_id"]
    turns: list[Any] = [user("How are you today, and what is 17 plus 25?")]
    turns.append(message_of(await chat(router.url, f"/sessions/{session}{CHAT}", turns)))
    text = "A text that is long enough to be found again in a cache:"
    first = await post(router.url, "/generate", text=text, sampling_params=SHORT)
    await post(router.url, "/update_weight_version", new_version="kept")
    turns.append(user("Go on."))
    await chat(router.url, f"/sessions/{session}{CHAT}", turns)
    second = await post(router.url, "/generate", text=f"{text}{first['text']} and more", sampling_params=SHORT)
    again = await post(router.url, "/generate", text=text, sampling_params=SHORT)
    records = orjson.loads((await ask(router.url, "GET", f"/sessions/{session}")).body)["records"]
    assert records[1]["cached_tokens"] > 0
    assert [run["version"] for run in records[1]["weight_versions"]] == ["kept"]
    assert records[1]["cache_versions"] == ["default", "kept"]
    assert (second["meta_info"]["cached_tokens"] > 0, again["meta_info"]["cached_tokens"]) == (True, 0)
    found = [await post(router.url, "/retrieve_from_text", rid=each["meta_info"]["id"]) for each in (second, again)]
    assert [each["cache_versions"] for each in found] == [["default", "kept"], []]


async def test_an_update_that_is_refused_and_took_effect_is_noticed(
    router: RunningRouter, sglang_workers: list[RealWorker]
) -> None:
    worker = sglang_workers[0].url
    await generate(router.url, 4000)
    model = str(ensure().dense_model)
    async with something_running(worker):
        await post(router.url, "/pause_generation", mode="in_place")
        refusal = await post(
            router.url, "/update_weights_from_disk", status=400, model_path=model, weight_version="half"
        )
        assert "Weights were updated, but the cache was not flushed" in refusal["message"]
        assert router.pool.weight_version == "half"
        named = orjson.loads((await ask(worker, "GET", "/model_info")).body)["weight_version"]
        assert named == "half", "SGLang names the old version until it is told"
        await post(router.url, "/continue_generation")
        assert await generate(worker, 4000) == ("half", 79)
        assert [await generate(router.url, 4000) for _ in range(2)] == [("half", 0), ("half", 79)]
