"""Claude Code as it comes from npm, over several turns: one segment on its main line, every sampled token in one
trained place, equal to what went through the worker's door."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.support.claude_code import claude_code, edits
from tests.support.session_trial import exactly, simulated_sessions
from tests.support.stage import Stage

#: It asks for 128,000 tokens behind some 12,000.
CONTEXT = 200_000


async def test_it_edits_a_file_and_leaves_one_exact_segment_and_that_of_its_sub_agent(
    stage: Stage, tmp_path: Path
) -> None:
    file = tmp_path / "work" / "a.txt"
    file.parent.mkdir()
    file.write_text("hello\n", encoding="utf-8")
    script: list[Any] = [*edits(file), {"reasoning": "Easy.", "text": "One file.", "when": "Count the files."}]
    async with simulated_sessions(stage, script=script, reasoning_parser="qwen3", context_len=CONTEXT) as trial:
        session = await trial.create()
        run = await claude_code(f"{trial.router.url}/sessions/{session}", "Replace hello by goodbye", file.parent)
        assert (run.code, run.said.strip()) == (0, "Replaced it."), run
        assert file.read_text(encoding="utf-8") == "goodbye\n"
        records = await trial.records(session)
        (beside,) = [place for place, record in enumerate(records) if record["reason"] is not None]
        assert (records[beside]["reason"], records[beside]["parent"]) == ("sub_agent", None)
        main = [place for place in range(len(records)) if place != beside]
        assert [records[place]["parent"] for place in main] == [None, *main[:-1]]
        generations = [exchange.generation for exchange in trial.door]
        samples = {sample["metadata"]["turns"][-1]["turn"]: sample for sample in await trial.samples(session)}
        assert samples.keys() == {beside, main[-1]}
        exactly(samples[main[-1]], *(generations[place] for place in main))
        exactly(samples[beside], generations[beside])
        assert (await trial.read(session))["metadata"]["untraced"] == []


async def test_it_asks_for_less_where_the_context_window_is_small(stage: Stage, tmp_path: Path) -> None:
    directory = tmp_path / "work"
    directory.mkdir()
    steps = [{"reasoning": "Hm.", "text": "Here I am."}]
    async with simulated_sessions(stage, script=steps, reasoning_parser="qwen3", context_len=40_000) as trial:
        session = await trial.create()
        run = await claude_code(f"{trial.router.url}/sessions/{session}", "Hello", directory)
        assert (run.code, run.said.strip()) == (0, "Here I am."), run
        assert [record["reason"] for record in await trial.records(session)] == [None]
