"""A worker with data-parallel ranks: each of them is counted, chosen and tied to on its own."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import orjson
import pytest

from miles_router.testing import SimulatedWorker
from tests.support import http
from tests.support.fleet import JSON, post, posting
from tests.support.http import Pairs, RawReply
from tests.support.metrics import metric
from tests.support.running_router import RunningRouter, running_router
from tests.support.simulated.odd_workers import RankDeafWorker
from tests.support.waiting import until

#: Long enough for any test: who waits for it has lost.
LONG = {"max_new_tokens": 30_000, "ignore_eos": True}
SHORT = {"max_new_tokens": 2}
MESSAGES = [{"role": "user", "content": "Hi"}]
CHAT = "/v1/chat/completions"
#: Each path that can be pinned, and what asks it for as many tokens as there are.
ROUTES: dict[str, dict[str, Any]] = {
    "/generate": {"text": "Hi", "sampling_params": LONG},
    CHAT: {"messages": MESSAGES, "max_tokens": 30_000, "ignore_eos": True},
    "/v1/completions": {"prompt": "Hi", "max_tokens": 30_000, "ignore_eos": True},
    "/v1/messages": {"model": "m", "messages": MESSAGES, "max_tokens": 30_000},
    "/v1/responses": {"model": "m", "input": "Hi", "max_output_tokens": 30_000},
}


def worker_with_ranks(worker_class: type[SimulatedWorker] = SimulatedWorker, **settings: Any) -> SimulatedWorker:
    return worker_class(**{"dp_size": 2, "token_latency_s": 0.02, "stop_probability": 0.0, **settings})


@asynccontextmanager
async def one(
    worker_class: type[SimulatedWorker] = SimulatedWorker, **settings: Any
) -> AsyncIterator[tuple[SimulatedWorker, RunningRouter]]:
    """A router with one worker that has two ranks, which it knows."""
    async with worker_with_ranks(worker_class, **settings) as worker, running_router(worker.url) as router:
        await ranks_known(router)
        yield worker, router


async def ranks_known(router: RunningRouter) -> None:
    await until(lambda: all(worker.facts for worker in router.pool), "all is known of the workers")


def ranks(worker: SimulatedWorker) -> Counter[int | None]:
    """How many generations each rank has now."""
    return Counter(each.dp_rank for each in worker.engine.running.values())


async def ask(router: RunningRouter, path: str, headers: Pairs = (), **fields: Any) -> RawReply:
    return await router.ask("POST", path, [*JSON, *headers], orjson.dumps(fields))


async def left(*tasks: asyncio.Task[RawReply]) -> None:
    """These clients leave."""
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)


async def rank_of(router: RunningRouter, headers: Pairs = (), **fields: Any) -> int:
    answer = await ask(router, "/generate", headers, text="Hi", sampling_params=SHORT, **fields)
    assert answer.status == 200, answer.body
    rank: int = answer.json()["meta_info"]["dp_rank"]
    return rank


@pytest.mark.alone("two processes may choose alike within a tenth of a second")
@pytest.mark.parametrize("path", ROUTES)
async def test_eight_requests_on_a_worker_with_two_ranks_are_four_each(path: str) -> None:
    """From its registration on: what comes before its ranks are known waits for that."""
    async with worker_with_ranks() as worker, running_router(worker.url) as router:
        clients = [posting(router, path, **ROUTES[path]) for _ in range(8)]
        await until(lambda: worker.running == 8, "all generate")
        assert ranks(worker) == {0: 4, 1: 4}
        await left(*clients)
        await until(lambda: router.pool.in_flight == 0, "every lease is given back")


async def test_ranks_are_shown_where_workers_are() -> None:
    async with one() as (worker, router):
        clients = [posting(router, **ROUTES["/generate"]) for _ in range(3)]
        await until(lambda: worker.running == 3, "all generate")
        (shown,) = (await router.ask("GET", "/workers")).json()["workers"]
        assert shown["in_flight"] == 3
        assert sorted(each["in_flight"] for each in shown["ranks"]) == [1, 2]
        assert [each["rank"] for each in shown["ranks"]] == [0, 1]
        for each in shown["ranks"]:
            labels = {"rank": str(each["rank"]), "worker": worker.url}
            assert await metric(router, "miles_router_rank_in_flight", **labels) == each["in_flight"]
        await left(*clients)


async def test_the_same_key_goes_to_the_same_rank() -> None:
    async with one() as (_, router):
        keys = [f"key {number}" for number in range(6)]
        homes = {key: await rank_of(router, [("X-SMG-Routing-Key", key)]) for key in keys}
        assert {*homes.values()} == {0, 1}
        for key in [*keys, *reversed(keys)]:
            assert await rank_of(router, [("X-SMG-Routing-Key", key)]) == homes[key]


async def test_a_rank_is_spliced_into_what_needs_it_and_bodies_stay_as_they_are_elsewhere() -> None:
    spelled = b' { "text" : "Hi", "sampling_params":{"max_new_tokens":2},\n"x": "\xc3\xa4" } '
    async with one() as (worker, router):
        await router.ask("POST", "/generate", JSON, spelled)
        body = worker.log.last.body
        assert body.startswith(spelled.rstrip()[:-1].rstrip())
        assert {**orjson.loads(spelled), "routed_dp_rank": worker.log.last.generation.dp_rank} == orjson.loads(body)
        for path, fields in list(ROUTES.items())[1:]:
            sent = orjson.dumps({**fields, "max_tokens": 2, "max_output_tokens": 2})
            await router.ask("POST", path, JSON, sent)
            assert worker.log.last.body == sent
            assert worker.log.last.header("x-data-parallel-rank") == str(worker.log.last.generation.dp_rank)


async def test_a_client_that_pins_a_rank_itself_has_it_and_is_counted_there() -> None:
    pins: list[tuple[str, Pairs, dict[str, Any]]] = [
        ("/generate", [], {"routed_dp_rank": 1}),
        ("/generate", [], {"data_parallel_rank": 1}),
        ("/generate", [("X-Data-Parallel-Rank", "0")], {"routed_dp_rank": 1}),
        (CHAT, [("X-Data-Parallel-Rank", "1")], {"routed_dp_rank": 0}),
        (CHAT, [], {"routed_dp_rank": 1}),
    ]
    async with one() as (worker, router):
        clients = [ask(router, path, headers, **ROUTES[path], **fields) for path, headers, fields in pins]
        running = [asyncio.ensure_future(each) for each in clients]
        await until(lambda: worker.running == len(pins), "all generate")
        assert ranks(worker) == {1: len(pins)}
        (record,) = router.pool
        assert [unit.in_flight for unit in record.units] == [0, len(pins)]
        await left(*running)
        assert router.app.router.metrics.ignored_ranks == 0


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("/generate", {"sampling_params": SHORT}),
        ("/generate", {"sampling_params": SHORT, "stream": True}),
        (CHAT, {"messages": MESSAGES, "max_tokens": 2, "return_meta_info": True}),
    ],
    ids=["whole", "streamed", "chat"],
)
async def test_an_engine_that_ignores_ranks_is_named_and_counted_as_one(
    path: str, fields: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    async with one(RankDeafWorker) as (worker, router):
        (record,) = router.pool
        await out_of_turn(worker)
        while not record.rank_fault:
            assert (await ask(router, path, **{"text": "Hi", **fields})).status == 200
            assert len(worker.log.generations) < 4, "a wrong rank passes unseen"
        assert router.app.router.metrics.ignored_ranks == 1
        assert caplog.messages.count("rank_ignored") == 1
        (shown,) = (await router.ask("GET", "/workers")).json()["workers"]
        assert "ranks" not in shown
        assert f"a request to {path} for rank" in shown["rank_fault"]
        await ask(router, path, **{"text": "Hi", **fields})
        assert b"dp_rank" not in worker.log.at(path)[-1].body
        assert worker.log.at(path)[-1].header("x-data-parallel-rank") is None
        assert [unit.rank for unit in record.units] == [None]


async def test_what_ran_when_ranks_changed_stays_counted() -> None:
    async with one(RankDeafWorker) as (worker, router):
        (record,) = router.pool
        clients = [posting(router, **ROUTES["/generate"]) for _ in range(3)]
        await until(lambda: worker.running == 3, "all generate")
        await post(router, "/generate", text="Hi", sampling_params=SHORT)
        await post(router, "/generate", text="Hi", sampling_params=SHORT)
        assert record.rank_fault
        assert (record.in_flight, router.pool.in_flight) == (3, 3)
        await left(*clients)
        await until(lambda: router.pool.in_flight == 0, "every lease is given back")


async def out_of_turn(worker: SimulatedWorker) -> None:
    """What comes past the router moves the engine's turns on: else they are by chance what the router means."""
    body = orjson.dumps({"text": "Hi", "sampling_params": SHORT})
    assert (await http.ask(worker.url, "POST", "/generate", JSON, body)).status == 200


async def test_a_path_that_takes_no_rank_is_counted_and_said_once(caplog: pytest.LogCaptureFixture) -> None:
    async with one() as (_, router):
        for _ in range(3):
            await ask(router, "/api/chat", model="m", messages=MESSAGES)
        assert router.app.router.metrics.unpinned_generations == 3
        assert caplog.messages.count("rank_not_pinned") == 1
