"""Claude Code as it comes from npm on a real SGLang that says what a script wants: the engine's own template, parsers
and streams. Its main line and its sub-agent's are a segment each, equal to what went through the engine's proxy, also
where a call was cut in the middle and went on under new weights."""

from __future__ import annotations

from pathlib import Path

import pytest

from miles_router.testing.worker.model.script import Step
from tests.support import tiers
from tests.support.agent_process import work_file
from tests.support.claude_code import COUNTING, EDITING, claude_code, edits
from tests.support.real_sessions import Cut, edit, versions_in
from tests.support.session_trial import exactly_through, qwen3

pytestmark = pytest.mark.sglang


@pytest.mark.skipif(not tiers.heavy(), reason="an engine of its own, and prompts of 12,000 tokens on a CPU")
@pytest.mark.parametrize("cut", [False, True])
async def test_it_edits_a_file_exactly(cut: bool, tmp_path: Path) -> None:
    file = work_file(tmp_path, "hello\n")
    steps = edits(file)
    beside = COUNTING + 1
    steps.insert(beside, {"reasoning": "Easy.", "text": "One file."})
    texts = [Step.read(step).written() for step in steps]
    environment = {"CLAUDE_CODE_MAX_OUTPUT_TOKENS": "2000"}
    records, generations, samples = await edit(
        lambda url: claude_code(url, "Replace hello by goodbye", file.parent, **environment),
        texts,
        tmp_path / "script.json",
        Cut(EDITING, "goodbye") if cut else None,
    )
    assert file.read_text(encoding="utf-8") == "goodbye\n"
    main = [place for place in range(len(steps)) if place != beside]
    assert [record["parent"] for record in records] == parents(main, beside)
    assert [len(generation.sampled) for generation in generations] == [len(qwen3().encode(text)) + 1 for text in texts]
    by_end = {sample["metadata"]["turns"][-1]["turn"]: sample for sample in samples}
    assert by_end.keys() == {beside, main[-1]}
    assert versions_in(by_end[main[-1]]) == ["default", "1"][: 1 + cut]
    exactly_through(by_end[main[-1]], [generations[place] for place in main])
    exactly_through(by_end[beside], [generations[beside]])


def parents(main: list[int], beside: int) -> list[int | None]:
    """What each turn extends: the one before it on the main line."""
    behind: dict[int, int | None] = {main[0]: None, beside: None, **dict(zip(main[1:], main, strict=False))}
    return [behind[place] for place in sorted(behind)]
