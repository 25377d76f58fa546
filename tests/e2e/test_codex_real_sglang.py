"""Codex as it comes from npm on a real SGLang that says what a script wants: the engine's own template, parsers and
streams. Its main line is one segment, equal to what went through the engine's door, also where a call was cut in the
middle and went on under new weights."""

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
from tests.support.codex import EDITING, KNOWN_MODEL, codex, edits
from tests.support.cuts import ScriptedCut
from tests.support.door import Door
from tests.support.generations import whole_generations
from tests.support.running_router import running_router
from tests.support.session_trial import IM_END, SESSIONS, SessionTrial, exactly_through, qwen3
from tests.support.under_way import under_way

pytestmark = pytest.mark.sglang


@pytest.mark.skipif(not tiers.heavy(), reason="an engine of its own, and prompts of 10,000 tokens on a CPU")
@pytest.mark.parametrize("cut", [False, True])
async def test_it_edits_a_file_exactly(cut: bool, tmp_path: Path) -> None:
    file, script = tmp_path / "work" / "a.txt", tmp_path / "script.json"
    file.parent.mkdir()
    file.write_text('hello "you"\n', encoding="utf-8")
    texts = [Step.read(step).written() for step in edits(KNOWN_MODEL)]
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
            url = f"{router.url}/sessions/{session}/v1"
            if cut:
                cutting.before(len(qwen3().encode(texts[EDITING].partition("+goodbye")[0])), len(texts) - 1 - EDITING)
            async with under_way(codex(url, "Replace hello by goodbye", file.parent, model=KNOWN_MODEL)) as running:
                if cut:
                    await cutting.update("1")
                run = await running
            assert (run.code, run.said.strip()) == (0, "Replaced it."), run
            assert file.read_text(encoding="utf-8") == 'goodbye "you"\n'
            records, generations = await trial.records(session), whole_generations(door.chats(version="default"))
            assert [record["parent"] for record in records] == [None, 0, 1, 2]
            sampled = [[*qwen3().encode(text), IM_END] for text in texts]
            assert [generation.sampled for generation in generations] == sampled
            (sample,) = await trial.samples(session)
            exactly_through(sample, generations)
            assert [generation.legs for generation in generations] == [
                1 + (cut and place == EDITING) for place in range(len(texts))
            ]
            spans = sample["weight_versions"]
            assert [version for version, _ in groupby(span["version"] for span in spans)] == [
                "default",
                *(["1"] if cut else []),
            ]
