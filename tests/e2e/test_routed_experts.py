"""RoutedExpertsMiddleware and `/generate`, over real sockets: whose rows are captured, and asked for once; held against
what the worker's engine has generated, never against what the router says of itself."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import pytest
from aiohttp import web

from miles_router.errors import ConfigError
from miles_router.settings.config import MiddlewareSpec
from miles_router.testing import SimulatedWorker
from miles_router.testing.tiny_tokenizer import build
from miles_router.testing.worker.model.moe import encode_routes
from tests.support.brake import Brake
from tests.support.cache_trial import CACHE, checkpoint, events
from tests.support.cuts import cut, lose
from tests.support.experts_trial import (
    ASKED,
    EXPERTS,
    HI,
    MOE,
    SHAPE,
    SHORT,
    ExpertsTrial,
    all_kept,
    compact,
    episode,
    event_of,
    experts_of,
    experts_trial,
    generated,
    in_one,
    simulated_experts,
    tokens_of,
    told,
    truth,
)
from tests.support.generations import Generating
from tests.support.http import ask
from tests.support.recording_proxy import Exchange, RecordingProxy
from tests.support.scripted_chat import DONE, EVENT_STREAM, JSON, able, chat_reply, meta_of
from tests.support.scripted_worker import LAST_CHUNK, chunk, chunked_head, script
from tests.support.session_apis import BOTH, case
from tests.support.session_trial import CHAT, SESSIONS, message_of, user
from tests.support.stage import Stage, staged
from tests.support.under_way import under_way
from tests.support.waiting import until

FIELD = b"routed_experts"
COMPLETIONS = "/v1/completions"


@pytest.fixture(scope="module")
async def shared() -> AsyncIterator[ExpertsTrial]:
    async with staged() as stage, simulated_experts(stage, around=(SESSIONS, CACHE)) as made:
        yield made


@pytest.fixture
def trial(shared: ExpertsTrial) -> ExpertsTrial:
    """Sessions and the cache with a keeper of experts behind them; of no test alone, but for its proxy."""
    shared.worker.log.clear()
    return shared


# Shapes of requests

SHAPES: dict[str, dict[str, Any]] = {
    "a text": {"text": "Question: one?"},
    "ids": {"input_ids": [40, 41, 42]},
    "texts": {"text": ["one", "and two", "and three"]},
    "lists of ids": {"input_ids": [[40, 41, 42], [43]]},
    "several samples": {"text": "one", "sampling_params": {**SHORT, "n": 3}},
    "several samples of texts": {"text": ["one", "and two"], "sampling_params": {**SHORT, "n": 3}},
    "one token": {"text": "one", "sampling_params": {**SHORT, "max_new_tokens": 1}},
    "a list of one": {"text": ["one"]},
}


async def test_the_request_is_asked_in_addition_to_what_it_asks(stage: Stage) -> None:
    async with simulated_experts(stage) as trial:
        for raw in (
            b' {"text":"one"}\n ',
            b'{\n"sampling_params": {},"text":"one"\n}',
            b'{"text":"one", "return_routed_experts": false}',
            b'{"text":"one", "routed_experts_start_len": 2}',
        ):
            with case(raw):
                answer = await trial.post("/generate", raw)
                assert (answer.status, FIELD in answer.body) == (200, False)
                want = {**json.loads(raw), "return_routed_experts": True, "routed_experts_start_len": 0}
                assert trial.worker.log.at("/generate")[-1].json() == want


async def test_what_is_no_request_is_refused_in_the_words_of_the_worker(stage: Stage) -> None:
    async with simulated_experts(stage) as trial:
        for raw in [b"{}", b"[1]", b"7", b'{"text": ', b'{"text": 7}', b""]:
            with case(raw):
                through = await trial.post("/generate", raw)
                direct = await ask(trial.worker.url, "POST", "/generate", JSON, raw)
                assert direct.status == 400
                assert (through.status, through.body) == (400, direct.body)
                assert (trial.held["generations"], trial.held["missing"]) == (0, {})


async def test_what_generates_nothing_passes_as_it_is(trial: ExpertsTrial) -> None:
    for path in (CHAT, COMPLETIONS):  # outside of sessions nobody holds what they generate
        body = {"model": "m", "messages": HI, "prompt": "Hi", "max_tokens": 4}
        assert (await trial.post(path, {**body, "return_routed_experts": True})).json()["sglext"].keys() == {
            "routed_experts"
        }
        assert FIELD not in (await trial.post(path, body)).body
        assert [each.json().keys() & {"return_routed_experts"} for each in trial.worker.log.at(path)] == [
            {"return_routed_experts"},
            set(),
        ]


# Clients that ask for rows themselves

PARTS = [
    {**generated([7], None), "text": "o", "meta_info": {"id": "r1", "finish_reason": None, "weight_version": "1"}},
    generated([7, 8], told([7, 8]), output_token_logprobs=[[-0.5, 7, None], [-0.5, 8, None]]),
]


@pytest.mark.parametrize("around", [(), (CACHE,)], ids=["alone", "behind the cache"])
@pytest.mark.parametrize("cut", [1, 100])
@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_asks_gets_every_byte_as_the_worker_sent_it(
    stage: Stage, around: Sequence[str], cut: int, stream: bool
) -> None:
    # Spaces, an escaped name and the order of fields: nothing is written anew.
    spaced = json.dumps({**PARTS[1], "odd": 'é\\"routed_experts": "AAAA"', "x": {"routed_experts_": "A"}}).encode()
    whole = b"".join([event_of(PARTS[0]), b"data: " + spaced + b"\n\n", DONE]) if stream else spaced + b"\n"
    head = chunked_head(EVENT_STREAM if stream else JSON)
    pieces = [chunk(whole[at : at + cut]) for at in range(0, len(whole), cut)]
    worker = (await stage.worker()).always(script(head, *pieces, LAST_CHUNK))
    trial = await experts_trial(stage, worker, around=around)
    asked = {**ASKED, "stream": stream, "return_logprob": True, "return_routed_experts": True}
    answer = await trial.post("/generate", asked)
    assert (answer.status, answer.body) == (200, whole)
    assert json.loads(worker.requests[-1].body) == asked
    assert np.array_equal(await trial.rows(rid="r1"), truth([*ASKED["input_ids"], 7, 8]))


@pytest.mark.parametrize("place", ["first", "last", "only"])
async def test_the_field_may_stand_anywhere(stage: Stage, place: str) -> None:
    meta = {"id": "r1", "finish_reason": {"type": "stop"}, "prompt_tokens": 3, "completion_tokens": 2}
    experts = {"routed_experts": told([7, 8])}
    placed = {"first": {**experts, **meta}, "last": {**meta, **experts}, "only": experts}[place]
    worker = (await stage.worker()).always(script(in_one({"meta_info": placed, "text": "ok"})))
    trial = await experts_trial(stage, worker)
    answer = await trial.post("/generate", ASKED)
    assert answer.body == compact({"meta_info": {} if place == "only" else meta, "text": "ok"})
    assert trial.held["generations"] == (place != "only"), "an id and the lengths are needed to keep them"


async def test_events_are_given_on_as_they_come(stage: Stage) -> None:
    gate = asyncio.Event()
    worker = await stage.worker()
    last = event_of(PARTS[1])
    steps = (chunk(event_of(PARTS[0])), gate, chunk(last[:200]), chunk(last[200:]), chunk(DONE), LAST_CHUNK)
    worker.always(script(chunked_head(EVENT_STREAM), *steps))
    trial = await experts_trial(stage, worker)
    for asks in (False, True):
        gate.clear()
        async with await stage.client(trial.router) as client:
            body = compact({**ASKED, "stream": True, "return_routed_experts": asks})
            head = f"POST /generate HTTP/1.1\r\nHost: a\r\nContent-Length: {len(body)}\r\n\r\n".encode()
            await client.send(head + body)
            await client.read_head("POST")
            assert await client.read_part() == event_of(PARTS[0])
            assert trial.held["answers"] == asks, "the last has not come yet"
            gate.set()
            rest = b""
            while not rest.endswith(DONE):
                rest += await client.read_part()
            assert (FIELD in rest) == asks


@pytest.mark.parametrize("way", ["whole", "cumulative", "incremental"])
@pytest.mark.parametrize("around", [(), (CACHE,)], ids=["alone", "behind the cache"])
async def test_all_rows_are_kept_and_told_to_clients_that_asked_for_them(
    stage: Stage, around: Sequence[str], way: str
) -> None:
    async with simulated_experts(stage, around=around, incremental_streaming_output=way == "incremental") as trial:
        for (name, shape), asks in itertools.product(SHAPES.items(), BOTH):
            with case(name, asks):
                trial.worker.log.clear()
                own = {"return_routed_experts": True} if asks else {}
                body = {"sampling_params": SHORT, **shape, "stream": way != "whole", **own}
                answer = await trial.post("/generate", body)
                seen = answer.json() if way == "whole" else events(answer.body)
                metas = [each["meta_info"] for each in (seen if isinstance(seen, list) else [seen])]
                found = {meta["id"]: meta.get("routed_experts") for meta in metas if meta["finish_reason"] is not None}
                generations = trial.generations("/generate")
                assert found == {
                    each.rid: encode_routes(truth(tokens_of(each))) if asks else None for each in generations
                }
                assert (FIELD in answer.body) is asks
                await all_kept(trial)
        assert trial.held["missing"] == {}


@pytest.mark.parametrize("around", [(), (CACHE,)], ids=["alone", "behind the cache"])
@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_s_own_first_row_leaves_a_gap_that_is_named(
    stage: Stage, around: Sequence[str], stream: bool
) -> None:
    async with simulated_experts(stage, around=around) as trial:
        own = {"return_routed_experts": True, "routed_experts_start_len": 4, "rid": "mine"}
        body = {"text": "Question: one?", "sampling_params": SHORT, "stream": stream, **own}
        answer = await trial.post("/generate", body)
        said = events(answer.body)[-1] if stream else answer.json()
        tokens = tokens_of(trial.generations()[-1])
        assert said["meta_info"]["routed_experts"] == encode_routes(truth(tokens, 4))
        assert np.array_equal(await trial.rows(rid="mine", start=4), truth(tokens, 4))
        assert np.array_equal(await trial.rows(rid="mine", start=6, stop=8), truth(tokens)[6:8])
        for start in (0, 3):
            status, error, message = await trial.refused(rid="mine", start=start)
            assert (status, error) == (404, "not_found")
            assert f"{start} to 3" in message
        # What the gap is in is asked for from its beginning.
        await trial.generate(input_ids=[*tokens, 40], rid="next")
        assert trial.starts("/generate")[-1] == 0
        assert np.array_equal(await trial.rows(rid="next"), truth(tokens_of(trial.generations()[-1])))


# Where it is listed, and what it is told

ORDERS = [
    ((EXPERTS, CACHE), "list it after"),
    ((EXPERTS, SESSIONS), "list it after"),
    ((SESSIONS, EXPERTS, CACHE), "list it after"),
    ((EXPERTS, SESSIONS, CACHE), "list it after"),
    ((SESSIONS, CACHE, EXPERTS, EXPERTS), "twice"),
    ((EXPERTS, EXPERTS), "twice"),
    ((EXPERTS, CACHE, EXPERTS), "twice|list it after"),
]


async def test_a_keeper_in_the_wrong_place_stops_the_start(stage: Stage) -> None:
    for order, says in ORDERS:
        with case(order, says), pytest.raises(ConfigError, match=f"routed_experts.*({says})"):
            await stage.router(middlewares=[MiddlewareSpec(path, {}) for path in order], hf_checkpoint=checkpoint())


async def test_a_shape_that_is_none_stops_the_start(stage: Stage) -> None:
    for shape in [
        "48x128",
        "48x128x8x1",
        "0x8x2",
        "4x0x2",
        "4x8x0",
        "4x8x9",
        "-4x8x2",
        "fourx8x2",
        "4x70000x2",
        "4*8*2",
        "x",
    ]:
        with case(shape), pytest.raises(ConfigError, match="moe_shape"):
            await experts_trial(stage, options={"moe_shape": shape})


SENSELESS: list[dict[str, Any]] = [{"max_bytes": 0}, {"max_bytes": -1}, {"shape": SHAPE}]


async def test_options_that_make_no_sense_stop_the_start(stage: Stage) -> None:
    for options in SENSELESS:
        with case(options), pytest.raises(ConfigError, match="routed_experts"):
            await experts_trial(stage, options=options)


TOLD: list[dict[str, Any]] = [
    {"num_hidden_layers": 3, "num_experts_per_tok": 2, "num_experts": 40},
    {"num_hidden_layers": 3, "num_experts_per_tok": 2, "n_routed_experts": 40},
    {"num_hidden_layers": 3, "num_experts_per_tok": 2, "num_local_experts": 40},
    {"num_hidden_layers": 9, "text_config": {"num_hidden_layers": 3, "num_experts_per_tok": 2, "num_experts": 40}},
]


@pytest.mark.parametrize("config", TOLD, ids=[str(number) for number in range(len(TOLD))])
async def test_the_checkpoint_tells_the_shape(stage: Stage, tmp_path: Path, config: dict[str, Any]) -> None:
    build(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(config))
    async with simulated_experts(stage, options={}, settings={"hf_checkpoint": str(tmp_path)}) as trial:
        assert trial.held["shape"] == {"layers": 3, "top_k": 2, "experts": 40}
        await trial.generate(text="Question: one?", rid="one")
        await all_kept(trial)
        assert (await trial.rows(rid="one")).shape[1:] == (3, 2)


async def test_what_the_operator_says_goes_before_the_checkpoint(stage: Stage, tmp_path: Path) -> None:
    build(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"num_hidden_layers": 6, "num_experts_per_tok": 1}))
    async with simulated_experts(stage, settings={"hf_checkpoint": str(tmp_path)}) as trial:
        await trial.generate(text="Question: one?")
        await all_kept(trial)


# Sessions


async def test_completions_in_a_session_have_their_rows(trial: ExpertsTrial) -> None:
    session = await trial.create()
    path = f"/sessions/{session}{COMPLETIONS}"
    assert (await trial.post(path, {"model": "m", "prompt": "Once upon", "max_tokens": 5})).status == 200
    tokens = tokens_of(trial.generations(COMPLETIONS)[-1])
    asked = {"model": "m", "prompt": [*tokens, 40, 41], "max_tokens": 5, "stream": True}
    answer = await trial.post(path, asked)
    assert answer.body.endswith(DONE)
    assert FIELD not in answer.body
    assert trial.starts(COMPLETIONS) == [0, len(tokens) - 1]
    (sample,) = await trial.exact(session)
    assert sample["tokens"] == tokens_of(trial.generations(COMPLETIONS)[-1])


@pytest.mark.parametrize("fields", [{"prompt": ["Once upon", "a time"]}, {"prompt": "Once upon", "n": 2}])
async def test_of_several_streamed_completions_the_engine_does_not_say_whose_rows_it_tells(
    trial: ExpertsTrial, fields: dict[str, Any]
) -> None:
    session = await trial.create()
    body = {"model": "m", "max_tokens": 5, "stream": True, **fields}
    assert (await trial.post(f"/sessions/{session}{COMPLETIONS}", body)).status == 200
    samples = await trial.samples(session)
    assert len(samples) == 2
    for sample in samples:
        assert "routed_experts" not in sample
        assert "of several completions" in sample["metadata"]["routed_experts_missing"]
    (asked,) = [exchange.json() for exchange in trial.worker.log.at(COMPLETIONS)]
    assert "return_routed_experts" not in asked


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("path", "fields"), [(CHAT, {}), (CHAT, {"n": 2}), (COMPLETIONS, {})], ids=["chat", "choices", "completion"]
)
async def test_an_agent_that_asks_for_rows_gets_none_and_leaves_no_gap(
    trial: ExpertsTrial, path: str, stream: bool, fields: dict[str, Any]
) -> None:
    session = await trial.create()
    body = {"model": "m", "messages": HI, "prompt": "Hi", "max_tokens": 6, "stream": stream, **fields}
    asks = {"return_routed_experts": True, "routed_experts_start_len": 3, "return_meta_info": not stream}
    answer = await trial.post(f"/sessions/{session}{path}", {**body, **asks})
    assert answer.status == 200
    assert FIELD not in answer.body
    assert await trial.exact(session)


async def test_a_stream_that_is_made_of_a_whole_answer_has_its_rows(stage: Stage) -> None:
    worker = able(await stage.worker(), "messages")  # an engine that cannot stream ids
    trial = await experts_trial(stage, worker, around=(SESSIONS,))
    worker.next(script(chat_reply([7, 8], meta_info=meta_of([7, 8], routed_experts=told([7, 8])))))
    session = await trial.create()
    assert await trial.stream(session, HI)
    assert not json.loads(worker.requests[-1].body).get("stream")
    assert len(await trial.exact(session)) == 1


async def test_a_sample_that_is_cut_has_the_rows_of_what_is_left(trial: ExpertsTrial) -> None:
    session = await trial.create()
    await episode(trial, session, 3)
    (whole,) = await trial.exact(session)
    first, second, third = whole["metadata"]["turns"]
    for length in (first["start"] + 1, first["end"], second["start"] + 3, second["end"], third["end"] - 1):
        (sample,) = await trial.exact(session, max_seq_len=length)
        assert len(sample["tokens"]) == length
        assert len(experts_of(sample)) == length - 1


# Aborts and pauses


@pytest.mark.parametrize("stream", [False, True])
async def test_a_turn_asks_for_the_rows_behind_each_cut_alone(stage: Stage, stream: bool) -> None:
    settings = {"partial_rollout": "resume"}
    async with simulated_experts(stage, around=(SESSIONS,), settings=settings, token_latency_s=0.0002) as trial:
        session, brake = await trial.create(), Brake(trial.worker.engine)
        async with under_way(trial.turn(session, HI, max_tokens=40, ignore_eos=True, stream=stream)) as turn:
            for version, tokens in (("2", 5), ("3", 8)):
                await cut(trial, brake, tokens, version)
            assert (await turn).status == 200
        (sample,) = await trial.exact(session)
        first, second, third = trial.generations(CHAT)
        assert sample["tokens"] == tokens_of(third)
        assert trial.starts(CHAT) == [0, len(tokens_of(first)) - 1, len(tokens_of(second)) - 1]


@pytest.mark.alone("its worker comes back within a step of the test's loop")
@pytest.mark.parametrize("tokens", [0, 1, 9])
async def test_a_stream_whose_worker_was_lost_has_all_its_rows(stage: Stage, tokens: int) -> None:
    settings = {"resume_on_worker_loss": True, "max_retries": 3}
    async with simulated_experts(stage, around=(SESSIONS,), settings=settings, token_latency_s=0.0002) as trial:
        session, brake = await trial.create(), Brake(trial.worker.engine)
        history = [*HI, message_of(await trial.chat(session, HI)), user("Go on")]
        brake.when = lambda generation: len(generation.output_ids) >= tokens
        async with under_way(trial.stream(session, history, max_tokens=12, ignore_eos=True)) as turn:
            await until(lambda: brake.on, "it has sampled so many")
            await lose(trial, brake)
            await turn
        (sample,) = await trial.exact(session)
        assert sample["loss_mask"][-12:] == [1] * 12


class EndsEarly(RecordingProxy):
    """Breaks chat streams off before they say that they end."""

    async def _answer(
        self, request: web.BaseRequest, exchange: Exchange, reply: aiohttp.ClientResponse, generating: Generating
    ) -> web.StreamResponse:
        if exchange.path != CHAT:
            return await super()._answer(request, exchange, reply, generating)
        answer = web.StreamResponse(headers={"Content-Type": reply.content_type})
        await answer.prepare(request)
        async for line in reply.content:
            if b'"finish_reason":"' in line:
                assert request.transport is not None
                request.transport.abort()
                break
            await answer.write(line)
        return answer


async def test_a_stream_that_was_lost_at_its_end_asks_for_its_rows_alone(stage: Stage) -> None:
    layers = (MiddlewareSpec(SESSIONS), MiddlewareSpec(EXPERTS, {"moe_shape": SHAPE}))
    async with (
        SimulatedWorker(moe=MOE, tokenizer=checkpoint(), weight_version="1") as worker,
        EndsEarly(worker.url) as proxy,
    ):
        settings: dict[str, Any] = {"hf_checkpoint": checkpoint(), "resume_on_worker_loss": True}
        trial = ExpertsTrial(await stage.router(proxy.url, middlewares=layers, **settings), [worker])
        session = await trial.create()
        await trial.stream(session, HI, max_tokens=12, ignore_eos=True)
        (sample,) = await trial.exact(session)
        assert sample["loss_mask"][-12:] == [1] * 12
        chat, rows = [each for each in worker.log if each.generations][-2:]
        assert (chat.path, rows.path) == (CHAT, "/generate")
        asked = rows.json()
        assert asked["sampling_params"]["max_new_tokens"] == 0
        assert asked["input_ids"] == sample["tokens"]
