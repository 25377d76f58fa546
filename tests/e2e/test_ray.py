"""A router on a Ray cluster of two nodes on one machine, in an environment of its own: nodes are killed, stopped and
continued, and so is the control actor."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest

from miles_router.testing import SimulatedWorker
from tests.clients.environments import DRIVERS, ray_python
from tests.support.session_trial import qwen3
from tests.support.tiers import heavy
from tests.support.tokenizers import tokenizer_directory

#: Seconds that all of it may take.
PATIENCE = 540.0
STEPS = (
    "both serve, and each finds what the other has",
    "a pause at one is a pause at all",
    "the control actor is back with its state",
    "a stopped machine commits nothing",
    "goes on at the other",
    "the command serves, and ends in order",
    "done",
)


@pytest.mark.clients
@pytest.mark.skipif(not heavy(), reason="it takes minutes, and an environment of its own")
@pytest.mark.timeout(600)
async def test_a_router_on_a_ray_cluster_loses_nothing_with_a_node(tmp_path: Path) -> None:
    driver = DRIVERS / "ray_machines.py"
    async with SimulatedWorker(tokenizer=qwen3(), weight_version="1") as worker:
        command = (ray_python(), driver, worker.url, tmp_path / "state", tokenizer_directory("qwen3"))
        ours = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
        log = tmp_path / "log"
        with log.open("wb") as file:
            process = await asyncio.create_subprocess_exec(*map(str, command), stdout=file, stderr=file, env=ours)
            try:
                await asyncio.wait_for(process.wait(), PATIENCE)
            finally:
                if process.returncode is None:
                    process.kill()
                    await process.wait()
    told = log.read_text(encoding="utf-8", errors="replace")
    assert [step for step in STEPS if step not in told] == [], told
