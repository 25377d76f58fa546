"""Codex, unmodified: fetched from npm once, pinned, and run without a terminal against a session.

run = await codex(session_url, "Replace hello by goodbye in a.txt", directory)
run.said
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

from tests.support.agent_process import Run, home_beside, npm_program, run_agent

PACKAGE = "@openai/codex"
VERSION = "0.169.0"
#: A model that Codex does not know: it is told of functions alone.
UNKNOWN_MODEL = "simulated-model"
#: One that it knows: it is told of `apply_patch` as a custom tool, and of a search for tools.
KNOWN_MODEL = "gpt-5.5"
#: Which of the steps of `edits` replaces.
EDITING = 1
#: Of a user who allows everything. It knows the session's address and nothing else of the router.
OPTIONS = ("exec", "--dangerously-bypass-approvals-and-sandbox", "--skip-git-repo-check")
CONFIG = """
model = "{model}"
model_provider = "router"

[model_providers.router]
name = "router"
base_url = "{base_url}"
wire_api = "responses"
request_max_retries = 0
stream_max_retries = 0
"""


@functools.cache
def program() -> Path:
    return npm_program("codex", PACKAGE, VERSION, "vendor/*/bin/codex")


async def codex(base_url: str, prompt: str, directory: Path, *options: str, model: str = UNKNOWN_MODEL) -> Run:
    home = home_beside(directory)
    (home / "config.toml").write_text(CONFIG.format(model=model, base_url=base_url), encoding="utf-8")
    return await run_agent([str(program()), *OPTIONS, *options, prompt], directory, home, {"CODEX_HOME": str(home)})


def edits(model: str) -> list[Any]:
    """What a model does that replaces `hello` in `a.txt`: it looks, edits, looks at two things at once, and says so."""
    return [
        {"reasoning": "Where is it?", "text": "I will look.", "calls": [_run("ls; cat a.txt")]},
        {"reasoning": "There.", "calls": [EDITS[model]]},
        {"text": "Let me check.", "calls": [_run("sleep 0.2; cat a.txt"), _run("echo '{\"a\": 1.0}'")]},
        {"reasoning": "It is done.", "text": "Replaced it."},
    ]


def _run(command: str) -> dict[str, Any]:
    return {"name": "exec_command", "arguments": {"cmd": command}}


PATCH = """*** Begin Patch
*** Update File: a.txt
@@
-hello "you"
+goodbye "you"
*** End Patch
"""
EDITS = {
    UNKNOWN_MODEL: _run("sed -i 's/hello/goodbye/' a.txt"),
    KNOWN_MODEL: {"name": "apply_patch", "arguments": {"input": PATCH}},
}


if __name__ == "__main__":
    print(program())
