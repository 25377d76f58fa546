"""New sessions that wait for room: who goes on, who waits no longer, what is given back, and what a
trainer is told of it at `GET /router/capacity`."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import orjson
import pytest

from miles_router.testing import SimulatedWorker
from tests.support.brake import Brake
from tests.support.fleet import JSON, gate, held, post
from tests.support.http import Client, RawReply, request
from tests.support.running_router import RunningRouter
from tests.support.scripted_worker import RESET, script
from tests.support.session_trial import SessionTrial, simulated_sessions, user
from tests.support.stage import Stage
from tests.support.under_way import under_way
from tests.support.waiting import until

MEMORY = 4_000
LONG, HI = [user("Hi " * 600)], [user("Hi")]


class Fleet:
    """A router with admission before workers that know how much memory they have."""

    def __init__(self, router: RunningRouter, *workers: SimulatedWorker) -> None:
        self.router = router
        self.workers = workers

    async def known(self) -> None:
        await until(lambda: all(worker.facts is not None for worker in self.router.pool), "their memory is known")

    async def turn(self, key: str | None, tokens: int, **fields: Any) -> RawReply:
        named = [] if key is None else [("X-SMG-Routing-Key", key)]
        return await self.router.ask("POST", "/generate", [*JSON, *named], body(tokens, **fields))

    def end(self, key: str) -> None:
        self.router.app.router.end_session(key)

    @property
    def tokens(self) -> list[int]:
        return [unit.tokens for worker in self.router.pool for unit in worker.units]


def body(tokens: int, **fields: Any) -> bytes:
    return orjson.dumps({"input_ids": [300] * tokens, "sampling_params": {"max_new_tokens": 2}, **fields})


@asynccontextmanager
async def fleet(stage: Stage, count: int = 1, *, memory: int = MEMORY, **settings: Any) -> AsyncIterator[Fleet]:
    workers = [SimulatedWorker(context_len=memory, token_latency_s=0.002) for _ in range(count)]
    async with workers[0], workers[-1] if count > 1 else _nothing():
        scene = Fleet(await stage.router(*(each.url for each in workers), admission=0.5, **settings), *workers)
        await scene.known()
        yield scene


@asynccontextmanager
async def _nothing() -> AsyncIterator[None]:
    yield


async def test_a_refused_first_turn_holds_nothing(stage: Stage) -> None:
    async with fleet(stage) as scene:
        assert (await scene.turn("a", 1_500, sampling_params={"max_new_tokens": "many"})).status == 400
        assert scene.tokens == [0]
        assert (await scene.turn("b", 1_500)).status == 200


async def test_a_prompt_for_which_no_worker_has_memory_is_refused_by_its_engine_at_once(stage: Stage) -> None:
    async with fleet(stage) as scene:
        assert (await scene.turn("a", 1_500)).status == 200
        async with under_way(scene.turn("b", 1_000)) as waiting:
            await held(scene.router, 1)
            refused = await scene.turn("c", 3 * MEMORY)
            assert (refused.status, waiting.done()) == (400, False)
            scene.end("a")
            assert (await waiting).status == 200


async def test_a_client_that_leaves_and_an_abort_let_the_next_one_begin(stage: Stage) -> None:
    async with fleet(stage) as scene:
        assert (await scene.turn("a", 1_500)).status == 200
        client: Client = await stage.client(scene.router)
        await client.send(request("POST", "/generate", [*JSON, ("X-SMG-Routing-Key", "b")], body(2_000)))
        await held(scene.router, 1)
        async with (
            under_way(scene.turn("c", 2_000, rid="rollout-c")) as aborted,
            under_way(scene.turn("d", 400)) as last,
        ):
            await held(scene.router, 3)
            await post(scene.router, "/abort_request", rid="rollout-c")
            answer = (await aborted).json()
            assert answer["meta_info"]["finish_reason"]["type"] == "abort"
            await held(scene.router, 2)
            client.abort()
            assert (await last).status == 200
        assert gate(scene.router).held == 0
        assert len(scene.workers[0].log.at("/generate")) == 2


async def test_a_first_turn_that_was_lost_is_held_where_it_was_answered(stage: Stage) -> None:
    workers = [await stage.worker() for _ in range(2)]
    router = await stage.router(*workers, admission=0.5)
    workers[0].next(script(RESET), script(RESET))  # on the connection that there is, and on a new one
    headers = [*JSON, ("X-SMG-Routing-Key", "a")]
    assert (await router.ask("POST", "/generate", headers, body(2_000))).status == 200
    lost, answered = (worker.units[0] for worker in router.pool)
    assert (lost.tokens, lost.sessions, answered.sessions) == (0, 0, 1)
    assert answered.tokens == pytest.approx(2_000, rel=0.1)


# Sessions of the middleware


@asynccontextmanager
async def sessions(stage: Stage, **settings: Any) -> AsyncIterator[SessionTrial]:
    async with simulated_sessions(
        stage, settings={"admission": 0.4, **settings}, context_len=2000, token_latency_s=0.002
    ) as trial:
        await until(lambda: next(iter(trial.router.pool)).facts is not None, "its capacity is known")
        yield trial


def held_tokens(trial: SessionTrial) -> int:
    return sum(unit.tokens for worker in trial.router.pool for unit in worker.units)


@pytest.mark.parametrize("how", ["deleted with abort", "deadline", "group"])
async def test_a_session_whose_work_is_over_waits_no_longer(stage: Stage, how: str) -> None:
    async with sessions(stage) as trial:
        first = await trial.create()
        assert (await trial.turn(first, LONG, max_tokens=3)).status == 200
        contract = {"budget": {"deadline_s": 0.5}} if how == "deadline" else {"group": "g"}
        second, third = await trial.create(contract=contract), await trial.create()
        async with under_way(trial.turn(second, LONG, max_tokens=3)) as over:
            if how != "deadline":
                await held(trial.router, 1)
            async with under_way(trial.turn(third, HI, max_tokens=3)) as following:
                if how == "deleted with abort":
                    await held(trial.router, 2)
                    await trial.ask("DELETE", f"/sessions/{second}?abort=true")
                elif how == "group":
                    await held(trial.router, 2)
                    await trial.ask("POST", "/abort_request", {"group": "g"})
                assert (await over).status in (400, 404)
                assert (await following).status == 200
        assert gate(trial.router).held == 0
        assert len(trial.log) == 2


async def test_a_turn_that_begins_in_a_deleted_session_leaves_nothing_behind(stage: Stage) -> None:
    """Without abort what was asked for finishes; it may have waited until then."""
    async with sessions(stage) as trial:
        first, second = await trial.create(), await trial.create()
        assert (await trial.turn(first, LONG, max_tokens=3)).status == 200
        async with under_way(trial.turn(second, LONG, max_tokens=3)) as waiting:
            await held(trial.router, 1)
            await trial.ask("DELETE", f"/sessions/{second}")
            await trial.ask("DELETE", f"/sessions/{first}")
            assert (await waiting).status == 200
        assert held_tokens(trial) == 0


async def test_an_evaluation_does_not_wait_for_all_training_before_it(stage: Stage) -> None:
    async with sessions(stage) as trial:
        first, *training = [await trial.create() for _ in range(3)]
        assert (await trial.turn(first, LONG, max_tokens=3)).status == 200
        evaluation = await trial.create(evaluation=True)
        async with AsyncExitStack() as turns:
            one, other, own = [
                await _queued(turns, trial, session, place) for place, session in enumerate((*training, evaluation), 1)
            ]
            await trial.ask("DELETE", f"/sessions/{first}")
            assert (await one).status == 200
            await trial.ask("DELETE", f"/sessions/{training[0]}")
            assert ((await own).status, other.done()) == (200, False)
            await trial.ask("DELETE", f"/sessions/{evaluation}")
            assert (await other).status == 200


async def _queued(turns: AsyncExitStack, trial: SessionTrial, session: str, place: int) -> asyncio.Task[RawReply]:
    turn = await turns.enter_async_context(under_way(trial.turn(session, LONG, max_tokens=3)))
    await held(trial.router, place)
    return turn


async def test_a_repeated_turn_waits_with_the_one_that_it_repeats(stage: Stage) -> None:
    async with sessions(stage) as trial:
        first, second, turn = await trial.create(), await trial.create(), [("X-Turn-Id", "t")]
        assert (await trial.turn(first, LONG, max_tokens=3)).status == 200
        async with (
            under_way(trial.turn(second, LONG, turn, max_tokens=3)) as one,
            under_way(trial.turn(second, LONG, turn, max_tokens=3)) as again,
        ):
            await held(trial.router, 1)
            await trial.ask("DELETE", f"/sessions/{first}")
            answers = [(await each).json() for each in (one, again)]
        assert answers[0] == answers[1]
        assert len(trial.log) == 2
        before = held_tokens(trial)
        assert (await trial.turn(second, LONG, turn, max_tokens=3)).status == 200
        assert held_tokens(trial) == before > 0


async def test_an_agent_whose_context_was_full_goes_on_at_once(stage: Stage) -> None:
    async with sessions(stage) as trial:
        first = await trial.create(contract={"budget": {"max_context": 700}})
        assert (await trial.turn(first, LONG[:1], max_tokens=3)).status == 200
        assert (await trial.turn(first, [user("Hi " * 900)], max_tokens=3)).status == 400
        assert (await trial.read(first))["metadata"]["end_reason"] == "context"
        async with under_way(trial.turn(await trial.create(), LONG, max_tokens=3)) as new:
            await held(trial.router, 1)
            assert (await trial.turn(first, HI, max_tokens=3)).status == 200
            assert not new.done()
            await trial.ask("DELETE", f"/sessions/{first}")
            assert (await new).status == 200


async def test_what_goes_on_from_what_was_sampled_begins_nothing(stage: Stage) -> None:
    """Its session was deleted while it was cut, and others hold the memory."""
    async with sessions(stage, partial_rollout="resume") as trial:
        other, cut, brake = await trial.create(), await trial.create(), Brake(trial.worker.engine)
        brake.when = lambda generation: len(generation.output_ids) > 250
        assert (await trial.turn(other, LONG, max_tokens=3)).status == 200
        async with under_way(trial.turn(cut, HI, ignore_eos=True, max_tokens=400)) as turn:
            await until(lambda: brake.on, "much is sampled")
            await post(trial.router, "/pause_generation", mode="abort")
            await held(trial.router, 1)
            brake.on = False
            await trial.ask("DELETE", f"/sessions/{cut}")
            await post(trial.router, "/continue_generation")
            assert (await turn).json()["usage"]["completion_tokens"] == 400


async def capacity(scene: Fleet, query: str = "") -> dict[str, Any]:
    reply = await scene.router.ask("GET", f"/router/capacity{query}")
    assert reply.status == 200, reply.body
    found: dict[str, Any] = orjson.loads(reply.body)
    return found


async def test_it_is_what_admission_lets_begin(stage: Stage) -> None:
    length = MEMORY // 10
    async with fleet(stage, 2) as scene:
        told = await capacity(scene, f"?tokens={length}")
        assert told == {
            **{"room": 10, "waiting": 0, "sessions": 0, "tokens_per_session": length, "tokens_held": 0},
            **{"tokens_capacity": 2 * MEMORY, "workers": 2, "paused": False},
        }
        assert (await capacity(scene))["room"] is None, "nobody has said how long an episode is"
        begun = 0
        while (told := await capacity(scene, f"?tokens={length}"))["room"]:
            assert told["room"] <= 10 - begun
            assert (await scene.turn(f"session-{begun}", length - 20)).status == 200
            begun += 1
        assert begun >= 8, "the length of a prompt is estimated"
        assert (told["sessions"], told["waiting"]) == (begun, 0)
        assert length - 30 < (await capacity(scene))["tokens_per_session"] < length + 50
        waits = asyncio.ensure_future(scene.turn("one too many", 2 * length))
        await held(scene.router, 1)
        assert (await capacity(scene, "?tokens=1"))["waiting"] == 1
        for number in range(begun):
            scene.end(f"session-{number}")
        assert (await waits).status == 200
        assert (await capacity(scene, f"?tokens={length}"))["room"] >= 6


async def test_a_pause_and_another_model_are_told(stage: Stage) -> None:
    async with fleet(stage) as scene:
        assert (await scene.turn("running", 100)).status == 200
        assert (await scene.router.ask("POST", "/pause_generation", body=b"{}")).status == 200
        async with under_way(scene.turn("running", 200)) as turn:
            await held(scene.router, 1)
            told = await capacity(scene, "?tokens=100")
            assert (told["paused"], told["waiting"]) == (True, 0), "a turn of a session that runs waits for no room"
            assert told["room"] > 15
            assert (await scene.router.ask("POST", "/continue_generation", body=b"{}")).status == 200
            assert (await turn).status == 200
        assert (await scene.router.ask("GET", "/router/capacity?model_id=other")).status == 404


async def test_a_pair_counts_once_and_half_a_pair_has_no_room(stage: Stage) -> None:
    async with fleet(stage) as scene, SimulatedWorker(context_len=MEMORY) as prefill:
        (alone,) = scene.router.pool
        assert (await scene.router.ask("POST", f"/remove_worker?url={alone.url}")).status == 200
        assert (await capacity(scene, "?tokens=100"))["room"] == 0, "there is no worker"
        added = orjson.dumps({"url": prefill.url, "worker_type": "prefill", "bootstrap_port": 9000})
        assert (await scene.router.ask("POST", "/workers", JSON, added)).status == 201
        await scene.known()
        assert (await capacity(scene, "?tokens=100"))["room"] == 0, "nothing generates"
        added = orjson.dumps({"url": scene.workers[0].url, "worker_type": "decode"})
        assert (await scene.router.ask("POST", "/workers", JSON, added)).status == 201
        await scene.known()
        for number in range(2):
            await scene.turn(f"session-{number}", 100)
        assert (await capacity(scene))["sessions"] == 2


@pytest.mark.parametrize("tokens", ["0", "-1", "1.5", "many", "", "1" * 10, "²"])
async def test_a_length_that_is_none_is_refused(stage: Stage, tokens: str) -> None:
    router = await stage.router()
    assert (await router.ask("GET", f"/router/capacity?tokens={tokens}".encode().decode("latin-1"))).status == 400
