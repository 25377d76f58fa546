"""What `/router/run` counts is what records, samples, texts and waits say, by interval and by the fleet's weights."""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator
from typing import Any

import pytest

from tests.e2e.test_episodes import HI, branched, got
from tests.support.cache_trial import simulated_trial
from tests.support.session_trial import SessionTrial, simulated_sessions, user
from tests.support.stage import Stage
from tests.support.under_way import under_way
from tests.support.waiting import until

SUMS = {"sampled", "evaluated", "given", "reused", "prompt", "cached", "trained", "turns"}
COUNTED = SUMS | {"forks", "waited_s", "waits"}
INTERVAL = COUNTED | {"start", "weight_version", "staleness"}
VERSION = COUNTED | {"weight_version", "since"}


@pytest.fixture
async def trial(stage: Stage) -> AsyncIterator[SessionTrial]:
    async with simulated_sessions(stage) as made:
        await made.router.probed()
        yield made


async def run(trial: Any) -> Any:
    return await got(trial, "run")


def total(told: Any, name: str) -> Any:
    """Of all intervals together."""
    found = [interval[name] for interval in told["intervals"]]
    return sum(map(Counter, found), Counter()) if found and isinstance(found[0], dict) else sum(found)


async def test_turns_are_counted_as_they_are_recorded(trial: SessionTrial) -> None:
    session = await branched(trial)
    records, told = await trial.records(session), await run(trial)
    assert all(set(interval) == INTERVAL and interval["start"] % 10 == 0 for interval in told["intervals"])
    sampled = sum(record["completion_tokens"] for record in records)
    assert total(told, "sampled") == {"1": sampled}
    assert total(told, "given") == sum(record["given_tokens"] for record in records)
    assert total(told, "reused") == sum(record["prompt_tokens"] - record["given_tokens"] for record in records)
    assert total(told, "prompt") == sum(record["prompt_tokens"] for record in records)
    assert total(told, "cached") == sum(record["cached_tokens"] for record in records) > 0
    assert (total(told, "turns"), total(told, "trained")) == (len(records), {})
    reasons = Counter(record["reason"] for record in records if record["reason"] is not None)
    assert total(told, "forks") == reasons
    (version,) = told["versions"]
    assert set(version) == VERSION
    assert (version["weight_version"], version["sampled"], version["turns"]) == ("1", sampled, len(records))
    assert (version["forks"], version["since"] <= told["now"]) == (reasons, True)
    assert {interval["weight_version"] for interval in told["intervals"]} == {"1"}


async def test_what_trainers_read_counts_once_however_often_they_read(trial: SessionTrial) -> None:
    session = await branched(trial)
    samples = await trial.samples(session)
    trained = sum(sum(sample["loss_mask"]) for sample in samples)
    told = await run(trial)
    assert (total(told, "trained"), total(told, "staleness")) == ({"1": trained}, {"0": trained})
    await trial.samples(session)
    assert total(await run(trial), "trained") == {"1": trained}
    history = [HI[0], user("So far: much was said."), trial_answer := (await trial.records(session))[-1]["response"]]
    assert trial_answer["role"] == "assistant"
    await trial.chat(session, [*history, user("More?")])
    (*_, last) = await trial.samples(session)
    new = (await trial.records(session))[-1]["completion_tokens"]
    assert last["metadata"]["turns"][-1]["end"] - last["metadata"]["turns"][-1]["start"] == new
    assert total(await run(trial), "trained") == {"1": trained + new}
    assert (await run(trial))["versions"][0]["trained"] == trained + new


async def test_staleness_is_how_far_the_fleet_was_ahead_when_samples_were_read(trial: SessionTrial) -> None:
    session = await trial.create()
    await trial.chat(session, HI)
    update = {"new_version": "4", "abort_all_requests": False}
    assert (await trial.ask("POST", "/update_weight_version", update)).status == 200
    trained = sum((await trial.samples(session))[0]["loss_mask"])
    told = await run(trial)
    assert (total(told, "trained"), total(told, "staleness")) == ({"1": trained}, {"3": trained})
    assert told["weight_version"] == "4"
    assert [(each["weight_version"], each["sampled"], each["trained"]) for each in told["versions"]] == [
        ("1", trained, 0),
        ("4", 0, trained),
    ]


async def test_the_reward_of_a_session_counts_once_for_the_weights_that_ended_it(trial: SessionTrial) -> None:
    session = await branched(trial)
    await trial.samples(session)
    assert (await run(trial))["rewards"] == [], "none is known yet"
    update = {"new_version": "2", "abort_all_requests": False}
    assert (await trial.ask("POST", "/update_weight_version", update)).status == 200
    for reward in (0.25, 1.0):
        assert {sample["reward"] for sample in await trial.samples(session, reward=reward)} == {reward}
    assert (await run(trial))["rewards"] == [{"weight_version": "1", "count": 1, "sum": 0.25}]
    odd: list[Any] = [-1, {"format": 1.0}]  # what is no number is the client's own
    for each in odd:
        other = await trial.create()
        await trial.chat(other, HI)
        await trial.samples(other, reward=each)
    assert (await run(trial))["rewards"] == [
        {"weight_version": "1", "count": 1, "sum": 0.25},
        {"weight_version": "2", "count": 1, "sum": -1.0},
    ]


async def test_rewards_of_texts_are_counted_as_they_are_told(stage: Stage) -> None:
    async with simulated_trial(stage) as trial:
        await trial.router.probed()
        answer = await trial.generate(text="one")
        text = f"one{answer['text']}"
        await trial.retrieve(text=text, rid=answer["meta_info"]["id"], reward=0.5)
        await trial.retrieve(rid=answer["meta_info"]["id"], reward=0)
        await trial.retrieve(texts=[text, "never seen", text], rewards=[2, 4.0, None])
        await trial.retrieve(text=text)
        assert (await run(trial))["rewards"] == [
            {"weight_version": "default", "count": 3, "sum": 2.5},
            {"weight_version": None, "count": 1, "sum": 4.0},
        ]


async def test_a_reward_that_is_none_is_refused_and_counts_nothing(stage: Stage) -> None:
    odd: list[Any] = ["1", True, {"a": 1}]
    wrong: list[Any] = [{"text": "one", "reward": each} for each in odd]
    wrong += [{"texts": ["one"], "rewards": each} for each in (1, [1, 2], [[1]])]
    async with simulated_trial(stage) as trial:
        for asked_for in (*wrong, {"text": "one", "rewards": [1]}, {"texts": ["one"], "reward": 1}):
            refused = await trial.post("/retrieve_from_text", asked_for)
            assert (refused.status, refused.error_type) == (400, "invalid_request"), asked_for
            assert "reward" in refused.json()["error"]["message"]
        assert (await run(trial))["rewards"] == []


async def test_a_wait_at_the_gate_counts_when_it_is_over(stage: Stage) -> None:
    async with simulated_sessions(stage) as trial:
        session = await trial.create()
        assert (await trial.ask("POST", "/pause_generation", {"mode": "retract"})).status == 200
        async with under_way(trial.chat(session, HI)) as turn:
            await until(lambda: trial.router.app.router.gate.held == 1, "it waits")
            told = await run(trial)
            assert (told["gate"], total(told, "waits")) == ({"closed": True, "held": 1}, 0)
            assert (await trial.ask("POST", "/continue_generation", {})).status == 200
            await turn
        told = await run(trial)
        (record,) = await trial.records(session)
        assert (total(told, "waits"), total(told, "waited_s")) == (1, record["waited_s"])
        assert record["waited_s"] > 0


async def test_texts_are_counted_too(stage: Stage) -> None:
    async with simulated_trial(stage) as trial:
        await trial.router.probed()
        first = await trial.generate(text="one")
        text = f"one{first['text']} and"
        second = await trial.generate(text=text)
        told = await run(trial)
        given = [len(exchange.generation.input_ids) for exchange in trial.log]
        kept = given[0] + 6
        assert (total(told, "turns"), total(told, "sampled")) == (2, {"default": 12})
        assert (total(told, "given"), total(told, "reused")) == (given[0] + given[1] - kept, kept)
        cached = [answer["meta_info"]["cached_tokens"] for answer in (first, second)]
        assert (total(told, "prompt"), total(told, "cached")) == (sum(given), sum(cached))
        found = await trial.retrieve(text=text + second["text"])
        assert total(await run(trial), "trained") == {"default": sum(found["loss_mask"])} == {"default": 12}
        assert total(await run(trial), "staleness") == {"unknown": 12}
        await trial.retrieve(rid=second["meta_info"]["id"])
        await trial.retrieve(text=f"one{first['text']}")
        assert total(await run(trial), "trained") == {"default": 12}
