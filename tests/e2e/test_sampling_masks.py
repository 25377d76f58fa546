"""Sampling masks: the ids that top-k and top-p left for each sampled token, from the engine to the trainer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pytest

from miles_router.settings.config import MiddlewareSpec
from miles_router.testing import SimulatedWorker
from miles_router.trajectory import sample as samples_format
from miles_router.trajectory.retrieved import read_safetensors
from tests.support.bare_calls import DATED, a_trial
from tests.support.brake import Brake
from tests.support.cache_trial import CACHE, Trial, checkpoint, simulated_trial, trial_before
from tests.support.cuts import cut, cuttable
from tests.support.fleet import JSON, post
from tests.support.http import RawReply
from tests.support.restarts import StateDirectories
from tests.support.scripted_chat import able, chat_reply, meta_of
from tests.support.scripted_worker import reply, script
from tests.support.session_apis import COMPLETIONS, MESSAGES, RESPONSES, Api, case
from tests.support.session_trial import (
    CHAT,
    SESSIONS,
    SessionTrial,
    by_ids,
    message_of,
    qwen3,
    simulated_sessions,
    user,
)
from tests.support.simulated_vllm import SimulatedVLLM
from tests.support.stage import Stage
from tests.support.under_way import under_way
from tests.support.waiting import until

TOP_K = 5
ASKED: dict[str, Any] = {"return_sampling_mask": True, "return_logprob": True}
PARAMS = {"max_new_tokens": 12, "ignore_eos": True, "top_k": TOP_K}
MASK, LOGPROBS = "output_token_sampling_mask", "output_token_sampling_logprobs"
CONTRACT = {"sampling": {"top_k": TOP_K, "return_sampling_mask": True}}
Ragged = Mapping[str, Sequence[int]]


def sets(mask: Ragged) -> list[list[int]]:
    """The ids of each token."""
    offsets = mask["offsets"]
    return [[*mask["ids"][a:b]] for a, b in pairwise(offsets)]


def last_event(reply: RawReply) -> Any:
    return orjson.loads(reply.body.split(b"\n\n")[-3].removeprefix(b"data: "))


def fits(found: Mapping[str, Any], *told: Mapping[str, Any]) -> None:
    """Check that sampled tokens have what the engine told in these `meta_info`, in order, and all others themselves
    alone."""
    masks, logprobs = ([*chain.from_iterable(each[name] for each in told)] for name in (MASK, LOGPROBS))
    marked = [*zip(sets(found["sampling_mask"]), found["sampling_logprobs"], found["tokens"], strict=True)]
    sampled = [each for each, is_in in zip(marked, found["loss_mask"], strict=True) if is_in]
    assert [ids for ids, _, _ in sampled] == masks
    assert np.array([each for _, each, _ in sampled], np.float32).tolist() == np.array(logprobs, np.float32).tolist()
    others = [each for each, is_in in zip(marked, found["loss_mask"], strict=True) if not is_in]
    assert all(ids == [token] and not logprob for ids, logprob, token in others)


async def test_a_text_of_three_turns_has_the_mask_of_each(stage: Stage) -> None:
    async with simulated_trial(stage) as trial:
        text, told = "Hi", []
        for stream in (False, True, False):
            if stream:
                reply = await trial.post(
                    "/generate", {"text": text, "sampling_params": PARAMS, **ASKED, "stream": True}
                )
                events = reply.body.split(b"\n\n")
                answer = orjson.loads(events[-3].removeprefix(b"data: "))
            else:
                answer = await trial.generate(text=text, sampling_params=PARAMS, **ASKED)
            told.append(answer["meta_info"])
            assert all(len(each) == TOP_K for each in answer["meta_info"][MASK])
            text += answer["text"] + " and "
        found = await trial.retrieve(text=text.removesuffix(" and "))
        fits(found, *told)
        accept = [*JSON, ("Accept", "application/octet-stream")]
        reply = await trial.post("/retrieve_from_text", {"text": text.removesuffix(" and ")}, accept)
        exact = read_safetensors(reply.body)
        assert exact.sampling_mask is not None
        assert sets({name: each.tolist() for name, each in exact.sampling_mask.arrays().items()}) == sets(
            found["sampling_mask"]
        )
        assert exact.sampling_mask.offsets.dtype == exact.sampling_mask.ids.dtype == np.int32
        assert exact.sampling_logprobs is not None
        assert exact.sampling_logprobs.dtype == np.float32
        assert exact.sampling_logprobs.tolist() == np.float32(found["sampling_logprobs"]).tolist()


async def test_a_text_with_a_turn_without_one_says_so_and_a_plain_one_has_none(stage: Stage) -> None:
    async with simulated_trial(stage) as trial:
        plain = await trial.generate(text="Hi", sampling_params=PARAMS)
        assert MASK not in plain["meta_info"]
        assert "sampling_mask" not in await trial.retrieve(text="Hi" + plain["text"])
        text = "Hi" + plain["text"]
        more = await trial.generate(text=text, sampling_params=PARAMS, **ASKED)
        found = await trial.retrieve(text=text + more["text"])
        assert "sampling_mask" not in found
        assert found["sampling_mask_missing"] == 12
        accept = [*JSON, ("Accept", "application/octet-stream")]
        exact = read_safetensors((await trial.post("/retrieve_from_text", {"text": found["response"]}, accept)).body)
        assert (exact.sampling_mask, exact.sampling_logprobs, exact.sampling_mask_missing) == (None, None, 12)


async def test_one_with_more_ids_than_the_cache_holds_evicts_nothing(stage: Stage) -> None:
    async with SimulatedWorker(tokenizer=checkpoint()) as worker:
        trial = await trial_before(stage, worker, max_tokens=1500)
        rids = [(await trial.generate(input_ids=[each, each]))["meta_info"]["id"] for each in (20, 30, 40)]
        params = {"max_new_tokens": 200, "ignore_eos": True, "top_k": 20}
        large = await trial.generate(input_ids=[50, 50], sampling_params=params, **ASKED)
        assert [(await trial.retrieve(rid=rid))["matched_tokens"] for rid in rids] == [8, 8, 8]
        assert trial.statistics()["refused"] == 1
        found = await trial.post("/retrieve_from_text", {"rid": large["meta_info"]["id"]})
        assert found.status == 404


async def test_siblings_that_differ_in_their_masks_alone_keep_their_own(stage: Stage) -> None:
    async with simulated_trial(stage) as trial:
        assert trial.worker is not None
        told = {}
        for top_k in (3, TOP_K):
            trial.worker.say("Hello")
            params = {"max_new_tokens": 64, "top_k": top_k}
            answer = await trial.generate(text="Hi", sampling_params=params, **ASKED, rid=f"with {top_k}")
            told[f"with {top_k}"] = answer["meta_info"]
        for rid, meta in told.items():
            fits(await trial.retrieve(text="HiHello", rid=rid), meta)


@pytest.mark.parametrize("stream", [False, True])
async def test_a_generation_that_a_pause_cut_has_the_masks_of_both_parts(stage: Stage, stream: bool) -> None:
    async with SimulatedWorker(tokenizer=checkpoint(), token_latency_s=0.0002) as worker:
        router = await stage.router(
            worker.url, middlewares=(MiddlewareSpec(CACHE),), hf_checkpoint=checkpoint(), partial_rollout="resume"
        )
        trial, brake = Trial(router, worker), Brake(worker.engine)
        brake.when = lambda generation: len(generation.output_ids) == 5
        body = {"text": "Hi", "sampling_params": PARAMS, **ASKED, "stream": stream}
        async with under_way(trial.post("/generate", body)) as generating:
            await until(lambda: brake.on, "five tokens are sampled")
            await post(router, "/pause_generation", mode="abort")
            brake.on = False
            await post(router, "/continue_generation")
            reply = await generating
        answer = last_event(reply) if stream else reply.json()
        meta = answer["meta_info"]
        assert meta["resumed"] == 1
        assert len(meta[MASK]) == meta[f"{MASK}_length"] == 12
        fits(await trial.retrieve(text="Hi" + answer["text"]), meta)


async def test_masks_outlive_the_router(tmp_path: Path) -> None:
    async with SimulatedWorker(tokenizer=checkpoint()) as worker:
        directories = StateDirectories(worker, tmp_path)
        found: list[Any] = []
        text = session = ""
        for _ in range(2):
            layers = MiddlewareSpec(SESSIONS), MiddlewareSpec(CACHE)
            async with directories.router(*layers, hf_checkpoint=checkpoint()) as router:
                texts, sessions = Trial(router, worker), SessionTrial(router, [worker])
                if not found:
                    answer = await texts.generate(text="Hi", sampling_params=PARAMS, **ASKED)
                    text = "Hi" + answer["text"]
                    session = await sessions.create(contract=CONTRACT)
                    said = await sessions.chat(session, [user("Hi")])
                    await sessions.chat(session, [user("Hi"), message_of(said), user("More")])
                exact, (sample,) = await texts.retrieve(text=text), await sessions.samples(session)
                assert len(sets(sample["sampling_mask"])) == len(sample["tokens"])
                names = ("tokens", "sampling_mask", "sampling_logprobs")
                found.append([each[name] for each in (exact, sample) for name in names])
        assert found[0] == found[1]


@pytest.mark.parametrize("path", [CHAT, MESSAGES, RESPONSES])
async def test_sessions_of_each_api_whole_streamed_and_cut(stage: Stage, tmp_path: Path, path: str) -> None:
    async with cuttable(stage, settings={"state_dir": str(tmp_path)}) as (trial, brake):
        api = Api(path)
        for kind in ("whole", "streamed", "cut"):
            with case(kind):
                session = await trial.create(contract=CONTRACT)
                asked = api.ask(trial, session, 12, stream=kind == "streamed", ignore_eos=True)
                if kind == "cut":
                    async with under_way(asked) as turn:
                        await cut(trial, brake, 3, kind)
                        answer = await turn
                else:
                    answer = await asked
                assert answer.status == 200, answer.body
                assert MASK.encode() not in answer.body, "the agent did not ask for it"
                (sample,) = await trial.samples(session)
                sampled = sum(sample["loss_mask"])
                found = [
                    each
                    for each, is_in in zip(sets(sample["sampling_mask"]), sample["loss_mask"], strict=True)
                    if is_in
                ]
                assert len(found) == sampled == 12
                assert [each < 0 for each in sample["sampling_logprobs"]] == [*map(bool, sample["loss_mask"])]
                assert all(len(each) == TOP_K for each in found)
                reply = await trial.ask("POST", f"/sessions/{session}/samples", {"format": "safetensors"})
                (exact,) = samples_format.read_safetensors(reply.body)
                assert exact.sampling_mask is not None
                assert exact.sampling_mask.ids.tolist() == sample["sampling_mask"]["ids"]
                assert exact.sampling_logprobs is exact.sampling_mask.logprobs
                assert exact.sampling_mask.logprobs.tolist() == np.float32(sample["sampling_logprobs"]).tolist()
                assert samples_format.Sample.from_json(exact.to_dict()).to_dict() == exact.to_dict()


async def test_an_engine_that_ignores_the_field_is_found_out(stage: Stage) -> None:
    worker = await stage.worker()
    trial = await trial_before(stage, worker)
    meta: dict[str, Any] = {"id": "r", "finish_reason": {"type": "length", "length": 1}, "prompt_tokens": 2}
    meta |= {"completion_tokens": 1, "output_token_logprobs": [[-1.0, 5, None]]}
    told = {"text": "a", "output_ids": [5], "meta_info": meta}
    whole = {MASK: [[7, 5]], LOGPROBS: [-0.5]}
    support = {MASK: [[7, 5]], LOGPROBS: [[-1.0, -0.5]]}  # SGLang's `sampling_logprobs_mode: "support"`
    for fields, asked, kept in (
        *((whole, True, True), (support, True, True), ({}, False, True), ({}, True, False)),
        *(({MASK: [[5, 7]]}, True, False), ({LOGPROBS: [-0.5]}, True, False), ({MASK: [[5, 7]]}, False, True)),
        *(({**whole, MASK: [[7]]}, True, False), ({**whole, LOGPROBS: []}, True, False)),
        *(({**whole, LOGPROBS: [-0.5, -0.5]}, True, False), ({**support, LOGPROBS: [[-1.0]]}, True, False)),
        *(({**whole, LOGPROBS: [None]}, True, False), ({**whole, LOGPROBS: [0.5]}, True, False)),
        ({**support, LOGPROBS: [[-1.0, -0.5, -0.2]]}, True, False),
    ):
        with case(fields, asked):
            rid = f"{fields} {asked}"
            answer: dict[str, Any] = {**told, "meta_info": {**meta, "id": rid, **fields}}
            worker.always(script(reply(orjson.dumps(answer), 200, JSON)))
            body = {"input_ids": [1, 2], "return_sampling_mask": asked, "sampling_params": {"top_k": 5}}
            assert (await trial.post("/generate", body)).status == 200
            found = await trial.post("/retrieve_from_text", {"rid": rid})
            assert (found.status == 200) is kept
            if asked and kept:
                assert found.json()["sampling_logprobs"] == [0.0, 0.0, -0.5]


async def test_an_answer_parsed_anew_keeps_its_masks(stage: Stage) -> None:
    """SGLang's parser failed at an escape in a call. SGLang refuses masks where `return_meta_info` is missing."""
    worker = able(await stage.worker())
    trial, tokens = await a_trial(stage, worker), qwen3().encode(DATED)
    meta = {**meta_of(tokens), MASK: [[each] for each in tokens], LOGPROBS: [-0.5] * len(tokens)}
    again = script(chat_reply(tokens, DATED, finish_reason="stop", meta_info=meta))
    for path in (CHAT, MESSAGES, RESPONSES):
        for stream in (False, True):
            with case(path, stream):
                worker.next(script(reply(b"Internal Server Error", status=500)), script(chat_reply([1], "x")), again)
                api, session, before = Api(path), await trial.create(contract=CONTRACT), len(worker.requests)
                tools = api.tools("get_date")
                assert (await api.ask(trial, session, 64, stream=stream, tools=tools)).status == 200
                asked = [orjson.loads(each.body) for each in worker.requests[before:]]
                assert len(asked) == 3
                assert all(each.get("return_meta_info") for each in asked if each.get("return_sampling_mask"))
                (sample,) = await trial.samples(session)
                assert sets(sample["sampling_mask"]) == [[each] for each in sample["tokens"]]
                assert sample["sampling_logprobs"] == [-0.5 * each for each in sample["loss_mask"]]


async def test_an_engine_without_masks_refuses_a_turn_unsampled(stage: Stage) -> None:
    async with SimulatedVLLM(checkpoint()).running() as vllm, simulated_sessions(stage, **by_ids(4096)) as jax:
        router = await stage.router(vllm.url, middlewares=(MiddlewareSpec(SESSIONS),), hf_checkpoint=checkpoint())
        for trial, sampled in ((SessionTrial(router, []), vllm.sampled), (jax, jax.worker.log.at("/generate"))):
            for path in (CHAT, MESSAGES, RESPONSES):
                for stream in (False, True):
                    with case(trial is jax, path, stream):
                        answer = await Api(path).ask(trial, await trial.create(contract=CONTRACT), 4, stream=stream)
                        assert (answer.status, sampled) == (501, [])
                        assert b"does not support return_sampling_mask" in answer.body


async def test_what_does_not_tell_masks_refuses_them_by_name(stage: Stage) -> None:
    async with cuttable(stage) as (trial, _):
        session = await trial.create(contract=CONTRACT)
        answer = await Api(COMPLETIONS).ask(trial, session, 4)
        assert answer.status == 400
        assert b"return_sampling_mask" in answer.body
        refused = await trial.turn(await trial.create(), [user("Hi")], return_sampling_mask=True)
        assert refused.status == 400, "the engine needs top_k"
        assert b"top_k" in refused.body
        for sampling in ({"return_sampling_mask": 1}, {"return_sampling_mask": True, "top_k": -1}):
            wrong = await trial.ask("POST", "/sessions", {"contract": {"sampling": sampling}})
            assert wrong.status == 400
            assert b"return_sampling_mask" in wrong.body
        greedy = await trial.create(contract={"sampling": {**CONTRACT["sampling"], "top_k": -1, "temperature": 0}})
        assert (await Api(CHAT).ask(trial, greedy, 4)).status == 200
