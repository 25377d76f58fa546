"""Prefill/decode pairs, data-parallel ranks and LoRA adapters with what trainers get beside the tokens: sampling masks,
evaluations, rewards of turns, accounts of the parser and teacher scores. Each works, or is refused by name."""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any

import orjson
import pytest

from miles_router.settings.config import MiddlewareSpec
from miles_router.testing import SimulatedWorker
from tests.e2e.test_evaluations import TEXT, refused, update
from tests.e2e.test_sampling_masks import ASKED, CONTRACT, MASK, PARAMS, TOP_K, fits, last_event, sets
from tests.e2e.test_session_restarts import Restarts
from tests.e2e.test_teachers import in_the_loss, own_words
from tests.support.cache_trial import CACHE
from tests.support.http import ask, whole_or_cut
from tests.support.pairs import Halves, halves
from tests.support.session_apis import BOTH, COMPLETIONS, PLAIN, TALKS, Api, case
from tests.support.session_trial import CHAT, JSON, SessionTrial, message_of, qwen3, session_trial, user
from tests.support.stage import Stage
from tests.support.tokenizers import tokenizer_directory
from tests.support.under_way import under_way
from tests.support.waiting import until

HI = [user("Hi")]
MODEL = "m"
OPTIONS: Any = {"tokenizer": qwen3(), "weight_version": "1"}
#: What a request to the fleet with adapters adds, and what a session's contract there has.
LORA: Any = {"lora_path": "one"}
OF_LORA = {"model": {"lora": "one"}}


class Unlike(SessionTrial):
    """Sessions and the text cache before a fleet that is not all alike."""

    pair: Halves
    asks: dict[str, Any]  # what each request adds

    async def begin(self, contract: Any = None, **fields: Any) -> str:
        """Make a session; that of a fleet with adapters has one by its contract."""
        fixed: Any = {**(contract or {}), **(OF_LORA if self.asks else {})}
        return await self.create(**({"contract": fixed, **fields} if fixed else fields))

    async def generate(self, *headers: tuple[str, str], **body: Any) -> Any:
        reply = await self.ask("POST", "/generate", {**body, **self.asks}, headers)
        assert reply.status == 200, reply.body
        return last_event(reply) if body.get("stream") else reply.json()


async def unlike(stage: Stage, *workers: SimulatedWorker, **settings: Any) -> Unlike:
    own = {"model_id": MODEL, "hf_checkpoint": tokenizer_directory("qwen3"), **settings}
    made = await session_trial(stage, *workers, more=[MiddlewareSpec(CACHE)], **own)
    trial = Unlike(made.router, made.workers)
    trial.asks = {}
    return trial


@asynccontextmanager
async def of_a_pair(stage: Stage, **settings: Any) -> AsyncIterator[Unlike]:
    trial = await unlike(stage, **settings)
    async with halves(stage, router=trial.router, worker=OPTIONS, masks=True) as trial.pair:
        trial.workers = trial.pair.decodes
        yield trial


@asynccontextmanager
async def of_ranks(stage: Stage, **settings: Any) -> AsyncIterator[Unlike]:
    async with SimulatedWorker(**OPTIONS, dp_size=2) as worker:
        trial = await unlike(stage, worker, **settings)
        await until(lambda: all(each.facts for each in trial.router.pool), "all is known of the worker")
        yield trial
        assert {each.dp_rank for each in worker.log.generations} == {0, 1}


@asynccontextmanager
async def of_adapters(stage: Stage, **settings: Any) -> AsyncIterator[Unlike]:
    async with SimulatedWorker(**OPTIONS, enable_lora=True) as worker:
        trial = await unlike(stage, worker, **settings)
        trial.asks = LORA
        for name in ("one", "two"):
            await load(trial, name)
        yield trial


async def load(trial: SessionTrial, name: str) -> None:
    loaded = await trial.ask("POST", "/load_lora_adapter", {"lora_name": name, "lora_path": "/x"})
    assert loaded.status == 200, loaded.body


async def load_again(trial: SessionTrial, name: str) -> None:
    """Give an adapter other weights."""
    assert (await trial.ask("POST", "/unload_lora_adapter", {"lora_name": name})).status == 200
    await load(trial, name)


Fleet = Callable[..., AbstractAsyncContextManager[Unlike]]
FLEETS: dict[str, Fleet] = {"pair": of_a_pair, "ranks": of_ranks, "adapters": of_adapters}
on_each = pytest.mark.parametrize("fleet", FLEETS.values(), ids=FLEETS)


# Sampling masks


@on_each
async def test_sampling_masks_of_every_token(stage: Stage, fleet: Fleet) -> None:
    async with fleet(stage) as trial:
        for stream in BOTH:
            answer = await trial.generate(text="Hi", sampling_params=PARAMS, **ASKED, stream=stream)
            told = answer["meta_info"][MASK]
            assert [len(each) for each in told] == [TOP_K] * PARAMS["max_new_tokens"]
            found = (await trial.ask("POST", "/retrieve_from_text", {"rid": answer["meta_info"]["id"]})).json()
            fits(found, answer["meta_info"])
        for api, stream in itertools.product(TALKS, BOTH):
            with case(api, stream):
                session = await trial.begin(CONTRACT)
                assert (await api.ask(trial, session, 6, stream=stream)).status == 200
                (sample,) = await trial.samples(session)
                found = sets(sample["sampling_mask"])
                assert all(sample["tokens"][place] in found[place] for place in in_the_loss(sample))
                assert [len(found[place]) for place in in_the_loss(sample)] == [TOP_K] * 6


@pytest.mark.parametrize("stream", BOTH)
async def test_a_pair_that_a_pause_cuts_has_the_masks_of_all_parts(stage: Stage, stream: bool) -> None:
    async with of_a_pair(stage, partial_rollout="resume") as trial:
        for phase in ("prompt", "output"):
            with case(phase):
                trial.pair.hold(trial.pair.prefills if phase == "prompt" else trial.pair.decodes)
                asked = trial.generate(text=phase, sampling_params=PARAMS, **ASKED, stream=stream)
                async with under_way(asked) as generating:
                    await (trial.pair.prefilling() if phase == "prompt" else trial.pair.decoding())
                    await trial.pair.post("/pause_generation", mode="abort")
                    trial.pair.release()
                    await trial.pair.post("/continue_generation")
                    answer = await generating
                assert [len(each) for each in answer["meta_info"][MASK]] == [TOP_K] * PARAMS["max_new_tokens"]


async def test_a_pair_started_without_masks_refuses_them_by_name(stage: Stage) -> None:
    trial = await unlike(stage)
    async with halves(stage, router=trial.router, worker=OPTIONS):
        for api, stream in itertools.product(TALKS, BOTH):
            with case(api, stream):
                session = await trial.begin(CONTRACT)
                reply = await api.ask(trial, session, 6, stream=stream)
                assert (reply.status, b"SGLANG_ENABLE_DISAGG_SAMPLING_MASK=1" in reply.body) == (400, True)
                assert await trial.records(session) == []
        for stream in BOTH:
            body = {"text": "Hi", "sampling_params": PARAMS, **ASKED, "stream": stream}
            reply = await trial.ask("POST", "/generate", body)
            assert reply.status == (200 if stream else 400), "a stream has it in its last event, as the engine does"
            assert b"SGLANG_ENABLE_DISAGG_SAMPLING_MASK=1" in reply.body
            found = await trial.ask("POST", "/retrieve_from_text", {"text": "Hi", "strict": True})
            assert found.status == 404


# Evaluations


@on_each
async def test_one_weight_version_evaluates(stage: Stage, fleet: Fleet) -> None:
    async with fleet(stage) as trial:
        for number, (api, stream) in enumerate(itertools.product(PLAIN, BOTH), 1):
            with case(api, stream):
                session = await trial.begin(evaluation=True)
                for text in ("Hi", "More"):
                    assert (await api.ask(trial, session, 4, text, stream=stream)).status == 200
                await trial.generate(*TEXT[1:], text="Hi", sampling_params={"max_new_tokens": 4}, stream=stream)
                await update(trial, str(number + 1))
                refused(await api.ask(trial, session, 4, "And", stream=stream), str(number), str(number + 1))
                assert len(await trial.records(session)) == 2


@pytest.mark.parametrize("half", ["prefill", "decode"])
async def test_halves_of_different_weights_evaluate_nothing(stage: Stage, half: str) -> None:
    """The router did not see the update: the answers tell of it."""
    async with of_a_pair(stage) as trial:
        renamed = orjson.dumps({"new_version": "2", "abort_all_requests": False})
        url = (trial.pair.prefill if half == "prefill" else trial.pair.decode).url
        assert (await ask(url, "POST", "/update_weight_version", JSON, renamed)).status == 200
        for api in PLAIN:
            with case(api):
                session = await trial.begin(evaluation=True)
                refused(await api.ask(trial, session, 4), "1", "2")
                assert await trial.records(session) == []
        body: Any = {"text": "Hi", "sampling_params": {"max_new_tokens": 4}}
        refused(await trial.ask("POST", "/generate", body, TEXT[1:]), "1", "2")
        streamed = await trial.ask("POST", "/generate", {**body, "stream": True}, TEXT[1:])
        assert (streamed.status, streamed.error_type) == (502, "upstream_error")
        assert "which weights sampled the first token" in streamed.json()["error"]["message"]


@pytest.mark.parametrize("phase", ["prompt", "output"])
async def test_an_update_within_a_pairs_turn_ends_its_evaluation(stage: Stage, phase: str) -> None:
    async with of_a_pair(stage, partial_rollout="resume") as trial:
        for number, stream in enumerate(BOTH, 1):
            with case(stream):
                session = await trial.begin(evaluation=True)
                trial.pair.hold(trial.pair.prefills if phase == "prompt" else trial.pair.decodes)
                asked = whole_or_cut(Api(CHAT).ask(trial, session, 400, stream=stream, ignore_eos=True))
                async with under_way(asked) as turn:
                    await (trial.pair.prefilling() if phase == "prompt" else trial.pair.decoding())
                    await trial.pair.post("/pause_generation", mode="abort")
                    trial.pair.release()
                    version = str(number + 1)
                    await trial.pair.post("/update_weight_version", new_version=version, abort_all_requests=False)
                    await trial.pair.post("/continue_generation")
                    reply = await turn
                assert b"began this evaluation" in reply.body, reply.body
                assert stream or reply.status == 409
                assert await trial.records(session) == []


async def test_an_adapter_that_is_loaded_again_ends_its_evaluations_alone(stage: Stage) -> None:
    """Its weights have no version."""
    async with of_adapters(stage) as trial:
        for api, stream in itertools.product(PLAIN, BOTH):
            with case(api, stream):
                fixed = await trial.begin(evaluation=True)
                named, other, base = [await trial.create(evaluation=True) for _ in range(3)]
                asking = [(fixed, {}), (named, LORA), (other, {"model": f"{MODEL}:two"}), (base, {})]
                for session, fields in asking:
                    assert (await api.ask(trial, session, 4, stream=stream, **fields)).status == 200
                await load_again(trial, "one")
                for session, fields in asking:
                    again = await api.ask(trial, session, 4, "More", stream=stream, **fields)
                    if session in (fixed, named):
                        assert "adapter one was loaded or unloaded" in refused(again)
                    else:
                        assert again.status == 200, again.body
                assert (await api.ask(trial, await trial.begin(evaluation=True), 4)).status == 200, "begun again"


@pytest.mark.parametrize("stream", BOTH)
async def test_an_adapter_that_is_loaded_within_a_cut_evaluation_ends_it(stage: Stage, stream: bool) -> None:
    async with of_adapters(stage, partial_rollout="resume") as trial:
        worker = trial.worker
        gate = trial.router.app.router.gate
        for kind in ("turn", "text"):
            with case(kind):
                session = await trial.begin(evaluation=True)
                body = {"text": "Hi", "sampling_params": {"max_new_tokens": 30_000, "ignore_eos": True}, **LORA}
                turn = Api(CHAT).ask(trial, session, 30_000, stream=stream, ignore_eos=True)
                text = trial.ask("POST", "/generate", {**body, "stream": stream}, TEXT[1:])
                asked, unused = (turn, text) if kind == "turn" else (text, turn)
                unused.close()
                async with under_way(whole_or_cut(asked)) as going:
                    await until(lambda: worker.running, "it is sampled")
                    await trial.ask("POST", "/pause_generation", {"mode": "abort"})
                    await until(lambda: gate.held, "it waits to go on")
                    await load_again(trial, "one")
                    await trial.ask("POST", "/continue_generation", {})
                    reply = await going
                assert stream or reply.status == 409
                assert b"adapter one was loaded or unloaded" in reply.body
                assert await trial.records(session) == []


async def test_an_adapter_may_have_changed_before_a_restart(tmp_path: Path) -> None:
    async with SimulatedWorker(**OPTIONS, enable_lora=True) as worker:
        restarts = Restarts(worker, tmp_path)
        async with restarts.started() as before:
            await load(before, "one")
            named, base = await before.create(evaluation=True), await before.create(evaluation=True)
            history = [*HI, message_of(await before.chat(named, HI, **LORA)), user("More")]
            others = [*HI, message_of(await before.chat(base, HI)), user("More")]
        async with restarts.started() as after:
            assert "adapter one may have changed" in refused(await after.turn(named, history, **LORA))
            await after.chat(base, others)


# Rewards of turns, and what the parser did


@on_each
async def test_rewards_and_the_parsers_account_of_each_turn(stage: Stage, fleet: Fleet) -> None:
    async with fleet(stage) as trial:
        for api, stream in itertools.product(PLAIN, BOTH):
            with case(api, stream):
                session = await trial.begin()
                assert (await api.ask(trial, session, 6, stream=stream, ignore_eos=True)).status == 200
                set_ = await trial.ask("POST", f"/sessions/{session}/rewards", {"turn": 0, "reward": 0.5})
                assert set_.status == 200, set_.body
                (sample,) = await trial.samples(session, per_token=["reward"])
                assert sample["per_token"]["reward"] == [0.0] * (len(sample["tokens"]) - 1) + [0.5]
                (turn,) = sample["metadata"]["turns"]
                assert turn["parsed"] == (None if api.path == COMPLETIONS else "whole")
                assert turn.get("adapter") == trial.asks.get("lora_path"), "a sample says which adapter it is of"


# Teacher scores


async def scores_are(teacher: SimulatedWorker, sample: Any, weight_version: str) -> None:
    """See that a sample has what this worker alone would say of its tokens."""
    meta = await own_words(teacher, sample["tokens"], 2)
    for row, place in enumerate(in_the_loss(sample)):
        assert sample["teacher_logprobs"][place] == pytest.approx(meta["input_token_logprobs"][place][0])
        assert sample["teacher_top_ids"][row] == [entry[1] for entry in meta["input_top_logprobs"][place]]
    assert in_the_loss(sample)
    assert sample["teacher"]["weight_version"] == weight_version


async def scored(trial: Unlike, teacher: str) -> tuple[Any, Any]:
    """A sample of a session and a text, with the scores of a teacher."""
    session, wanted = await trial.begin(), {"model": teacher, "top_k": 2}
    await trial.chat(session, HI)
    (sample,) = await trial.samples(session, teacher=wanted)
    rid = (await trial.generate(text="Hi", sampling_params={"max_new_tokens": 6}))["meta_info"]["id"]
    text = await trial.ask("POST", "/retrieve_from_text", {"rid": rid, "teacher": wanted})
    assert text.status == 200, text.body
    return sample, text.json()


@on_each
async def test_a_plain_teacher_scores_what_such_a_fleet_sampled(stage: Stage, fleet: Fleet) -> None:
    async with fleet(stage) as trial, SimulatedWorker(**{**OPTIONS, "weight_version": "T7"}, seed=2) as teacher:
        assert (await trial.ask("POST", "/workers", {"url": teacher.url, "model_id": "teacher"})).status == 201
        for sample in await scored(trial, "teacher"):
            await scores_are(teacher, sample, "T7")
        assert not [each for each in teacher.log.generations if each.lora_path], "the student's adapter is its own"


@pytest.mark.parametrize("kind", FLEETS)
async def test_such_a_fleet_can_be_the_teacher(stage: Stage, kind: str) -> None:
    options: Any = {**OPTIONS, "weight_version": "T7", "seed": 2}
    async with SimulatedWorker(**OPTIONS) as student, SimulatedWorker(**options) as alike:
        trial = await unlike(stage, student)
        if kind == "pair":
            async with halves(stage, router=trial.router, worker=options, attributes={"model_id": "teacher"}):
                for sample in await scored(trial, "teacher"):
                    await scores_are(alike, sample, "T7")
            return
        own = {"dp_size": 2} if kind == "ranks" else {"enable_lora": True}
        async with SimulatedWorker(**options, **own) as teacher:
            assert (await trial.ask("POST", "/workers", {"url": teacher.url, "model_id": "teacher"})).status == 201
            if kind == "adapters":
                teacher.engine.adapters["expert"] = "/x"
            for name in ("teacher", "teacher", *(["teacher:expert"] if kind == "adapters" else [])):
                for sample in await scored(trial, name):
                    await scores_are(alike, sample, "T7")
                    assert sample["teacher"]["model"] == name
            if kind == "ranks":
                assert {each.dp_rank for each in teacher.log.generations} == {0, 1}
            else:
                assert [each.lora_path for each in teacher.log.generations] == [None] * 4 + ["expert"] * 2


async def test_the_student_teaches_itself_with_base_weights_or_an_adapter(stage: Stage) -> None:
    async with of_adapters(stage) as trial:
        session = await trial.begin()
        await trial.chat(session, HI)
        for teacher, adapter in ((MODEL, None), (f"{MODEL}:two", "two"), (f"{MODEL}:one", "one")):
            (sample,) = await trial.samples(session, teacher=teacher)
            assert (trial.worker.log.last.generation.lora_path, sample["teacher"]["model"]) == (adapter, teacher)
        for teacher, status, words in (
            (f"{MODEL}:none", 400, "never been loaded: none"),
            ("one", 404, "no worker is registered with the model_id 'one'"),
            (f"{MODEL}:", 404, f"the model_id '{MODEL}:'"),
        ):
            with case(teacher):
                reply = await trial.ask("POST", f"/sessions/{session}/samples", {"teacher": teacher})
                assert (reply.status, words in reply.json()["error"]["message"]) == (status, True), reply.body
    async with SimulatedWorker(**OPTIONS) as plain:
        trial = await unlike(stage, plain)
        await trial.chat(session := await trial.begin(), HI)
        reply = await trial.ask("POST", f"/sessions/{session}/samples", {"teacher": f"{MODEL}:one"})
        assert (reply.status, b"--enable-lora" in reply.body) == (400, True)
