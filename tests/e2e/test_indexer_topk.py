"""Positions that sparse attention chose, kept beside routed experts by the same code: both kinds at once."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import Any

import numpy as np
import pytest

from miles_router.client import RouterClient
from miles_router.client.errors import NotFound
from miles_router.testing import IndexerShape
from miles_router.testing.worker.model.indexer import choose
from miles_router.testing.worker.model.moe import encode_routes
from tests.support.cache_trial import CACHE
from tests.support.experts_trial import (
    SHORT,
    ExpertsTrial,
    episode,
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
from tests.support.session_trial import SESSIONS, user
from tests.support.stage import Stage

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
