"""The rollout script of docs/text-rollouts.md, against a router process and two workers whose proxies are watched."""

from __future__ import annotations

import importlib
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from miles_router.testing import SimulatedWorker
from miles_router.testing.worker.exchange_log import GenerationRecord
from tests.docs.pages import ROOT, blocks
from tests.support.running_router import router_process

PAGE = ROOT / "docs" / "text-rollouts.md"
SCRIPT = next(block for block in blocks(PAGE, "python") if block.file_name == "grpo_rollout.py")
CONFIG = str(ROOT / "configs" / "grpo-text.yaml")


@pytest.fixture
async def workers(checkpoint: Path) -> AsyncIterator[list[SimulatedWorker]]:
    async with SimulatedWorker(tokenizer=str(checkpoint)) as first, SimulatedWorker(tokenizer=str(checkpoint)) as other:
        yield [first, other]


async def test_the_script_makes_a_batch_of_what_the_engines_were_given_and_sampled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, checkpoint: Path, workers: list[SimulatedWorker]
) -> None:
    urls = [worker.url for worker in workers]
    async with router_process("--config", CONFIG, "--hf-checkpoint", str(checkpoint), "--worker-urls", *urls) as router:
        (tmp_path / "grpo_rollout.py").write_text(SCRIPT.text.replace("http://127.0.0.1:31000", router.url))
        monkeypatch.syspath_prepend(str(tmp_path))
        script: Any = importlib.import_module("grpo_rollout")
        sys.modules.pop("grpo_rollout")
        rollouts, batch = await script.collect()
    assert all(worker.log.generations for worker in workers)
    truth = {record.rid: record for worker in workers for record in worker.log.generations}
    assert len(rollouts) == len(script.QUESTIONS) * script.GROUP
    for row, rollout in enumerate(rollouts):
        assert_exact(
            {name: batch[name][row] for name in ("tokens", "loss_mask", "rollout_logp")}, truth[rollout["rid"]]
        )
        assert not batch["advantages"][row][batch["loss_mask"][row] == 0].any()
    assert batch["weight_versions"] == [{"default"}] * len(rollouts)
    assert np.abs(batch["advantages"]).max() > 0


def assert_exact(row: dict[str, Any], record: GenerationRecord) -> None:
    """A row holds what the engine was given and sampled in the last turn, then padding; the first turn's tokens are
    those that the engine was given again."""
    given, whole = len(record.input_ids), len(record.input_ids) + len(record.output_ids)
    assert row["tokens"][:whole].tolist() == record.input_ids + record.output_ids
    assert row["loss_mask"][given:whole].all()
    assert row["rollout_logp"][given:whole].tolist() == np.array(record.logprobs, dtype=np.float32).tolist()
    assert row["loss_mask"][:given].any()
    assert not any(row[name][whole:].any() for name in row)
