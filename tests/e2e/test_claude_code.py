"""Claude Code as it comes from npm edits a file over several turns: one segment on its main line, every sampled token in
one trained place, equal to what went through the worker's door."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.claude_code import claude_code
from tests.support.session_trial import SessionTrial, exactly, simulated_sessions
from tests.support.stage import Stage

CONTEXT = 400_000


def edits(file: Path) -> list[Any]:
    """What a model does that replaces a word: it reads, edits, looks at two things at once, and says so."""
    path = str(file)
    return [
        {
            "reasoning": "I read it first.",
            "text": "I will read it.",
            "calls": [{"name": "Read", "arguments": {"file_path": path}}],
        },
        {"calls": [{"name": "Edit", "arguments": {"file_path": path, "old_string": "hello", "new_string": "goodbye"}}]},
        {
            "reasoning": "Let me check.",
            "calls": [
                {"name": "Bash", "arguments": {"command": f"sleep 0.2; cat {path}", "description": "Show the file"}},
                {"name": "Bash", "arguments": {"description": "Say so", "command": "echo 1.0"}},
            ],
        },
        {"reasoning": "It is done.", "text": "Replaced it."},
    ]


async def test_it_edits_a_file_and_leaves_one_exact_segment(stage: Stage, tmp_path: Path) -> None:
    directory = tmp_path / "work"
    directory.mkdir()
    file = directory / "a.txt"
    file.write_text("hello\n", encoding="utf-8")
    async with simulated_sessions(stage, script=edits(file), reasoning_parser="qwen3", context_len=CONTEXT) as trial:
        session = await trial.create()
        run = await claude_code(f"{trial.router.url}/sessions/{session}", "Replace hello by goodbye", directory)
        assert (run.code, run.said.strip()) == (0, "Replaced it."), run
        assert file.read_text(encoding="utf-8") == "goodbye\n"
        records = await trial.records(session)
        for r in records:
            print(
                {k: v for k, v in r.items() if k in ("turn", "parent", "reason", "path", "streamed", "finish_reason")}
            )
        (sample,) = await trial.samples(session)
        exactly(sample, *(exchange.generation for exchange in trial.door))
