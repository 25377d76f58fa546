"""The reference rollouts of texts, before a simulated worker whose proxy knows what was given and what was sampled."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import numpy as np
import pytest

from miles_router.client import (
    ErrorReply,
    Generation,
    InvalidSample,
    NotFound,
    Retries,
    RouterClient,
    Sample,
    group,
    multi_turn,
    single_turn,
)
from miles_router.testing import SimulatedWorker
from miles_router.testing.worker.exchange_log import GenerationRecord
from miles_router.trajectory import Piece, Retrieved, Trajectory
from miles_router.trajectory.retrieved import write_safetensors
from tests.e2e.test_episodes import got
from tests.support import waiting
from tests.support.cache_trial import CACHE, SHORT, Trial, simulated_trial, trial_before
from tests.support.experts_trial import simulated_experts, truth
from tests.support.scripted_worker import reply, script
from tests.support.session_apis import case
from tests.support.session_trial import SESSIONS, user
from tests.support.stage import Stage
from tests.support.under_way import under_way
from tests.support.waiting import until

PROMPT = "<|im_start|>user\nWhat is 17 plus 25?<|im_end|>\n<|im_start|>assistant\n"
TOOL = "<|im_end|>\n<|im_start|>tool\n{}<|im_end|>\n<|im_start|>assistant\n"
LONG = {"max_new_tokens": 200}
PATIENCE: dict[str, Any] = {"retries": Retries(attempts=0), "timeout": waiting.PATIENCE}  # what hangs fails


@pytest.fixture
async def trial(stage: Stage) -> AsyncIterator[Trial]:
    async with simulated_trial(stage) as made:
        yield made


@pytest.fixture
async def client(trial: Trial) -> AsyncIterator[RouterClient]:
    async with RouterClient(trial.router.url, **PATIENCE) as made:
        yield made


@pytest.fixture
def worker(trial: Trial) -> SimulatedWorker:
    assert trial.worker is not None
    return trial.worker


def records(trial: Trial) -> list[GenerationRecord]:
    return [record for exchange in trial.log for record in exchange.generations]


def check(sample: Sample, turns: list[GenerationRecord]) -> None:
    """The sample is what the last turn was given and sampled; each turn's sampled tokens are in the loss, no others."""
    last = turns[-1]
    mask, logprobs, position = [], [], 0
    for turn in turns:
        told = len(turn.input_ids) - position
        assert last.input_ids[position : len(turn.input_ids)] == turn.input_ids[position:]
        mask += [0] * told + [1] * len(turn.output_ids)
        logprobs += [0.0] * told + turn.logprobs
        position += told + len(turn.output_ids)
        assert sample.tokens[:position].tolist() == turn.input_ids + turn.output_ids
    assert len(sample) == position
    assert sample.loss_mask.tolist() == mask
    assert sample.logprobs.tolist() == np.array(logprobs, dtype=np.float32).tolist()
    assert sample.prompt_length == len(turns[0].input_ids)


# One turn


async def test_one_turn(trial: Trial, client: RouterClient) -> None:
    sample = await single_turn(
        client, PROMPT, SHORT, reward=1.0, label="42", metadata={"group": 3}, custom_params={"a": 1}
    )
    (record,) = records(trial)
    check(sample, [record])
    assert (sample.response, sample.response_length, sample.status) == (record.text, 6, "truncated")
    assert (sample.reward, sample.label, sample.metadata) == (1.0, "42", {"rid": record.rid, "group": 3})
    assert sample.weight_versions == (("default", len(record.input_ids), len(sample)),)
    assert (await got(trial, "run"))["rewards"] == [{"weight_version": "default", "count": 1, "sum": 1.0}]
    assert trial.log[-1].json()["custom_params"] == {"a": 1}


async def test_a_sample_has_its_sampling_mask_or_says_how_many_tokens_lack_one(client: RouterClient) -> None:
    params: dict[str, Any] = {"max_new_tokens": 12, "ignore_eos": True, "top_k": 5}
    masked = await single_turn(client, PROMPT, params, return_sampling_mask=True)
    assert masked.sampling_logprobs is not None
    assert [bool(each) for each in masked.sampling_logprobs] == masked.loss_mask.astype(bool).tolist()
    plain = await single_turn(client, "Hi", params, metadata={"a": 1})
    assert "sampling_mask_missing" not in plain.metadata
    partly = await single_turn(client, "Hi" + plain.response, params, return_sampling_mask=True, metadata={"a": 1})
    assert (partly.sampling_logprobs, partly.metadata) == (None, {**partly.metadata, "sampling_mask_missing": 12})


async def test_the_reward_may_be_made_of_what_was_generated(trial: Trial, client: RouterClient) -> None:
    async def judged(answer: Generation) -> float:
        return len(answer.text) + (0.5 if answer.status == "truncated" else 0)

    one = await single_turn(client, PROMPT, SHORT, reward=lambda answer: len(answer.text))

    async def again(said: str) -> str | None:
        return TOOL.format(said)

    two = await multi_turn(client, PROMPT, again, SHORT, max_turns=2, reward=judged)
    assert one.reward == len(one.response)
    assert two.reward == len(records(trial)[-1].text) + 0.5
    (rewards,) = (await got(trial, "run"))["rewards"]
    assert (rewards["count"], rewards["sum"]) == (2, one.reward + two.reward)
    with pytest.raises(ValueError, match="reward is nan"):
        await single_turn(client, PROMPT, SHORT, reward=lambda _: float("nan"))


async def test_a_group_ends_with_its_first_failure(stage: Stage) -> None:
    async with (
        simulated_trial(stage, token_latency_s=0.05) as trial,
        RouterClient(trial.router.url, **PATIENCE) as client,
    ):
        worker = trial.worker
        assert worker is not None
        worker.faults.status(400, path="/generate")
        endless = {"max_new_tokens": 4000, "ignore_eos": True}
        with pytest.raises(ErrorReply):
            await group(lambda: single_turn(client, PROMPT, endless), 3)
        await until(lambda: worker.running == 0 and all(each.done for each in worker.log), "the others have ended")


# Several turns


async def test_what_the_environment_says_is_given_and_not_trained_on(
    trial: Trial, client: RouterClient, worker: SimulatedWorker
) -> None:
    for says in ("calc(17+25)", "calc(42*2)", "It is 84."):
        worker.say(says)
    heard: list[str] = []

    async def environment(reply: str) -> str | None:
        heard.append(reply)
        worker.engine.weight_version = str(len(heard))
        return TOOL.format(len(heard)) if reply.startswith("calc") else None

    sample = await multi_turn(client, PROMPT, environment, LONG, reward=1.0, metadata={"group": 3})
    turns = records(trial)
    check(sample, turns)
    assert heard == ["calc(17+25)", "calc(42*2)", "It is 84."]
    assert sample.response == f"calc(17+25){TOOL.format(1)}calc(42*2){TOOL.format(2)}It is 84."
    assert sample.status == "completed"
    assert [run.version for run in sample.weight_versions] == ["default", "1", "2"]
    assert (sample.reward, sample.metadata) == (1.0, {"rids": [turn.rid for turn in turns], "group": 3})
    keys = {exchange.header("x-smg-routing-key") for exchange in trial.log}
    assert len(keys) == 1
    assert None not in keys, "all turns go where their prefix is cached"


async def test_siblings_of_equal_text_keep_their_own_tokens(
    trial: Trial, client: RouterClient, worker: SimulatedWorker
) -> None:
    encode = worker.tokenizer.encode
    spellings = [encode(" the"), [*encode(" t"), *encode("h"), *encode("e")]]
    for ids in spellings:
        worker.say(ids)

    async def environment(reply: str) -> None:
        sibling = await client.generate(PROMPT, sampling_params=LONG)
        assert (sibling.text, sibling.output_ids[:-1]) == (reply, spellings[1])

    sample = await multi_turn(client, PROMPT, environment, LONG)
    assert sample.tokens[sample.loss_mask == 1][:-1].tolist() == spellings[0], "the text's newest tokens are another's"
    check(sample, records(trial)[:1])


async def test_turns_that_run_out_truncate_the_sample(
    trial: Trial, client: RouterClient, worker: SimulatedWorker
) -> None:
    async def environment(reply: str) -> str | None:
        return TOOL.format(reply)

    for _ in range(2):
        worker.say("calc(1)")
    sample = await multi_turn(client, PROMPT, environment, LONG, max_turns=2)
    assert sample.status == "truncated"
    assert sample.response == f"calc(1){TOOL.format('calc(1)')}calc(1)", "it ends with what was sampled"
    check(sample, records(trial))
    with pytest.raises(ValueError, match="max_turns"):
        await multi_turn(client, PROMPT, environment, LONG, max_turns=0)


# What is cut


@pytest.mark.parametrize("turn", [1, 2])
async def test_an_aborted_rollout_has_what_was_sampled(stage: Stage, turn: int) -> None:
    async with (
        simulated_trial(stage, token_latency_s=0.002, stop_probability=0.0) as trial,
        RouterClient(trial.router.url, **PATIENCE) as client,
    ):
        worker = trial.worker
        assert worker is not None
        for _ in range(turn - 1):
            worker.say("calc(1)")

        async def environment(reply: str) -> str | None:
            assert reply == "calc(1)"
            return TOOL.format(1)

        rollout = multi_turn(client, PROMPT, environment, {"max_new_tokens": 4000, "min_new_tokens": 4000})
        async with under_way(rollout) as running:
            await until(lambda: len(records(trial)) == turn and worker.running == 1, "the last turn runs")
            await client.abort_all()
            sample = await running
    assert sample.status == "aborted"
    check(sample, records(trial))


# What is refused


async def test_a_router_that_holds_no_tokens_is_an_error(stage: Stage) -> None:
    async with SimulatedWorker() as worker:
        router = await stage.router(worker.url)
        async with RouterClient(router.url, **PATIENCE) as client:
            with pytest.raises(ErrorReply) as caught:
                await single_turn(client, PROMPT, SHORT)
    assert caught.value.status == 404, "the worker knows no /retrieve_from_text"
    async with simulated_trial(stage) as plenty:
        assert plenty.worker is not None
        trial = await trial_before(stage, plenty.worker, max_tokens=1)
        async with RouterClient(trial.router.url, **PATIENCE) as client:
            with pytest.raises(NotFound):
                await single_turn(client, PROMPT, SHORT)


OTHERS = {
    "other ids": Trajectory([Piece.given([1]), Piece.sampled([7, 8, 10], [-0.5] * 3, "1")]),
    "not all sampled": Trajectory([Piece.given([1, 7]), Piece.sampled([8, 9], [-0.5] * 2, "1")]),
    "fewer": Trajectory([Piece.sampled([8, 9], [-0.5] * 2, "1")]),
}


async def test_tokens_other_than_those_generated_are_refused(stage: Stage) -> None:
    """Of two generations with one id, say."""
    server = await stage.worker()
    meta = {"id": "r", "prompt_tokens": 1, "finish_reason": {"type": "stop"}}
    answer = {"text": "abc", "output_ids": [7, 8, 9], "meta_info": meta}
    async with RouterClient(server.url, **PATIENCE) as client:
        for kind, held in OTHERS.items():
            with case(kind):
                found = write_safetensors([Retrieved(held, "oneabc", len(held), ("r",), "r", "stop", True)], many=False)
                server.next(script(reply(json.dumps(answer).encode())), script(reply(found)))
                with pytest.raises(InvalidSample) as caught:
                    await single_turn(client, "one")
                assert caught.value.invariant == "retrieved_as_generated"


# Routed experts


@pytest.fixture
async def of_experts(stage: Stage) -> AsyncIterator[RouterClient]:
    """The client of a router with text cache, sessions and the layer that keeps rows."""
    async with simulated_experts(stage, around=[SESSIONS, CACHE]) as trial, RouterClient(trial.router.url) as made:
        yield made


async def test_a_generation_has_its_rows_by_id_and_by_text(of_experts: RouterClient) -> None:
    generation = await of_experts.generate("Hello", sampling_params=SHORT)
    tokens = (await of_experts.retrieve(rid=generation.rid)).tokens
    expected = truth(tokens.tolist())
    by_id = await of_experts.routed_experts(rid=generation.rid)
    assert (by_id.dtype.name, by_id.shape) == ("uint8", (len(tokens) - 1, 3, 2))
    assert np.array_equal(by_id, expected)
    assert np.array_equal(await of_experts.routed_experts(text="Hello" + generation.text), expected)
    assert np.array_equal(await of_experts.routed_experts(rid=generation.rid, start=1, stop=4), expected[1:4])


async def test_a_sample_has_its_rows_by_session_and_leaf_and_in_itself(of_experts: RouterClient) -> None:
    async with await of_experts.create_session() as session:
        for question in ("one", "two"):
            await session.chat([user(question)], max_tokens=4)
        samples = await session.collect()
        assert len(samples) == 2
        for sample in samples:
            expected = truth(sample.tokens.tolist())
            assert sample.routed_experts is not None
            assert np.array_equal(sample.routed_experts, expected)
            leaf = sample.metadata["leaf"]
            assert np.array_equal(await of_experts.routed_experts(session_id=session.id, leaf=leaf), expected)
        with pytest.raises(ErrorReply, match="leaf must be the number of a turn"):
            await of_experts.routed_experts(session_id=session.id)
    for name in ("rid", "text", "session_id"):
        with pytest.raises(NotFound):
            await of_experts.routed_experts(**{name: "nobody"})  # type: ignore[arg-type]
    for named in ({}, {"rid": "a", "text": "b"}):
        with pytest.raises(ErrorReply, match="exactly one of"):
            await of_experts.routed_experts(**named)  # type: ignore[arg-type]
