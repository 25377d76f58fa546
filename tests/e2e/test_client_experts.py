"""The client's way to routed experts, through a router with text cache, sessions and the layer that keeps them."""

from __future__ import annotations

from collections.abc import AsyncIterator

import numpy as np
import pytest

from miles_router.client import ErrorReply, NotFound, RouterClient
from tests.support.cache_trial import CACHE
from tests.support.experts_trial import SHORT, ExpertsTrial, simulated_experts, truth
from tests.support.session_trial import SESSIONS, user
from tests.support.stage import Stage


@pytest.fixture
async def trial(stage: Stage) -> AsyncIterator[ExpertsTrial]:
    """A router with all three layers."""
    async with simulated_experts(stage, around=[SESSIONS, CACHE]) as made:
        yield made


@pytest.fixture
async def client(trial: ExpertsTrial) -> AsyncIterator[RouterClient]:
    async with RouterClient(trial.router.url) as made:
        yield made


async def test_a_generation_has_its_rows_by_id_and_by_text(client: RouterClient) -> None:
    generation = await client.generate("Hello", sampling_params=SHORT)
    tokens = (await client.retrieve(rid=generation.rid)).tokens
    expected = truth(tokens.tolist())
    by_id = await client.routed_experts(rid=generation.rid)
    assert (by_id.dtype.name, by_id.shape) == ("uint8", (len(tokens) - 1, 3, 2))
    assert np.array_equal(by_id, expected)
    assert np.array_equal(await client.routed_experts(text="Hello" + generation.text), expected)
    assert np.array_equal(await client.routed_experts(rid=generation.rid, start=1, stop=4), expected[1:4])


async def test_a_sample_has_its_rows_by_session_and_leaf_and_in_itself(client: RouterClient) -> None:
    async with await client.create_session() as session:
        for question in ("one", "two"):
            await session.chat([user(question)], max_tokens=4)
        samples = await session.collect()
        assert len(samples) == 2
        for sample in samples:
            expected = truth(sample.tokens.tolist())
            assert sample.routed_experts is not None
            assert np.array_equal(sample.routed_experts, expected)
            leaf = sample.metadata["leaf"]
            assert np.array_equal(await client.routed_experts(session_id=session.id, leaf=leaf), expected)
        with pytest.raises(ErrorReply, match="leaf must be the number of a turn"):
            await client.routed_experts(session_id=session.id)
    for name in ("rid", "text", "session_id"):
        with pytest.raises(NotFound):
            await client.routed_experts(**{name: "nobody"})  # type: ignore[arg-type]
    for named in ({}, {"rid": "a", "text": "b"}):
        with pytest.raises(ErrorReply, match="exactly one of"):
            await client.routed_experts(**named)  # type: ignore[arg-type]
