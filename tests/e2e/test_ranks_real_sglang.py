"""A real SGLang with two data-parallel ranks: each of its routes heeds how the router pins it, and shows it."""

from __future__ import annotations

import asyncio
import os
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from typing import Any

import orjson
import pytest

from tests.e2e.test_sampling_masks import last_event
from tests.sglang_worker import RealWorker
from tests.support import http, tiers
from tests.support.fleet import JSON, post, posting
from tests.support.http import RawReply
from tests.support.running_router import RunningRouter, running_router
from tests.support.waiting import soon, until

pytestmark = pytest.mark.sglang

MESSAGES = [{"role": "user", "content": "Count."}]
SAMPLING = {"max_new_tokens": 4000, "ignore_eos": True}
#: Each path that can be pinned, and what keeps it busy.
LONG: dict[str, dict[str, Any]] = {
    "/generate": {"text": "Count", "sampling_params": SAMPLING},
    "/v1/chat/completions": {"messages": MESSAGES, "max_tokens": 4000, "ignore_eos": True},
    "/v1/completions": {"prompt": "Count", "max_tokens": 4000, "ignore_eos": True},
    "/v1/messages": {"messages": MESSAGES, "max_tokens": 4000, "ignore_eos": True},
    "/v1/responses": {"input": "Count", "max_output_tokens": 4000},
    "/invocations": {"messages": MESSAGES, "max_tokens": 4000, "ignore_eos": True},
}


@pytest.fixture(scope="module")
def worker() -> Iterator[RealWorker]:
    if not tiers.heavy():
        pytest.skip("an engine of its own, with two schedulers")
    cores = sorted(os.sched_getaffinity(0))
    bound = {"SGLANG_CPU_OMP_THREADS_BIND": f"{cores[0]}|{cores[-1]}"}  # without it, each rank wants a node of its own
    with RealWorker.start("--dp-size", "2", environment=bound) as started:
        yield started


@pytest.fixture
async def router(worker: RealWorker) -> AsyncIterator[RunningRouter]:
    async with running_router(worker.url) as running:
        await until(lambda: all(each.facts for each in running.pool), "all is known of the worker")
        yield running
        await until(lambda: running.pool.in_flight == 0, "every lease is given back")
        await loads_become(worker, Counter())


async def loads_become(worker: RealWorker, wanted: Counter[int]) -> None:
    """Wait until the engine says that its ranks run so many requests."""

    async def look() -> None:
        while True:
            said = (await http.ask(worker.url, "GET", "/v1/loads?include=core")).json()["loads"]
            if Counter({each["dp_rank"]: each["num_running_reqs"] for each in said}) == wanted:
                return
            await asyncio.sleep(0.05)

    await soon(look())


async def left(clients: list[asyncio.Task[RawReply]]) -> None:
    """These clients leave."""
    for client in clients:
        client.cancel()
    await asyncio.wait(clients)


async def test_eight_requests_are_four_each_and_each_rank_says_so(router: RunningRouter) -> None:
    (record,) = router.pool
    params = {"max_new_tokens": 200, "ignore_eos": True}
    clients = [posting(router, text="Count", sampling_params=params) for _ in range(8)]
    await until(lambda: [unit.in_flight for unit in record.units] == [4, 4], "each rank has four")
    answers = [answer.json() for answer in await asyncio.gather(*clients)]
    assert Counter(answer["meta_info"]["dp_rank"] for answer in answers) == {0: 4, 1: 4}
    assert router.app.router.metrics.ignored_ranks == 0
    assert len(record.units) == 2


@pytest.mark.parametrize("path", LONG)
async def test_each_route_heeds_its_pin(worker: RealWorker, router: RunningRouter, path: str) -> None:
    """Three with one key are on one rank; without a pin the engine would take turns."""
    headers = [*JSON, ("X-SMG-Routing-Key", path)]
    model = (await http.ask(worker.url, "GET", "/model_info")).json()["served_model_name"]  # one route checks it
    body = orjson.dumps({**LONG[path], "model": model})
    clients = [asyncio.ensure_future(router.ask("POST", path, headers, body)) for _ in range(3)]
    (record,) = router.pool
    await until(lambda: record.in_flight == 3, "three are in flight")
    (home,) = [unit for unit in record.units if unit.in_flight]
    assert home.rank is not None
    await loads_become(worker, Counter({home.rank: 3}))
    await left(clients)


async def test_the_prefix_of_a_key_is_found_on_its_rank(router: RunningRouter) -> None:
    ids = list(range(1000, 1200))
    for key in ("a", "b"):
        headers = [*JSON, ("X-SMG-Routing-Key", key)]
        for turn in range(3):
            body = {"input_ids": [ord(key), *ids], "sampling_params": {"max_new_tokens": 1}}
            answer = (await router.ask("POST", "/generate", headers, orjson.dumps(body))).json()
            assert (answer["meta_info"]["cached_tokens"] > 0) == (turn > 0), (key, turn)


async def test_a_client_s_own_rank_is_kept_and_one_that_is_none_refused(router: RunningRouter) -> None:
    fields = {"text": "Hi", "sampling_params": {"max_new_tokens": 1}}
    for name in ("routed_dp_rank", "data_parallel_rank"):
        for _ in range(3):
            answer = await post(router, "/generate", **fields, **{name: 1})
            assert answer.json()["meta_info"]["dp_rank"] == 1
    refused = await post(router, "/generate", **fields, routed_dp_rank=2)
    assert (refused.status, b"out of range [0, 2)" in refused.body) == (400, True)


async def test_a_pause_and_a_new_version_reach_all_ranks(router: RunningRouter) -> None:
    assert (await post(router, "/pause_generation", mode="retract")).status == 200
    waiting = [posting(router, text="Hi", sampling_params={"max_new_tokens": 2}) for _ in range(4)]
    assert (await post(router, "/update_weight_version", new_version="9", abort_all_requests=False)).status == 200
    assert (await post(router, "/continue_generation")).status == 200
    metas = [answer.json()["meta_info"] for answer in await asyncio.gather(*waiting)]
    assert Counter((meta["dp_rank"], meta["weight_version"]) for meta in metas) == {(0, "9"): 2, (1, "9"): 2}


@pytest.mark.parametrize("stream", [False, True])
async def test_each_rank_tells_sampling_masks(router: RunningRouter, stream: bool) -> None:
    params = {"max_new_tokens": 8, "ignore_eos": True, "top_k": 5}
    seen = Counter[int]()
    for rank in (0, 1):
        body = {"text": "Count", "sampling_params": params, "return_sampling_mask": True, "routed_dp_rank": rank}
        reply = await post(router, "/generate", **body, stream=stream)
        assert reply.status == 200, reply.body
        answer = last_event(reply) if stream else reply.json()
        masks = answer["meta_info"]["output_token_sampling_mask"]
        assert [token in mask for token, mask in zip(answer["output_ids"], masks, strict=True)] == [True] * 8
        assert {len(mask) for mask in masks} <= {*range(1, 6)}
        seen[answer["meta_info"]["dp_rank"]] += 1
    assert seen == {0: 1, 1: 1}
