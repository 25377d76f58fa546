"""Claude Code, unmodified: fetched from npm once, pinned, and run without a terminal against a session.

run = await claude_code(session_url, "Replace hello by goodbye in a.txt", directory)
run.said
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

from tests.support.agent_process import Run, home_beside, npm_program, run_agent

PACKAGE = "@anthropic-ai/claude-code"
VERSION = "2.1.332"
#: Of a user who allows everything, and of a machine that reaches nobody but the router.
ENVIRONMENT = {
    "IS_SANDBOX": "1",
    "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
    "DISABLE_AUTOUPDATER": "1",
    "ANTHROPIC_API_KEY": "none",
}
#: Which of the steps of `edits` replaces, and which has a sub-agent count the files.
EDITING, COUNTING = 2, 4


@functools.cache
def program() -> Path:
    return npm_program("claude-code", PACKAGE, VERSION, "claude")


async def claude_code(base_url: str, prompt: str, directory: Path, *options: str, **environment: str) -> Run:
    command = [str(program()), "-p", prompt, "--dangerously-skip-permissions", *options]
    settings = {**ENVIRONMENT, "ANTHROPIC_BASE_URL": base_url, **environment}
    return await run_agent(command, directory, home_beside(directory), settings)


def edits(file: Path) -> list[Any]:
    """What a model does that replaces `hello` in a file: it looks, reads, edits, loads a tool, has a sub-agent count
    the files, looks at two things at once, and says so. Half of its calls are such as Claude Code writes anew."""
    path, directory = str(file), str(file.parent)
    replacement = {"file_path": path, "old_string": "hello", "new_string": "goodbye  "}
    counting = {"description": "Count", "prompt": "Count the files.", "subagent_type": "general-purpose"}
    return [
        {
            "reasoning": "Where is it?",
            "text": "I will look.",
            "calls": [_call("Bash", command=f"cd {directory} && ls", description="List the files")],
        },
        {"reasoning": "There.", "calls": [_call("Read", file_path=path, limit="20")]},
        {"calls": [_call("Edit", **replacement)]},
        {"text": "Next:", "calls": [_call("ToolSearch", query="select:TaskStop", max_results=1)]},
        {"calls": [_call("Agent", **counting, run_in_background=False)]},
        {
            "reasoning": "Let me check.",
            "calls": [
                _call("Bash", command=f"sleep 0.2; cat {path}", description="Show the file"),
                _call("Bash", description="Say so", command="echo 1.0"),
            ],
        },
        {"reasoning": "It is done.", "text": "Replaced it."},
    ]


def _call(name: str, **arguments: Any) -> dict[str, Any]:
    return {"name": name, "arguments": arguments}


if __name__ == "__main__":
    print(program())
