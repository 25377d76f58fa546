"""Turns that go on from held ones: the engine is given what it was given and what it sampled, never an encoding of its
own words, whatever agents and templates make of the history on the way; and what agents do beside going on, each a
branch with its reason."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from typing import Any

import pytest

from miles_router.testing import SimulatedWorker
from miles_router.testing.worker.exchange_log import GenerationRecord
from tests.support.http import RawReply
from tests.support.scripted_chat import able, chat_reply
from tests.support.scripted_worker import ScriptedWorker, reply, script
from tests.support.session_apis import BOTH, Api, case
from tests.support.session_trial import (
    ADD,
    ASK_ADD,
    CHAT,
    IM_END,
    Message,
    SessionTrial,
    exactly,
    message_of,
    qwen3,
    said,
    session_trial,
    simulated_sessions,
    text_of,
    tool_result,
    user,
)
from tests.support.stage import Stage, staged
from tests.support.under_way import under_way

HI: list[Any] = [user("Hi")]


@pytest.fixture(scope="module")
async def shared() -> AsyncIterator[SessionTrial]:
    async with staged() as stage, simulated_sessions(stage) as made:
        yield made


@pytest.fixture
def trial(shared: SessionTrial) -> SessionTrial:
    shared.worker.log.clear()
    return shared


def generations(trial: SessionTrial) -> list[GenerationRecord]:
    return [generation for exchange in trial.log for generation in exchange.generations]


def held(generation: GenerationRecord) -> list[int]:
    return generation.input_ids + generation.output_ids


def given_behind(generation: GenerationRecord, before: GenerationRecord, *, dropped: int = 0) -> str:
    """The text that a turn was given behind what was held, which it must begin with."""
    kept = held(before)[: len(held(before)) - dropped]
    assert generation.input_ids[: len(kept)] == kept
    return qwen3().decode(generation.input_ids[len(kept) :])


def spelled(text: str) -> list[int]:
    """A text in single characters and the end of the message: nobody encodes it so."""
    return [*(qwen3().encode(character)[0] for character in text), IM_END]


async def test_a_tool_agent_s_episode_is_what_the_engine_saw(trial: SessionTrial) -> None:
    session = await trial.create()
    history: list[Message] = [{"role": "system", "content": "Add."}, user("17 + 25?")]
    for turn in range(6):
        trial.worker.say(spelled(ASK_ADD if turn % 2 == 0 else f"It is {turn}, naïve 世界."))
        if turn % 3 == 2:
            text = text_of(await trial.stream(session, history, tools=[ADD], max_tokens=99))
            message = (await trial.records(session))[-1]["response"]
            assert (message["content"] or "") == text
        else:
            message = message_of(await trial.chat(session, history, tools=[ADD], max_tokens=99))
        calls = message.get("tool_calls") or []
        history += [message, *([tool_result(call, "42") for call in calls] or [user("Again")])]
    (sample,) = await trial.samples(session)
    exactly(sample, *generations(trial))
    assert sum(sample["loss_mask"]) == sum(len(each.output_ids) for each in generations(trial))
    for each in generations(trial):
        assert qwen3().encode(qwen3().decode(each.output_ids)) != each.output_ids, "encoding it again would drift"
    assert (await trial.reasons(session)) == [None] * 6


async def test_completions_go_on_from_ids_that_are_held(trial: SessionTrial) -> None:
    session = await trial.create()
    path = f"/sessions/{session}/v1/completions"
    first = (await trial.ask("POST", path, {"model": "m", "prompt": "Once upon", "max_tokens": 5})).json()
    assert set(first["choices"][0]) == {"index", "text", "logprobs", "finish_reason", "matched_stop"}
    assert first["choices"][0]["logprobs"] is None
    one = trial.worker.log.at("/v1/completions")[-1].generation
    prompt = [*held(one), 40, 41]
    asked = {"model": "m", "prompt": prompt, "max_tokens": 5, "stream": True, "logprobs": 1}
    body = (await trial.ask("POST", path, asked)).body
    assert b"token_ids" not in body
    two = trial.worker.log.at("/v1/completions")[-1].generation
    assert two.input_ids == prompt
    (sample,) = await trial.samples(session)
    exactly(sample, one, two)
    assert [each["path"] for each in await trial.records(session)] == ["/v1/completions"] * 2
    async with trial.agent(session) as client:
        answer = await client.completions.create(model="m", prompt=["a", "b"], max_tokens=3, logprobs=0)
    assert [len(choice.logprobs.token_logprobs or ()) for choice in answer.choices if choice.logprobs] == [3, 3]
    assert len(await trial.samples(session)) == 3


async def test_reasoning_stays_held_whether_or_not_the_agent_sends_it_back(stage: Stage) -> None:
    """Qwen3's template leaves the reasoning of earlier answers out: that would be another history."""
    async with simulated_sessions(stage, reasoning_parser="qwen3") as trial:
        for returned, stream in itertools.product(BOTH, BOTH):
            with case(returned, stream):
                trial.worker.log.clear()
                session, history = await trial.create(), [*HI]
                for turn in range(3):
                    trial.worker.say(f"<think>\nThought {turn}.\n</think>\n\nAnswer {turn}.")
                    told = await Api(CHAT).turn(trial, session, history, 99, stream=stream)
                    assert (told.reasoning, told.text) == (f"\nThought {turn}.\n", f"\n\nAnswer {turn}.")
                    history += [*(told.items if returned else [said(told.text)]), user("Go on")]
                (sample,) = await trial.samples(session)
                exactly(sample, *generations(trial))
                assert sample["response"].count("Thought") == 3


async def test_what_the_prompt_is_not_made_of_may_change_from_turn_to_turn(trial: SessionTrial) -> None:
    tools: dict[str, Any] = {"tools": [ADD]}
    changes: list[tuple[dict[str, Any], dict[str, Any]]] = [
        (tools, {**tools, "tool_choice": "none"}),
        (tools, {**tools, "tool_choice": "auto", "temperature": 0.3, "max_tokens": 4}),
        ({}, {"response_format": {"type": "json_object"}}),
        ({}, {"stream": True, "n": 2}),
    ]
    for first, second in changes:
        with case(second):
            trial.worker.log.clear()
            session = await trial.create()
            message = message_of(await trial.chat(session, HI, **first))
            assert (await trial.turn(session, [*HI, message, user("Go on")], **second)).status == 200
            assert {each["parent"] for each in (await trial.records(session))[1:]} == {0}
            given_behind(generations(trial)[1], generations(trial)[0])


async def test_what_cannot_be_continued_exactly_is_a_new_segment_by_name(trial: SessionTrial) -> None:
    part = {"role": "user", "content": [{"type": "tool_reference", "name": "f"}]}
    cases: list[tuple[dict[str, Any], Message, str]] = [
        ({"input_ids": [1, 2, 3]}, user("Go on"), "own_input_ids"),
        ({"continue_final_message": True}, user("Go on"), "continue_final_message"),
        ({}, part, "not_text"),
    ]
    for fields, appended, reason in cases:
        with case(reason):
            trial.worker.log.clear()
            session = await trial.create()
            message = message_of(await trial.chat(session, HI))
            await trial.chat(session, [*HI, message, appended], **fields)
            assert await trial.reasons(session) == [None, reason]
            one, two = await trial.samples(session)
            exactly(one, generations(trial)[0])
            exactly(two, generations(trial)[1])
            assert (one["metadata"]["reason"], two["metadata"]["reason"]) == (None, reason)


async def test_messages_that_are_none_are_the_engine_s_to_refuse(stage: Stage) -> None:
    worker = able(await stage.worker()).next(script(chat_reply([7, 8])))
    worker.always(script(reply(b'{"message": "no"}', 400)))
    trial = await session_trial(stage, worker)
    session = await trial.create()
    message = message_of(await trial.chat(session, HI))
    call = {"function": {"name": "add", "arguments": "[1]"}}
    contents: list[Any] = [[{"type": "text"}], [{"type": "text", "text": 7}], [7], 7]
    odd: list[Message] = [
        *({"role": "user", "content": content} for content in contents),
        *({"role": "assistant", "content": "", "tool_calls": [each]} for each in (7, call)),
        {"role": "nobody", "content": "Hi"},
    ]
    for each, stream in itertools.product(odd, BOTH):
        answer = await trial.turn(session, [*HI, message, each, user("Go on")], stream=stream)
        assert (answer.status, answer.body) == (400, b'{"message": "no"}'), each
    assert len(await trial.records(session)) == 1


async def test_an_equality_that_is_none_stops_the_start(stage: Stage) -> None:
    for equality in ("loose", "no.such.module.function", "json.decoder"):
        with pytest.raises(ValueError, match="message_equality"):
            await session_trial(stage, options={"message_equality": equality})


SYSTEM: Message = {"role": "system", "content": "Be brief."}
BRIEF = [SYSTEM, user("Hi")]


@pytest.fixture
async def scripted(stage: Stage, worker: ScriptedWorker) -> SessionTrial:
    return await session_trial(stage, worker)


async def episode(trial: SessionTrial, session: str, turns: int, **fields: Any) -> list[Message]:
    """So many turns, one behind the other; the whole history up to the last answer."""
    history = [*BRIEF]
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


async def _all(asking: list[Any]) -> list[RawReply]:
    return list(await asyncio.gather(*asking))


async def test_a_turn_id_without_end_is_refused(worker: ScriptedWorker, scripted: SessionTrial) -> None:
    answer = await scripted.turn(await scripted.create(), BRIEF, [("X-Turn-Id", "t" * 257)])
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
