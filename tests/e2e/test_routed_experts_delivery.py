"""`POST /routed_experts`, how long rows are held, and what is missing is said; rows of both kinds, experts and
the positions that attention chose."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load

from miles_router.client import RouterClient
from miles_router.client.errors import NotFound
from miles_router.testing import IndexerShape
from miles_router.testing.worker.model.indexer import choose
from miles_router.testing.worker.model.moe import MoeShape, encode_routes
from tests.support.cache_trial import CACHE
from tests.support.experts_trial import (
    ASKED,
    HI,
    SHAPE,
    SHORT,
    WIDTH,
    ExpertsTrial,
    array_of,
    episode,
    experts_of,
    experts_trial,
    generated,
    in_one,
    simulated_experts,
    tokens_of,
    told,
    truth,
)
from tests.support.scripted_chat import PROMPT
from tests.support.scripted_worker import script
from tests.support.session_apis import case
from tests.support.session_trial import CHAT, SESSIONS, message_of, user
from tests.support.stage import Stage, staged


@pytest.fixture
async def cached(stage: Stage) -> AsyncIterator[ExpertsTrial]:
    async with simulated_experts(stage, around=(CACHE,)) as made:
        yield made


# Delivery


@pytest.mark.parametrize(("experts", "dtype"), [(256, "uint8"), (60_000, "uint16")])
async def test_every_format_says_the_same(stage: Stage, experts: int, dtype: str) -> None:
    moe = MoeShape(5, experts, 3)
    async with simulated_experts(stage, moe=moe, options={"moe_shape": f"5x{experts}x3"}) as trial:
        long = {"max_new_tokens": 200, "ignore_eos": True}
        answer = await trial.generate(text="Question: one?", sampling_params=long)
        (generation,) = trial.generations()
        want = truth(tokens_of(generation), moe=moe)
        rid = answer["meta_info"]["id"]
        raw = await trial.deliver(rid=rid)
        assert (raw.value("x-dtype"), raw.value("x-start")) == (dtype.encode(), b"0")
        assert raw.value("x-rid") == rid.encode()
        assert raw.value("x-shape") == f"{len(want)},5,3".encode()
        assert np.array_equal(array_of(raw), want)
        packed = await trial.deliver(rid=rid, format="safetensors")
        assert packed.value("content-type") == b"application/octet-stream"
        arrays = load(packed.body)
        assert set(arrays) == {"routed_experts"}
        assert (arrays["routed_experts"].dtype.name, arrays["routed_experts"].shape) == (dtype, want.shape)
        assert np.array_equal(arrays["routed_experts"], want)
        spelled = await trial.deliver(rid=rid, format="json")
        assert spelled.value("content-type") == b"application/json"
        assert spelled.json()["routed_experts"] == encode_routes(want), "as the engine itself tells them"
        assert (spelled.json()["shape"], spelled.json()["dtype"]) == ([*want.shape], "int32")


@pytest.mark.parametrize("rid", ["r 1", "é", "a\nb", "x" * 300])
async def test_any_id_may_name_rows(stage: Stage, rid: str) -> None:
    worker = (await stage.worker()).always(script(in_one(generated([7, 8], told([7, 8]), rid=rid))))
    trial = await experts_trial(stage, worker)
    await trial.generate(**ASKED)
    delivered = await trial.deliver(rid=rid)
    assert np.array_equal(array_of(delivered), truth([*ASKED["input_ids"], 7, 8]))
    assert (delivered.value("x-rid") or rid.encode()) == rid.encode()


@pytest.fixture(scope="module")
async def kept() -> AsyncIterator[ExpertsTrial]:
    """A generation "one", and sessions "line" and "tree", of which the second has leaves 0 and 1."""
    async with staged() as stage, simulated_experts(stage, around=(SESSIONS, CACHE)) as made:
        await made.generate(text="Question: one?", rid="one")
        for session, times in (("line", 1), ("tree", 2)):
            await made.create(session)
            for _ in range(times):
                await made.chat(session, HI)
        yield made


async def test_any_range_of_rows_is_delivered(kept: ExpertsTrial) -> None:
    want = truth(tokens_of(kept.worker.log.generation("one")))
    end = len(want)
    for start, stop in [(0, 0), (0, 1), (3, 5), (2, None), (None, 4), (None, None), (end, end)]:
        with case(start, stop):
            part = want[start:stop]
            given = {name: value for name, value in (("start", start), ("stop", stop)) if value is not None}
            raw = await kept.deliver(rid="one", **given)
            assert (raw.value("x-start"), array_of(raw).shape) == (str(start or 0).encode(), part.shape)
            told = (await kept.deliver(rid="one", format="json", **given)).json()
            assert (told["routed_experts"], told["start"]) == (encode_routes(part), start or 0)
            packed = load((await kept.deliver(rid="one", format="safetensors", **given)).body)["routed_experts"]
            for found in (array_of(raw), packed):
                assert np.array_equal(found, part)


async def test_rows_are_delivered_by_whatever_names_them(kept: ExpertsTrial) -> None:
    one = kept.worker.log.generation("one")
    for named in ({"rid": "one"}, {"text": f"Question: one?{one.text}"}):
        assert np.array_equal(await kept.rows(**named), truth(tokens_of(one)))
    first, *_ = await kept.exact("tree")
    for session, fields in (("tree", {"leaf": 0}), ("line", {}), ("line", {"leaf": 0})):
        (sample, *_) = await kept.exact(session)
        assert np.array_equal(await kept.rows(session_id=session, **fields), experts_of(sample))
        rid = (await kept.records(session))[0]["rid"]
        assert np.array_equal(await kept.rows(rid=rid), experts_of(sample))
    assert first["metadata"]["leaf"] == 0


async def test_what_nobody_has_is_not_found(kept: ExpertsTrial) -> None:
    unknown: list[Any] = [{"rid": "two"}, {"rid": ""}, {"text": "Question"}, {"session_id": "other"}]
    for asked in unknown:
        assert (await kept.refused(**asked))[:2] == (404, "not_found"), asked


REFUSED: list[Any] = [
    b"{",
    [],
    {},
    {"rid": None},
    {"rid": "one", "text": "Question: one?"},
    {"rid": "one", "session_id": "line"},
    {"rid": 7},
    {"text": 7},
    {"session_id": ["line"]},
    {"rid": "one", "leaf": 0},
    {"rid": "one", "strict": True},
    {"rid": "one", "format": "pickle"},
    {"rid": "one", "format": ["raw"]},
    {"rid": "one", "start": -1},
    {"rid": "one", "start": True},
    {"rid": "one", "start": 3, "stop": 2},
    {"rid": "one", "stop": 10_000},
    {"rid": "one", "stop": None},
    {"session_id": "tree"},
    {"session_id": "tree", "leaf": 2},
    {"session_id": "tree", "leaf": True},
]


async def test_what_is_no_request_for_rows_is_refused_and_changes_nothing(kept: ExpertsTrial) -> None:
    for asked in REFUSED:
        with case(asked):
            before = kept.held
            answer = await kept.post("/routed_experts", asked)
            assert (answer.status, answer.error_type) == (400, "invalid_request")
            assert answer.json()["error"]["message"]
            assert kept.held == before
            assert (await kept.deliver(rid="one")).status == 200


async def test_what_no_layer_holds_cannot_be_named(stage: Stage) -> None:
    async with simulated_experts(stage) as trial:
        await trial.generate(text="Question: one?")
        for asked in ({"text": "Question: one?"}, {"session_id": "s"}):
            assert (await trial.refused(**asked))[:2] == (400, "invalid_request")
        assert (await trial.ask("GET", "/routed_experts")).status == 405


# How long rows are held


@pytest.mark.alone("what is in memory is bounded in each process")
async def test_rows_that_found_no_room_are_said_to_be_missing(stage: Stage) -> None:
    room = 100 * WIDTH
    options = {"moe_shape": SHAPE, "max_bytes": room}
    async with simulated_experts(stage, around=(SESSIONS,), options=options) as trial:
        old, new = await trial.create("old"), await trial.create("new")
        message = message_of(await trial.chat(old, HI, max_tokens=30))
        await trial.exact(old)
        await trial.chat(new, [*HI, user("Something quite different")], max_tokens=30)
        assert (trial.held["evicted"], trial.held["generations"]) == (1, 1)
        assert await trial.metric("evicted_total") == 1
        assert trial.held["bytes"] <= room
        (sample,) = await trial.samples(old)
        assert "routed_experts" not in sample
        assert "evicted" in sample["metadata"]["routed_experts_missing"]
        assert (await trial.records(old))[0]["routed_experts"] == {"rows": 0, "reason": "evicted"}
        answer = await trial.post(f"/sessions/{old}/samples", {"format": "safetensors"})
        assert set(load(answer.body)) == {"0.tokens", "0.loss_mask", "0.logprobs"}
        status, error, _ = await trial.refused(session_id=old)
        assert (status, error) == (404, "not_found")
        await trial.exact(new)
        await trial.chat(old, [*HI, message, user("Go on")], max_tokens=2)
        assert trial.starts(CHAT)[-1] == 0, "what is held no more is asked for again"
        await trial.exact(old)
        assert trial.held["bytes"] <= room


async def test_what_is_larger_than_all_room_is_said_and_nothing_else_goes_wrong(stage: Stage) -> None:
    options = {"moe_shape": SHAPE, "max_bytes": 20 * WIDTH}
    async with simulated_experts(stage, around=(SESSIONS,), options=options) as trial:
        session = await trial.create()
        assert message_of(await trial.chat(session, HI, max_tokens=60))
        (sample,) = await trial.samples(session)
        assert "max_bytes" in sample["metadata"]["routed_experts_missing"]
        assert (await trial.missing(), trial.held["bytes"]) == ({"experts_fit": 1}, 0)


async def test_the_numbers_are_those_of_what_came(cached: ExpertsTrial) -> None:
    first = await cached.generate(text="Question: one?")
    await cached.generate(text=f"Question: one?{first['text']} and two?")
    one, two = (len(tokens_of(each)) - 1 for each in cached.generations())
    want = {"answers": 2, "transferred_rows": two, "reused_rows": one, "evicted": 0, "evicted_bytes": 0}
    assert cached.held | want == cached.held
    assert cached.held["saved_bytes"] == len(encode_routes(truth(range(one + 1))))
    assert cached.held["shape"] == {"layers": 3, "top_k": 2, "experts": 40}
    for name in (*want, "saved_bytes"):
        assert await cached.metric(f"{name}_total") == cached.held[name]
    for name in ("generations", "bytes"):
        assert await cached.metric(name) == cached.held[name]
    assert (await cached.ask("GET", "/router/info")).json()["statistics"]["routed_experts"] == cached.held


POSITIONS = "middleware_hub.indexer_topk_middleware.IndexerTopkMiddleware"
INDEXER = IndexerShape(2, 5)
IDS = [40, 41, 42]
SHAPED = (POSITIONS, {"indexer_shape": "2x5"})


def chosen(tokens: Sequence[int]) -> Any:
    return choose(INDEXER, tokens)


@pytest.fixture
async def trial(stage: Stage) -> AsyncIterator[ExpertsTrial]:
    """A router with sessions, text cache and the keepers of both kinds."""
    async with simulated_experts(stage, around=[SESSIONS, CACHE, SHAPED], indexer=INDEXER) as made:
        yield made


@pytest.fixture
async def client(trial: ExpertsTrial) -> AsyncIterator[RouterClient]:
    async with RouterClient(trial.router.url) as made:
        yield made


@pytest.mark.parametrize("stream", [False, True])
async def test_a_generation_has_the_rows_of_both_kinds(trial: ExpertsTrial, client: RouterClient, stream: bool) -> None:
    body = {"input_ids": [5, 6, 7], "rid": "r", "sampling_params": SHORT, "stream": stream}
    answer = await trial.post("/generate", body)
    assert (answer.status, b"indexer_topk" in answer.body, b"routed_experts" in answer.body) == (200, False, False)
    (generation,) = trial.generations("/generate")
    tokens = tokens_of(generation)
    assert np.array_equal(await client.routed_experts(rid="r"), truth(tokens))
    positions = await client.indexer_topk(rid="r")
    assert (positions.dtype.name, positions.shape) == ("int16", (len(tokens) - 1, 2, 5))
    assert np.array_equal(positions, chosen(tokens))
    assert np.array_equal(await client.indexer_topk(rid="r", start=2, stop=4), chosen(tokens)[2:4])


async def test_agents_samples_have_the_rows_of_both_kinds(trial: ExpertsTrial, client: RouterClient) -> None:
    session = await trial.create()
    await episode(trial, session, turns=4)  # every second one is streamed, which tells no positions
    (sample,) = await client.session(session).collect()
    assert np.array_equal(sample.rows["routed_experts"], truth(sample.tokens.tolist()))
    assert np.array_equal(sample.rows["indexer_topk"], chosen(sample.tokens.tolist()))
    assert sample.trainer_fields()["rollout_indexer_topk"] is sample.indexer_topk
    records = await trial.records(session)
    for record in records:
        assert record["indexer_topk"] == record["routed_experts"] == {"rows": record["span"][1] - 1}
    held = await client.indexer_topk(session_id=session, leaf=sample.metadata["leaf"])
    assert np.array_equal(held, sample.rows["indexer_topk"])
    (plain,) = await trial.samples(session)
    assert plain["indexer_topk"]["dtype"] == "int16"


async def test_a_sample_says_why_it_has_no_positions(stage: Stage) -> None:
    tolerant = (POSITIONS, {"indexer_shape": "2x5", "required": False})
    async with simulated_experts(stage, around=[SESSIONS, tolerant]) as trial, RouterClient(trial.router.url) as client:
        session = await trial.create()
        await trial.chat(session, [user("Hi")])
        (sample,) = await client.session(session).collect()
        assert list(sample.rows) == ["routed_experts"]
        assert "--enable-return-indexer-topk" in sample.metadata["indexer_topk_missing"]
        await client.generate(input_ids=[5], sampling_params=SHORT, rid="r")
        with pytest.raises(NotFound, match="no chosen positions of generation 'r' are in memory"):
            await client.indexer_topk(rid="r")


async def test_places_in_an_engines_memory_are_not_taken_for_positions(stage: Stage) -> None:
    """Some kernels give slots of the cache; a trainer would attend to the wrong tokens."""
    worker = await stage.worker()
    slots = encode_routes(chosen([*PROMPT, *IDS]) + 1)
    worker.always(script(in_one(generated(IDS, told(IDS), indexer_topk=slots))))
    trial = await experts_trial(stage, worker, around=[SHAPED])
    answer = await trial.post("/generate", {"input_ids": PROMPT, "sampling_params": SHORT})
    assert answer.status == 200, "the answer is given"
    assert trial.router.app.router.statistics["indexer_topk"]()["missing"] == {"positions_are_causal": 1}
    refused = await trial.post("/indexer_topk", {"rid": "r1"})
    assert (refused.status, refused.error_type) == (404, "not_found")
    assert np.array_equal(await trial.rows(rid="r1"), truth([*PROMPT, *IDS])), "the other kind is kept"
