"""Codex as it comes from npm, over several turns: one segment on its main line, every sampled token in one trained
place, equal to what went through the worker's door."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.clients.table import CODEX
from tests.support.agent_process import work_file
from tests.support.codex import KNOWN_MODEL, UNKNOWN_MODEL, codex, edits
from tests.support.cuts import check_cut, update_within
from tests.support.session_trial import exactly, simulated_sessions
from tests.support.stage import Stage
from tests.support.under_way import under_way

CONTEXT = 200_000


@pytest.mark.parametrize("model", [UNKNOWN_MODEL, KNOWN_MODEL])
async def test_it_edits_a_file_and_leaves_one_exact_segment(stage: Stage, tmp_path: Path, model: str) -> None:
    file = work_file(tmp_path, 'hello "you"\n')
    async with simulated_sessions(stage, script=edits(model), reasoning_parser="qwen3", context_len=CONTEXT) as trial:
        session = await trial.create()
        url = f"{trial.router.url}/sessions/{session}/v1"
        run = await codex(url, "Replace hello by goodbye", file.parent, model=model)
        assert (run.code, run.said.strip()) == (0, "Replaced it."), run
        assert file.read_text(encoding="utf-8") == 'goodbye "you"\n', run
        records = await trial.records(session)
        assert [(record["parent"], record["reason"], record["streamed"]) for record in records] == [
            (place, None, True) for place in (None, 0, 1, 2)
        ]
        found = await trial.read(session)
        assert (found["metadata"]["segments"], found["metadata"]["untraced"]) == (CODEX.segments, [])
        (sample,) = await trial.samples(session)
        exactly(sample, *(exchange.generation for exchange in trial.door))


async def test_it_notices_nothing_of_new_weights_in_the_middle_of_a_call(stage: Stage, tmp_path: Path) -> None:
    file = work_file(tmp_path, 'hello "you"\n')
    steps = edits(KNOWN_MODEL)
    kind: dict[str, Any] = {"script": steps, "reasoning_parser": "qwen3", "context_len": CONTEXT}
    async with simulated_sessions(stage, settings={"partial_rollout": "resume"}, **kind) as trial:
        session = await trial.create()
        url = f"{trial.router.url}/sessions/{session}/v1"
        async with under_way(codex(url, "Replace hello by goodbye", file.parent, model=KNOWN_MODEL)) as running:
            await update_within(trial, "-hello ", "2")
            run = await running
        assert (run.code, run.said.strip()) == (0, "Replaced it."), run
        assert file.read_text(encoding="utf-8") == 'goodbye "you"\n', run
        await check_cut(trial, session, turns=len(steps))
