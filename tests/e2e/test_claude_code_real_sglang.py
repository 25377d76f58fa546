"""Claude Code as it comes from npm on a real SGLang that says what a script wants: the engine's own template, parsers
and streams. Its main line and its sub-agent's are a segment each, equal to what went through the engine's door, also
where a call was cut in the middle and went on under new weights."""

from __future__ import annotations

import json
from itertools import groupby
from pathlib import Path

import pytest

from miles_router.settings.config import MiddlewareSpec
from miles_router.testing.worker.model.script import Step
from tests.sglang.environment import ensure
from tests.sglang_worker import RealWorker
from tests.support import tiers
from tests.support.claude_code import COUNTING, EDITING, claude_code, edits
from tests.support.cuts import ScriptedCut
from tests.support.door import Door
from tests.support.generations import whole_generations
from tests.support.running_router import running_router
from tests.support.session_trial import IM_END, SESSIONS, SessionTrial, exactly_through, qwen3
from tests.support.under_way import under_way

pytestmark = pytest.mark.sglang


@pytest.mark.skipif(not tiers.heavy(), reason="an engine of its own, and prompts of 12,000 tokens on a CPU")
@pytest.mark.parametrize("cut", [False, True])
async def test_it_edits_a_file_exactly(cut: bool, tmp_path: Path) -> None:
    file, script = tmp_path / "work" / "a.txt", tmp_path / "script.json"
    file.parent.mkdir()
    file.write_text("hello\n", encoding="utf-8")
    steps = edits(file)
    beside = COUNTING + 1
    steps.insert(beside, {"reasoning": "Easy.", "text": "One file."})
    texts = [Step.read(step).written() for step in steps]
    sessions = (MiddlewareSpec(SESSIONS, {}),)
    # Each chunk of a prompt would take a step off the script.
    flags = ("--reasoning-parser", "qwen3", "--script-file", str(script), "--chunked-prefill-size", "-1")
    with RealWorker.start(*flags) as worker:
        script.write_text(json.dumps([[*qwen3().encode(text), IM_END] for text in texts]), encoding="utf-8")
        async with (
            Door(worker.url) as door,
            running_router(
                door.url, middlewares=sessions, partial_rollout="resume", hf_checkpoint=str(ensure().dense_model)
            ) as router,
        ):
            trial = SessionTrial(router, ())
            cutting = ScriptedCut(trial, worker, script)
            session = await trial.create()
            url = f"{router.url}/sessions/{session}"
            environment = {"CLAUDE_CODE_MAX_OUTPUT_TOKENS": "2000"}
            if cut:
                cutting.before(len(qwen3().encode(texts[EDITING].partition("goodbye")[0])), len(texts) - 1 - EDITING)
            async with under_way(claude_code(url, "Replace hello by goodbye", file.parent, **environment)) as running:
                if cut:
                    await cutting.update("1")
                run = await running
            assert (run.code, run.said.strip()) == (0, "Replaced it."), run
            assert file.read_text(encoding="utf-8") == "goodbye\n"
            records, generations = await trial.records(session), whole_generations(door.chats(version="default"))
            main = [place for place in range(len(steps)) if place != beside]
            assert [record["parent"] for record in records] == parents(main, beside)
            assert [len(generation.sampled) for generation in generations] == [
                len(qwen3().encode(text)) + 1 for text in texts
            ]
            samples = {sample["metadata"]["turns"][-1]["turn"]: sample for sample in await trial.samples(session)}
            assert samples.keys() == {beside, main[-1]}
            assert [generation.legs for generation in generations] == [
                1 + (cut and place == EDITING) for place in range(len(steps))
            ]
            spans = samples[main[-1]]["weight_versions"]
            assert [version for version, _ in groupby(span["version"] for span in spans)] == [
                "default",
                *(["1"] if cut else []),
            ]
            exactly_through(samples[main[-1]], [generations[place] for place in main])
            exactly_through(samples[beside], [generations[beside]])


def parents(main: list[int], beside: int) -> list[int | None]:
    """What each turn extends: the one before it on the main line."""
    behind: dict[int, int | None] = {main[0]: None, beside: None, **dict(zip(main[1:], main, strict=False))}
    return [behind[place] for place in sorted(behind)]
