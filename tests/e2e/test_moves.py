"""Running generations that an idler worker takes over: what moves, what it is then, and what stays."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from typing import Any

import pytest

from miles_router.tasks import cancelled
from tests.support.fleet import gate, post
from tests.support.moving import BUDGET, HELD, SOON, moving, of_one_go
from tests.support.stage import Stage
from tests.support.waiting import soon, until

pytestmark = pytest.mark.alone("generations do not move to idler workers")

REQUESTS: dict[str, dict[str, Any]] = {
    "ids": {},
    "text": {"text": "Tell me of 世界"},
    "logprobs": {"return_logprob": True, "top_logprobs_num": 2, "logprob_start_len": 0},
    "rows": {"return_logprob": True, "return_routed_experts": True, "routed_experts_start_len": 1},
}


def has_moved(answer: dict[str, Any]) -> bool:
    return bool(answer["meta_info"].get("resumed"))


async def looked() -> None:
    """Somebody has looked at the requests since, and would have moved one: nothing tells that none has moved."""
    await asyncio.sleep(3 * SOON)


# What moves


@pytest.mark.parametrize("fields", REQUESTS.values(), ids=REQUESTS)
async def test_what_runs_long_moves_to_an_idler_worker_and_is_what_one_go_would_give(
    stage: Stage, fields: dict[str, Any]
) -> None:
    async with moving(stage) as scene:
        await scene.run(3, **fields)
        for number in range(2):  # as many as will be there
            scene.ask(f"one-that-stays-{number}", ("X-Session-Id", "s"))
        await scene.held(5)
        await scene.open()
        await scene.moved(2)
        await looked()
        assert scene.numbers == {"moved_generations": 2, "unmoved_generations": {}}, "then they are even enough"
        assert scene.aborts() == ["rollout-number-0", "rollout-number-1"], "the oldest first"
        answers = await scene.end()
        assert all(has_moved(answers[f"rollout-number-{number}"]) for number in range(2))
        for rid in ("rollout-number-0", "rollout-number-1", "rollout-number-2"):
            assert of_one_go(answers[rid]) == of_one_go(await scene.uncut(rid, **fields))


async def test_it_moves_again_where_that_one_has_too_many(stage: Stage) -> None:
    """They come back when the others have ended."""
    async with moving(stage) as scene:
        await scene.run(4)
        await scene.open()
        await scene.moved(2)
        await until(lambda: scene.held_there.holds(2), "two are at the second worker")
        scene.holds.on = False
        await scene.moved(3)
        answers = await scene.end()
        assert max(each["meta_info"].get("resumed", 0) for each in answers.values()) >= 2
        for rid, answer in answers.items():
            assert of_one_go(answer) == of_one_go(await scene.uncut(rid))


# What stays

UNMOVED: dict[str, tuple[str, dict[str, Any]]] = {
    "several samples": ("several", {"params": {"n": 2, "temperature": 1}}),
    "no name": ("unnamed", {"rid": None}),
    "a name that an engine might begin one with": ("named_alike", {"rid": "5e7a"}),
    "a rank": ("placed", {"routed_dp_rank": 0}),
    "an image": ("media", {"image_data": "data:"}),
    "a grammar": ("stateful", {"params": {"regex": "x{90}"}}),
    "no bound": ("too_long", {"params": {"max_new_tokens": 32_760}}),
}


@pytest.mark.parametrize(("reason", "fields"), UNMOVED.values(), ids=UNMOVED)
async def test_what_cannot_be_carried_on_exactly_is_never_aborted(
    stage: Stage, reason: str, fields: dict[str, Any]
) -> None:
    async with moving(stage) as scene:
        scene.ask(**{"rid": "one-that-stays", **fields})
        await until(lambda: scene.source.running, "it runs")
        scene.ask("another-that-stays", stream=True)
        await until(lambda: scene.router.pool.in_flight == 2, "both are there")
        await scene.open()
        await until(lambda: scene.unmoved(reason), f"it was chosen: {scene.numbers}")
        scene.holds.on = False
        assert scene.aborts() == []
        for asking in scene.asked.values():
            assert (await soon(asking)).status == 200
        assert scene.numbers["moved_generations"] == 0


async def test_requests_with_a_key_and_streams_stay(stage: Stage) -> None:
    async with moving(stage) as scene:
        await scene.run(2, ("X-SMG-Routing-Key", "mine"))
        scene.ask("a-stream-that-has-begun", stream=True)
        await scene.held(3)
        scene.ask("one-that-moves")
        await scene.held(4)
        await scene.open()
        await scene.moved(1)
        await looked()
        assert scene.aborts() == ["one-that-moves"], "although there are three against one"
        assert scene.numbers["unmoved_generations"] == {}, "nobody has read the others"


async def test_a_name_that_another_one_begins_with_stays(stage: Stage) -> None:
    """An engine aborts all names that begin with the one that it is told."""
    async with moving(stage) as scene:
        scene.ask("the-name-of-a-rollout")
        await scene.held(1)
        scene.ask("the-name-of-a-rollout-2")
        await scene.held(2)
        await scene.open()
        await scene.moved(1)
        assert scene.unmoved("named_alike") == 1
        assert scene.aborts() == ["the-name-of-a-rollout-2"]
        assert has_moved((await scene.end())["the-name-of-a-rollout-2"])


@pytest.mark.parametrize("state", ["paused in place", "asleep", "an update under way", "other weights"])
async def test_none_moves_while_the_fleet_is_at_a_standstill_or_between_weights(stage: Stage, state: str) -> None:
    other = {"weight_version": "2"} if state == "other weights" else {}
    async with moving(stage, target=other, readmit="healthy") as scene:
        await scene.run(3)
        async with AsyncExitStack() as stack:
            pool = scene.router.pool
            if state == "paused in place":
                await post(scene.router, "/pause_generation", mode="in_place")
                stack.push_async_callback(post, scene.router, "/continue_generation")
            elif state == "asleep":
                gate(scene.router).sleep()
                stack.callback(gate(scene.router).wake)
            elif state == "an update under way":
                stack.enter_context(pool.changing_weights())
            await scene.open()
            await looked()
            assert scene.aborts() == []
        if state == "other weights":
            pool.record_alive(pool.get(scene.target.url), "1")
        await scene.moved(1)
        await scene.end()


# What comes between


async def test_an_abort_by_its_client_reaches_it_where_it_runs_now(stage: Stage) -> None:
    async with moving(stage) as scene:
        await scene.run(2, return_logprob=True)
        await scene.open()
        await scene.moved(1)
        await until(lambda: scene.held_there.holds(1), "it runs there")
        assert (await post(scene.router, "/abort_request", rid="rollout-number-0")).status == 200
        answer = (await soon(scene.asked["rollout-number-0"])).json()
        uncut = await scene.uncut("rollout-number-0", return_logprob=True)
        assert answer["meta_info"]["finish_reason"]["type"] == "abort"
        assert answer["meta_info"]["id"] == "rollout-number-0"
        count = len(answer["output_ids"])
        assert HELD < count < BUDGET
        assert answer["output_ids"] == uncut["output_ids"][:count]
        logprobs = uncut["meta_info"]["output_token_logprobs"][:count]
        assert answer["meta_info"]["output_token_logprobs"] == logprobs
        others = await scene.end()
        assert others["rollout-number-1"]["output_ids"] == uncut["output_ids"]


@pytest.mark.parametrize("partial_rollout", ["return", "resume"])
async def test_a_pause_cuts_what_has_moved_like_everything_else(stage: Stage, partial_rollout: str) -> None:
    async with moving(stage, partial_rollout=partial_rollout) as scene:
        await scene.run(2, return_routed_experts=True)
        await scene.open()
        await scene.moved(1)
        await until(lambda: scene.held_there.holds(1), "it runs there")
        assert (await post(scene.router, "/pause_generation", mode="abort")).status == 200
        if partial_rollout == "return":
            cut = (await soon(scene.asked["rollout-number-0"])).json()
            assert cut["meta_info"]["finish_reason"]["type"] == "abort"
            uncut = await scene.uncut("rollout-number-0")
            assert cut["output_ids"] == uncut["output_ids"][: len(cut["output_ids"])]
            assert HELD < len(cut["output_ids"]) < BUDGET
        await post(scene.router, "/continue_generation")
        answers = await scene.end()
        for rid in answers if partial_rollout == "resume" else ():
            uncut = await scene.uncut(rid, return_routed_experts=True)
            assert of_one_go(answers[rid]) == of_one_go(uncut)


async def test_a_client_that_leaves_ends_it_where_it_runs_now(stage: Stage) -> None:
    async with moving(stage) as scene:
        await scene.run(2)
        await scene.open()
        await scene.moved(1)
        await until(lambda: scene.held_there.holds(1), "it runs there")
        await cancelled(scene.asked.pop("rollout-number-0"))
        await until(lambda: not scene.target.running, "it has ended there")
        await scene.end()
