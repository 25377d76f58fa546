"""Where RoutedExpertsMiddleware is listed, and what it is told of the model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from miles_router.errors import ConfigError
from miles_router.settings.config import MiddlewareSpec
from miles_router.testing.tiny_tokenizer import build
from miles_router.testing.worker.model.moe import MoeShape, encode_routes
from tests.support.cache_trial import CACHE, checkpoint
from tests.support.experts_trial import (
    EXPERTS,
    HI,
    MOE,
    SHAPE,
    all_kept,
    experts_trial,
    simulated_experts,
    tokens_of,
    truth,
)
from tests.support.session_apis import case
from tests.support.session_trial import SESSIONS
from tests.support.stage import Stage

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
