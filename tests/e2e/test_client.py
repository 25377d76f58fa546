"""The client against a real router and simulated workers: generations, exact tokens, control of the fleet."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import numpy as np
import orjson
import pytest

from miles_router.client import (
    ConnectionLost,
    ErrorReply,
    FanOutFailed,
    NotConnected,
    NotFound,
    Retries,
    RouterClient,
    group,
)
from miles_router.testing import SimulatedWorker
from tests.support.cache_trial import SHORT, Trial, simulated_trial
from tests.support.running_router import RunningRouter
from tests.support.scripted_worker import RESET, ScriptedWorker, reply, script
from tests.support.stage import Stage
from tests.support.under_way import under_way
from tests.support.waiting import PATIENCE, until

ONCE = Retries(attempts=0, first_delay=0.0, longest_delay=0.0)
ENDLESS = {"max_new_tokens": 4000, "ignore_eos": True}


@contextlib.asynccontextmanager
async def connected(url: str, **options: Any) -> AsyncIterator[RouterClient]:
    async with RouterClient(url, **{"retries": ONCE, "timeout": PATIENCE, **options}) as client:
        yield client


@pytest.fixture
async def trial(stage: Stage) -> AsyncIterator[Trial]:
    async with simulated_trial(stage) as made:
        yield made


@pytest.fixture
async def workers() -> AsyncIterator[list[SimulatedWorker]]:
    async with SimulatedWorker(token_latency_s=0.002) as first, SimulatedWorker(token_latency_s=0.002) as second:
        yield [first, second]


@pytest.fixture
async def router(stage: Stage, workers: list[SimulatedWorker]) -> RunningRouter:
    return await stage.router(*(worker.url for worker in workers))


# Generations and their tokens


async def test_a_generation_and_its_exact_tokens(trial: Trial) -> None:
    async with connected(trial.router.url) as client:
        made = await client.generate("one", sampling_params=SHORT, rid="mine", return_logprob=True)
        found = await client.retrieve(f"one{made.text}", rid=made.rid)
    truth = trial.log[-1].generation
    assert (made.rid, made.output_ids, made.prompt_tokens) == ("mine", truth.output_ids, len(truth.input_ids))
    assert made.status == "truncated"
    assert made.logprobs == pytest.approx(truth.logprobs)
    assert found.tokens.tolist() == truth.input_ids + truth.output_ids
    assert found.loss_mask.tolist() == [0] * len(truth.input_ids) + [1] * 6
    assert found.logprobs[-6:].tolist() == np.array(truth.logprobs, dtype=np.float32).tolist()
    assert found.weight_versions == [("default", len(truth.input_ids), len(found))]
    assert (found.rid, found.finish_reason, found.finished, found.ambiguous) == ("mine", "length", True, False)


async def test_a_stream_ends_with_the_whole(trial: Trial) -> None:
    async with connected(trial.router.url) as client:
        events = [each async for each in client.generate_stream("one", sampling_params=SHORT)]
        found = await client.retrieve(rid=events[-1].rid)
    assert [each.finish_reason for each in events] == [None] * (len(events) - 1) + ["length"]
    assert found.text == f"one{events[-1].text}"
    assert found.tokens[-6:].tolist() == events[-1].output_ids


async def test_tokens_that_nobody_generated_are_given_only_when_asked_for(trial: Trial) -> None:
    async with connected(trial.router.url) as client:
        for text, rid in (("never", None), (None, "unknown")):
            with pytest.raises(NotFound):
                await client.retrieve(text, rid=rid)
        found = await client.retrieve("never", strict=False)
    assert (found.matched_tokens, found.rid, int(found.loss_mask.sum())) == (0, None, 0)


async def test_what_the_router_refuses_is_an_error_with_its_type(router: RunningRouter) -> None:
    async with connected(router.url) as client:
        with pytest.raises(ErrorReply) as caught:
            await client.pause("gently")  # type: ignore[arg-type]
        assert (caught.value.status, caught.value.type) == (400, "invalid_request")
        assert caught.value.request_id is not None
        with pytest.raises(ErrorReply) as caught:
            await client.generate("a", sampling_params={"temperature": "hot"})
        assert (caught.value.status, caught.value.retryable) == (400, False)


async def test_an_unknown_model_has_the_router_s_type(stage: Stage, workers: list[SimulatedWorker]) -> None:
    """OpenAI's form of this error has the router's type as `code`."""
    router = await stage.router()
    async with connected(router.url) as client:
        await client.add_worker(workers[0].url, model_id="policy")
        with pytest.raises(ErrorReply) as caught:
            await client.generate("a", model="gpt-4", sampling_params=SHORT)
        assert (caught.value.status, caught.value.type) == (404, "model_not_found")


# Workers


async def test_workers_come_and_go(router: RunningRouter, workers: list[SimulatedWorker]) -> None:
    async with connected(router.url) as client, SimulatedWorker() as third:
        added = await client.add_worker(third.url, labels={"rack": "b"})
        assert added["url"] == third.url
        assert {worker["url"] for worker in await client.workers()} == {each.url for each in [*workers, third]}
        await client.remove_worker(third.url)
        await client.remove_worker((await client.workers())[0]["id"], drain=True)
        assert len(await client.workers()) == 1
        with pytest.raises(NotFound):
            await client.remove_worker(third.url)
        assert (await client.info())["workers_total"] == 1


# Control


async def test_a_weight_update(router: RunningRouter, workers: list[SimulatedWorker]) -> None:
    """The trainer's loop of docs/weight-updates.md, with generations under way that come back partial."""
    async with contextlib.AsyncExitStack() as stack:
        client = await stack.enter_async_context(connected(router.url))
        rollouts = group(lambda: client.generate("a", sampling_params=ENDLESS), 8)
        running = await stack.enter_async_context(under_way(rollouts))
        await until(lambda: sum(worker.running for worker in workers) == 8, "all run")
        async with client.paused("abort"):
            assert (await client.info())["gate"]["closed"]
            later = client.generate("b", sampling_params=SHORT)
            held = await stack.enter_async_context(under_way(later))
            await client.update_weights_from_disk("/weights/7", weight_version="7")
            await client.flush_cache()
            await until(lambda: router.app.router.gate.held == 1, "it waits")
        assert {answer.status for answer in await running} == {"aborted"}
        assert (await held).meta_info["weight_version"] == "7"
        await client.update_weight_version("8")
        assert {worker.weight_version for worker in workers} == {"8"}
        assert (await client.info())["weight_version"] == "8"
    sent = [worker.log.at("/update_weight_version")[0].json() for worker in workers]
    assert sent == [{"new_version": "8", "abort_all_requests": False}] * 2


async def test_sleep_waking_in_steps_and_any_control_endpoint(
    router: RunningRouter, workers: list[SimulatedWorker]
) -> None:
    async with connected(router.url) as client:
        await client.release_memory()
        for tags, asleep in ((["weights"], True), (["kv_cache", "cuda_graph"], False)):
            await client.resume_memory(tags)
            assert (await client.info())["gate"]["closed"] is asleep
        assert await client.control("/freeze_gc") == "Garbage collection frozen.\n"
        assert await client.control("/slow_down", forward_sleep_time=0.0) is None


# A pause always ends


async def closed(client: RouterClient) -> bool:
    gate = (await client.info())["gate"]
    return bool(gate["closed"])


async def test_the_fleet_continues_when_the_update_fails(router: RunningRouter) -> None:
    async def update(client: RouterClient) -> None:
        async with client.paused():
            assert (await client.info())["gate"]["mode"] == "retract"
            raise LookupError("no weights")

    async with connected(router.url) as client:
        with pytest.raises(LookupError):
            await update(client)
        assert not await closed(client)


@pytest.mark.parametrize("cancelled_before", [True, False])
async def test_a_cancellation_does_not_cut_the_continue_short(stage: Stage, cancelled_before: bool) -> None:
    inside, leave, may_continue = asyncio.Event(), asyncio.Event(), asyncio.Event()
    server = await stage.worker()
    server.standing["/pause_generation"] = script(reply())
    server.always(script(may_continue, reply()))

    async def update(client: RouterClient) -> None:
        async with client.paused():
            inside.set()
            await leave.wait()

    async with connected(server.url) as client, under_way(update(client)) as updating:
        await inside.wait()
        if cancelled_before:
            updating.cancel()
        leave.set()
        await until(lambda: [each.path for each in server.requests] == ["/continue_generation"], "it continues")
        updating.cancel()
        await asyncio.sleep(0)
        assert not updating.done()
        may_continue.set()
        with pytest.raises(asyncio.CancelledError):
            await updating
    assert server.visits[0].link.served == 2, "on one connection, and nobody broke it"


async def test_a_pause_that_was_refused_is_not_continued(stage: Stage, workers: list[SimulatedWorker]) -> None:
    """Somebody else's pause would end with it."""
    router = await stage.router(*(worker.url for worker in workers))
    workers[0].faults.status(500, path="/pause_generation")
    async with connected(router.url) as client:
        with pytest.raises(FanOutFailed):
            async with client.paused():
                raise AssertionError("not paused")
        assert not await closed(client)
        await client.pause()
        with pytest.raises(ErrorReply, match="mode"):
            async with client.paused("gently"):  # type: ignore[arg-type]
                raise AssertionError("not paused")
        assert await closed(client)
        await client.continue_()
    async with connected("http://127.0.0.1:9") as client:
        with pytest.raises(NotConnected, match="/pause_generation"):
            async with client.paused():
                raise AssertionError("not paused")


@pytest.mark.parametrize("failure", [script(RESET), script(reply(b"", 504))], ids=["lost", "a gateway's error"])
async def test_a_pause_that_may_have_happened_is_continued(stage: Stage, failure: Any) -> None:
    server: ScriptedWorker = await stage.worker()
    server.next(failure)
    async with connected(server.url) as client:
        with pytest.raises((ConnectionLost, ErrorReply)):
            async with client.paused():
                raise AssertionError("nobody knows that it is paused")
    assert [(each.path, orjson.loads(each.body)) for each in server.requests] == [
        ("/pause_generation", {"mode": "retract"}),
        ("/continue_generation", {}),
    ]
