"""The same on a real SGLang that says what a script wants: its own template, parsers and streams. Each line is a
segment, equal to what went through the engine's proxy, also where a call was cut and went on under new weights."""

from __future__ import annotations

from pathlib import Path

import pytest

from miles_router.testing.worker.model.script import Step
from tests.support import codex, tiers
from tests.support.agent_process import work_file
from tests.support.claude_code import COUNTING, EDITING, claude_code, edits
from tests.support.real_sessions import Cut, edit, versions_in
from tests.support.session_trial import IM_END, exactly_through, qwen3

pytestmark = pytest.mark.sglang
in_heavy = pytest.mark.skipif(not tiers.heavy(), reason="an engine of its own, and prompts of 10,000 tokens on a CPU")


@in_heavy
@pytest.mark.parametrize("cut", [False, True])
async def test_claude_code_edits_a_file_exactly(cut: bool, tmp_path: Path) -> None:
    file = work_file(tmp_path, "hello\n")
    steps = edits(file)
    beside = COUNTING + 1
    steps.insert(beside, {"reasoning": "Easy.", "text": "One file."})
    texts = [Step.read(step).written() for step in steps]
    records, generations, samples = await edit(
        lambda url: claude_code(url, "Replace hello by goodbye", file.parent, CLAUDE_CODE_MAX_OUTPUT_TOKENS="2000"),
        texts,
        tmp_path / "script.json",
        Cut(EDITING, "goodbye") if cut else None,
    )
    assert file.read_text(encoding="utf-8") == "goodbye\n"
    main = [place for place in range(len(steps)) if place != beside]
    behind: dict[int, int | None] = {main[0]: None, beside: None, **dict(zip(main[1:], main, strict=False))}
    assert [record["parent"] for record in records] == [behind[place] for place in range(len(steps))]
    assert [len(generation.sampled) for generation in generations] == [len(qwen3().encode(text)) + 1 for text in texts]
    by_end = {sample["metadata"]["turns"][-1]["turn"]: sample for sample in samples}
    assert by_end.keys() == {beside, main[-1]}
    assert versions_in(by_end[main[-1]]) == ["default", "1"][: 1 + cut]
    exactly_through(by_end[main[-1]], [generations[place] for place in main])
    exactly_through(by_end[beside], [generations[beside]])


@in_heavy
@pytest.mark.parametrize("cut", [False, True])
async def test_codex_edits_a_file_exactly(cut: bool, tmp_path: Path) -> None:
    file = work_file(tmp_path, 'hello "you"\n')
    texts = [Step.read(step).written() for step in codex.edits(codex.KNOWN_MODEL)]
    records, generations, samples = await edit(
        lambda url: codex.codex(f"{url}/v1", "Replace hello by goodbye", file.parent, model=codex.KNOWN_MODEL),
        texts,
        tmp_path / "script.json",
        Cut(codex.EDITING, "+goodbye") if cut else None,
    )
    assert file.read_text(encoding="utf-8") == 'goodbye "you"\n'
    assert [record["parent"] for record in records] == [None, 0, 1, 2]
    assert [generation.sampled for generation in generations] == [[*qwen3().encode(text), IM_END] for text in texts]
    (sample,) = samples
    exactly_through(sample, generations)
    assert versions_in(sample) == ["default", "1"][: 1 + cut]
