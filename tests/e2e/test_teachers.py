"""Another pool's logprobs of the sampled tokens, as columns of samples and of retrieved texts."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import numpy as np
import pytest

from middleware_hub.auditing import teachers
from miles_router.client import RouterClient
from miles_router.settings.config import MiddlewareSpec
from miles_router.testing import SimulatedWorker
from miles_router.trajectory import Sample, TeacherScores
from miles_router.trajectory.sample import read_safetensors
from tests.support.audits import LONG, episode, forget_all, text_rollout, text_rollouts
from tests.support.cache_trial import CACHE, checkpoint
from tests.support.http import ask
from tests.support.session_apis import BOTH, PLAIN, case
from tests.support.session_trial import JSON, SessionTrial, qwen3, session_trial, user
from tests.support.simulated.sglang_jax import SimulatedJax
from tests.support.simulated_vllm import SimulatedVLLM
from tests.support.stage import Stage, staged
from tests.support.under_way import under_way
from tests.support.waiting import until

GENERATE, RETRIEVE = "/generate", "/retrieve_from_text"
TEACHER: Any = {"model": "teacher", "top_k": 3}
LAYERS = (MiddlewareSpec(CACHE),)


class TeacherTrial(SessionTrial):
    """A router with a student, and a teacher with other weights in a pool of its own."""

    teacher: SimulatedWorker

    async def asked(self, kind: str, made: str, **fields: Any) -> Any:
        """The reply to a request for the samples of an episode, or for its text."""
        if kind == "session":
            return await self.ask("POST", f"/sessions/{made}/samples", fields)
        (rollout,) = [each for each in text_rollouts(self) if each.id == made]
        rid = rollout.turns[max(rollout.turns)].entry.rid
        return await self.ask("POST", RETRIEVE, {"rid": rid, **fields})

    async def only_sample(self, kind: str, made: str, **fields: Any) -> Any:
        answer = await self.asked(kind, made, **fields)
        assert answer.status == 200, answer.body
        return answer.json()["samples"][0] if kind == "session" else answer.json()


async def teacher_trial(stage: Stage, teacher: SimulatedWorker, student: SimulatedWorker) -> TeacherTrial:
    made = await session_trial(stage, student, more=LAYERS, model_id="m")
    trial = TeacherTrial(made.router, made.workers)
    trial.teacher = teacher
    assert (await trial.ask("POST", "/workers", {"url": teacher.url, "model_id": "teacher"})).status == 201
    return trial


@pytest.fixture(scope="module")
async def shared() -> AsyncIterator[TeacherTrial]:
    options: Any = {"tokenizer": qwen3(), "weight_version": "1"}
    async with (
        SimulatedWorker(**options, seed=1) as student,
        SimulatedWorker(**{**options, "weight_version": "T7"}, seed=2, context_len=4096) as teacher,
        staged() as stage,
    ):
        yield await teacher_trial(stage, teacher, student)


@pytest.fixture
async def trial(shared: TeacherTrial) -> AsyncIterator[TeacherTrial]:
    shared.worker.log.clear()
    shared.teacher.log.clear()
    yield shared
    await forget_all(shared)


of_each_kind = pytest.mark.parametrize("kind", ["session", "text"])


async def recorded(trial: TeacherTrial, kind: str, turns: int = 2) -> str:
    if kind == "text":
        return await text_rollout(trial, turns)
    session = await trial.create()
    await episode(trial, session, turns)
    return session


async def own_words(worker: SimulatedWorker, ids: list[int], top_k: int = 0) -> Any:
    """What a worker itself answers for these ids."""
    request = {"input_ids": ids, "sampling_params": {"max_new_tokens": 0}, "logprob_start_len": 0}
    body = json.dumps({**request, "return_logprob": True, "top_logprobs_num": top_k}).encode()
    answer = await ask(worker.url, "POST", GENERATE, JSON, body)
    assert answer.status == 200, answer.body
    return answer.json()["meta_info"]


def in_the_loss(sample: Any) -> list[int]:
    return [place for place, trained in enumerate(sample["loss_mask"]) if trained]


async def see_scores(trial: TeacherTrial, sample: Any, top_k: int, sampled: list[int] | None = None) -> None:
    """See that a sample's columns are the teacher's own words at the sampled positions, and nothing elsewhere."""
    sampled = in_the_loss(sample) if sampled is None else sampled
    meta = await own_words(trial.teacher, sample["tokens"], top_k)
    own = [entry[0] for entry in meta["input_token_logprobs"]]
    expected = [own[place] if place in sampled else 0.0 for place in range(len(own))]
    assert sample["teacher_logprobs"] == pytest.approx(expected)
    assert sample["teacher"] == {"model": "teacher", "weight_version": "T7"}
    if not top_k:
        assert not {name for name in sample if name.startswith("teacher_top")}
        return
    tops = [meta["input_top_logprobs"][place] for place in sampled]
    assert sample["teacher_top_positions"] == sampled
    assert sample["teacher_top_ids"] == [[entry[1] for entry in row] for row in tops]
    assert sample["teacher_top_logprobs"] == [pytest.approx([entry[0] for entry in row]) for row in tops]


@of_each_kind
async def test_scores_are_what_the_teacher_itself_answers_for_the_ids(trial: TeacherTrial, kind: str) -> None:
    made = await recorded(trial, kind)
    before = await trial.only_sample(kind, made)
    trial.worker.log.clear()
    for teacher, top_k in (("teacher", 0), (TEACHER, 3), ({"model": "m"}, 0)):
        with case(teacher):
            sample = await trial.only_sample(kind, made, teacher=teacher)
            scores = {name: sample.pop(name) for name in [*sample] if name.startswith("teacher")}
            assert sample == before
            sampled = in_the_loss(sample)
            assert len(sampled) == 2 * LONG["max_tokens"]
            logprobs = sample["logprobs" if kind == "session" else "rollout_logp"]
            if teacher == {"model": "m"}:
                assert scores["teacher_logprobs"] == pytest.approx(logprobs)
            else:
                await see_scores(trial, {**sample, **scores}, top_k)
                assert np.abs(np.subtract(scores["teacher_logprobs"], logprobs))[sampled].max() > 0.1
    assert len(trial.worker.log.at(GENERATE)) == 1, "the student was asked once, as its own teacher"


async def test_turns_of_all_apis_are_scored_whole_and_streamed(trial: TeacherTrial) -> None:
    for api in PLAIN:
        for stream in BOTH:
            with case(api, stream):
                session = await trial.create()
                assert (await api.ask(trial, session, 12, stream=stream)).status == 200
                (sample,) = await trial.samples(session, teacher=TEACHER)
                await see_scores(trial, sample, 3)


async def test_tokens_out_of_the_loss_are_scored_and_cut_ones_are_not(trial: TeacherTrial) -> None:
    session = await recorded(trial, "session")
    (whole,) = await trial.samples(session)
    sampled = in_the_loss(whole)
    (sample,) = await trial.samples(session, teacher=TEACHER, mask="last_turn", max_seq_len=sampled[-1] - 2)
    assert in_the_loss(sample) == sampled[LONG["max_tokens"] : -3]
    await see_scores(trial, sample, 3, sampled[:-3])
    (exchange,) = [each for each in trial.teacher.log.at(GENERATE) if b'logprob_start_len":0' not in each.body][:1]
    assert exchange.json()["logprob_start_len"] == sampled[0] - 1
    assert exchange.json()["input_ids"] == sample["tokens"]


async def test_branches_and_texts_have_scores_of_their_own(trial: TeacherTrial) -> None:
    session = await trial.create()
    history = await episode(trial, session, 1)
    for words in ("Hi", "Hello"):
        await trial.chat(session, [*history[:-1], user(words)], max_tokens=6)
    samples = await trial.samples(session, teacher="teacher")
    for sample in samples:
        await see_scores(trial, sample, 0, np.flatnonzero(sample["logprobs"]).tolist())
    assert sum(samples[0]["loss_mask"]) - sum(samples[1]["loss_mask"]) == LONG["max_tokens"], (
        "the first trains the turn"
    )
    texts = []
    for words in ("One two", "Three four"):
        body = {"text": words, "sampling_params": {"max_new_tokens": 5, "ignore_eos": True}}
        texts.append(words + (await trial.ask("POST", GENERATE, body)).json()["text"])
    answer = await trial.ask("POST", RETRIEVE, {"texts": [*texts, "Never seen"], "teacher": TEACHER})
    *found, unknown = answer.json()
    for each in found:
        await see_scores(trial, each, 3)
    assert set(unknown["teacher_logprobs"]) == {0.0}
    assert unknown["teacher"]["weight_version"] is None, "nobody was asked"
    assert unknown["teacher_top_positions"] == unknown["teacher_top_ids"] == unknown["teacher_top_logprobs"] == []


async def test_both_forms_and_the_client_read_the_same_scores(trial: TeacherTrial) -> None:
    session, made = await recorded(trial, "session"), await recorded(trial, "text")
    (in_json,) = await trial.samples(session, teacher=TEACHER)
    body = {"format": "safetensors", "teacher": TEACHER}
    in_tensors = read_safetensors((await trial.ask("POST", f"/sessions/{session}/samples", body)).body)
    rid = (await trial.only_sample("text", made))["rid"]
    text = await trial.only_sample("text", made, teacher=TEACHER)
    async with RouterClient(trial.router.url) as client:
        collected = await client.session(session).collect(teacher=TEACHER)
        retrieved = await client.retrieve(rid=rid, teacher=TEACHER)
    samples = [Sample.from_json(in_json), *in_tensors, *collected, Sample.from_json(collected[0].to_dict())]
    for scores, held in [*((each.teacher, in_json) for each in samples), (retrieved.teacher, text)]:
        assert isinstance(scores, TeacherScores)
        assert scores.facts == held["teacher"]
        assert {name: array.tolist() for name, array in scores.arrays.items()} == {
            name: np.asarray(held[name], array.dtype).tolist() for name, array in scores.arrays.items()
        }
        assert [array.dtype.name for array in scores.arrays.values()] == ["float32", "int32", "int32", "float32"]
    (sample,) = collected
    told = sample.trainer_fields()["teacher_log_probs"]
    assert told == pytest.approx(in_json["teacher_logprobs"][-sample.response_length :])


async def test_engines_of_all_kinds_can_teach(stage: Stage) -> None:
    async with (
        SimulatedWorker(tokenizer=checkpoint()) as student,
        SimulatedVLLM(checkpoint(), names_ids=True).running() as vllm,
        SimulatedVLLM(checkpoint()).running() as plain,
        SimulatedJax(tokenizer=checkpoint(), seed=3) as jax,
    ):
        trial = await session_trial(stage, student, more=LAYERS, model_id="m", hf_checkpoint=checkpoint())
        long = "One two" * 900  # an answer with its logprobs is translated in a thread
        body = {"text": long, "sampling_params": {"max_new_tokens": 6, "ignore_eos": True}}
        text = body["text"] + (await trial.ask("POST", GENERATE, body)).json()["text"]
        for model, url in (("vllm", vllm.url), ("jax", jax.url)):
            assert (await trial.ask("POST", "/workers", {"url": url, "model_id": model})).status == 201
            for top_k in (0, 2):
                with case(model, top_k):
                    teacher = {"model": model, "top_k": top_k}
                    found = (await trial.ask("POST", RETRIEVE, {"text": text, "teacher": teacher})).json()
                    again = {"input_ids": found["tokens"], "return_logprob": True, "top_logprobs_num": top_k}
                    fields = {"model": model, "sampling_params": {"max_new_tokens": 1}, "logprob_start_len": 0}
                    meta = (await trial.ask("POST", GENERATE, {**fields, **again})).json()["meta_info"]
                    for row, place in enumerate(in_the_loss(found)):
                        own = meta["input_token_logprobs"][place][0]
                        assert found["teacher_logprobs"][place] == pytest.approx(own)
                        if top_k:
                            tops = [entry[:2] for entry in meta["input_top_logprobs"][place]]
                            tops += [[-9999.0, -1]] * (top_k - len(tops))  # vLLM's stand-in returns fewer
                            assert found["teacher_top_ids"][row] == [token for _, token in tops]
                            assert found["teacher_top_logprobs"][row] == pytest.approx([each for each, _ in tops])
                    assert len(in_the_loss(found)) == 6
        assert (await trial.ask("POST", "/workers", {"url": plain.url, "model_id": "plain"})).status == 201
        refusal = await trial.ask("POST", RETRIEVE, {"text": text, "teacher": {"model": "plain", "top_k": 2}})
        assert (refusal.status, refusal.json()["error"]["type"]) == (501, "unsupported_by_engine")


# Refused, and nothing is changed


async def refused(trial: TeacherTrial, kind: str, made: str, **fields: Any) -> tuple[int, str, str]:
    """The status, the code and the message of a refusal, after which the samples are as they were."""
    before = await trial.only_sample(kind, made)
    answer = await trial.asked(kind, made, **fields)
    assert await trial.only_sample(kind, made) == before
    error = answer.json()["error"]
    return answer.status, error.get("code") or error["type"], error["message"]


@of_each_kind
async def test_a_wrong_field_is_refused_by_its_name(trial: TeacherTrial, kind: str) -> None:
    made = await recorded(trial, kind, 1)
    counts = [{**TEACHER, "top_k": count} for count in (-1, "3", True, 129)]
    for teacher in (7, "", [], {}, {"model": 1}, {**TEACHER, "k": 1}, *counts):
        with case(teacher):
            status, code, message = await refused(trial, kind, made, teacher=teacher)
            assert (status, code, "teacher" in message) == (400, "invalid_request", True)
    status, code, message = await refused(trial, kind, made, teacher="tutor")
    assert (status, code) == (404, "model_not_found")
    assert "'tutor'" in message
    assert trial.teacher.log.at(GENERATE) == []


@pytest.mark.alone("the bound is lowered in the test's own process")
@of_each_kind
async def test_what_exceeds_a_bound_is_refused_before_the_teacher_is_asked(
    trial: TeacherTrial, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = await recorded(trial, kind, 1)
    monkeypatch.setattr(teachers, "MOST_TOKENS", 2 * LONG["max_tokens"])
    status, code, message = await refused(trial, kind, made, teacher=TEACHER)
    assert (status, code, message.partition(" for ")[0]) == (400, "invalid_request", "144 likeliest tokens")
    monkeypatch.setattr(teachers, "MOST_TOKENS", 40)
    status, _, message = await refused(trial, kind, made, teacher="teacher")
    assert (status, message.endswith("one request may have 40")) == (400, True)
    assert trial.teacher.log.at(GENERATE) == []


async def test_a_sample_beyond_the_teachers_context_is_refused(stage: Stage) -> None:
    options: Any = {"tokenizer": qwen3(), "weight_version": "1"}
    async with SimulatedWorker(**options) as student, SimulatedWorker(**options, context_len=64) as teacher:
        trial = await teacher_trial(stage, teacher, student)
        session = await recorded(trial, "session", 1)
        status, code, message = await refused(trial, "session", session, teacher="teacher")
        assert (status, code, "reads at most 56 tokens" in message) == (400, "invalid_request", True)
        assert len((await trial.samples(session, teacher="teacher", max_seq_len=40))[0]["teacher_logprobs"]) == 40


@of_each_kind
async def test_a_teacher_that_fails_is_an_error_without_samples(trial: TeacherTrial, kind: str) -> None:
    made = await recorded(trial, kind, 1)
    for status, body, words in ((400, b'{"error":{"message":"no room"}}', "no room"), (200, b"{}", "unreadable")):
        trial.teacher.faults.status(status, body=body, path=GENERATE)
        told = await refused(trial, kind, made, teacher=TEACHER)
        assert (*told[:2], words in told[2]) == (502, "upstream_error", True)
    sample = await trial.only_sample(kind, made, teacher=TEACHER)
    await see_scores(trial, sample, 3)


# The gate, and how many at once


async def test_a_pause_of_the_teachers_pool_lets_requests_wait(trial: TeacherTrial) -> None:
    session, made = await recorded(trial, "session"), await recorded(trial, "text")
    gate = trial.router.app.router.fleets["teacher"].gate
    await trial.ask("POST", "/pause_generation?model_id=teacher", {"mode": "retract"})

    async def both() -> tuple[Any, ...]:
        return await asyncio.gather(
            trial.only_sample("session", session, teacher="teacher"), trial.only_sample("text", made, teacher="teacher")
        )

    async with under_way(both()) as scored:
        await until(lambda: gate.held == 2, "both wait at the teacher's gate")
        await trial.chat(await trial.create(), [user("Hi")])  # the student goes on
        assert trial.teacher.log.at(GENERATE) == []
        await trial.ask("POST", "/continue_generation?model_id=teacher", {})
        for sample in await scored:
            await see_scores(trial, sample, 0)


async def sampled_texts(trial: TeacherTrial, count: int) -> list[str]:
    texts = []
    for number in range(count):
        body = {"text": f"Number {number}", "sampling_params": {"max_new_tokens": 2, "ignore_eos": True}}
        texts.append(body["text"] + (await trial.ask("POST", GENERATE, body)).json()["text"])
    return texts


async def test_a_teacher_that_refused_is_asked_no_more(trial: TeacherTrial) -> None:
    texts = await sampled_texts(trial, 4 * teachers.AT_ONCE)
    trial.teacher.faults.status(400, body=b"{}", path=GENERATE, times=None)
    answer = await trial.ask("POST", RETRIEVE, {"texts": texts, "teacher": "teacher"})
    trial.teacher.faults.clear()
    assert answer.status == 502
    assert len(trial.teacher.log.at(GENERATE)) < len(texts)
    answer = await trial.ask("POST", RETRIEVE, {"texts": texts, "teacher": "teacher"})
    assert answer.status == 200, "all places are free again"


async def test_a_teacher_has_a_bounded_number_of_requests(trial: TeacherTrial) -> None:
    texts = await sampled_texts(trial, teachers.AT_ONCE + 4)
    gate = trial.router.app.router.fleets["teacher"].gate
    await trial.ask("POST", "/pause_generation?model_id=teacher", {"mode": "retract"})
    async with under_way(trial.ask("POST", RETRIEVE, {"texts": texts, "teacher": "teacher"})) as scored:
        await until(lambda: gate.held == teachers.AT_ONCE, "as many as may wait at the gate")
        await trial.ask("GET", "/sessions")  # the others have had their time
        assert gate.held == teachers.AT_ONCE
        await trial.ask("POST", "/continue_generation?model_id=teacher", {})
        assert len((await scored).json()) == len(texts)
