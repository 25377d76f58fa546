"""Training samples of a session: exactly what the engine was given and sampled, each token trained once, in either
format, for the branches that were asked for; and never one that breaks an invariant."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

import numpy as np
import pytest

from middleware_hub.openai_session.sessions.session import Session
from middleware_hub.openai_session.sessions.turn import Turn
from miles_router.testing.worker.exchange_log import GenerationRecord
from miles_router.trajectory import Piece
from tests.support.audits import spoil
from tests.support.scripted_chat import able, chat_reply, meta_of
from tests.support.scripted_worker import script
from tests.support.session_apis import case
from tests.support.session_trial import (
    ADD,
    ASK_ADD,
    Message,
    SessionTrial,
    exactly,
    message_of,
    qwen3,
    session_trial,
    simulated_sessions,
    tool_result,
    user,
)
from tests.support.stage import Stage, staged

SYSTEM: Message = {"role": "system", "content": "Be brief."}
HI = [SYSTEM, user("Hi")]
FIELDS = {"tokens", "loss_mask", "logprobs", "weight_versions", "response", "response_length", "status", "metadata"}
POLICY = "tests.e2e.test_session_samples.first_leaf"


def first_leaf(session: Session) -> Sequence[Turn]:
    """A branch policy of an operator's."""
    return session.leaves()[:1]


@pytest.fixture(scope="module")
async def shared() -> AsyncIterator[SessionTrial]:
    async with staged() as stage, simulated_sessions(stage, options={"branch_policies": (POLICY,)}) as made:
        yield made


@pytest.fixture
def trial(shared: SessionTrial) -> SessionTrial:
    shared.worker.log.clear()
    return shared


def generations(trial: SessionTrial) -> list[GenerationRecord]:
    return [generation for exchange in trial.log for generation in exchange.generations]


async def episode(trial: SessionTrial, session: str, turns: int, **fields: Any) -> list[Message]:
    history = [*HI]
    for turn in range(turns):
        history += [message_of(await trial.chat(session, history, **fields)), user(f"Go on {turn}")]
    return history[:-1]


async def branched(trial: SessionTrial) -> str:
    """A session with an edited history, a retry and a compaction: leaves 2, 3, 4, 5."""
    session = await trial.create()
    history = await episode(trial, session, 3)
    await trial.chat(session, [*history[:-2], user("Something else")])
    await trial.chat(session, [*history[:-2], user("Something else")])
    await trial.chat(session, [SYSTEM, user("So far: much was said.")])
    return session


# What a sample is


async def test_a_sample_is_what_the_engine_was_given_and_sampled(trial: SessionTrial) -> None:
    session = await trial.create(metadata={"task": 7})
    trial.worker.say(ASK_ADD)
    message = message_of(await trial.chat(session, HI, tools=[ADD], max_tokens=99))
    trial.worker.say("It is 42.")
    await trial.chat(session, [*HI, message, tool_result(message["tool_calls"][0], "42")], tools=[ADD], max_tokens=99)
    answer = await trial.ask("POST", f"/sessions/{session}/samples")
    assert answer.value("content-type") == b"application/json"
    assert set(answer.json()) == {"samples", "metadata"}
    (sample,) = answer.json()["samples"]
    one, two = generations(trial)
    exactly(sample, one, two)
    assert set(sample) == FIELDS
    prompt, length = len(one.input_ids), len(sample["tokens"])
    assert sample["response_length"] == length - prompt
    assert sample["response"] == qwen3().decode(sample["tokens"][prompt:])
    assert sample["status"] == "completed"
    spans = [(prompt, prompt + len(one.output_ids)), (len(two.input_ids), length)]
    assert sample["weight_versions"] == [{"version": "1", "start": start, "end": end} for start, end in spans]
    told = sample["metadata"]
    assert (told["task"], told["session_id"], told["leaf"], told["reason"]) == (7, session, 1, None)
    assert [(turn["start"], turn["end"]) for turn in told["turns"]] == spans
    assert [turn["finish_reason"] for turn in told["turns"]] == ["tool_calls", "stop"]
    assert [turn["cached_tokens"] for turn in told["turns"]] == [0, prompt + len(one.output_ids) - 1]
    assert all(turn["asked_at"] <= turn["answered_at"] for turn in told["turns"])
    assert {turn["worker"] for turn in told["turns"]} == {trial.worker.url}
    whole = answer.json()["metadata"]
    assert (whole["turns"], whole["segments"], whole["untraced"], whole["task"]) == (2, 1, [], 7)


async def test_versions_are_those_that_sampled_each_token(stage: Stage) -> None:
    worker = able(await stage.worker())
    spans = [{"version": "1", "start": 0, "end": 1}, {"version": "2", "start": 1, "end": 3}]
    worker.next(
        script(chat_reply([7, 8, 9], meta_info=meta_of([7, 8, 9], weight_versions=spans))),
        script(
            chat_reply(
                [10], prompt_token_ids=None, meta_info=meta_of([10], weight_versions=[{**spans[0], "version": "2"}])
            )
        ),
    )
    trial = await session_trial(stage, worker)
    session = await trial.create()
    message = message_of(await trial.chat(session, HI))
    await trial.chat(session, [*HI, message, user("Go on")])
    (sample,) = await trial.samples(session)
    length = len(sample["tokens"])
    assert sample["weight_versions"] == [
        {"version": "1", "start": 3, "end": 4},
        {"version": "2", "start": 4, "end": 6},
        {"version": "2", "start": length - 1, "end": length},
    ]


# Which branches


async def test_every_branch_is_a_sample_and_a_shared_turn_is_trained_once(trial: SessionTrial) -> None:
    session = await branched(trial)
    samples = await trial.samples(session)
    assert [each["metadata"]["leaf"] for each in samples] == [2, 3, 4, 5]
    assert [each["metadata"]["reason"] for each in samples] == [None, "edited_history", "retry", "compaction"]
    made = generations(trial)
    exactly(samples[0], *made[:3])
    exactly(samples[3], made[5])
    for sample, last in ((samples[1], made[3]), (samples[2], made[4])):
        assert sample["tokens"] == last.input_ids + last.output_ids
        begin = len(last.input_ids)
        assert sample["loss_mask"] == [0] * begin + [1] * len(last.output_ids)
        assert sample["logprobs"][:begin] == samples[0]["logprobs"][:begin], "known, and out of the loss"
        assert sample["metadata"]["untrained_turns"] == [0, 1]
    trained = sum(sum(each["loss_mask"]) for each in samples)
    assert trained == sum(len(each.output_ids) for each in made), "each sampled token once"


# What is refused


def positive(piece: Piece) -> Piece:
    return Piece(piece.tokens, piece.logprobs + np.float32(9) if piece.logprobs is not None else None, piece.version)


def not_a_number(piece: Piece) -> Piece:
    return Piece(piece.tokens, np.full(len(piece), np.nan, dtype=np.float32), piece.version)


def negative(piece: Piece) -> Piece:
    return Piece(-piece.tokens - 1, piece.logprobs, piece.version)


def versionless(piece: Piece) -> Piece:
    return Piece(piece.tokens, piece.logprobs, None)


def misaligned(piece: Piece) -> Piece:
    return Piece(piece.tokens, piece.logprobs[:-1] if piece.logprobs is not None else None, piece.version)


async def test_a_sample_that_would_break_an_invariant_is_refused_by_its_name(trial: SessionTrial) -> None:
    broken: list[tuple[Callable[[Piece], Piece], str]] = [
        (positive, "logprobs_are_logprobs"),
        (not_a_number, "logprobs_are_logprobs"),
        (negative, "tokens_are_ids"),
        (versionless, "versions_cover_the_loss"),
        (misaligned, "aligned"),
    ]
    for break_it, invariant in broken:
        with case(invariant):
            session = await trial.create()
            await episode(trial, session, 2)
            assert len(await trial.samples(session)) == 1
            middleware: Any = trial.router.app.layers[0]
            turn = middleware.store.get(session).turns[-1]
            spoil(turn, "sampled", tuple(map(break_it, turn.sampled)))
            for form in ("json", "safetensors"):
                answer = await trial.ask("POST", f"/sessions/{session}/samples", {"format": form})
                assert (answer.status, answer.error_type) == (422, "invalid_sample")
                assert invariant in answer.json()["error"]["message"]
                assert b'tokens"' not in answer.body


async def test_the_caller_chooses_the_branches(trial: SessionTrial) -> None:
    session, lines = await branched(trial), {2: [0, 1, 2], 3: [0, 1, 3], 4: [0, 1, 4], 5: [5]}
    made = generations(trial)
    for policy, leaves in (("last", [5]), ("drop-superseded", [2, 4, 5]), (POLICY, [2])):
        samples = await trial.samples(session, branches=policy)
        assert [each["metadata"]["leaf"] for each in samples] == leaves, policy
        trained = {turn for leaf in leaves for turn in lines[leaf]}
        loss = sum(sum(each["loss_mask"]) for each in samples)
        assert loss == sum(len(made[turn].output_ids) for turn in trained), policy
    wrong: list[Any] = [{"format": "parquet"}, {"max_seq_len": 0}, {"branches": "some"}, {"rewards": 1.0}, [], b"{"]
    for want in wrong:
        answer = await trial.ask("POST", f"/sessions/{session}/samples", want)
        assert (answer.status, answer.error_type) == (400, "invalid_request"), want
    (whole, *_), (cut, *_) = await trial.samples(session), await trial.samples(session, max_seq_len=60, reward=0.5)
    assert (cut["tokens"], cut["status"], cut["reward"]) == (whole["tokens"][:60], "truncated", 0.5)
