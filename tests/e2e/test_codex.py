"""Codex as it comes from npm, over several turns: one segment on its main line, every sampled token in one trained
place, equal to what went through the worker's door."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.codex import KNOWN_MODEL, UNKNOWN_MODEL, codex, edits
from tests.support.session_trial import exactly, simulated_sessions
from tests.support.stage import Stage

CONTEXT = 200_000


@pytest.mark.parametrize("model", [UNKNOWN_MODEL, KNOWN_MODEL])
async def test_it_edits_a_file_and_leaves_one_exact_segment(stage: Stage, tmp_path: Path, model: str) -> None:
    file = tmp_path / "work" / "a.txt"
    file.parent.mkdir()
    file.write_text('hello "you"\n', encoding="utf-8")
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
        (sample,) = await trial.samples(session)
        exactly(sample, *(exchange.generation for exchange in trial.door))
        assert (await trial.read(session))["metadata"]["untraced"] == []
