"""The trial that a GPU is lent for, on a real worker without one: other weights come through shared memory."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.gpu.model import Shape, write
from tests.gpu.weight_transfer import MODES, options, transfer
from tests.sglang.environment import HERE, ensure
from tests.sglang_worker import RealWorker
from tests.support.tiers import size

pytestmark = pytest.mark.sglang

GENERATIONS, TOKENS = 8, 60
SMALL = Shape(
    num_hidden_layers=4,
    hidden_size=64,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    num_experts=8,
    num_experts_per_tok=2,
    moe_intermediate_size=32,
)


@pytest.mark.skipif(size(heavy=False, otherwise=True), reason="takes a minute")
async def test_weight_update_during_generation_stamps_each_token_with_its_version(
    tmp_path: Path,
) -> None:
    environment = ensure()
    write(tmp_path, environment.moe_model, SMALL)
    flags = ("--model-path", str(tmp_path), "--load-format", "dummy", "--enable-return-routed-experts")
    python = f"{environment.python} {HERE / 'with_stand_ins.py'}"
    with RealWorker.start(*flags) as worker:
        asked = ["--model", str(tmp_path), "--worker", worker.url, "--python", python, "--device", "cpu"]
        asked += ["--bucket-mib", "8", "--generations", str(GENERATIONS), "--tokens", str(TOKENS)]
        report = await transfer(options(asked))
    trials = {trial["mode"]: trial for trial in report["trials"]}
    assert set(trials) == set(MODES)
    for trial in trials.values():
        assert trial["crossed"] == trial["generations"] == GENERATIONS
        assert trial["tokens"] == GENERATIONS * TOKENS
        assert trial["transfer"]["bytes"] == SMALL.bytes
        assert trial["transfer"]["buckets"] > 1
    assert trials["abort"]["carried_on"] == GENERATIONS
