"""What agents do beside going on: they edit and compact their history, change tools, call sub-agents, ask twice or at
once. Every one of these is a branch with its reason, and none disturbs another. And where a session's turns go."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from typing import Any

import pytest

from miles_router.testing import SimulatedWorker
from tests.support.http import RawReply
from tests.support.scripted_chat import able
from tests.support.scripted_worker import ScriptedWorker
from tests.support.session_trial import (
    Message,
    SessionTrial,
    exactly,
    message_of,
    qwen3,
    session_trial,
    simulated_sessions,
    user,
)
from tests.support.stage import Stage, staged
from tests.support.under_way import under_way

SYSTEM: Message = {"role": "system", "content": "Be brief."}
HI = [SYSTEM, user("Hi")]
SAME = [("X-Turn-Id", "t1")]


@pytest.fixture(scope="module")
async def shared() -> AsyncIterator[SessionTrial]:
    async with staged() as stage, simulated_sessions(stage) as made:
        yield made


@pytest.fixture
def trial(shared: SessionTrial) -> SessionTrial:
    shared.worker.log.clear()
    return shared


@pytest.fixture
async def worker(stage: Stage) -> ScriptedWorker:
    return able(await stage.worker())


@pytest.fixture
async def scripted(stage: Stage, worker: ScriptedWorker) -> SessionTrial:
    return await session_trial(stage, worker)


async def episode(trial: SessionTrial, session: str, turns: int, **fields: Any) -> list[Message]:
    """So many turns, one behind the other; the whole history up to the last answer."""
    history = [*HI]
    for turn in range(turns):
        history += [message_of(await trial.chat(session, history, **fields)), user(f"Go on {turn}")]
    return history[:-1]


async def parents(trial: SessionTrial, session: str) -> list[int | None]:
    return [record["parent"] for record in await trial.records(session)]


async def all_exact(trial: SessionTrial, session: str, *lines: list[int]) -> None:
    """One sample for each of these lines of generations, in the order of the proxy; what two of them share is trained
    in the first."""
    generations = [each for exchange in trial.log for each in exchange.generations]
    samples = await trial.samples(session)
    assert len(samples) == len(lines)
    before: set[int] = set()
    for sample, line in zip(samples, lines, strict=True):
        exactly(sample, *(generations[number] for number in line), elsewhere=len(before & set(line)))
        before |= set(line)


# Branches


async def test_a_sub_agent_has_a_tree_of_its_own(trial: SessionTrial) -> None:
    session = await trial.create()
    history = await episode(trial, session, 1)
    critic = [{"role": "system", "content": "You are a critic."}, user("Is it good?")]
    answer = message_of(await trial.chat(session, critic))
    await trial.chat(session, [*critic, answer, user("Really?")])
    await trial.chat(session, [*history, user("Go on")])
    assert await parents(trial, session) == [None, None, 1, 0]
    assert await trial.reasons(session) == [None, "sub_agent", None, None]
    await all_exact(trial, session, [1, 2], [0, 3])
    assert [sample["metadata"]["side_call"] for sample in await trial.samples(session)] == [True, False]
    (main,) = await trial.samples(session, side_calls=False)
    assert [turn["turn"] for turn in main["metadata"]["turns"]] == [0, 3]


@pytest.mark.parametrize(("value", "aside"), [("collab_spawn", True), ("review", True), ("compact", False)])
async def test_what_a_harness_calls_a_sub_agent_is_a_side_call(trial: SessionTrial, value: str, aside: bool) -> None:
    session = await trial.create()
    path, body = f"/sessions/{session}/v1/responses", {"model": "m", "input": "Hi", "max_output_tokens": 8}
    for headers in ([], [("x-openai-subagent", value)]):
        assert (await trial.ask("POST", path, body, headers)).status == 200
    labels = [sample["metadata"]["side_call"] for sample in await trial.samples(session)]
    assert labels == [False, aside], "although it begins as the main line does"


async def test_requests_at_once_are_branches_and_none_is_lost(trial: SessionTrial) -> None:
    session = await trial.create()
    history = await episode(trial, session, 1)
    questions = [[*history, user(f"Question {number}")] for number in range(12)]
    await trial.ask("POST", "/pause_generation", {"mode": "retract"})
    asking = [trial.turn(session, each, stream=bool(number % 2)) for number, each in enumerate(questions)]
    async with under_way(_all(asking)) as turns:
        while (await trial.read(session))["metadata"]["in_flight"] < 12:
            pass
        await trial.ask("POST", "/continue_generation", {})
        assert [answer.status for answer in await turns] == [200] * 12
    assert await parents(trial, session) == [None, *[0] * 12]
    assert sorted(map(str, await trial.reasons(session))) == ["None", "None", *["parallel"] * 11]
    assert (await trial.read(session))["metadata"]["in_flight"] == 0
    samples = await trial.samples(session)
    by_prompt = {tuple(each.generation.input_ids): each.generation for each in trial.log}
    assert len(samples) == 12
    for sample in samples:
        begin = sample["metadata"]["turns"][-1]["start"]
        generation = by_prompt[tuple(sample["tokens"][:begin])]
        assert sample["tokens"][begin:] == generation.output_ids


# Turn ids


async def test_a_turn_that_is_repeated_gets_the_answer_of_before(trial: SessionTrial) -> None:
    session = await trial.create()
    first = await trial.turn(session, HI, SAME)
    second = await trial.turn(session, HI, SAME)
    assert first.status == second.status == 200
    assert first.body == second.body
    assert first.value("content-type") == second.value("content-type")
    assert first.value("x-request-id") != second.value("x-request-id")
    assert len(trial.log) == len(await trial.records(session)) == 1
    assert (await trial.records(session))[0]["turn_id"] == "t1"
    assert (await trial.turn(session, HI, [("X-Turn-Id", "t2")])).body != first.body
    assert len(await trial.records(session)) == 2


async def _all(asking: list[Any]) -> list[RawReply]:
    return list(await asyncio.gather(*asking))


async def test_a_turn_id_without_end_is_refused(worker: ScriptedWorker, scripted: SessionTrial) -> None:
    answer = await scripted.turn(await scripted.create(), HI, [("X-Turn-Id", "t" * 257)])
    assert (answer.status, answer.error_type) == (400, "invalid_request")
    assert worker.requests == []


# Where turns go


@pytest.fixture
async def fleet(stage: Stage) -> AsyncIterator[SessionTrial]:
    """Sessions before three workers."""
    async with AsyncExitStack() as stack:
        workers = [
            await stack.enter_async_context(SimulatedWorker(tokenizer=qwen3(), weight_version="1", replica=replica))
            for replica in range(3)
        ]
        yield await session_trial(stage, *workers)


@pytest.mark.parametrize("how", ["killed", "removed"])
async def test_a_session_moves_when_its_worker_is_gone_and_goes_on_exactly(fleet: SessionTrial, how: str) -> None:
    session = await fleet.create()
    history = await episode(fleet, session, 2)
    home = (await fleet.records(session))[0]["worker"]
    (gone,) = [worker for worker in fleet.workers if worker.url == home]
    if how == "killed":
        await gone.kill()
    else:
        assert (await fleet.ask("POST", f"/remove_worker?url={home}")).status == 200
    message = message_of(await fleet.chat(session, [*history, user("Still there?")]))
    await fleet.stream(session, [*history, user("Still there?"), message, user("Good")])
    workers = [record["worker"] for record in await fleet.records(session)]
    assert workers[:2] == [home, home]
    assert workers[2] == workers[3] != home
    (moved,) = [worker for worker in fleet.workers if worker.url == workers[2]]
    (sample,) = await fleet.samples(session)
    generations = [each for worker in (gone, moved) for exchange in worker.log for each in exchange.generations]
    exactly(sample, *generations)
