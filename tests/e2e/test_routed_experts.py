"""RoutedExpertsMiddleware and `/generate`, over real sockets: whose rows are captured, and asked for once; held against
what the worker's engine has generated, never against what the router says of itself."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from miles_router.errors import ConfigError
from miles_router.settings.config import MiddlewareSpec
from miles_router.testing.tiny_tokenizer import build
from miles_router.testing.worker.model.moe import MoeShape, encode_routes
from tests.support.cache_trial import CACHE, checkpoint, events
from tests.support.experts_trial import (
    ASKED,
    EXPERTS,
    HI,
    MOE,
    SHAPE,
    SHORT,
    WIDTH,
    ExpertsTrial,
    all_kept,
    array_of,
    compact,
    event_of,
    experts_trial,
    generated,
    in_one,
    simulated_experts,
    tokens_of,
    told,
    truth,
)
from tests.support.http import ask
from tests.support.scripted_chat import DONE, EVENT_STREAM, JSON
from tests.support.scripted_worker import LAST_CHUNK, chunk, chunked_head, script
from tests.support.session_apis import BOTH, case
from tests.support.session_trial import CHAT, SESSIONS
from tests.support.stage import Stage, staged

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


@pytest.fixture
async def cached(stage: Stage) -> AsyncIterator[ExpertsTrial]:
    async with simulated_experts(stage, around=(CACHE,)) as made:
        yield made


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


# What is held is not asked for again


@pytest.mark.parametrize("stream", [False, True])
async def test_a_prompt_that_goes_on_is_asked_for_its_new_rows_alone(cached: ExpertsTrial, stream: bool) -> None:
    text = "Question: one?"
    held = 0
    for turn in range(4):
        answer = await cached.post("/generate", {"text": text, "sampling_params": SHORT, "stream": stream})
        said = events(answer.body)[-1]["text"] if stream else answer.json()["text"]
        generation = cached.generations("/generate")[-1]
        assert cached.starts("/generate")[-1] == held, "all rows of the turn before, its last token has none"
        held = len(tokens_of(generation)) - 1
        delivered = await cached.deliver(text=text + said)
        assert np.array_equal(array_of(delivered), truth(tokens_of(generation)))
        assert delivered.value("x-rid") == generation.rid.encode()
        text += f"{said}\nand {turn}?"
    await all_kept(cached)
    assert cached.held["transferred_rows"] == held, "each came once"
    assert cached.held["bytes"] == held * WIDTH, "and is held once"
    assert cached.held["reused_rows"] == sum(cached.starts("/generate"))


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


@pytest.mark.parametrize("moe", [MOE, MoeShape(4, 64, 8), MoeShape(7, 300, 3)], ids=str)
async def test_where_nobody_tells_the_shape_rows_are_flat(stage: Stage, moe: MoeShape) -> None:
    async with simulated_experts(stage, around=(SESSIONS,), moe=moe, options={}) as trial:
        for rid, ids in (("short", [40]), ("long", [40, 41, 42])):
            await trial.generate(input_ids=ids, rid=rid)
            want = truth(tokens_of(trial.worker.log.generation(rid)), moe=moe)
            assert np.array_equal(await trial.rows(rid=rid), want.reshape(len(want), -1))
            spelled = (await trial.deliver(rid=rid, format="json")).json()
            assert spelled["shape"] == [len(want), moe.layers * moe.top_k]
            assert spelled["routed_experts"] == encode_routes(want)
        session = await trial.create()
        await trial.chat(session, HI)
        (sample,) = await trial.samples(session)
        want = truth(sample["tokens"], moe=moe)
        assert "moe_shape" in sample["metadata"]["routed_experts_missing"], "what is trained on has its dimensions"
        assert np.array_equal(await trial.rows(session_id=session), want.reshape(len(want), -1))
        assert trial.held["shape"] is None


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
