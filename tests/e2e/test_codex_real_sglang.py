"""Codex as it comes from npm on a real SGLang that says what a script wants: the engine's own template, parsers and
streams. Its main line is one segment, equal to what went through the engine's proxy, also where a call was cut in the
middle and went on under new weights."""

from __future__ import annotations

from pathlib import Path

import pytest

from miles_router.testing.worker.model.script import Step
from tests.support import tiers
from tests.support.agent_process import work_file
from tests.support.codex import EDITING, KNOWN_MODEL, codex, edits
from tests.support.real_sessions import Cut, edit, versions_in
from tests.support.session_trial import IM_END, exactly_through, qwen3

pytestmark = pytest.mark.sglang


@pytest.mark.skipif(not tiers.heavy(), reason="an engine of its own, and prompts of 10,000 tokens on a CPU")
@pytest.mark.parametrize("cut", [False, True])
async def test_it_edits_a_file_exactly(cut: bool, tmp_path: Path) -> None:
    file = work_file(tmp_path, 'hello "you"\n')
    texts = [Step.read(step).written() for step in edits(KNOWN_MODEL)]
    records, generations, samples = await edit(
        lambda url: codex(f"{url}/v1", "Replace hello by goodbye", file.parent, model=KNOWN_MODEL),
        texts,
        tmp_path / "script.json",
        Cut(EDITING, "+goodbye") if cut else None,
    )
    assert file.read_text(encoding="utf-8") == 'goodbye "you"\n'
    assert [record["parent"] for record in records] == [None, 0, 1, 2]
    assert [generation.sampled for generation in generations] == [[*qwen3().encode(text), IM_END] for text in texts]
    (sample,) = samples
    exactly_through(sample, generations)
    assert versions_in(sample) == ["default", "1"][: 1 + cut]
