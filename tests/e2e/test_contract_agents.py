"""Claude Code and Codex as they come from npm, in an episode whose contract leaves no room: they say that their context
is full, as they do when their own API says so."""

from __future__ import annotations

from pathlib import Path

from tests.support.claude_code import claude_code
from tests.support.codex import codex
from tests.support.session_trial import simulated_sessions
from tests.support.stage import Stage

SMALL = {"budget": {"max_context": 500}}


async def test_claude_code_knows_that_its_context_is_full(stage: Stage, tmp_path: Path) -> None:
    directory = tmp_path / "work"
    directory.mkdir()
    async with simulated_sessions(stage) as trial:
        session = await trial.create(contract=SMALL)
        run = await claude_code(f"{trial.router.url}/sessions/{session}", "Hello", directory)
        assert "Prompt is too long" in run.said, run
        assert trial.log == []
        assert (await trial.read(session))["metadata"]["end_reason"] == "context"


async def test_codex_knows_that_its_context_is_full(stage: Stage, tmp_path: Path) -> None:
    directory = tmp_path / "work"
    directory.mkdir()
    async with simulated_sessions(stage) as trial:
        session = await trial.create(contract=SMALL)
        run = await codex(f"{trial.router.url}/sessions/{session}/v1", "Hello", directory)
        assert "ran out of room in the model's context window" in run.complained, run
        assert trial.log == []
        assert (await trial.read(session))["metadata"]["end_reason"] == "context"
