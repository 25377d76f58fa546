"""Prefill/decode pairs: one request to two workers, and the one exact answer that they make; sessions and expert rows
above them."""

from __future__ import annotations

import base64
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import numpy as np
import orjson
import pytest

from miles_router.tasks import spawn
from miles_router.testing import SimulatedWorker
from miles_router.testing.worker.exchange_log import GenerationRecord
from miles_router.testing.worker.model.moe import route
from tests.support.cache_trial import CACHE, checkpoint
from tests.support.events import events_of
from tests.support.experts_trial import HI, ExpertsTrial, episode, experts_trial
from tests.support.pairs import JSON, MOE, PROMPT, SHORT, TELLING, Halves, halves
from tests.support.session_trial import CHAT, SESSIONS, exactly, message_of, qwen3, session_trial, user
from tests.support.simulated.half_worker import HalfWorker
from tests.support.simulated.pairing import Pairing
from tests.support.stage import Stage
from tests.support.tokenizers import tokenizer_directory
from tests.support.under_way import under_way
from tests.support.waiting import until

whole_and_streamed = pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
ROOM = ("bootstrap_host", "bootstrap_port", "bootstrap_room")


def rows_of(answer: Any) -> Any:
    return np.frombuffer(base64.b64decode(answer["meta_info"]["routed_experts"]), np.int32).reshape(-1, 3, 2)


def check(pair: Halves, answer: Any, stream: bool = False) -> None:
    """An answer is what the decode half sampled."""
    truth = pair.truth()
    assert answer["output_ids"] == truth.output_ids
    assert answer["text"] == truth.text
    assert len(answer["output_ids"]) == SHORT["max_new_tokens"]


@whole_and_streamed
async def test_both_halves_are_asked_the_same_and_decode_answers(stage: Stage, stream: bool) -> None:
    async with halves(stage) as pair:
        for _ in range(3):
            check(pair, await pair.answer(stream=stream))
        ours = pair.asked(pair.prefill)
        assert ours == pair.asked(pair.decode)
        assert [{name: each[name] for name in ROOM[:2]} for each in ours] == [
            {"bootstrap_host": "127.0.0.1", "bootstrap_port": pair.prefill.pairing.port}
        ] * 3
        assert len({each["bootstrap_room"] for each in ours}) == 3
        without = [{name: value for name, value in each.items() if name not in ROOM} for each in ours]
        assert without == [{"input_ids": PROMPT, "sampling_params": SHORT, "stream": stream}] * 3


async def test_a_body_is_not_touched_but_for_the_room_behind_it(stage: Stage) -> None:
    async with halves(stage) as pair:
        body = b'{ "input_ids" :[5, 6],"sampling_params":{"max_new_tokens":2} , "odd":1e2}'
        reply = await pair.router.ask("POST", "/generate", [("Content-Type", "application/json")], body)
        assert reply.status == 200
        (seen,) = pair.decode.log.at("/generate")
        assert seen.body.startswith(body[:-1] + b',"bootstrap_host":"127.0.0.1"')


@whole_and_streamed
async def test_prompts_of_a_list_meet_in_rooms_of_their_own(stage: Stage, stream: bool) -> None:
    async with halves(stage) as pair:
        reply = await pair.generate(input_ids=[PROMPT, PROMPT[:2], PROMPT], stream=stream)
        assert reply.status == 200, reply.body
        told = [generation.output_ids for generation in pair.decode.log.generations]
        if stream:
            ends = {event["index"]: event["output_ids"] for event in events_of(reply.body)}
            assert [ends[index] for index in range(3)] == told
        else:
            assert [answer["output_ids"] for answer in reply.json()] == told


@whole_and_streamed
async def test_logprobs_of_the_output_and_of_the_prompt(stage: Stage, stream: bool) -> None:
    asked = {"return_logprob": True, "logprob_start_len": 0, "top_logprobs_num": 2, "token_ids_logprob": [9, 10]}
    async with halves(stage) as pair, SimulatedWorker() as alone:
        answer = await pair.answer(stream=stream, **asked)
        check(pair, answer)
        router = await stage.router(alone.url)
        alone.say(answer["output_ids"])
        body = orjson.dumps({"input_ids": PROMPT, "sampling_params": SHORT, **asked})
        plain = await router.ask("POST", "/generate", JSON, body)
        logprobs = {name: each for name, each in plain.json()["meta_info"].items() if "logprobs" in name}
        assert len(logprobs) == 7
        assert len(logprobs["input_token_logprobs"]) == len(PROMPT)
        assert {name: answer["meta_info"][name] for name in logprobs} == logprobs


@whole_and_streamed
@pytest.mark.parametrize("start", [0, 2, len(PROMPT)])
async def test_expert_rows_of_the_prompt_and_of_the_output(stage: Stage, stream: bool, start: int) -> None:
    async with halves(stage, worker=TELLING) as pair:
        await pair.answer(input_ids=[9, 8, 7])
        answer = await pair.answer(stream=stream, return_routed_experts=True, routed_experts_start_len=start)
        check(pair, answer)
        assert np.array_equal(rows_of(answer), route(MOE, [*PROMPT, *answer["output_ids"]], start))


@whole_and_streamed
async def test_chat(stage: Stage, stream: bool) -> None:
    async with halves(stage) as pair:
        said: dict[str, Any] = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 6, "stream": stream}
        reply = await pair.post("/v1/chat/completions", model="m", **said)
        assert reply.status == 200, reply.body
        if stream:
            deltas = [chunk["choices"][0]["delta"].get("content") for chunk in events_of(reply.body)]
            text = "".join(filter(None, deltas))
        else:
            text = reply.json()["choices"][0]["message"]["content"]
        assert text == pair.truth().text
        assert pair.asked(pair.prefill, "/v1/chat/completions") == pair.asked(pair.decode, "/v1/chat/completions")


async def test_what_does_not_generate_goes_to_one_worker(stage: Stage) -> None:
    async with halves(stage) as pair:
        for path, body in (("/v1/tokenize", {"prompt": "Hi"}), ("/v1/detokenize", {"tokens": [5]})):
            assert (await pair.post(path, **body)).status == 200
            assert len(pair.prefill.log.at(path)) + len(pair.decode.log.at(path)) == 1
        assert (await pair.router.ask("GET", "/v1/models")).status == 200


async def test_what_a_pair_would_answer_otherwise_is_refused_by_name(stage: Stage) -> None:
    async with halves(stage) as pair:
        messages = [{"role": "user", "content": "Hi"}]
        for path, body in (
            ("/v1/chat/completions", {"messages": messages, "n": 2}),
            ("/v1/chat/completions", {"messages": messages, "return_routed_experts": True}),
            ("/v1/completions", {"prompt": "Hi", "echo": True, "logprobs": 1}),
            ("/api/generate", {"prompt": "Hi"}),
        ):
            reply = await pair.post(path, **body)
            assert (reply.status, reply.error_type) == (501, "unsupported_by_engine"), reply.body
        assert not pair.decode.log.generations


async def test_halves_that_join_by_the_gateways_route_serve(stage: Stage) -> None:
    router = await stage.router()
    async with (
        HalfWorker(Pairing("prefill")) as prefill,
        HalfWorker(Pairing("decode")) as decode,
    ):
        for half in (prefill, decode):
            role, port = (half.registration.get(name) for name in ("worker_type", "bootstrap_port"))
            said = {"url": half.url, "worker_type": role, **({} if port is None else {"bootstrap_port": int(port)})}
            answer = await router.ask("POST", "/workers", JSON, orjson.dumps(said))
            assert answer.status == 201, answer.body
        body = orjson.dumps({"input_ids": PROMPT, "sampling_params": SHORT})
        answer = await router.ask("POST", "/generate", JSON, body)
        assert answer.status == 200, answer.body
        assert answer.json()["output_ids"] == decode.log.generations[-1].output_ids
        assert len(prefill.log.at("/generate")) == 1


@pytest.mark.alone("idle workers take turns in each process")
async def test_both_halves_have_fewest_in_flight(stage: Stage) -> None:
    async with halves(stage, 2, 2) as pair:
        for _ in range(4):
            check_any = await pair.answer()
            assert len(check_any["output_ids"]) == 6
        assert [len(worker.log.at("/generate")) for worker in pair.workers] == [2, 2, 2, 2]


async def test_a_key_keeps_its_decode_half_and_its_prefill_half(stage: Stage) -> None:
    async with halves(stage, 2, 2) as pair:
        body = orjson.dumps({"input_ids": PROMPT, "sampling_params": SHORT})
        headers = [("Content-Type", "application/json"), ("X-SMG-Routing-Key", "k")]
        for _ in range(4):
            assert (await pair.router.ask("POST", "/generate", headers, body)).status == 200
        assert sorted(len(worker.log.at("/generate")) for worker in pair.prefills) == [0, 4]
        assert sorted(len(worker.log.at("/generate")) for worker in pair.decodes) == [0, 4]


# Ranks and pools


async def test_a_half_with_ranks_is_one_unit_whose_engine_chooses_the_rank(stage: Stage) -> None:
    """Where the prompt is, the decode half finds by the room; a pin to a rank would lead it astray."""
    async with halves(stage, worker={"dp_size": 2}) as pair:
        for stream in (False, True) * 4:
            check(pair, await pair.answer(stream=stream))
        for exchange in pair.prefill.log.at("/generate"):
            assert exchange.generation.dp_rank == exchange.json()["bootstrap_room"] % 2
        shown = (await pair.router.ask("GET", "/workers")).json()["workers"]
        assert not any("ranks" in each for each in shown)
        assert not any("routed_dp_rank" in body for worker in pair.workers for body in pair.asked(worker))


@pytest.mark.parametrize("headers", [[], [("X-Data-Parallel-Rank", "1")]], ids=["by a field", "by a header"])
async def test_who_wants_a_rank_is_not_sent_to_a_pair(stage: Stage, headers: list[tuple[str, str]]) -> None:
    wish = {} if headers else {"routed_dp_rank": 1}
    body = orjson.dumps({"input_ids": PROMPT, "sampling_params": SHORT, **wish})
    async with halves(stage) as pair, SimulatedWorker(dp_size=2) as ranked:
        refused = await pair.router.ask("POST", "/generate", [*JSON, *headers], body)
        assert (refused.status, refused.error_type) == (501, "unsupported_by_engine")
        await pair.router.ask("POST", f"/add_worker?url={ranked.url}")
        await until(lambda: not pair.router.leftovers(), "the first probes are over")
        for _ in range(4):
            assert (await pair.router.ask("POST", "/generate", [*JSON, *headers], body)).status == 200
        assert [each.dp_rank for each in ranked.log.generations] == [1] * 4
        assert not pair.decode.log.generations


async def test_the_halves_of_a_pair_are_of_one_model(stage: Stage) -> None:
    router = await stage.router()
    async with (
        halves(stage, router=router, attributes={"model_id": "actor"}, worker={"weight_version": "1"}) as actor,
        halves(stage, router=router, attributes={"model_id": "judge"}, worker={"weight_version": "2"}) as judge,
    ):
        for model, pair, version in (("judge", judge, "2"), ("actor", actor, "1")) * 3:
            answer = await pair.answer(model=model)
            check(pair, answer)
            assert answer["meta_info"]["weight_versions"] == [{"version": version, "start": 0, "end": 6}]
        assert [len(worker.log.at("/generate")) for worker in (*actor.workers, *judge.workers)] == [3] * 4


async def test_a_role_that_is_none_is_refused_and_nobody_joins(stage: Stage) -> None:
    router = await stage.router()
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"worker_type": "both"}, "worker_type must be one of regular, prefill, decode"),
        ({"worker_type": "prefill"}, "needs its bootstrap_port"),
        ({"worker_type": "prefill", "bootstrap_port": 0}, "bootstrap_port must be a port"),
        ({"worker_type": "decode", "bootstrap_port": True}, "bootstrap_port must be a port"),
        ({"worker_type": ["decode"]}, "worker_type must be one of"),
    ]
    for said, problem in wrong:
        reply = await router.ask("POST", "/workers", JSON, orjson.dumps({"url": "http://127.0.0.1:1", **said}))
        assert (reply.status, len(router.pool)) == (400, 0), said
        assert problem in reply.json()["error"]["message"]


TURN: dict[str, Any] = {"max_tokens": 8}


@asynccontextmanager
async def above(stage: Stage, **settings: Any) -> AsyncIterator[tuple[ExpertsTrial, Halves]]:
    """Sessions, the cache and a keeper of experts before two pairs that sample alike."""
    trial = await experts_trial(stage, around=(SESSIONS, CACHE), **settings)
    worker = {"moe": MOE, "tokenizer": checkpoint(), "weight_version": "1"}
    async with halves(stage, 2, 2, router=trial.router, worker=worker) as pair:
        yield trial, pair


def turns_of(pair: Halves, path: str) -> list[GenerationRecord]:
    """What the decode halves sampled, in the order of its prompts' lengths."""
    told = [record for worker in pair.decodes for exchange in worker.log.at(path) for record in exchange.generations]
    return sorted(told, key=lambda record: len(record.input_ids))


async def test_an_episode_is_exact_with_the_rows_of_every_position(stage: Stage) -> None:
    async with above(stage) as (trial, pair):
        session = await trial.create()
        await episode(trial, session, 5, **TURN)
        (sample,) = await trial.exact(session)
        told = turns_of(pair, CHAT)
        assert len(told) == 5
        exactly(sample, *told)
        busy = [worker for worker in pair.workers if worker.log.at(CHAT)]
        assert len(busy) == 2, "a session keeps its halves"


@pytest.mark.parametrize("mode", ["abort", "retract", "in_place"])
@pytest.mark.parametrize("phase", ["prompt", "output"])
async def test_a_turn_outlives_an_update(stage: Stage, mode: str, phase: str) -> None:
    async with above(stage, partial_rollout="resume") as (trial, pair):
        session = await trial.create()
        history = [*HI, message_of(await trial.chat(session, HI, **TURN)), user("Go on")]
        pair.hold(pair.prefills if phase == "prompt" else pair.decodes)
        turn = spawn(trial.chat(session, history, **TURN), name="an agent")
        await (pair.prefilling() if phase == "prompt" else pair.decoding())
        await pair.post("/pause_generation", mode=mode)
        pair.release()
        await pair.post("/update_weight_version", new_version="2", abort_all_requests=False)
        await pair.post("/continue_generation")
        await turn
        (sample,) = await trial.exact(session)
        sampled = Counter[str]()
        for each in sample["weight_versions"]:
            sampled[each["version"]] += each["end"] - each["start"]
        assert sampled["1"] + sampled["2"] == 16
        assert sampled["2"] == 8 if phase == "prompt" else 0 < sampled["2"] < 8


@pytest.mark.parametrize("lost", ["prefill", "decode"])
async def test_a_streamed_turn_outlives_the_loss_of_a_half(stage: Stage, lost: str) -> None:
    trial = await session_trial(stage, resume_on_worker_loss=True, hf_checkpoint=tokenizer_directory("qwen3"))
    worker = {"tokenizer": qwen3(), "weight_version": "1"}
    async with halves(stage, 2, 2, router=trial.router, worker=worker) as pair:
        session = await trial.create()
        those = pair.prefills if lost == "prefill" else pair.decodes
        pair.hold(those)
        async with under_way(trial.stream(session, HI, max_tokens=20, ignore_eos=True)) as turn:
            await (pair.prefilling() if lost == "prefill" else pair.decoding())
            await next(each for each in those if each.running).kill()
            pair.release()
            await turn
        (sample,) = await trial.samples(session)
        last = turns_of(pair, CHAT)[-1]
        assert sample["tokens"] == [*last.input_ids, *last.output_ids]
        assert sum(sample["loss_mask"]) == 20
